"""`draftwire train-draft`: lets a target write, and trains a head on it; resumable.

The folder that is made holds a complete set of drafts or none: `draft.json`, without which nothing
is read, comes last. What is needed to go on lies in its `work`: the corpus, the state of the
training, and what has become of the order.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import read_json
from engine.head_file import ABOUT, TABLE, WEIGHTS, About, check_family, read_set, save_head
from engine.loader import LoadedModel, load
from engine.ngram_count import count
from engine.ngram_table import SIZES, write_table
from engine.training.account import Account, Entries
from engine.training.corpus import Corpus
from engine.training.fitting import fit
from engine.training.order import Order, Run
from engine.training.progress import Progress
from engine.training.prompts import files_of
from engine.training.scoring import held_out, scores, seconds_for
from engine.training.start import common_ids
from engine.training.trainer import Schedule
from engine.training.writing import write

TABLE_BYTES = 4 << 20


def train_draft(
    order: Order,
    clock: Callable[[], float],
    progress: Progress,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Raises ConfigError for a model, ValueError for data and folders that cannot be used, OSError
    for a disk, and Interrupted when it was `stopped`."""
    out, directory = Path(order.out), Path(order.model)
    files_of(map(Path, order.data))  # before anything slow
    check_family((read_json(directory, "config.json").get("architectures") or ["?"])[0])
    about = About.of_directory(directory)
    if (out / ABOUT).exists():
        read_set(out, about, directory)
        progress.say(f"{out} is finished; nothing was done")
        return
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    asked = Entries(about.weights_hash, about.tokenizer_hash, order.vocabulary, order.seed)
    torch.set_num_threads(order.threads or len(os.sched_getaffinity(0)))
    with _alone(work):
        run = Run(order, Account(work / "account.json", asked, clock), clock, progress, stopped)
        if not run.account.entries.written:
            write(run, work / "corpus")
        train(run, load(directory, "auto", "cpu"), out)


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """The lock goes with the process, however it ends."""
    with (work / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{work} is in use: another process makes these drafts") from None
        yield


def train(run: Run, target: LoadedModel, out: Path) -> None:
    """On a corpus that is complete."""
    work, stage = out / "work", out / "work" / "set"
    corpus = Corpus(work / "corpus", target.config.hidden_size)
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    count_table(target, corpus, stage / TABLE)
    vocabulary = common_ids(corpus, run.order.vocabulary)
    held = held_out(run, corpus)
    trainer = fit(run, target, corpus, vocabulary, work / "state.pt", seconds_for(run, len(held)))
    save_head(trainer.module, stage)
    about = About.of(target, len(vocabulary), _recipe(run.order, trainer.schedule, corpus.rows))
    about.write(stage)
    about = replace(about, scores=scores(run, trainer, corpus, held, stage))
    about.write(stage)
    publish(stage, out)
    run.account.save()
    run.progress.say(f"on what was held out: {about.scores}")
    run.progress.say(
        f"{out} is finished: serve it with --draft ngram,table:{out},head:{out}; "
        f"{work} is not needed any more"
    )


def publish(stage: Path, out: Path) -> None:
    """The set is moved to its place, what says that it is there last."""
    shutil.rmtree(out / TABLE, ignore_errors=True)
    for name in (TABLE, WEIGHTS, ABOUT):
        (stage / name).replace(out / name)


def count_table(target: LoadedModel, corpus: Corpus, directory: Path) -> None:
    """Of what the target wrote, with the tokens before that the first ones follow. Raises
    ValueError if nothing came twice."""
    tokens, before = corpus.tokens(), max(SIZES)
    documents: Sequence[tuple[int, int]] = [
        (d.start + max(0, d.prompt - before), d.start + d.length)
        for d in corpus.documents
        if not d.held_out
    ]
    entries = count((tokens[a:b].tolist() for a, b in documents), target.vocab_size, TABLE_BYTES)
    if not any(len(e.keys) for e in entries):
        raise ValueError(f"too little to train on: the model wrote {corpus.rows} tokens")
    write_table(directory, target.vocab_size, entries)


def _recipe(order: Order, schedule: Schedule, rows: int) -> dict[str, Any]:
    recipe = {**asdict(order), "schedule": asdict(schedule), "rows": rows}
    return {n: v for n, v in recipe.items() if n not in ("model", "out", "data", "minutes")}
