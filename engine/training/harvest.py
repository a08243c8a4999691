"""Lets an engine write, and keeps what it wrote together with the hidden states behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.core import Engine
from engine.draft import DraftSource, DraftWrapper
from engine.features import FeaturePool
from engine.request import Request
from engine.training.corpus import Corpus
from engine.types import Proposal, StepPlan, Verdict

# Of every so many pairs of prompts, one that is gone on with greedily and one that is not, one is
# held out, the first ones among them.
HELD_OUT = 20


class Listener(DraftWrapper):
    """A source that also keeps the hidden states of all rows that have become part of a sequence.

    Without a prefix cache every position is computed while it listens; a sequence that was
    preempted is computed again, with the same bits.
    """

    def __init__(self, source: DraftSource, features: FeaturePool, block_size: int) -> None:
        super().__init__(source)
        self._features = features
        self._block_size = block_size
        self._heard: dict[str, list[Tensor]] = {}

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        super().observe(plan, proposals, verdicts)
        for work, verdict in zip(plan.work, verdicts, strict=True):
            positions = torch.arange(work.start, work.start + work.count + verdict.accepted)
            blocks = torch.tensor(work.seq.table.ids)
            slots = blocks[positions // self._block_size] * self._block_size
            rows = self._features.rows[slots + positions % self._block_size]
            heard = self._heard.setdefault(work.seq.request.id, [])
            if work.start == 0:
                heard.clear()
            heard.append(rows.cpu())

    def take(self, request_id: str) -> Tensor:
        """(T, hidden): of all of a sequence that has ended but its last token."""
        return torch.cat(self._heard.pop(request_id, []) or [self._features.rows[:0]])


def harvest(
    engine: Engine,
    listener: Listener,
    requests: Iterator[Request],
    at_once: int,
    corpus: Corpus,
    enough: Callable[[], bool],
) -> Iterator[int]:
    """Serves `requests`, so many at a time, into `corpus`, until there are no more or it is
    `enough`. Their ids are numbers. Yields how many tokens came, step by step."""
    live: dict[str, tuple[Request, list[int]]] = {}
    more = True
    while True:
        while more and not enough() and len(live) < at_once:
            request = next(requests, None)
            if request is None:
                more = False
                break
            engine.submit(request)
            live[request.id] = request, []
        if not live or enough():
            break
        chunks = engine.step()
        for chunk in chunks:
            live[chunk.request_id][1].extend(chunk.tokens)
            if chunk.finish is not None:
                failed = bool(chunk.finish.error)
                _keep(corpus, listener, *live.pop(chunk.request_id), failed=failed)
        yield sum(len(c.tokens) for c in chunks)
    for name, (request, output) in live.items():  # what they have got to is as good
        engine.cancel(name)
        _keep(corpus, listener, request, output)
    engine.step()


def _keep(
    corpus: Corpus, listener: Listener, request: Request, output: list[int], failed: bool = False
) -> None:
    features = listener.take(request.id)
    if failed or not output:
        return
    tokens = [*request.prompt, *output]
    count = min(len(tokens), len(features))
    temperature = request.sampling.temperature
    number = int(request.id)
    held_out = number // 2 % HELD_OUT == 0
    corpus.add(tokens[:count], features[:count], len(request.prompt), temperature, held_out, number)
