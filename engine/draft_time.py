"""A draft source that takes too long is as good as one that fails."""

from __future__ import annotations

from collections.abc import Callable

from engine.draft import DraftSource, DraftWrapper
from engine.types import Proposal, StepPlan


class TimedDraft(DraftWrapper):
    """Wraps a source: raises TimeoutError where it took more than `most_s` seconds of `clock`, for
    `engine.draft_guard` to count and, if that goes on, to leave it alone for a while.

    What never returns is the watchdog's matter (`engine.process`).
    """

    def __init__(self, source: DraftSource, clock: Callable[[], float], most_s: float) -> None:
        super().__init__(source)
        self._clock = clock
        self._most_s = most_s

    def propose(self, plan: StepPlan) -> list[Proposal]:
        begun = self._clock()
        proposals = super().propose(plan)
        took = self._clock() - begun
        if took > self._most_s:
            raise TimeoutError(
                f"{self.name} took {took:.3g} s to draft, {self._most_s:.3g} at most"
            )
        return proposals
