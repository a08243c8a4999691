"""Drafts only where they have paid lately: a fixed threshold, until costs are measured."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from engine.draft import DraftSource, DraftWrapper
from engine.types import Proposal, StepPlan, Verdict

# How fast the average follows, and where it starts above what drafts must be worth.
WEIGHT = 0.1
DOUBT = 1.0


@dataclass(slots=True)
class _Record:
    average: float
    rest: int = 0


class GatedDraft(DraftWrapper):
    """Wraps a source: a sequence whose drafts do not pay gets none for `rest` steps, then a try.

    `worth` is how many drafts of a step must be accepted, on average, for its additional rows to
    cost less than they save. Each sequence begins with the benefit of the doubt.
    """

    def __init__(self, source: DraftSource, worth: float, rest: int) -> None:
        super().__init__(source)
        self._worth = worth
        self._rest = rest
        self._records: dict[str, _Record] = {}

    def propose(self, plan: StepPlan) -> list[Proposal]:
        work = tuple(
            w.capped(0) if w.draft_cap and self._rests(w.seq.request.id) else w for w in plan.work
        )
        return super().propose(replace(plan, work=work))

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        for work, proposal, verdict in zip(plan.work, proposals, verdicts, strict=True):
            if proposal.source == self.name and not verdict.error:
                self._learn(work.seq.request.id, verdict.accepted)
        super().observe(plan, proposals, verdicts)

    def forget(self, request_id: str) -> None:
        self._records.pop(request_id, None)
        super().forget(request_id)

    def _rests(self, request_id: str) -> bool:
        record = self._records.get(request_id)
        if record is None or not record.rest:
            return False
        record.rest -= 1
        return True

    def _learn(self, request_id: str, accepted: int) -> None:
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record(self._worth + DOUBT)
        record.average += WEIGHT * (accepted - record.average)
        if record.average < self._worth:
            # One failure more after the rest, and it rests again; one success, and it goes on.
            record.average, record.rest = self._worth, self._rest
