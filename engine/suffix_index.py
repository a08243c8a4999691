"""Where the end of a text was before, and what came after it there.

SuffixDecoding (Oliaro et al., NeurIPS 2025) in little: a guess is the most frequent child of the
node of a suffix tree that the longest match leads to, then that one's, and so on, each with the
share count(child) / count(node). Here the node is found without a tree: its occurrences are looked
for among the latest of the last GRAM tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import NamedTuple

GRAM = 3  # tokens that must match at least
LONGEST = 8  # longer matches are as good as one of so many tokens
LATEST = 8  # occurrences that are looked at
LEAST = 0.05  # guesses end where all of them are less likely to be right than this
# A node that was seen once is no certainty, the less the shorter its match: so many occurrences,
# over the length of the match, are taken to have gone on otherwise.
DOUBT = 2.0
BITS = 32
MASK = (1 << GRAM * BITS) - 1
END = -1  # of a document; no id


class Guess(NamedTuple):
    """Tokens that may come next, how likely each is after those before it, and how many of them
    are expected to be right."""

    tokens: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    score: float = 0.0


NO_GUESS = Guess()


class SuffixIndex:
    """A text that grows at its end, and from whose start documents may be dropped. Takes about 150
    bytes a token."""

    def __init__(self) -> None:
        self._text = array("i")
        # By token: the place before it where the GRAM tokens ahead of it were last, -1 if nowhere.
        self._before = array("q")
        self._last: dict[int, int] = {}  # GRAM tokens as a number: the last token that they precede
        self._dropped = 0  # places count from the first token that there ever was
        self._window, self._length = 0, 0  # the last ids as a number; tokens since the last END

    def __len__(self) -> int:
        """Tokens held, ends of documents among them."""
        return len(self._text)

    def extend(self, tokens: Seq[int]) -> None:
        text, before, last = self._text, self._before, self._last
        window, length, place = self._window, self._length, self._dropped + len(text)
        for token in tokens:
            if length >= GRAM:
                before.append(last.get(window, -1))
                last[window] = place
            else:
                before.append(-1)
            text.append(token)
            window = (window << BITS | token) & MASK
            length += 1
            place += 1
        self._window, self._length = window, length

    def end_document(self) -> None:
        """Nothing before this goes on behind it."""
        self._text.append(END)
        self._before.append(-1)
        self._window = self._length = 0

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens: whole documents, their ends included."""
        window = length = 0
        last, place = self._last, self._dropped
        for token in self._text[:count]:
            if token == END:
                window = length = 0
            else:
                if length >= GRAM and last.get(window) == place:
                    del last[window]
                window = (window << BITS | token) & MASK
                length += 1
            place += 1
        del self._text[:count], self._before[:count]
        self._dropped = place

    def guess(self, tail: Seq[int], limit: int) -> Guess:
        """At most `limit` tokens that may follow `tail`, the last LONGEST tokens of a text."""
        if len(tail) < GRAM:
            return NO_GUESS
        places, length = self._longest_matches(tail)
        if not places:
            return NO_GUESS
        return _walk([self._after(place, limit) for place in places], length)

    def _longest_matches(self, tail: Seq[int]) -> tuple[list[int], int]:
        """Indices behind the longest of the latest matches, the latest first, and its length."""
        text, before, dropped = self._text, self._before, self._dropped
        window = 0
        for token in tail[-GRAM:]:
            window = window << BITS | token
        rest = list(tail[-GRAM - 1 :: -1])  # the tokens ahead of these, from the last on
        at = self._last.get(window, -1) - dropped
        found: list[int] = []
        longest = 0
        for _ in range(LATEST):
            if at < 0:
                break
            length, ahead = 0, at - GRAM - 1
            for token in rest[: ahead + 1]:
                if text[ahead - length] != token:
                    break
                length += 1
            if length > longest or not found:
                found, longest = [at], length
            elif length == longest:
                found.append(at)
            at = before[at] - dropped
        return found, longest + GRAM

    def _after(self, place: int, count: int) -> list[int]:
        """What comes there. Past its end the text goes on with what is read (a repetition)."""
        tokens = self._text[place : place + count].tolist()
        for position in range(count - len(tokens)):
            tokens.append(tokens[position])
        return tokens


def _walk(texts: list[list[int]], length: int) -> Guess:
    """From the most frequent child to its most frequent child, the first of equals, in texts of one
    length that come after matches of `length` tokens."""
    tokens: list[int] = []
    shares: list[float] = []
    survival, score = 1.0, 0.0
    columns: Iterator[tuple[int, ...]] = zip(*texts, strict=True)
    for depth in range(len(texts[0])):
        nexts = next(columns)
        token, among = nexts[0], len(nexts)
        count = nexts.count(token)
        if count < among:
            token = max(nexts, key=nexts.count)
            count = nexts.count(token)
            texts = [text for text in texts if text[depth] == token]
            columns = islice(zip(*texts, strict=True), depth + 1, None)
        share = count / (among + DOUBT / (length + depth))
        survival *= share
        if token == END or survival < LEAST:
            break
        tokens.append(token)
        shares.append(share)
        score += survival
    return Guess(tuple(tokens), tuple(shares), score)


class RecentTexts:
    """An index over the latest documents, of at most `most` tokens together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lengths: deque[int] = deque()
        self._index = SuffixIndex()

    @property
    def tokens(self) -> int:
        """Held, ends of documents among them."""
        return len(self._index)

    def add(self, document: Seq[int]) -> None:
        """The oldest are dropped for it; of one that is too long its end is kept."""
        kept = document[max(0, len(document) + 1 - self._most) :]
        while self._lengths and len(self._index) + len(kept) + 1 > self._most:
            self._index.drop(self._lengths.popleft())
        self._index.extend(kept)
        self._index.end_document()
        self._lengths.append(len(kept) + 1)

    def guess(self, tail: Seq[int], limit: int) -> Guess:
        return self._index.guess(tail, limit)
