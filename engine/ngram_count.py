"""Counts what follows what, for `engine.ngram_table`, in bounded memory.

Pairs of a context and the token after it are sorted and added up a piece of text at a time. Where
there are too many of them the rarest are forgotten, as in lossy counting (Manku & Motwani 2002),
but for how often their context was seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.ngram_table import ENTRY_BYTES, ID_BITS, MOST_IDS, ONE, SIZES, Entries

PIECE = 1 << 20  # tokens that are sorted together
MOST_PAIRS = 1 << 22  # of each order, at 20 bytes
SEEN = 2  # times that a context must have been seen
OTHER = np.int32(np.iinfo(np.int32).max)  # follows a context, and which it was is forgotten

Keys = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """How often each `token` came after each context; sorted by both, none twice."""

    keys: Keys
    tokens: Tokens
    counts: Counts


_NONE = _Pairs(np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.int64))


class NgramCounter:
    """Adds up documents. Needs memory for `piece` tokens, the longest document, and thrice
    `most_pairs` pairs of each order."""

    def __init__(self, vocab_size: int, piece: int = PIECE, most_pairs: int = MOST_PAIRS) -> None:
        if not 0 < vocab_size <= MOST_IDS:
            raise ValueError(f"a vocabulary of {vocab_size} ids; {MOST_IDS} at most")
        self._vocab_size = vocab_size
        self._piece = piece
        self._most_pairs = most_pairs
        self._waiting: list[npt.NDArray[np.int64]] = []
        self._tokens = 0
        self._pairs = dict.fromkeys(SIZES, _NONE)

    def add(self, document: Seq[int]) -> None:
        """No n-gram goes from one document into the next. Raises ValueError for an id that is not
        of the vocabulary."""
        ids = np.asarray(document, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise ValueError(f"an id outside 0..{self._vocab_size - 1}")
        self._waiting.append(ids)
        self._tokens += len(ids)
        if self._tokens >= self._piece:
            self._count()

    def entries(self, most_bytes: int) -> list[Entries]:
        """What a table of at most so many bytes should have: of the contexts that were seen twice
        those whose guesses were right most often."""
        self._count()
        best = [_best(self._pairs[size]) for size in SIZES]
        kept = _most_often([c for _, _, c, _ in best], most_bytes // ENTRY_BYTES)
        return [
            Entries(size, keys[keep], tokens[keep], _shares(right, seen)[keep])
            for size, (keys, tokens, right, seen), keep in zip(SIZES, best, kept, strict=True)
        ]

    def _count(self) -> None:
        if not self._waiting:
            return
        lengths = [len(ids) for ids in self._waiting]
        ids = np.concatenate(self._waiting)
        begun = np.repeat(np.cumsum(lengths) - lengths, lengths)
        behind = np.arange(len(ids)) - begun  # tokens of its document before each
        self._waiting, self._tokens = [], 0
        for size in SIZES:
            at = np.flatnonzero(behind >= size)
            keys = np.zeros(len(at), np.uint64)
            for back in range(size, 0, -1):
                keys = keys << np.uint64(ID_BITS) | ids[at - back].astype(np.uint64)
            new = _added(keys, ids[at].astype(np.int32), np.ones(len(at), np.int64))
            self._pairs[size] = _thinned(_both(self._pairs[size], new), self._most_pairs)


def count(documents: Iterable[Seq[int]], vocab_size: int, most_bytes: int) -> list[Entries]:
    """What a table of at most so many bytes should have, from the ids of documents. The same
    documents in the same order give the same entries."""
    counter = NgramCounter(vocab_size)
    for document in documents:
        counter.add(document)
    return counter.entries(most_bytes)


def _both(one: _Pairs, other: _Pairs) -> _Pairs:
    return _added(
        np.concatenate((one.keys, other.keys)),
        np.concatenate((one.tokens, other.tokens)),
        np.concatenate((one.counts, other.counts)),
    )


def _added(keys: Keys, tokens: Tokens, counts: Counts) -> _Pairs:
    """Pairs that may come several times and in any order, added up."""
    if not len(keys):
        return _NONE
    order = np.lexsort((tokens, keys))
    keys, tokens, counts = keys[order], tokens[order], counts[order]
    first = np.flatnonzero(_changes(keys) | _changes(tokens))
    return _Pairs(keys[first], tokens[first], np.add.reduceat(counts, first))


def _thinned(pairs: _Pairs, most: int) -> _Pairs:
    """At most so many. What is forgotten of a context counts as OTHER; a context of which nothing
    else is left is forgotten, too."""
    rare = 1
    while len(pairs.keys) > most:
        tokens = np.where(pairs.counts <= rare, OTHER, pairs.tokens).astype(np.int32)
        pairs = _added(pairs.keys, tokens, pairs.counts)
        # OTHER comes last of a context; it is alone where it comes first, too.
        known = ~(_changes(pairs.keys) & (pairs.tokens == OTHER))
        pairs = _Pairs(pairs.keys[known], pairs.tokens[known], pairs.counts[known])
        rare *= 2
    return pairs


def _best(pairs: _Pairs) -> tuple[Keys, Tokens, Counts, Counts]:
    """Contexts that were seen often enough; the token that came most often, the lowest of several;
    how often it came, and how often the context."""
    if not len(pairs.keys):
        return _NONE.keys, _NONE.tokens, _NONE.counts, _NONE.counts
    named = np.where(pairs.tokens == OTHER, 0, pairs.counts)
    order = np.lexsort((pairs.tokens, -named, pairs.keys))
    keys, tokens, named = pairs.keys[order], pairs.tokens[order], named[order]
    first = np.flatnonzero(_changes(keys))
    seen = np.add.reduceat(pairs.counts[order], first)
    first, seen = first[seen >= SEEN], seen[seen >= SEEN]
    return keys[first], tokens[first], named[first], seen


def _most_often(right: Seq[Counts], most: int) -> list[npt.NDArray[np.bool_]]:
    """Which entries of each order to keep: those right most often, and of equals the shorter
    contexts, then the lower keys."""
    every = np.concatenate(right)
    kept = np.zeros(len(every), np.bool_)
    kept[np.argsort(-every, kind="stable")[:most]] = True
    return np.split(kept, np.cumsum([len(r) for r in right])[:-1])


def _shares(right: Counts, seen: Counts) -> npt.NDArray[np.uint8]:
    """How likely the guess is: as often as it was right, and once more the context was seen and
    it was not, so that two of two are not certain. Rounded to the nearest 255th."""
    return ((2 * ONE * right + seen + 1) // (2 * (seen + 1))).astype(np.uint8)


def _changes(values: npt.NDArray[np.uint64] | npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before; true for the first."""
    return np.concatenate(([True], values[1:] != values[:-1]))[: len(values)]
