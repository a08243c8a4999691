"""Draft sources that know the answer, and one whose length is drawn anew each time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.draft import DraftSource, DraftWrapper
from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict, Work

FLAW = 0.25


class KnownDraft:
    """Drafts from `texts`, the whole token lists by request id. `flaw`: how often one is wrong."""

    errors = 0

    def __init__(
        self, name: str, texts: Mapping[str, Seq[int]], vocab_size: int, flaw: float, seed: str
    ) -> None:
        self.name = name
        self._texts = texts
        self._vocab_size = vocab_size
        self._flaw = flaw
        self._rng = random.Random(seed)

    def propose(self, plan: StepPlan) -> list[Proposal]:
        return [self._one(w) if w.draft_cap else NO_PROPOSAL for w in plan.work]

    def _one(self, work: Work) -> Proposal:
        end = work.start + work.count
        known = self._texts[work.seq.request.id][end : end + work.draft_cap]
        tokens = tuple(
            (token + self._rng.randint(1, self._vocab_size - 1)) % self._vocab_size
            if self._rng.random() < self._flaw
            else token
            for token in known
        )
        return Proposal(tokens, self.name) if tokens else NO_PROPOSAL

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        return None

    def forget(self, request_id: str) -> None:
        return None


class VaryingDraft(DraftWrapper):
    """Wraps a source: per sequence and step it may make 0 to `most` guesses, drawn at random."""

    def __init__(self, source: DraftSource, most: int, seed: str) -> None:
        super().__init__(source)
        self._most = most
        self._rng = random.Random(seed)

    def propose(self, plan: StepPlan) -> list[Proposal]:
        work = tuple(
            replace(w, draft_cap=min(w.draft_cap, self._rng.randint(0, self._most)))
            for w in plan.work
        )
        return super().propose(replace(plan, work=work))
