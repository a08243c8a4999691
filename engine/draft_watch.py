"""A draft source of which nothing is accepted any more is as good as one that fails."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.draft import DraftSource, DraftWrapper
from engine.types import Proposal, StepPlan, Verdict

HOPELESS = 100


class WatchedDraft(DraftWrapper):
    """Wraps a source: raises RuntimeError after `hopeless` proposals in a row, of any sequences,
    of which not even the first draft was accepted, and after each such proposal from then on, for
    `engine.draft_guard` to count and to leave the source alone for a while.

    KV of its own that is not what it should be shows in nothing else.
    """

    def __init__(self, source: DraftSource, hopeless: int = HOPELESS) -> None:
        super().__init__(source)
        self._hopeless = hopeless
        self._refused = 0

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        super().observe(plan, proposals, verdicts)
        before = self._refused
        for proposal, verdict in zip(proposals, verdicts, strict=True):
            if proposal.source == self.name and proposal.tokens and not verdict.error:
                self._refused = 0 if verdict.accepted else self._refused + 1
        if self._refused >= self._hopeless and self._refused > before:
            raise RuntimeError(f"{self._refused} proposals of {self.name} in a row were refused")
