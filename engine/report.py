"""Turns a finished step into a `StepReport`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.observer import StepReport
from engine.outcome import SourceStats, TokenChunk
from engine.scheduler import Scheduler
from engine.types import Proposal, StepPlan, Verdict


class StepClock:
    """Laps of one step by the injected clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.started = self.now = clock()
        self.laps: list[tuple[str, float]] = []

    def lap(self, phase: str) -> None:
        now = self._clock()
        self.laps.append((phase, now - self.now))
        self.now = now


def make_report(
    clock: StepClock,
    plan: StepPlan,
    proposals: Seq[Proposal],
    verdicts: Seq[Verdict],
    chunks: Seq[TokenChunk],
    scheduler: Scheduler,
    draft_errors: int,
) -> StepReport:
    """Counts of one step. `accepted` is what verification accepted, before any stop cut it."""
    by_source: dict[str, SourceStats] = {}
    for proposal, verdict in zip(proposals, verdicts, strict=True):
        if proposal.tokens:
            stats = SourceStats.of(len(proposal.tokens), verdict.accepted)
            by_source[proposal.source] = by_source.get(proposal.source, SourceStats()) + stats
    drafts = sum(by_source.values(), SourceStats())
    pool = scheduler.pool
    return StepReport(
        number=plan.number,
        started=clock.started,
        ended=clock.now,
        rows=plan.rows + drafts.drafted,
        prefill_rows=sum(w.count - w.samples for w in plan.work),
        drafted=drafts.drafted,
        accepted=drafts.accepted,
        emitted=sum(len(c.tokens) for c in chunks),
        sequences=len(plan.work),
        waiting=scheduler.waiting_by_class,
        free_blocks=pool.free - pool.idle,
        used_blocks=pool.num_blocks - pool.free,
        preempted=plan.preempted,
        cached_blocks=pool.idle,
        prefix_queries=plan.looked_up,
        prefix_hits=plan.found,
        phases=tuple(clock.laps),
        by_source=tuple(by_source.items()),
        draft_errors=draft_errors,
    )
