"""A stop string is found wherever it falls, and no part of it ever gets out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.text import Detokenizer, StopStrings
from tests.engine.vocabularies import byte_fallback, byte_level, encode

letters = st.text("abc", min_size=1, max_size=4)


def one_by_one(text: str, stops: Seq[str]) -> tuple[str, str | None]:
    """The definition: add characters one at a time until one of the stops is complete."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def feed(stops: Seq[str], chunks: Seq[str]) -> tuple[str, str | None]:
    """What gets out of `chunks`; stops at the first match, flushes at the end."""
    finder, out = StopStrings(stops), ""
    for chunk in chunks:
        piece, stop = finder.push(chunk)
        out += piece
        if stop is not None:
            return out, stop
    return out + finder.flush(), None


@given(chunks=st.lists(st.text("abc", max_size=5), max_size=8), stops=st.lists(letters, max_size=4))
@example(chunks=["ab", "ab", "c"], stops=["abc"])
@example(chunks=["aab"], stops=["ab", "aab"])
@example(chunks=["a", "a", "a"], stops=["aa"])
def test_any_chunks_as_one_by_one(chunks: list[str], stops: list[str]) -> None:
    assert feed(stops, chunks) == one_by_one("".join(chunks), stops)


@given(chunks=st.lists(st.text("ab", max_size=3), max_size=8), stops=st.lists(letters, max_size=3))
def test_nothing_gets_out_too_early_or_too_late(chunks: list[str], stops: list[str]) -> None:
    """After each chunk: all that no stop can reach any more, and nothing else."""
    finder, text, out = StopStrings(stops), "", ""
    for chunk in chunks:
        piece, stop = finder.push(chunk)
        text, out = text + chunk, out + piece
        if stop is not None:
            return
        ends = range(len(text) + 1)
        open_from = next(n for n in ends if any(s.startswith(text[n:]) for s in [*stops, ""]))
        assert out == text[:open_from]


@pytest.mark.parametrize("stops", list(permutations(["cd", "bcd", "b"])))
@pytest.mark.parametrize("chunks", [["abcde"], list("abcde"), ["ab", "cde"], ["abc", "de"]])
def test_the_stop_that_completes_first_wins(stops: Seq[str], chunks: list[str]) -> None:
    assert feed(stops, chunks) == ("a", "b")


@pytest.mark.parametrize("stops", list(permutations(["cd", "bcd", "d"])))
@pytest.mark.parametrize("chunks", [["abcde"], list("abcde")])
def test_the_order_of_the_list_breaks_ties(stops: Seq[str], chunks: list[str]) -> None:
    assert feed(stops, chunks) == ("abcd"[: 4 - len(stops[0])], stops[0])


def test_a_token_that_goes_past_the_stop_is_cut() -> None:
    assert feed(["\n"], ["Answer", "\n\n"]) == ("Answer", "\n")


@pytest.mark.parametrize("length", range(1, 13))
def test_cut_at_every_boundary(length: int) -> None:
    stop = "\nUser: hello"[:length]
    text = f"Sure, here it is.{stop} and more"
    for first in range(len(text) + 1):
        for second in range(first, min(first + 4, len(text)) + 1):
            chunks = [text[:first], text[first:second], text[second:]]
            assert feed([stop], chunks) == ("Sure, here it is.", stop)


@pytest.mark.parametrize("length", range(2, 13))
def test_what_was_held_back_comes_at_the_end(length: int) -> None:
    stop = "\nUser: hello"[:length]
    text = f"Sure{stop[:-1]}"
    for first in range(len(text) + 1):
        assert feed([stop], [text[:first], text[first:]]) == (text, None)


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
@pytest.mark.parametrize("stop", ["세계", "👨‍👩", "in   range", "\n\n", "계! ", ":\n   "])
def test_in_the_text_of_tokens(kind: object, stop: str) -> None:
    """Tokens begin and end anywhere, inside a character too."""
    tokenizer = kind()  # type: ignore[operator]
    text = f"안녕하세요 세계! def f(x):\n    for i in   range(3): 👨‍👩‍👧\n\n{stop} done"
    detokenizer = Detokenizer(tokenizer, encode(tokenizer, "do"), StopStrings([stop]))
    out, found = "", None
    for token in encode(tokenizer, text):
        piece, found = detokenizer.push(token)
        out += piece
        assert stop not in out
        if found is not None:
            break
    assert found == stop
    assert out.removeprefix(" ") == text[: text.index(stop)]


def test_a_stop_in_the_unfinished_end_is_not_given() -> None:
    """U+FFFD can be asked for; it is only certain at the end, in `flush`."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, (), StopStrings(["x\ufffd"]))
    ids = [tokenizer.token_to_id(name) for name in ("x", "ð")]
    assert [detokenizer.push(i) for i in ids] == [("", None), ("", None)]
    assert detokenizer.flush() == ""


def fed(finder: StopStrings, text: str, cuts: list[int]) -> tuple[str, str | None]:
    """What comes of a text in pieces, and the stop."""
    out, stop = "", None
    while text and stop is None:
        size = cuts.pop() if cuts else 1
        piece, stop = finder.push(text[:size])
        out, text = out + piece, text[size:]
    return out + ("" if stop else finder.flush()), stop


@given(st.text("ab", max_size=12), st.integers(0, 14), st.lists(st.integers(1, 4)))
def test_none_begins_in_what_is_skipped(text: str, skip: int, cuts: list[int]) -> None:
    out, stop = fed(StopStrings(["ab", "bb"], skip=skip), text, cuts)
    tail = text[skip:]
    at = min((tail.find(s) for s in ("ab", "bb") if s in tail), default=len(tail))
    assert out == text[: skip + at]
    assert (stop is not None) == (at < len(tail))


@given(st.text("ab", max_size=12), st.lists(st.integers(1, 4)))
def test_included_where_it_is_asked_for(text: str, cuts: list[int]) -> None:
    out, _ = fed(StopStrings(["abb"], include=True), text, cuts)
    end = text.find("abb") + 3 if "abb" in text else len(text)
    assert out == text[:end]
