"""Prompt lookup: the request's own tokens as the draft (Saxena 2023, "Prompt Lookup Decoding").

The last n tokens are looked up among all earlier n-grams of the sequence, longest n first; what
followed the most recent match is proposed. Costs no model pass.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict

SIZES = (5, 3, 2, 1)


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
            guess = index.continuation(work.seq.tokens, work.draft_cap)
            proposals.append(Proposal(guess, self.name) if guess else NO_PROPOSAL)
        return proposals

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        return None

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class NgramIndex:
    """Where each n-gram of one append-only token list was last followed by something."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._follows: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in sizes)
        self._indexed = 1

    def continuation(self, tokens: Seq[int], limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that followed the longest, latest match; empty if none."""
        self._extend(tokens)
        for size, follows in zip(self._sizes, self._follows, strict=True):
            at = follows.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if at is not None:
                return _copy_from(tokens, at, limit)
        return ()

    def _extend(self, tokens: Seq[int]) -> None:
        """Index every n-gram that has a token after it."""
        for end in range(self._indexed, len(tokens)):
            for size, follows in zip(self._sizes, self._follows, strict=True):
                if size <= end:
                    follows[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens))


def _copy_from(tokens: Seq[int], at: int, limit: int) -> tuple[int, ...]:
    """`limit` tokens from `at` on; past the end it reads its own output (a repeating text)."""
    out: list[int] = []
    for position in range(at, at + limit):
        out.append(tokens[position] if position < len(tokens) else out[position - len(tokens)])
    return tuple(out)
