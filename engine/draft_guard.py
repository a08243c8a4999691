"""A draft source that misbehaves costs its drafts, never a request."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.draft import DraftSource
from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict


class GuardedDraft:
    """Wraps a source: exceptions and nonsense become "no proposal".

    After `patience` failures in a row the source is left alone for `rest` steps, then tried again
    (half-open); each failed trial doubles the rest, up to 64 times. `errors` counts failures.
    """

    def __init__(
        self, source: DraftSource, vocab_size: int, patience: int = 3, rest: int = 50
    ) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._patience = patience
        self._rest = rest
        self._failed_in_row = 0
        self._skip = 0
        self._working = False  # the source has proposed in this step, and may hear how it went
        self.errors = 0

    @property
    def name(self) -> str:
        return self._source.name

    def propose(self, plan: StepPlan) -> list[Proposal]:
        self._working = False
        none = [NO_PROPOSAL] * len(plan.work)
        if self._skip:
            self._skip -= 1
            return none
        try:
            proposals = self._source.propose(plan)
            self._check(plan, proposals)
        except Exception:  # whatever it is, no request may notice
            self._failed()
            return none
        self._working = True
        return proposals

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        if not self._working:
            return
        try:
            self._source.observe(plan, proposals, verdicts)
        except Exception:  # as above
            self._failed()
        else:
            self._failed_in_row = 0

    def forget(self, request_id: str) -> None:
        try:
            self._source.forget(request_id)
        except Exception:  # as above
            self.errors += 1

    def _check(self, plan: StepPlan, proposals: Seq[Proposal]) -> None:
        for work, proposal in zip(plan.work, proposals, strict=True):
            tokens = proposal.tokens
            if len(tokens) > work.draft_cap:
                raise ValueError("more drafts than asked for")
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
                raise ValueError("a draft outside the vocabulary")
            if proposal.grades and len(proposal.grades) < len(tokens):
                raise ValueError("drafts without a grade")
            probs = proposal.probs
            if probs is None:
                continue
            if len(probs) != len(tokens) or max(map(len, probs)) > self._vocab_size:
                raise ValueError("drafts and what they were drawn from do not match")

    def _failed(self) -> None:
        self.errors += 1
        self._failed_in_row += 1
        over = self._failed_in_row - self._patience
        if over >= 0:
            self._skip = self._rest * 2 ** min(over, 6)
