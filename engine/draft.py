"""Draft sources: whoever guesses the next tokens. Guessing wrong costs time, never output."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from engine.types import Proposal, StepPlan, Verdict, Work


class DraftSource(Protocol):
    """Two methods: propose, then learn how it went.

    A source with KV of its own moves `Sequence.drafted`; others leave it alone. Feeding that KV is
    part of `propose`, within the source's row budget.
    """

    @property
    def name(self) -> str:
        """Name on the command line, on the wire and in metrics."""
        ...

    @property
    def errors(self) -> int:
        """Failures so far that were kept from the requests (see `engine.draft_guard`)."""
        ...

    def propose(self, plan: StepPlan) -> list[Proposal]:
        """Per work at most `draft_cap` guesses; `NO_PROPOSAL` is always fine."""
        ...

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        """Called once per step, before commit, with everybody's proposals and the outcome."""
        ...

    def forget(self, request_id: str) -> None:
        """The sequence has ended; drop what is kept for it."""
        ...


class DraftWrapper:
    """A source that is another one, but for what is overridden."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def errors(self) -> int:
        return self._source.errors

    def propose(self, plan: StepPlan) -> list[Proposal]:
        return self._source.propose(plan)

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        self._source.observe(plan, proposals, verdicts)

    def forget(self, request_id: str) -> None:
        self._source.forget(request_id)


def allowed(work: Work, source: str) -> bool:
    """Whether this request lets `source` draft for it."""
    sources = work.seq.request.speculation.sources
    return not sources or source in sources
