"""Output that begins with a given text, ended where the model would end a token (token healing).

The text's tokens but the last are all that can be drawn at first. Of what is left, a token may be
the beginning, or begin with all of it and go on: the boundary in the middle of a word, where the
text happens to end, is not forced on the model (Microsoft's guidance calls this token healing).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.request import ForcedText
from engine.token_bytes import TokenBytes

# Where the output is: so many of the text's tokens, and what is left after them.
State = tuple[int, bytes]
DONE: State = (-1, b"")
LOST: State = (-2, b"")  # a draft that does not fit: no row from here on is drawn from


class ForcedRule:
    """`LogitRule` of one sequence."""

    def __init__(self, text: ForcedText, vocabulary: TokenBytes) -> None:
        self._tokens = text.tokens
        self._vocabulary = vocabulary
        # After each token of the output, until it is done.
        self._states: list[State] = [(0, text.rest)]
        self._beyond = 0  # tokens since then

    def edit(self, row: Tensor) -> None:
        """See `engine.logits.LogitRule`."""
        place, rest = self._states[-1]
        if place < 0:
            return
        if place < len(self._tokens):
            fits = torch.zeros(len(row), dtype=torch.bool)
            fits[self._tokens[place]] = True
        else:
            fits = torch.from_numpy(self._vocabulary.fitting(rest))
        row.masked_fill_(~fits.to(row.device), -math.inf)

    def push(self, token: int) -> None:
        """See `engine.logits.LogitRule`."""
        state = self._states[-1]
        if state[0] < 0:
            self._beyond += 1
        else:
            self._states.append(self._next(*state, token))

    def pop(self) -> None:
        """See `engine.logits.LogitRule`."""
        if self._beyond:
            self._beyond -= 1
        else:
            self._states.pop()

    def ahead(self, most: int) -> tuple[int, ...]:
        """At most so many of the tokens that are all that can come next."""
        place, _ = self._states[-1]
        return self._tokens[place : place + most] if place >= 0 else ()

    def _next(self, place: int, rest: bytes, token: int) -> State:
        if place < len(self._tokens):
            if token != self._tokens[place]:
                return LOST
            return (place + 1, rest) if place + 1 < len(self._tokens) or rest else DONE
        text = self._vocabulary[token]
        if text.startswith(rest):
            return DONE
        return (place, rest[len(text) :]) if text and rest.startswith(text) else LOST
