"""Serves requests through an engine in ever-changing company, the same way for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.core import Engine
from engine.observer import StepReport
from engine.outcome import Finish, TokenChunk
from engine.request import Request

REDRAW, CANCEL = 0.1, 0.04
MOST_EMPTY = 10_000


class Ticks:
    """A clock that counts how often it was read, so that a run repeats exactly."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1e-6
        return self._now


@dataclass(slots=True)
class Tally:
    """Observer: what happened, to know that what should have been tested was."""

    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    most_at_once: int = 0
    chunked: int = 0

    def step(self, report: StepReport) -> None:
        self.drafted += report.drafted
        self.accepted += report.accepted
        self.preempted += report.preempted
        self.most_at_once = max(self.most_at_once, report.sequences)
        self.chunked += report.prefill_rows > 0


@dataclass(slots=True)
class Output:
    """What one request got. A cancelled one got a part."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, chunk: TokenChunk) -> None:
        assert self.finish is None, "something came after the end"
        assert chunk.offset == len(self.tokens), "a gap in the output"
        self.tokens.extend(chunk.tokens)
        self.finish = chunk.finish


class Company:
    """Requests that come and go: between `batch[0]` and `batch[1]` at once.

    `doomed` are requests among them that are cancelled sooner or later, before or during a pass.
    """

    def __init__(
        self, engine: Engine, batch: tuple[int, int], rng: random.Random, doomed: frozenset[str]
    ) -> None:
        self._engine = engine
        self._batch = batch
        self._rng = rng
        self._doomed = doomed
        self._live: set[str] = set()
        self._submitted = 0

    def serve(self, requests: Seq[Request]) -> dict[str, Output]:
        """All of them, in the order given; outputs by id."""
        outputs = {r.id: Output() for r in requests}
        waiting = list(requests)[::-1]
        wanted, idle = self._rng.randint(*self._batch), 0
        while waiting or self._live:
            while waiting and len(self._live) < wanted:
                self._submit(waiting.pop())
            chunks = self._step()
            for chunk in chunks:
                outputs[chunk.request_id].add(chunk)
                if chunk.finish is not None:
                    self._live.discard(chunk.request_id)
            if self._rng.random() < REDRAW:
                wanted = self._rng.randint(*self._batch)
            idle = 0 if chunks else idle + 1
            assert idle < MOST_EMPTY, "nothing comes any more"
        return outputs

    def _submit(self, request: Request) -> None:
        """Who is asked later is later in line, whatever the order in other runs."""
        self._submitted += 1
        self._live.add(request.id)
        self._engine.submit(replace(request, arrived=float(self._submitted)))

    def _step(self) -> list[TokenChunk]:
        victims = [i for i in sorted(self._doomed & self._live) if self._rng.random() < CANCEL]
        early = [v for v in victims if self._rng.random() < 0.5]
        for victim in early:
            self._engine.cancel(victim)

        def late() -> None:
            for victim in victims:
                if victim not in early:
                    self._engine.cancel(victim)

        return self._engine.step(late)
