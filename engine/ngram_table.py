"""What most likely comes after three, two or one tokens, counted beforehand.

The longest context that the table has decides ("stupid back-off", Brants et al. 2007). On disk it
is a directory: `header.json`, and `table.bin`, which is mapped into memory. That has,
little-endian, the sorted keys of all orders (uint64), one order after the other, then what follows
each (int32), then how likely that is (uint8, in 255ths). A key is the number that the ids of a
context make, ID_BITS each.
"""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT, VERSION = "draftwire n-gram table", 1
HEADER, DATA = "header.json", "table.bin"
SIZES = (1, 2, 3)  # tokens of a context
ID_BITS = 21
MOST_IDS = 1 << ID_BITS
ENTRY_BYTES = 8 + 4 + 1
ONE = 255  # a probability of 1


@dataclass(frozen=True, slots=True)
class Entries:
    """The contexts of `size` tokens. All arrays are of one length, `keys` ascending."""

    size: int
    keys: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.int32]
    shares: npt.NDArray[np.uint8]


class NgramTable:
    """Entries to look up one by one, in about a microsecond each: as a memory view a key of an
    array is a plain number, and the search is in C."""

    def __init__(self, vocab_size: int, entries: Seq[Entries]) -> None:
        """Raises ValueError for what is not in order."""
        if not 0 < vocab_size <= MOST_IDS:
            raise ValueError(f"a vocabulary of {vocab_size} ids; {MOST_IDS} at most")
        for order in entries:
            _check(order, vocab_size)
        self.vocab_size = vocab_size
        longest_first = sorted(entries, key=lambda order: -order.size)
        self._orders = [
            (e.size, _ones(e.size), len(e.keys), _view(e.keys), _view(e.tokens), _view(e.shares))
            for e in longest_first
            if len(e.keys)
        ]
        self._full = _ones(max(SIZES))

    def chain(self, tokens: Seq[int], limit: int, least: float) -> list[tuple[int, float]]:
        """At most `limit` guesses for what comes after `tokens`, each with its probability after
        those before it; ends before that of all of them together falls under `least`."""
        full, length = self._full, min(len(tokens), max(SIZES))
        window = 0
        for token in tokens[len(tokens) - length :]:
            window = window << ID_BITS | token
        chain: list[tuple[int, float]] = []
        survival = 1.0
        while len(chain) < limit:
            guess = self._after(window, length)
            if guess is None:
                break
            survival *= guess[1]
            if survival < least:
                break
            chain.append(guess)
            window, length = (window << ID_BITS | guess[0]) & full, length + 1
        return chain

    def _after(self, window: int, length: int) -> tuple[int, float] | None:
        for size, mask, count, keys, tokens, shares in self._orders:
            if size <= length:
                key = window & mask
                at = bisect_left(keys, key)
                if at < count and keys[at] == key:
                    return tokens[at], shares[at] / ONE
        return None


def write_table(directory: Path, vocab_size: int, entries: Seq[Entries]) -> None:
    """All of it or nothing; the same bytes for the same entries. Raises ValueError for what
    `open_table` would refuse, and OSError where it cannot be written: `directory` must not be
    there, or be empty."""
    NgramTable(vocab_size, entries)
    if not sum(len(e.keys) for e in entries):
        raise ValueError("a table without entries")
    header = {
        "format": FORMAT,
        "version": VERSION,
        "vocab_size": vocab_size,
        "orders": [{"size": e.size, "entries": len(e.keys)} for e in entries],
    }
    columns = (
        *(e.keys.astype("<u8") for e in entries),
        *(e.tokens.astype("<i4") for e in entries),
        *(e.shares.astype("u1") for e in entries),
    )
    directory = directory.absolute()
    part = directory.with_name(f"{directory.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        (part / HEADER).write_text(json.dumps(header, indent=2) + "\n")
        (part / DATA).write_bytes(b"".join(column.tobytes() for column in columns))
        part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def open_table(directory: Path) -> NgramTable:
    """Maps the table read-only and looks at all of it once. Raises ValueError that says what is
    wrong with which file."""
    path = directory / HEADER
    try:
        vocab_size, counts = _read_header(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    path = directory / DATA
    try:
        data = np.memmap(path, np.uint8, "r")
        return NgramTable(vocab_size, _parts(data, counts))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read_header(header: Any) -> tuple[int, list[tuple[int, int]]]:
    """The size of the vocabulary; size and number of entries of each order."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("not the header of an n-gram table")
    if header.get("version") != VERSION:
        raise ValueError(f"version {header.get('version')!r}, known is {VERSION}")
    vocab_size, orders = header.get("vocab_size"), header.get("orders")
    if type(vocab_size) is not int or not isinstance(orders, list):
        raise ValueError("vocab_size or orders are missing")
    counts = [_read_order(order) for order in orders]
    sizes = [size for size, _ in counts]
    if not set(sizes) <= set(SIZES) or len(set(sizes)) < len(sizes):
        raise ValueError(f"orders of sizes {sizes}; each may be one of {SIZES}")
    return vocab_size, counts


def _read_order(order: Any) -> tuple[int, int]:
    size, count = map(order.get, ("size", "entries")) if isinstance(order, dict) else (None, None)
    if type(size) is not int or type(count) is not int or count < 0:
        raise ValueError("orders must have whole numbers as size and entries")
    return size, count


def _parts(data: npt.NDArray[np.uint8], counts: Seq[tuple[int, int]]) -> list[Entries]:
    total = sum(count for _, count in counts)
    if len(data) != total * ENTRY_BYTES:
        raise ValueError(f"{len(data)} bytes, but {total} entries take {total * ENTRY_BYTES}")
    keys = data[: 8 * total].view("<u8")
    tokens = data[8 * total : 12 * total].view("<i4")
    shares = data[12 * total :]
    entries, start = [], 0
    for size, count in counts:
        part = slice(start, start + count)
        entries.append(Entries(size, keys[part], tokens[part], shares[part]))
        start += count
    return entries


def _check(entries: Entries, vocab_size: int) -> None:
    keys, tokens, size = entries.keys, entries.tokens, entries.size
    if not len(keys) == len(tokens) == len(entries.shares):
        raise ValueError(f"columns of different lengths at order {size}")
    if not bool(np.all(keys[1:] > keys[:-1])):
        raise ValueError(f"keys that are not sorted at order {size}")
    if bool(np.any(keys >> np.uint64(size * ID_BITS))):
        raise ValueError(f"keys of more than {size} ids at order {size}")
    mask = np.uint64(MOST_IDS - 1)
    ids = (keys >> np.uint64(place * ID_BITS) & mask for place in range(size))
    if any(bool(np.any(i >= vocab_size)) for i in ids):
        raise ValueError(f"contexts outside the vocabulary at order {size}")
    if bool(np.any((tokens < 0) | (tokens >= vocab_size))):
        raise ValueError(f"tokens outside the vocabulary at order {size}")


def _view(column: npt.NDArray[Any]) -> memoryview[int]:
    return np.ascontiguousarray(column).data


def _ones(size: int) -> int:
    return (1 << size * ID_BITS) - 1
