"""Where each token's text begins: what it completed lies between its offset and the next."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.outcome import FinishReason
from engine.request import OutputParams, Request, SamplingParams
from engine.text import Detokenizer, StopStrings
from engine.types import TextStream
from tests.engine.fakes import EOS, VOCAB, Rig, reference
from tests.engine.test_detokenizer import BAD
from tests.engine.vocabularies import CORPUS, END, KINDS, byte_level, encode

PROMPT = [3, 1, 4, 1, 5]
# What the tokens of the hash model say, the first of which is EOS: a letter, the two bytes of a
# combining mark, the first two of an emoji, and one that is in no character.
SAID = (END, "Ì", "ģ", "a", "ð", "Ł", "ÿ")


def walk(stream: TextStream, ids: Seq[int]) -> tuple[list[int], list[str], str]:
    """The offset of each token and what it completed, up to a stop; then the whole text."""
    offsets: list[int] = []
    pieces: list[str] = []
    for token in ids:
        offsets.append(stream.length)
        piece, stop = stream.push(token)
        pieces.append(piece)
        if stop is not None:
            return offsets, pieces, "".join(pieces)
    return offsets, pieces, "".join(pieces) + stream.flush()


def check(offsets: Seq[int], pieces: Seq[str], text: str) -> None:
    bounds = [*offsets, len("".join(pieces))]
    assert bounds[0] == 0
    assert bounds == sorted(bounds)
    assert [text[start:end] for start, end in pairwise(bounds)] == list(pieces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", CORPUS)
def test_every_split_of_a_text(kind: str, text: str) -> None:
    """A token begins behind the characters that the tokens before it make up, as the tokenizer
    itself decodes them."""
    tokenizer = KINDS[kind]()
    ids = encode(tokenizer, text)
    inside = 0
    for cut in range(1, len(ids), 3):
        prompt, rest = ids[:cut], ids[cut:]
        if BAD in tokenizer.decode(prompt):
            continue
        offsets, pieces, whole = walk(Detokenizer(tokenizer, prompt, StopStrings(())), rest)
        check(offsets, pieces, whole)
        head, complete = len(tokenizer.decode(prompt)), [0]
        for n in range(1, len(rest)):
            so_far = tokenizer.decode(ids[: cut + n])
            # Some decoders take back whole characters while the one after them is not.
            complete.append(max(complete[-1], len(so_far.rstrip(BAD)) - head))
            inside += BAD in so_far
        assert offsets == complete[: len(rest)]
    assert inside or kind == "metaspace" or text.isascii()


@given(
    kind=st.sampled_from(sorted(KINDS)),
    prompt=st.lists(st.integers(0, 290), max_size=4),
    ids=st.lists(st.integers(0, 310), max_size=24),
    keep=st.booleans(),
)
def test_any_ids(kind: str, prompt: list[int], ids: list[int], keep: bool) -> None:
    stream = Detokenizer(KINDS[kind](), prompt, StopStrings(()), keep_special=keep)
    offsets, pieces, text = walk(stream, ids)
    check(offsets, pieces, text)
    assert stream.length == len("".join(pieces))


@pytest.mark.parametrize(
    ("kind", "names", "offsets"),
    [
        ("byte-level", ["a", "ð", "Ł", "ĳ", "į", "a"], [0, 1, 1, 1, 1, 2]),
        ("byte-level", ["a", "ÿ", "ÿ", "a", "a"], [0, 1, 1, 1, 4]),  # no character: U+FFFD
        ("byte-level", ["e", "Ì", "ģ", "a"], [0, 1, 1, 2]),  # a combining mark is a character
        ("byte-level", [END, "a", END, "ð", END, "Ł"], [0, 0, 1, 1, 1, 1]),
        ("byte-fallback", ["a", "<0xF0>", "<0x9F>", "<0x91>", "<0x8D>", "a"], [0, 1, 1, 1, 1, 2]),
        ("byte-fallback", ["a", "<0x41>", "<0x42>", "<0xFF>"], [0, 1, 2, 3]),
        ("byte-fallback", ["안", "국", "a"], [0, 1, 2]),
    ],
)
def test_by_hand(kind: str, names: list[str], offsets: list[int]) -> None:
    tokenizer = KINDS[kind]()
    ids = [tokenizer.token_to_id(name) for name in names]
    assert None not in ids
    stream = Detokenizer(tokenizer, encode(tokenizer, "do"), StopStrings(()))
    assert walk(stream, ids)[0] == offsets


def test_special_tokens_that_are_kept_have_a_text() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(name) for name in ("a", END, "a")]
    stream = Detokenizer(tokenizer, (), StopStrings(()), keep_special=True)
    assert walk(stream, ids) == ([0, 1, 5], ["a", END, "a"], f"a{END}a")


@given(
    kind=st.sampled_from(["byte-level", "byte-fallback"]),
    ids=st.lists(st.integers(0, 310), max_size=24),
    stops=st.lists(st.text("ad \ufffd안", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    skip=st.integers(0, 6),
    unwatched=st.integers(0, 6),
)
def test_stop_strings_move_nothing(
    kind: str, ids: list[int], stops: list[str], include: bool, skip: int, unwatched: int
) -> None:
    """What is held back or left out for them counts as there; a text that is cut is cut behind."""
    plain, _, whole = walk(Detokenizer(KINDS[kind](), (), StopStrings(())), ids)
    watching = Detokenizer(KINDS[kind](), (), StopStrings(stops, include, skip), unwatched)
    offsets, _, text = walk(watching, ids)
    assert offsets == plain[: len(offsets)]
    assert whole.startswith(text)


@pytest.mark.parametrize(("include", "text"), [(True, "do in"), (False, "do")])
def test_tokens_of_a_stop_string_that_was_cut_lie_at_or_beyond_the_end(
    include: bool, text: str
) -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(name) for name in ("d", "o", "Ġ", "i", "n")]
    stream = Detokenizer(tokenizer, (), StopStrings([" in"], include))
    assert walk(stream, ids)[::2] == ([0, 1, 2, 3, 4], text)


# ---- through the engine ------------------------------------------------------------------------


@cache
def said() -> tuple[Tokenizer, tuple[int, ...]]:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(name) for name in SAID]
    assert None not in ids
    assert len(ids) == VOCAB
    return tokenizer, tuple(ids)


class Spoken:
    """The hash model's tokens as tokens of a vocabulary over bytes."""

    def __init__(self, stops: Seq[str], include: bool) -> None:
        tokenizer, self._ids = said()
        self._stream = Detokenizer(tokenizer, (), StopStrings(stops, include))

    @property
    def length(self) -> int:
        return self._stream.length

    def push(self, token: int) -> tuple[str, str | None]:
        return self._stream.push(self._ids[token])

    def flush(self) -> str:
        return self._stream.flush()


def spoken(request: Request) -> TextStream:
    return Spoken(request.stopping.strings, request.output.include_stop)


def rig_offsets(rig: Rig, name: str) -> list[int]:
    """Delivered offsets; checks that each chunk has as many as tokens."""
    for chunk in rig.chunks[name]:
        assert len(chunk.text_offsets) == len(chunk.tokens)
    return [offset for chunk in rig.chunks[name] for offset in chunk.text_offsets]


@pytest.mark.parametrize("draft", ["perfect", "junk"])
@pytest.mark.parametrize("drafted", range(9))
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("strings", [(), ("a\ufffda",), ("aa",)])
@pytest.mark.parametrize("eos", [False, True])
def test_drafts_chunks_and_company_change_none(
    draft: str, drafted: int, include: bool, strings: tuple[str, ...], eos: bool
) -> None:
    output = OutputParams(include_stop=include, text_offsets=True)
    rig = Rig(draft=draft, max_draft_tokens=drafted, texts=spoken, max_step_rows=12, num_blocks=48)
    names = [str(i) for i in range(6)]
    for i, name in enumerate(names):
        sampling = SamplingParams(0.8, seed=i)
        rig.submit(
            name,
            [*PROMPT, i],
            40,
            sampling=sampling,
            output=output,
            strings=strings,
            ignore_eos=not eos,
        )
    rig.submit("silent", PROMPT, 40)
    rig.drain()
    for i, name in enumerate(names):
        ends = frozenset({EOS}) if eos else frozenset[int]()
        want = reference([*PROMPT, i], 40, SamplingParams(0.8, seed=i), ends)
        stream = Spoken(strings, include)
        offsets, _, text = walk(stream, want)
        assert rig.tokens(name) == want[: len(offsets)]
        assert rig_offsets(rig, name) == offsets
        assert rig.text(name) == text
    assert not any(chunk.text_offsets for chunk in rig.chunks["silent"])


@pytest.mark.parametrize("include", [False, True])
def test_an_end_of_sequence_stands_at_the_end(include: bool) -> None:
    output = OutputParams(include_stop=include, text_offsets=True)
    rig = Rig()
    first = next(n for n in range(1, 500) if EOS in reference([n % 7, n // 7, 1], 9)[2:])
    prompt = [first % 7, first // 7, 1]
    rig.submit("a", prompt, 9, output=output)
    rig.drain()
    tokens = rig.tokens("a")
    assert rig.finish("a").reason is FinishReason.EOS
    assert rig_offsets(rig, "a") == list(range(len(tokens)))
    assert len(rig.text("a")) == len(tokens) - (not include)
