"""Holds a sequence's output to its grammar: the mask of each row, in step with the output.

Of a grammar that can only end, one end-of-sequence token is all that is left, whatever other rules
say: so the output ends there, with EOS. What drafts bring after that end, or against the grammar,
is counted and taken back like any other draft; what is drawn after it is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.grammar import MOST_MASK_S, TOO_SLOW, Pace, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = np.ndarray[tuple[int], np.dtype[np.uint8]]

# Tokens whose mask is widened at a time; a buffer for all would be new pages each time.
PIECE = 1 << 14
NO_WAY_ON = "the output does not match the grammar, or the grammar leaves no token"


class GrammarMask:
    """`LogitRule` and `OutputGrammar` over a copy of `start`. `ends` are not empty.

    A grammar one of whose masks takes too long is given up, by all who use it: `pace` is theirs.
    A matcher that fails (its limits of time or memory for one token) stays failed and cannot go
    back. If a draft did that, a fresh copy reads the output again, and no more is drafted; if the
    output itself did, there is no next token, and `fault` says why.
    """

    def __init__(
        self, start: LLMatcher, ends: Seq[int], longest: bool = False, pace: Pace | None = None
    ) -> None:
        self._start = start
        self._pace = pace or Pace()
        self._matcher = start.deep_copy()
        self._ends = tuple(ends)
        self._longest = longest
        self._tokens: list[int] = []  # what the matcher has consumed
        self._beyond = 0  # tokens since then: an end, or one that cannot come, and what followed
        self._ended = False  # it was an end
        self._failed: tuple[int, str] = (-1, "")
        self._drafting = True

    def edit(self, row: Tensor) -> None:
        """See `engine.logits.LogitRule`."""
        if self._ended:
            return  # some token must be drawn for the end before it to count as accepted
        allowed = self._allowed()
        if allowed is None:
            row.fill_(-math.inf)
        elif not allowed.any():
            row.fill_(-math.inf)
            row[self._ends[0]] = 0.0
        else:
            keep(row, allowed)

    def push(self, token: int) -> None:
        """See `engine.logits.LogitRule`."""
        if self._beyond or not self._consume(token):
            self._beyond += 1

    def pop(self) -> None:
        """See `engine.logits.LogitRule`."""
        if self._beyond:
            self._beyond -= 1
            self._ended = self._ended and self._beyond > 0
            return
        self._tokens.pop()
        if not self._matcher.is_error() and not self._matcher.rollback(1):
            self._read_again()

    @property
    def fault(self) -> str:
        """See `engine.types.OutputGrammar`."""
        place, cause = self._failed
        if place == len(self._tokens):
            return cause
        return NO_WAY_ON if self._beyond else ""

    def legal(self, drafts: Seq[int]) -> int:
        """See `engine.types.OutputGrammar`."""
        if self._beyond or not self._drafting:
            return 0
        end = next((i for i, token in enumerate(drafts) if token in self._ends), len(drafts))
        fit = self._sound().validate_tokens(list(drafts[:end]))
        fits = fit == end < len(drafts) and self._after(drafts[:end], lambda m: m.is_accepting())
        return fit + fits

    def forced(self, most: int) -> tuple[int, ...]:
        """See `engine.types.OutputGrammar`."""
        if self._beyond or not self._drafting:
            return ()
        tokens = self._sound().compute_ff_tokens()[:most]
        end = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        forced = tuple(tokens[:end])
        if len(forced) < most and self._after(forced, lambda m: m.is_stopped()):
            return (*forced, self._ends[0])
        return forced

    def _allowed(self) -> Bits | None:
        """A bit for each of the vocabulary, none set if the output can only end; None if nothing
        can come."""
        if self._beyond:
            return None
        if self._pace.too_slow:
            self._failed = len(self._tokens), TOO_SLOW
            return None
        matcher = self._sound()
        begun = time.thread_time()
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        self._pace.too_slow = time.thread_time() - begun > MOST_MASK_S
        if matcher.is_error():
            self._fail(matcher)
            return None
        if matcher.is_accepting():
            further = allowed.copy()
            for end in self._ends:
                further[end // 8] &= ~(1 << end % 8) & 0xFF
            return further if self._longest or not further.any() else allowed
        if not allowed.any():
            self._failed = len(self._tokens), NO_WAY_ON
            return None
        return allowed

    def _consume(self, token: int) -> bool:
        matcher = self._sound()
        if token in self._ends and matcher.is_accepting():
            self._ended = True
            return False
        if matcher.try_consume_tokens([token]) != 1:
            if matcher.is_error():
                self._fail(matcher)
            return False
        self._tokens.append(token)
        return True

    def _fail(self, matcher: LLMatcher) -> None:
        self._failed = len(self._tokens), f"the grammar: {first_line(matcher.get_error())}"

    def _after(self, tokens: Seq[int], ask: Callable[[LLMatcher], bool]) -> bool:
        """What the matcher says after `tokens`; False if they cannot come or it fails."""
        for token in tokens:
            self.push(token)
        try:
            return not self._beyond and not self._matcher.is_error() and ask(self._matcher)
        finally:
            for _ in tokens:
                self.pop()

    def _sound(self) -> LLMatcher:
        """The matcher, where it is; in an error state only if the output leads it there."""
        if self._matcher.is_error():
            self._read_again()
        return self._matcher

    def _read_again(self) -> None:
        self._drafting = False
        self._matcher = self._start.deep_copy()
        for token in self._tokens:
            self._matcher.consume_token(token)


def keep(row: Tensor, allowed: Bits) -> None:
    """Minus infinity where no bit is set, the lowest bit of a byte first. On the CPU by one thread:
    torch's own would wait for each other at every row."""
    if row.device.type != "cpu" or row.dtype != torch.float32:
        kept = np.unpackbits(allowed, count=len(row), bitorder="little").view(np.bool_)
        row.masked_fill_(torch.from_numpy(~kept).to(row.device), -math.inf)
        return
    values, limits = row.numpy(), _limits()
    for start in range(0, len(values), PIECE):
        piece = values[start : start + PIECE]
        limit = limits.take(allowed[start // 8 : (start + PIECE) // 8], axis=0, mode="clip")
        np.minimum(piece, limit.reshape(-1)[: len(piece)], out=piece)


@cache
def _limits() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """(256, 8): what the eight tokens of a byte may not exceed."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(np.inf), np.float32(-np.inf))
