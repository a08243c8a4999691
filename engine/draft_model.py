"""A small model with the target's vocabulary as the draft (Leviathan et al., Chen et al. 2023).

It keeps KV of its own under the same block tables; `Sequence.drafted` says how much of it is
valid. It never feeds its own last guess, and after a rejection simply feeds `tokens[drafted:]`,
one or two tokens, so a full acceptance needs no special case (`algorithms.md` I4).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import prod
from typing import Any

from engine.acceptance import grade_of
from engine.types import NO_PROPOSAL, Drawn, Feed, Model, Proposal, StepPlan, Verdict, Work


class _Guess:
    """What is drafted for one sequence, so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._probs: list[Any] = []
        self._sure: list[float] = []
        self.hope = 1.0  # that all of them are right, by what the draft model thinks of them

    @property
    def usable(self) -> bool:
        """Whether the last token is one."""
        return self.tokens[-1] >= 0

    def add(self, drawn: Drawn) -> None:
        self.tokens.extend(drawn.tokens)
        self._sure.extend(drawn.sure)
        self.hope *= prod(drawn.sure)
        if drawn.probs is not None:
            self._probs.extend(drawn.probs)

    def proposal(self, source: str) -> Proposal:
        count = len(self.tokens)
        if count and not self.usable:
            count -= 1
        if not count:
            return NO_PROPOSAL
        grades = tuple(grade_of(p) for p in self._sure)
        return Proposal(tuple(self.tokens[:count]), source, self._probs[:count] or None, grades)


class ModelDraft:
    """`DraftSource` over any `Model`.

    Catching up (prompt, or steps without drafting) happens when a sequence may draft, in plan
    order, within `rows` rows a step; who is still behind gets no drafts in that step. Positions
    from `context_limit` on are never drafted. How it draws is the model's matter: with the
    target's noise, so that it agrees with the target as often as the two distributions allow, or
    with its own, and then it says what from.

    A chain ends after a token with which all of it is less than `least` likely to be right, by what
    the model says of them; 0 with noise of its own: how long a chain is must not depend on what was
    drawn (`engine.types.Proposal`).
    """

    name = "model"
    errors = 0

    def __init__(self, model: Model, rows: int, context_limit: int, least: float = 0.0) -> None:
        self._model = model
        self._least = least
        self._rows = rows
        self._context_limit = context_limit

    def propose(self, plan: StepPlan) -> list[Proposal]:
        guesses = [_Guess() for _ in plan.work]
        drafting = self._catch_up(plan, guesses)
        while drafting:
            drafting = [
                i
                for i in drafting
                if guesses[i].usable
                and guesses[i].hope >= self._least
                and len(guesses[i].tokens) < self._cap(plan.work[i])
            ]
            feeds = [
                _feed(w, (guess[-1],), _end(w) + len(guess) - 1, sample=1)
                for w, guess in ((plan.work[i], guesses[i].tokens) for i in drafting)
            ]
            for i, drawn in zip(drafting, self._model.run(feeds) if feeds else (), strict=True):
                guesses[i].add(drawn)
        return [guess.proposal(self.name) for guess in guesses]

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        for work, proposal, verdict in zip(plan.work, proposals, verdicts, strict=True):
            if proposal.source == self.name and not verdict.error:
                fed = max(len(proposal.tokens) - 1, 0)
                work.seq.drafted = _end(work) + self._kept(min(verdict.accepted, fed))

    def forget(self, request_id: str) -> None:
        return None

    def _catch_up(self, plan: StepPlan, guesses: list[_Guess]) -> list[int]:
        """Feed what the draft has not seen. Returns who is level, with a first guess each."""
        budget, feeds, owners = self._rows, [], []
        for i, work in enumerate(plan.work):
            start = work.seq.drafted
            count = min(self._readable(work) - start, budget)
            if self._cap(work) == 0 or count <= 0:
                continue
            budget -= count
            tokens = tuple(work.seq.tokens[start : start + count])
            feeds.append(_feed(work, tokens, start, sample=int(start + count == _end(work))))
            owners.append(i)
        if not feeds:
            return []
        results = self._model.run(feeds)
        for i, feed in zip(owners, feeds, strict=True):
            plan.work[i].seq.drafted = feed.start + len(feed.tokens)
        for i, drawn in zip(owners, results, strict=True):
            guesses[i].add(drawn)
        return [i for i in owners if guesses[i].tokens]

    def _readable(self, work: Work) -> int:
        """How many tokens of the sequence can be fed now."""
        return _end(work)

    def _kept(self, accepted: int) -> int:
        """How many of so many accepted drafts, which were fed, need not be fed again."""
        return accepted

    def _cap(self, work: Work) -> int:
        return max(0, min(work.draft_cap, self._context_limit - _end(work)))


def _end(work: Work) -> int:
    return work.start + work.count


def _feed(work: Work, tokens: tuple[int, ...], start: int, sample: int) -> Feed:
    return Feed(tokens, start, work.seq.table.ids, sample, work.seq.request.sampling)
