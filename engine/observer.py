"""How the engine tells what it does. It knows no clock, logger, tracer or metric by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.outcome import SourceStats


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step in numbers. Times are monotonic seconds; `phases` are durations by verb.

    Every block is used, cached (held by nobody, but its content may be found) or free. Of
    `prefix_queries` tokens of the sequences that began or began again, `prefix_hits` had their KV
    in the prefix cache.
    `draft_errors` is the total since the engine started.
    """

    number: int
    started: float
    ended: float
    rows: int
    prefill_rows: int
    drafted: int
    accepted: int
    emitted: int
    sequences: int
    waiting: tuple[int, int, int]
    free_blocks: int
    used_blocks: int
    preempted: int
    cached_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    by_source: tuple[tuple[str, SourceStats], ...] = ()
    draft_errors: int = 0


class EngineObserver(Protocol):
    """Receives reports; must not raise (the engine guards against it all the same)."""

    def step(self, report: StepReport) -> None: ...


class NullObserver:
    """Looks away."""

    def step(self, report: StepReport) -> None:
        return None
