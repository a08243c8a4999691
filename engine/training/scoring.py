"""The third part: how good the drafts are, on what was held out."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.pooled import load_models
from engine.request import Request, SamplingParams, StopParams
from engine.training.corpus import Corpus, Document
from engine.training.evaluate import rates
from engine.training.order import Run
from engine.training.trainer import Trainer, Windows

SETTINGS = ("ngram", "table:{0}", "head:{0}", "ngram,table:{0},head:{0}")  # the last has all
SCORING = 0.05  # of the time
MOST_HELD_OUT, TOKENS = 24, 80  # documents that the scores are of; tokens of each
# Fewer sequences at once, every draft verified: a token takes so many times as long as in writing.
SLOWER = 3.0
BATCHES = 16
KV_MIB = 256


def held_out(run: Run, corpus: Corpus) -> list[Document]:
    """As many as there is time for."""
    a_document = len(SETTINGS) * TOKENS * SLOWER * run.account.entries.token_s
    fit = SCORING * 60 * run.order.minutes / max(a_document, 1e-9)
    held = [d for d in corpus.documents if d.held_out]
    return held[: max(2, min(MOST_HELD_OUT, int(fit)))]


def seconds_for(run: Run, documents: int) -> float:
    """That scoring so many documents takes, about."""
    entries = run.account.entries
    tokens = len(SETTINGS) * TOKENS * documents
    return bool(documents) * (1.5 * entries.load_s + SLOWER * entries.token_s * tokens)


def scores(
    run: Run, trainer: Trainer, corpus: Corpus, held: Seq[Document], directory: Path
) -> dict[str, Any]:
    """Of the set of drafts in `directory`; the target goes on greedily from the prompts of these
    documents. Raises Interrupted."""
    found: dict[str, Any] = {"held_out": len(held)}
    if not any(d.length > 1 for d in held):
        return found
    windows, schedule = Windows(corpus, held_out=True, seed=run.order.seed), trainer.schedule
    batches = (windows.batch(i, schedule.windows, schedule.length) for i in range(BATCHES))
    found["accuracy_by_depth"] = [round(share, 4) for share in trainer.accuracy(batches)]
    config = EngineConfig(
        run.order.model,
        draft=SETTINGS[-1].format(directory),
        threads=run.order.threads,
        kv_cache_mib=KV_MIB,
    )
    models = load_models(config, run.clock)
    found["greedy"] = {}
    for draft in SETTINGS:
        setting = replace(config, draft=draft.format(directory))
        counts = rates(setting, _requests(run, corpus, held), models=models)
        found["greedy"][draft.format("SET")] = counts.scores()
    return found


def _requests(run: Run, corpus: Corpus, held: Seq[Document]) -> Iterator[Request]:
    tokens = corpus.tokens()
    for number, document in enumerate(held):
        run.check()
        prompt = tuple(tokens[document.start : document.start + document.prompt].tolist())
        yield Request(str(number), prompt, StopParams(TOKENS), SamplingParams(0.0))
