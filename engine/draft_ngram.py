"""Prompt lookup: the request's own tokens as the draft (Saxena 2023, "Prompt Lookup Decoding").

The last n tokens are looked up among all earlier n-grams of the sequence, longest n first; what
followed the most recent match is proposed. Costs no model pass.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict

SIZES = (8, 5, 3, 2)
TOKEN_BITS = 32


class NgramDraft:
    """`DraftSource` by lookup. Keeps one index per sequence; each token is indexed once."""

    name = "ngram"
    errors = 0

    def __init__(self, sizes: Seq[int] = SIZES) -> None:
        self._sizes = tuple(sorted(sizes, reverse=True))
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, plan: StepPlan) -> list[Proposal]:
        proposals = []
        for work in plan.work:
            if work.draft_cap == 0:
                proposals.append(NO_PROPOSAL)
                continue
            index = self._indexes.get(work.seq.request.id)
            if index is None:
                index = self._indexes[work.seq.request.id] = NgramIndex(self._sizes)
            guess, grade = index.continuation(work.seq.tokens, work.draft_cap)
            proposals.append(
                Proposal(guess, self.name, None, (grade,) * len(guess)) if guess else NO_PROPOSAL
            )
        return proposals

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        return None

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class NgramIndex:
    """Where each n-gram of one append-only token list was last followed by something.

    An n-gram is the number that its ids make, TOKEN_BITS each; ids must fit.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        longest = max(sizes, default=0)
        self._grams = [(n, _ones(n), dict[int, int]()) for n in sizes]
        self._by_length = list(zip(reversed(range(len(sizes))), self._grams, strict=True))
        self._window, self._mask = 0, _ones(longest)  # the last ids as a number
        self._read = 0

    def continuation(self, tokens: Seq[int], limit: int) -> tuple[tuple[int, ...], int]:
        """At most `limit` tokens that followed the longest, latest match, and how many shorter
        sizes there are than that of the match; no tokens if there is none."""
        self._read_up_to(tokens)
        window = self._window
        for shorter, (size, mask, follows) in self._by_length:
            at = follows.get(window & mask)
            if at is not None and size <= len(tokens):
                return _copy_from(tokens, at, limit), shorter
        return (), 0

    def _read_up_to(self, tokens: Seq[int]) -> None:
        """Index every n-gram that has a token after it."""
        window, full, grams = self._window, self._mask, self._grams
        for end in range(self._read, len(tokens)):
            for size, mask, follows in grams:
                if size <= end:
                    follows[window & mask] = end
            window = (window << TOKEN_BITS | tokens[end]) & full
        self._window, self._read = window, len(tokens)


def _ones(size: int) -> int:
    return (1 << size * TOKEN_BITS) - 1


def _copy_from(tokens: Seq[int], at: int, limit: int) -> tuple[int, ...]:
    """`limit` tokens from `at` on; past the end it reads its own output (a repeating text)."""
    out = list(tokens[at : at + limit])
    for position in range(limit - len(out)):
        out.append(out[position])
    return tuple(out)
