"""A table says what a count by hand says; a spoilt one says what is wrong with it."""

from __future__ import annotations

import json
import mmap
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draft_table import LEAST, TableDraft
from engine.ngram_count import NgramCounter, count
from engine.ngram_table import (
    DATA,
    ENTRY_BYTES,
    HEADER,
    ID_BITS,
    ONE,
    Entries,
    NgramTable,
    open_table,
    write_table,
)
from tests.engine.test_draft_ngram import plan, sequence

VOCAB = 5
PLENTY = 1 << 20
Context = tuple[int, ...]
Known = dict[Context, tuple[int, int]]  # what comes next, and how likely in 255ths

documents_of = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=12), max_size=12)


def by_hand(documents: Seq[Seq[int]], most: int = PLENTY) -> Known:
    """The definition, by dictionary."""
    follows: dict[Context, Counter[int]] = defaultdict(Counter)
    for document in documents:
        for size in (1, 2, 3):
            for at in range(size, len(document)):
                follows[tuple(document[at - size : at])][document[at]] += 1
    found = []
    for context, counts in follows.items():
        token, right = min(counts.items(), key=lambda item: (-item[1], item[0]))
        seen = counts.total()
        if seen >= 2:
            found.append((-right, len(context), context, token, share_of(right, seen)))
    return {context: (token, share) for _, _, context, token, share in sorted(found)[:most]}


def share_of(right: int, seen: int) -> int:
    return int(255 * right / (seen + 1) + 0.5)


def contents(entries: Seq[Entries]) -> Known:
    known: Known = {}
    for order in entries:
        for key, token, share in zip(order.keys, order.tokens, order.shares, strict=True):
            ids = [int(key) >> ID_BITS * p & (1 << ID_BITS) - 1 for p in range(order.size)]
            known[tuple(reversed(ids))] = int(token), int(share)
    return known


def walk(known: Known, tokens: Seq[int], limit: int, least: float) -> list[tuple[int, float]]:
    context, chain, survival = list(tokens), list[tuple[int, float]](), 1.0
    for _ in range(limit):
        tried = (tuple(context[-size:]) for size in (3, 2, 1) if size <= len(context))
        found = next((known[c] for c in tried if c in known), None)
        if found is None:
            break
        survival *= found[1] / 255
        if survival < least:
            break
        context.append(found[0])
        chain.append((found[0], found[1] / 255))
    return chain


@given(documents=documents_of, piece=st.integers(1, 40), most=st.integers(0, 30))
def test_counts_as_by_hand(documents: list[list[int]], piece: int, most: int) -> None:
    """However many tokens are sorted at a time, and however few entries are kept."""
    counter = NgramCounter(VOCAB, piece)
    for document in documents:
        counter.add(document)
    assert contents(counter.entries(PLENTY)) == by_hand(documents)
    kept = counter.entries(most * ENTRY_BYTES + ENTRY_BYTES - 1)
    assert contents(kept) == by_hand(documents, most)
    assert sum(len(e.keys) for e in kept) <= most


@given(
    documents=documents_of,
    tokens=st.lists(st.integers(0, VOCAB + 1), max_size=6),
    limit=st.integers(0, 9),
    least=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_goes_on_from_the_longest_context(
    documents: list[list[int]], tokens: list[int], limit: int, least: float
) -> None:
    table = NgramTable(VOCAB, count(documents, VOCAB, PLENTY))
    assert table.chain(tokens, limit, least) == walk(by_hand(documents), tokens, limit, least)


@given(documents=documents_of, most_pairs=st.integers(1, 30), piece=st.integers(1, 30))
def test_what_is_forgotten_takes_no_guess_with_it(
    documents: list[list[int]], most_pairs: int, piece: int
) -> None:
    """With room for few pairs there are fewer guesses, of contexts that were there."""
    counter = NgramCounter(VOCAB, piece, most_pairs)
    for document in documents:
        counter.add(document)
        assert all(len(p.keys) <= most_pairs for p in counter._pairs.values())
    seen = Counter[Context]()
    for document in documents:
        for size in (1, 2, 3):
            seen.update(tuple(document[at - size : at]) for at in range(size, len(document)))
    for context in contents(counter.entries(PLENTY)):
        assert seen[context] >= 2


def test_the_rare_is_forgotten_and_the_frequent_kept() -> None:
    rng = random.Random(1)
    counter = NgramCounter(2000, piece=500, most_pairs=300)
    for _ in range(200):
        counter.add([1, 2, 3, 4, 5, *(rng.randrange(10, 2000) for _ in range(50))])
    known = contents(counter.entries(PLENTY))
    assert {known[c][0] for c in [(1,), (1, 2), (1, 2, 3)]} == {2, 3, 4}
    assert known[(2, 3, 4)] == (5, share_of(200, 200))


def test_what_is_forgotten_still_counts_for_its_context() -> None:
    counter = NgramCounter(2000, piece=1, most_pairs=8)
    for token in range(100, 140):
        counter.add([1, 2])
        counter.add([1, token])
    (token, share) = contents(counter.entries(PLENTY))[(1,)]
    assert (token, share) == (2, share_of(40, 80))


@pytest.mark.parametrize("wrong", [[VOCAB], [-1], [1, 2, 1 << 40]])
def test_ids_outside_the_vocabulary_are_not_counted(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="outside"):
        NgramCounter(VOCAB).add(wrong)
    with pytest.raises(ValueError, match="vocabulary"):
        NgramCounter((1 << ID_BITS) + 1)


def test_the_largest_ids_are_told_apart() -> None:
    top = (1 << ID_BITS) - 1
    documents = [[top, top - 1, top, 0]] * 2 + [[top - 1, top - 1, top, 1]] * 2
    table = NgramTable(1 << ID_BITS, count(documents, 1 << ID_BITS, PLENTY))
    assert table.chain([top, top - 1, top], 1, 0.0)[0][0] == 0
    assert table.chain([top - 1, top - 1, top], 1, 0.0)[0][0] == 1


# ---- on disk -----------------------------------------------------------------------------------


def some(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(20)]


def written(directory: Path) -> Path:
    write_table(directory, VOCAB, count(some(), VOCAB, PLENTY))
    return directory


@settings(max_examples=20)
@given(documents=documents_of.filter(lambda d: bool(by_hand(d))))
def test_reads_what_was_written(
    documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("tables") / "table"
    write_table(directory, VOCAB, count(documents, VOCAB, PLENTY))
    table, known = open_table(directory), by_hand(documents)
    assert table.vocab_size == VOCAB
    for context, (token, share) in known.items():
        assert table.chain(context, 1, 0.0) == [(token, share / 255)]


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one"), written(tmp_path / "other")
    for name in (HEADER, DATA):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "other"]
    assert sorted(p.name for p in one.iterdir()) == sorted([HEADER, DATA])


def test_a_table_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = written(tmp_path / "table")
    before = (directory / DATA).read_bytes()
    with pytest.raises(OSError, match="table"):  # it is not replaced
        write_table(directory, VOCAB, count(some(1), VOCAB, PLENTY))
    assert (directory / DATA).read_bytes() == before

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        written(tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir()] == ["table"]


def test_it_is_mapped_and_cannot_be_written(tmp_path: Path) -> None:
    table = open_table(written(tmp_path / "table"))
    for _, _, _, keys, tokens, shares in table._orders:
        for view in (keys, tokens, shares):
            assert view.readonly
            array = view.obj
            while isinstance(array, np.ndarray):
                array = array.base
            assert isinstance(array, mmap.mmap)


def _header(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / HEADER
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _bytes(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def changed(directory: Path) -> None:
        data = bytearray((directory / DATA).read_bytes())
        (directory / DATA).write_bytes(change(data) or data)  # type: ignore[arg-type]

    return changed


def _entries() -> int:
    return sum(len(e.keys) for e in count(some(), VOCAB, PLENTY))


def _swap(data: bytearray) -> None:
    data[0:8], data[8:16] = data[8:16], data[0:8]


def _put(at: int, value: bytes) -> Callable[[bytearray], object]:
    def put(data: bytearray) -> None:
        data[at : at + len(value)] = value

    return put


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no header": (lambda d: (d / HEADER).unlink(), "header.json.*No such file"),
    "no data": (lambda d: (d / DATA).unlink(), "table.bin.*No such file"),
    "header cut": (lambda d: (d / HEADER).write_text('{"format"'), "header.json"),
    "header no text": (lambda d: (d / HEADER).write_bytes(b"\xff\xfe\x00"), "header.json"),
    "header of depth": (lambda d: (d / HEADER).write_text("[" * 100_000), "header.json"),
    "header of a list": (lambda d: (d / HEADER).write_text("[]"), "not the header"),
    "foreign": (_header(format="other"), "not the header"),
    "of later": (_header(version=2), "version 2"),
    "no vocabulary": (_header(vocab_size=None), "vocab_size"),
    "a vocabulary of true": (_header(vocab_size=True), "vocab_size"),
    "no vocabulary at all": (_header(vocab_size=0), "vocabulary of 0"),
    "a vast vocabulary": (_header(vocab_size=1 << 40), "vocabulary"),
    "a small vocabulary": (_header(vocab_size=VOCAB - 1), "outside the vocabulary"),
    "no orders": (_header(orders=None), "orders"),
    "orders of numbers": (_header(orders=[1]), "whole numbers"),
    "orders of less than nothing": (_header(orders=[{"size": 1, "entries": -1}]), "whole numbers"),
    "an order of four": (_header(orders=[{"size": 4, "entries": 1}]), "sizes"),
    "an order twice": (_header(orders=[{"size": 1, "entries": 1}] * 2), "sizes"),
    "other counts": (_header(orders=[{"size": 1, "entries": 1}]), "1 entries take 13"),
    "vast counts": (_header(orders=[{"size": 1, "entries": 1 << 70}]), "entries take"),
    "cut": (_bytes(lambda data: data[:-1]), "bytes, but"),
    "longer": (_bytes(lambda data: data + b"0"), "bytes, but"),
    "empty": (lambda d: (d / DATA).write_bytes(b""), "table.bin"),
    "not sorted": (_bytes(_swap), "not sorted"),
    "a key twice": (_bytes(lambda data: _put(8, bytes(data[:8]))(data)), "not sorted"),
    "a long key": (_bytes(_put(8 * (VOCAB - 1) + 7, b"\xff")), "more than 1 ids"),
    "a context outside": (_bytes(_put(8 * (VOCAB - 1), bytes([VOCAB]))), "contexts outside"),
    "a token outside": (_bytes(_put(8 * _entries(), bytes([VOCAB]))), "tokens outside"),
    "a negative token": (_bytes(_put(8 * _entries(), b"\xff" * 4)), "tokens outside"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_table_is_refused(kind: str, tmp_path: Path) -> None:
    spoil, message = SPOILT[kind]
    directory = written(tmp_path / "table")
    open_table(directory)
    spoil(directory)
    with pytest.raises(ValueError, match=message) as caught:
        open_table(directory)
    assert str(directory) in str(caught.value)


@given(at=st.integers(0, 100_000), bit=st.integers(0, 7), of=st.sampled_from([HEADER, DATA]))
def test_whatever_is_flipped_there_are_only_guesses(
    at: int, bit: int, of: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Refused with a ValueError, or guesses of the vocabulary."""
    directory = written(tmp_path_factory.mktemp("tables") / "table")
    data = bytearray((directory / of).read_bytes())
    data[at % len(data)] ^= 1 << bit
    (directory / of).write_bytes(data)
    try:
        table = open_table(directory)
    except ValueError:
        return
    chain = table.chain([1, 2, 3], 20, 0.0)
    assert all(0 <= token < table.vocab_size for token, _ in chain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.array([1], np.int32)}, "lengths"),
        ({"keys": np.array([2, 1], np.uint64)}, "not sorted"),
    ],
)
def test_what_could_not_be_opened_is_not_written(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pair = np.array([1, 2])
    good = Entries(1, pair.astype(np.uint64), pair.astype(np.int32), pair.astype(np.uint8))
    with pytest.raises(ValueError, match=message):
        write_table(tmp_path / "table", VOCAB, [replace(good, **changes)])
    with pytest.raises(ValueError, match="without entries"):
        write_table(tmp_path / "table", VOCAB, count([], VOCAB, PLENTY))
    assert not list(tmp_path.iterdir())


# ---- as a draft source -------------------------------------------------------------------------


def test_drafts_have_grades_and_keep_their_caps() -> None:
    documents = [[0, 1, 2, 3]] * 30 + [[3, 4], [3, 0], [3, 0]]
    draft = TableDraft(NgramTable(VOCAB, count(documents, VOCAB, PLENTY)))
    caps = [0, 1, 3, 8]
    proposals = draft.propose(plan(*((sequence([0], str(c)), c) for c in caps)))
    assert [p.tokens for p in proposals] == [(), (1,), (1, 2, 3), (1, 2, 3, 0, 1, 2, 3, 0)]
    assert [p.source for p in proposals] == ["", "table", "table", "table"]
    assert proposals[3].grades == (9, 9, 9, 5, 9, 9, 9, 5)
    (nothing,) = TableDraft(NgramTable(VOCAB, [])).propose(plan((sequence([0]), 4)))
    assert nothing.tokens == ()


def test_unlikely_chains_end() -> None:
    documents = [[0, n, 0] for n in range(1, 5) for _ in range(4)]
    draft = TableDraft(NgramTable(VOCAB, count(documents, VOCAB, PLENTY)))
    (proposal,) = draft.propose(plan((sequence([0]), 40)))
    share = share_of(4, 16) / ONE
    assert proposal.grades == (2, 8)
    assert share * 0.8 * share < LEAST < share * 0.8
