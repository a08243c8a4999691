"""The tenant's recent outputs, and the request's own tokens, as the draft (`engine.suffix_index`).

What one tenant was served never shows in another's guesses, and so neither in the time that these
take. A request that shares its KV with few (`Request.cache_salt`) shares no text: it has its own
tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.acceptance import grade_of
from engine.request import Request
from engine.suffix_index import LONGEST, NO_GUESS, Guess, RecentTexts, SuffixIndex
from engine.types import NO_PROPOSAL, Proposal, Sequence, StepPlan, Verdict, Work

TOKENS = 1 << 16  # of a tenant's outputs that are kept
TENANTS = 16  # whose outputs are kept, at up to 10 MB each


class _Live:
    """A sequence that has not ended, and the index of its tokens so far."""

    __slots__ = ("index", "seq")

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.index = SuffixIndex()

    def guess(self, tail: Seq[int], limit: int) -> Guess:
        self.index.extend(self.seq.tokens[len(self.index) :])
        return self.index.guess(tail, limit)


class SuffixDraft:
    """`DraftSource` by suffix index. Of each tenant the latest `tokens` tokens of output are kept,
    and of no more than `tenants` tenants, those who were served last. The grade of a guess is how
    likely it is, in tenths."""

    name = "suffix"
    errors = 0

    def __init__(self, tokens: int = TOKENS, tenants: int = TENANTS) -> None:
        self._tokens = tokens
        self._tenants = tenants
        self._recent: dict[str, RecentTexts] = {}  # by tenant, who was served last is last
        self._live: dict[str, _Live] = {}

    def propose(self, plan: StepPlan) -> list[Proposal]:
        return [self._one(work) for work in plan.work]

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        """Also whoever was never drafted for is known to the end. Who has ended by now was
        forgotten by now."""
        for work in plan.work:
            if work.seq.finish is None:
                self._note(work.seq)

    def forget(self, request_id: str) -> None:
        """Keeps the output for the tenant, and the end of the prompt, which it began after."""
        live = self._live.pop(request_id, None)
        if live is None or not live.seq.generated or not _shares(live.seq.request):
            return
        tenant = live.seq.request.tenant
        recent = self._recent.pop(tenant, None) or RecentTexts(self._tokens)
        begin = max(0, len(live.seq.request.prompt) - LONGEST)
        recent.add(live.seq.tokens[begin:])
        self._recent[tenant] = recent
        while len(self._recent) > self._tenants:
            del self._recent[next(iter(self._recent))]

    def _note(self, seq: Sequence) -> _Live:
        live = self._live.get(seq.request.id)
        if live is None:
            live = self._live[seq.request.id] = _Live(seq)
        return live

    def _one(self, work: Work) -> Proposal:
        live = self._note(work.seq)
        if not work.draft_cap:
            return NO_PROPOSAL
        tail = work.seq.tokens[-LONGEST:]
        guess = live.guess(tail, work.draft_cap)
        others = self._of_tenant(work, tail)
        if others.score > guess.score:
            guess = others
        if not guess.tokens:
            return NO_PROPOSAL
        grades = tuple(map(grade_of, guess.shares))
        return Proposal(guess.tokens, self.name, None, grades)

    def _of_tenant(self, work: Work, tail: Seq[int]) -> Guess:
        request = work.seq.request
        recent = self._recent.get(request.tenant)
        if recent is None or not _shares(request):
            return NO_GUESS
        return recent.guess(tail, work.draft_cap)


def _shares(request: Request) -> bool:
    return not request.cache_salt
