"""What was counted beforehand as the draft: the target's own habits (`engine.ngram_table`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.acceptance import grade_of
from engine.ngram_table import NgramTable
from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict, Work

LEAST = 0.05  # guesses end where all of them are less likely to be right than this


class TableDraft:
    """`DraftSource` that goes from guess to guess through a table. Keeps nothing of a request. The
    grade of a guess is how likely it is, in tenths."""

    name = "table"
    errors = 0

    def __init__(self, table: NgramTable) -> None:
        self._table = table

    def propose(self, plan: StepPlan) -> list[Proposal]:
        return [self._one(work) for work in plan.work]

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        return None

    def forget(self, request_id: str) -> None:
        return None

    def _one(self, work: Work) -> Proposal:
        chain = self._table.chain(work.seq.tokens, work.draft_cap, LEAST)
        if not chain:
            return NO_PROPOSAL
        tokens = tuple(token for token, _ in chain)
        return Proposal(tokens, self.name, None, tuple(grade_of(p) for _, p in chain))
