"""Joined pieces are the text of all ids, character by whole character, wherever it is cut."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.text import Detokenizer, StopStrings
from tests.engine.vocabularies import CORPUS, END, KINDS, byte_fallback, byte_level, encode

BAD = "\ufffd"


def stream(tokenizer: Tokenizer, prompt: Seq[int], ids: Seq[int]) -> tuple[list[str], str]:
    """Pieces by token, and what `flush` adds."""
    detokenizer = Detokenizer(tokenizer, prompt, StopStrings(()))
    pushed = [detokenizer.push(i) for i in ids]
    assert all(stop is None for _, stop in pushed)
    return [piece for piece, _ in pushed], detokenizer.flush()


def continuation(tokenizer: Tokenizer, prompt: Seq[int], ids: Seq[int]) -> str:
    """What `ids` add to the text of `prompt`, by decoding all at once."""
    head, whole = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *ids])
    assert whole.startswith(head)
    return whole[len(head) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", CORPUS)
def test_every_split_of_a_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = encode(tokenizer, text)
    for cut in range(1, len(ids)):
        prompt, rest = ids[:cut], ids[cut:]
        if BAD in tokenizer.decode(prompt):
            continue  # the prompt ends inside a character, which the output then completes
        pieces, tail = stream(tokenizer, prompt, rest)
        assert "".join(pieces) + tail == continuation(tokenizer, prompt, rest)
        assert not any(BAD in piece for piece in (*pieces, tail))


@pytest.mark.parametrize("kind", KINDS)
def test_every_end(kind: str) -> None:
    """`max_tokens` may fall inside a character: what is whole has come, the rest is U+FFFD."""
    tokenizer = KINDS[kind]()
    prompt, ids = encode(tokenizer, "do:"), encode(tokenizer, " 👨‍👩‍👧‍👦 안녕 řeka 🇨🇿")
    cut_inside = 0
    for n in range(len(ids) + 1):
        pieces, tail = stream(tokenizer, prompt, ids[:n])
        prefixes = (continuation(tokenizer, prompt, ids[:m]) for m in range(n + 1))
        whole = max((text.rstrip(BAD) for text in prefixes), key=len)
        assert "".join(pieces) == whole
        assert tail.strip(BAD) == ""
        assert (tail == "") == (BAD not in tokenizer.decode([*prompt, *ids[:n]]))
        cut_inside += tail != ""
    assert cut_inside > 0 or kind == "metaspace"


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_is_given_once_it_is_complete(kind: str) -> None:
    """Nothing is held longer than need be: 4 bytes, 4 tokens, and the last one brings it."""
    tokenizer = KINDS[kind]()
    names = {"byte-level": "ðŁĳį", "byte-fallback": ["<0xF0>", "<0x9F>", "<0x91>", "<0x8D>"]}[kind]
    ids = [tokenizer.token_to_id(name) for name in names]
    assert None not in ids
    pieces, tail = stream(tokenizer, encode(tokenizer, "do"), [*ids, *ids])
    assert pieces == ["", "", "", "👍"] * 2
    assert tail == ""


def test_whole_characters_do_not_wait_for_an_unfinished_one() -> None:
    """A token that ends one character and begins the next brings the first at once."""
    tokenizer = byte_level(300, ("값이값이값이 값이값이값이",) * 9)
    ids = encode(tokenizer, "값이값이값이 값이")
    pieces, tail = stream(tokenizer, (), ids)
    assert "".join(pieces) + tail == "값이값이값이 값이"
    for n in range(1, len(ids) + 1):
        so_far = tokenizer.decode(ids[:n]).rstrip(BAD)
        assert "".join(pieces[:n]) == so_far


@given(
    prompt=st.lists(st.integers(0, 419), max_size=3),
    ids=st.lists(st.integers(0, 419), max_size=24),
)
def test_any_ids_byte_level(prompt: list[int], ids: list[int]) -> None:
    tokenizer = byte_level()
    pieces, tail = stream(tokenizer, prompt, ids)
    assert "".join(pieces) + tail == tokenizer.decode(ids)


@given(
    prompt=st.lists(st.integers(0, 310), max_size=4),
    ids=st.lists(st.integers(0, 310), max_size=24),
)
def test_any_ids_byte_fallback(prompt: list[int], ids: list[int]) -> None:
    """Never an error. The decoder would take back characters if bytes that are not UTF-8 follow;
    what was given stays, so the texts agree in all but the U+FFFDs."""
    tokenizer = byte_fallback()
    pieces, tail = stream(tokenizer, prompt, ids)
    text = "".join(pieces) + tail
    if BAD not in tokenizer.decode(prompt) + tokenizer.decode([*prompt, *ids]):
        assert text == continuation(tokenizer, prompt, ids)
    printable = "".join(c for c in tokenizer.decode(_without_bytes(tokenizer, ids)) if c != " ")
    assert _is_subsequence(printable, text)


def test_what_was_given_is_never_taken_back() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0x41, 0xE2, 0x82, 0xAC, 0xFF)]
    assert tokenizer.decode(ids) == BAD * 5
    pieces, tail = stream(tokenizer, encode(tokenizer, "do"), ids)
    assert (pieces, tail) == (["A", "", "", "€", ""], BAD)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_bytes_that_never_become_a_character_are_not_held_for_ever(kind: str) -> None:
    tokenizer = KINDS[kind]()
    name = {"byte-level": "ÿ", "byte-fallback": "<0xFF>"}[kind]
    pieces, tail = stream(tokenizer, (), [tokenizer.token_to_id(name)] * 50)
    assert "".join(pieces) + tail == BAD * 50
    assert len(tail) <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_not_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    end = tokenizer.token_to_id(END)
    ids = encode(tokenizer, "do in")
    pieces, tail = stream(
        tokenizer, encode(tokenizer, "do"), [end, *ids[:1], end, end, *ids[1:], end]
    )
    assert ("".join(pieces) + tail).strip() == "do in"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["do", "do ", "do    ", "do\t", "do\n", "do\n\n"])
def test_leading_blanks_are_kept(kind: str, prefix: str) -> None:
    """Decoders that strip the first blank of a text must not strip it from an output."""
    tokenizer = KINDS[kind]()
    prompt, ids = encode(tokenizer, prefix), encode(tokenizer, "   in  do")
    pieces, tail = stream(tokenizer, prompt, ids)
    assert "".join(pieces) + tail == continuation(tokenizer, prompt, ids)


@pytest.mark.parametrize("kind", ["byte-fallback", "metaspace"])
def test_leading_blanks_are_kept_after_a_special_token(kind: str) -> None:
    """Chat prompts end in one; it decodes to nothing, so what stands before it must count."""
    tokenizer = KINDS[kind]()
    prompt = [*encode(tokenizer, "do"), tokenizer.token_to_id(END)]
    ids = encode(tokenizer, "in do")
    pieces, tail = stream(tokenizer, prompt, ids)
    assert "".join(pieces) + tail == " in do"
    pieces, tail = stream(tokenizer, [tokenizer.token_to_id(END)], ids)
    assert "".join(pieces) + tail == "in do"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_without_a_text_counts(kind: str) -> None:
    """A decoder strips the first blank of prompt and output together, and special tokens are not
    in its way: after a prompt that is that blank alone, all of the output is kept."""
    tokenizer = KINDS[kind]()
    end, blanks = tokenizer.token_to_id(END), encode(tokenizer, " do")[:1]
    textless = [i for i in range(tokenizer.get_vocab_size()) if not tokenizer.decode([i])]
    assert end in textless
    for token in textless:
        for prompt in ([token], [end, token], [token, end], [end, token, end, end]):
            for ids in ([token], [token, token], blanks, [*blanks, token], [token, end, *blanks]):
                pieces, tail = stream(tokenizer, prompt, ids)
                assert "".join(pieces) + tail == continuation(tokenizer, prompt, ids), (prompt, ids)


def test_a_prompt_that_ends_in_byte_tokens_leaves_the_output_whole() -> None:
    tokenizer = byte_fallback()
    prompt, ids = encode(tokenizer, "do 東京の夜"), encode(tokenizer, "静か")[1:]
    pieces, tail = stream(tokenizer, prompt, ids)
    assert "".join(pieces) + tail == "静か"


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_impossible_id_is_an_error(token: int) -> None:
    """The scheduler ends that one generation with it."""
    with pytest.raises(OverflowError):
        Detokenizer(byte_level(), (), StopStrings(())).push(token)


def test_an_id_past_the_vocabulary_is_no_text() -> None:
    """Padded embedding rows have ids that the tokenizer does not know."""
    pieces, tail = stream(byte_level(), (), [100_000, 70, 100_001])
    assert "".join(pieces) + tail == byte_level().decode([70])


def _without_bytes(tokenizer: Tokenizer, ids: Seq[int]) -> list[int]:
    return [i for i in ids if not str(tokenizer.id_to_token(i)).startswith("<0x")]


def _is_subsequence(short: str, text: str) -> bool:
    rest = iter(text)
    return all(c in rest for c in short)
