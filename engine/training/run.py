"""`draftwire train-draft`: lets a target write, and trains a head on it; resumable.

The folder that is made is complete from the first checkpoint on. What is needed to go on lies in
`work` beside it: the corpus, and the state of the training.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from engine.build import assemble
from engine.config import EngineConfig
from engine.drafting import draft_choice
from engine.head_file import TABLE, About, save_head
from engine.loader import LoadedModel, load
from engine.ngram_count import count
from engine.ngram_table import SIZES, write_table
from engine.pooled import load_models
from engine.request import Request, SamplingParams, StopParams
from engine.training.corpus import Corpus, Document
from engine.training.evaluate import rates
from engine.training.harvest import Listener, harvest
from engine.training.progress import Progress
from engine.training.prompts import Prompt, read_prompts
from engine.training.start import common_ids, frozen_parts, new_head
from engine.training.trainer import Schedule, Trainer, Windows

WRITING = 0.4  # of the time
AT_ONCE, LONGEST_PROMPT, MOST_TOKENS = 32, 256, 160
CHECKPOINT_S = 60.0
TABLE_BYTES = 4 << 20
MOST_HELD_OUT = 24  # documents that the scores are of
BEST = "ngram,table:{0},head:{0}"


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be made. `tokens` and `steps` 0: as many as there is time for."""

    model: str
    data: tuple[str, ...]
    out: str
    minutes: float = 60.0
    tokens: int = 0
    steps: int = 0
    vocabulary: int = 4096
    seed: int = 0
    threads: int = 0


def train_draft(order: Order, clock: Callable[[], float], progress: Progress) -> None:
    """Raises ConfigError for a model, ValueError for data that cannot be used."""
    out = Path(order.out)
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(order.threads or len(os.sched_getaffinity(0)))
    begun = clock()
    corpus = write(order, work, begun + WRITING * 60 * order.minutes, clock, progress)
    target = load(order.model, "auto", "cpu")
    train(order, target, corpus, out, begun + 60 * order.minutes, clock, progress)


# ---- writing -----------------------------------------------------------------------------------


def write(
    order: Order, work: Path, until: float, clock: Callable[[], float], progress: Progress
) -> Corpus:
    """Until there is enough, or it is time. Goes on where the last run ended."""
    config = EngineConfig(
        model=order.model,
        draft="ngram",
        prefix_cache=False,
        max_seqs=AT_ONCE,
        kv_cache_mib=1024,
        threads=order.threads,
    )
    models = load_models(config, clock, read=True)
    assert models.target.features is not None
    corpus = Corpus(work / "corpus", models.target.loaded.config.hidden_size)
    choice = draft_choice(config, models, clock)
    listener = Listener(choice, models.target.features, config.block_size)
    built = assemble(config, models, choice, clock, listener=listener)
    wanted = order.tokens or None
    first = len(corpus.documents)

    def enough() -> bool:
        return corpus.rows >= wanted if wanted else clock() >= until

    with progress.phase("writing", wanted, corpus.rows, "tokens") as bar:
        source = requests(order, models.target.loaded, first)
        for _ in harvest(built.engine, listener, source, AT_ONCE, corpus, enough):
            bar(corpus.rows)
    if not corpus.documents:
        raise ValueError("the data gave no prompt that the model wrote anything after")
    return corpus


def requests(order: Order, target: LoadedModel, first: int) -> Iterator[Request]:
    """Greedy ones and drawn ones in turn, from the `first` one on."""
    tokenizer: Any = AutoTokenizer.from_pretrained(target.directory, local_files_only=True)
    prompts = read_prompts([Path(p) for p in order.data], order.seed)
    for number, prompt in enumerate(prompts):
        ids = _ids(prompt, target, tokenizer)
        if number < first or not 0 < len(ids) <= LONGEST_PROMPT:
            continue
        yield Request(
            str(number),
            ids,
            StopParams(MOST_TOKENS, eos_ids=frozenset(target.eos_ids)),
            SamplingParams(float(number % 2), seed=order.seed + number),
        )


def _ids(prompt: Prompt, target: LoadedModel, tokenizer: Any) -> tuple[int, ...]:
    if prompt.said and getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.said}], tokenize=False, add_generation_prompt=True
        )
        return tuple(target.tokenizer.encode(text, add_special_tokens=False).ids)
    return prompt.ids or tuple(target.tokenizer.encode(prompt.text or prompt.said).ids)


# ---- training ----------------------------------------------------------------------------------


def train(
    order: Order,
    target: LoadedModel,
    corpus: Corpus,
    out: Path,
    until: float,
    clock: Callable[[], float],
    progress: Progress,
) -> None:
    """Until the schedule is through. Goes on from the last checkpoint."""
    count_table(target, corpus, out / TABLE)
    vocabulary = common_ids(corpus, order.vocabulary)
    module = new_head(target, corpus, vocabulary, order.seed)
    embedding, norm = frozen_parts(target)
    trainer = Trainer(module, embedding, norm, Schedule(order.steps or 1))
    windows = Windows(corpus, held_out=False, seed=order.seed)
    state = out / "work" / "state.pt"
    done = trainer.load(state) if state.exists() else 0
    if not done:
        steps = order.steps or _steps_in(until - clock(), trainer, windows, clock)
        trainer.schedule = replace(trainer.schedule, steps=steps)
        module.load_state_dict(new_head(target, corpus, vocabulary, order.seed).state_dict())
        trainer.reset()
    schedule = trainer.schedule
    saved = clock()
    with progress.phase("training", schedule.steps, done, "steps") as bar:
        for number in range(done, schedule.steps):
            batch = windows.batch(number, schedule.windows, schedule.length)
            loss = trainer.step(number, batch)
            bar(number + 1, f"loss {loss:.3f}")
            if clock() - saved > CHECKPOINT_S or number + 1 == schedule.steps:
                trainer.save(state, number + 1)
                saved = clock()
    recipe = {**asdict(order), "schedule": asdict(schedule), "rows": corpus.rows}
    del recipe["model"], recipe["out"], recipe["data"], recipe["minutes"]
    about = About.of(target, len(vocabulary), recipe)
    save_head(module, out)
    about.write(out)
    held = [d for d in corpus.documents if d.held_out]
    scores: dict[str, Any] = {"held_out": len(held)}
    if held:
        windows = Windows(corpus, held_out=True, seed=order.seed)
        scores["accuracy_by_depth"] = _accuracy(trainer, windows)
        scores["greedy"] = _rates(order, corpus, held[:MOST_HELD_OUT])
    replace(about, scores=scores).write(out)
    progress.say(f"on what was held out: {scores}")


def count_table(target: LoadedModel, corpus: Corpus, directory: Path) -> None:
    """Of what the target wrote, with the tokens before that the first ones follow."""
    tokens, before = corpus.tokens(), max(SIZES)
    documents = (
        tokens[d.start + max(0, d.prompt - before) : d.start + d.length].tolist()
        for d in corpus.documents
        if not d.held_out
    )
    entries = count(documents, target.vocab_size, TABLE_BYTES)
    shutil.rmtree(directory, ignore_errors=True)
    write_table(directory, target.vocab_size, entries)


def _steps_in(
    seconds: float, trainer: Trainer, windows: Windows, clock: Callable[[], float]
) -> int:
    """Measured on a few, of every depth."""
    schedule = Schedule(9, deeper=(0.0, 0.0, 0.0))
    times = []
    for depth in range(1, schedule.depth + 1):
        trainer.schedule = replace(schedule, depth=depth)
        for _ in range(3):
            begun = clock()
            trainer.step(0, windows.batch(0, schedule.windows, schedule.length))
            times.append(clock() - begun)
    trainer.schedule = Schedule(1)
    one, two, three = (min(times[i : i + 3]) for i in (0, 3, 6))
    deeper = trainer.schedule.deeper
    mean = one * deeper[1] + two * (deeper[2] - deeper[1]) + three * (1 - deeper[2])
    return max(10, int(seconds / (1.05 * mean)))


def _rates(order: Order, corpus: Corpus, held: list[Document]) -> dict[str, Any]:
    """Of the target going on from the prompts of these documents, greedily."""
    tokens = corpus.tokens()
    prompts = [tuple(tokens[d.start : d.start + d.prompt].tolist()) for d in held]
    found = {}
    for draft in ("ngram", f"table:{order.out}", f"head:{order.out}", BEST):
        config = EngineConfig(
            order.model, draft=draft.format(order.out), threads=order.threads, kv_cache_mib=512
        )
        served = (
            Request(str(i), prompt, StopParams(MOST_TOKENS // 2), SamplingParams(0.0))
            for i, prompt in enumerate(prompts)
        )
        found[draft.format("SET").replace(order.out, "SET")] = rates(config, served).scores()
    return found


def _accuracy(trainer: Trainer, held: Windows) -> list[float]:
    schedule, several = trainer.schedule, 8  # batches
    found = [
        trainer.accuracy(held.batch(i, schedule.windows, schedule.length)) for i in range(several)
    ]
    return [round(sum(depth) / several, 4) for depth in zip(*found, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; `--model` is a directory here."""
    parser = argparse.ArgumentParser(prog="draftwire train-draft")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    order = Order(**{**given, "data": tuple(given["data"])})
    train_draft(order, time.monotonic, Progress())
