"""Where an output ends, however many tokens the step that reached the end brought."""

from __future__ import annotations

import pytest

from engine.outcome import Finish, FinishReason
from engine.request import SpeculationParams
from tests.engine.fakes import EOS, VOCAB, Rig, letters, reference
from tests.engine.test_stop_strings import one_by_one

PROMPT = [3, 1, 4, 1, 5]
NEVER = frozenset[int]()
GREEDY = reference(PROMPT, 64, stop_ids=NEVER)
DRAFTED = range(9)


def new_at(index: int, start: int = 1) -> tuple[list[int], list[int]]:
    """A prompt whose output has a token at `index` that was not there before, and that output."""
    for first in range(start, 10_000):
        prompt = [first % VOCAB, first // VOCAB % VOCAB, first // VOCAB**2 % VOCAB, 1]
        out = reference(prompt, 24, stop_ids=NEVER)
        if out[index] not in out[:index] and out[index] != EOS:
            return prompt, out
    raise AssertionError


def run(
    drafted: int,
    max_tokens: int,
    prompt: list[int] = PROMPT,
    *,
    stop_ids: frozenset[int] = NEVER,
    strings: tuple[str, ...] = (),
    eos: bool = False,
    context_limit: int = 10_000,
) -> tuple[list[int], str, Finish]:
    """One request whose drafts are all accepted, `drafted` in a step."""
    rig = Rig(draft="perfect", max_draft_tokens=drafted, context_limit=context_limit)
    rig.submit("a", prompt, max_tokens, stop_ids=stop_ids, strings=strings, ignore_eos=not eos)
    rig.drain()
    assert rig.pool.free == rig.pool.num_blocks
    most, accepted = rig.totals()
    assert most == accepted
    return rig.tokens("a"), rig.text("a"), rig.finish("a")


@pytest.mark.parametrize("drafted", DRAFTED)
@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_exactly_max_tokens(drafted: int, max_tokens: int) -> None:
    tokens, text, finish = run(drafted, max_tokens)
    assert tokens == GREEDY[:max_tokens]
    assert text == letters(tokens)
    assert finish.reason is FinishReason.LENGTH
    assert finish.completion_tokens == max_tokens
    assert finish.target_steps == -(-max_tokens // (drafted + 1))


@pytest.mark.parametrize("drafted", DRAFTED)
@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("index", [0, 1, 2, 4])
def test_a_stop_id_at_or_before_the_cap_wins(drafted: int, max_tokens: int, index: int) -> None:
    prompt, out = new_at(index)
    tokens, text, finish = run(drafted, max_tokens, prompt, stop_ids=frozenset({out[index]}))
    if index < max_tokens:
        assert (finish.reason, finish.matched) == (FinishReason.STOP, out[index])
        assert tokens == out[: index + 1]
        assert text == letters(out[:index]), "a stop id is no text, and changes none"
    else:
        assert (finish.reason, finish.matched) == (FinishReason.LENGTH, None)
        assert tokens == out[:max_tokens]


@pytest.mark.parametrize("drafted", DRAFTED)
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_stop_string_at_or_before_the_cap_wins(drafted: int, max_tokens: int) -> None:
    prompt, out = new_at(3)
    stop = letters(out[2:4])
    tokens, text, finish = run(drafted, max_tokens, prompt, strings=("zz", stop))
    if max_tokens >= 4:
        assert (finish.reason, finish.matched) == (FinishReason.STOP, stop)
        assert (tokens, text) == (out[:4], letters(out[:2]))
    else:
        assert (finish.reason, finish.matched) == (FinishReason.LENGTH, None)
        assert (tokens, text) == (out[:max_tokens], letters(out[:max_tokens]))


@pytest.mark.parametrize("drafted", DRAFTED)
@pytest.mark.parametrize("strings", [("cd", "bcd", "b"), ("ab",), ("f", "g"), ("ea", "da", "ba")])
def test_stop_strings_as_one_character_at_a_time(drafted: int, strings: tuple[str, ...]) -> None:
    text, matched = one_by_one(letters(GREEDY), strings)
    _, got, finish = run(drafted, len(GREEDY), strings=strings)
    assert (got, finish.matched) == (text, matched)


@pytest.mark.parametrize("drafted", DRAFTED)
def test_eos_in_an_accepted_run_ends_it(drafted: int) -> None:
    for first in range(1, VOCAB):
        prompt = [first, 2, 5]
        want = reference(prompt, 40)
        tokens, text, finish = run(drafted, 40, prompt, eos=True)
        assert tokens == want
        assert text == letters(want[:-1] if want[-1] == EOS else want)
        assert (finish.reason is FinishReason.EOS) == (want[-1] == EOS)


@pytest.mark.parametrize("drafted", DRAFTED)
def test_eos_as_the_very_first_token(drafted: int) -> None:
    """Also three times in a row on one engine, beside running neighbours."""
    first = next(p for p in range(1, 10_000) if reference(_digits(p), 1) == [EOS])
    rig = Rig(draft="perfect", max_draft_tokens=drafted)
    for i in range(3):
        rig.submit(f"other{i}", [i + 1, 2], 30, ignore_eos=True)
    for i in range(3):
        rig.submit(f"turn{i}", _digits(first), 10)
        while f"turn{i}" not in rig.chunks:
            rig.step()
        assert rig.tokens(f"turn{i}") == [EOS]
        assert rig.text(f"turn{i}") == ""
        assert rig.finish(f"turn{i}").reason is FinishReason.EOS
    rig.drain()
    for i in range(3):
        assert rig.tokens(f"other{i}") == reference([i + 1, 2], 30, stop_ids=NEVER)


def test_what_comes_first_when_one_token_is_all() -> None:
    """Stop id, then EOS, then stop string, then max_tokens, then context."""
    prompt, out = new_at(2)
    token, limit = out[2], len(prompt) + 3
    everything = frozenset({token})
    _, text, finish = run(
        4, 3, prompt, stop_ids=everything, strings=(letters(out[1:3]),), context_limit=limit
    )
    assert (finish.reason, finish.matched, text) == (FinishReason.STOP, token, letters(out[:2]))
    _, text, finish = run(4, 3, prompt, strings=(letters(out[1:3]),), context_limit=limit)
    assert (finish.reason, text) == (FinishReason.STOP, letters(out[:1]))
    assert run(4, 3, prompt, context_limit=limit)[2].reason is FinishReason.LENGTH
    assert run(4, 4, prompt, context_limit=limit)[2].reason is FinishReason.CONTEXT


@pytest.mark.parametrize("drafted", [0, 1, 3, 8])
@pytest.mark.parametrize("length", range(24, 33))
def test_the_context_is_a_wall(drafted: int, length: int) -> None:
    """The limit is what users see: drafts need no slack, and nothing overruns."""
    prompt = [1 + i % (VOCAB - 1) for i in range(length)]
    tokens, _, finish = run(drafted, 100, prompt, context_limit=32)
    assert finish.reason is FinishReason.CONTEXT
    assert tokens == reference(prompt, max(1, 32 - length), stop_ids=NEVER)


def test_a_prompt_past_the_context_is_refused_and_the_next_one_works() -> None:
    rig = Rig(draft="perfect", context_limit=32)
    rig.submit("long", [1] * 33, 1)
    rig.submit("empty", [], 5)
    rig.submit("fine", [1] * 31, 1)
    rig.drain()
    for name in ("long", "empty"):
        assert rig.finish(name).reason is FinishReason.ERROR
        assert "context" in rig.finish(name).error
    assert rig.finish("fine").reason is FinishReason.LENGTH


@pytest.mark.parametrize("draft", ["none", "perfect", "ngram"])
@pytest.mark.parametrize("length", [1, 2, 23, 24, 25, 60])
def test_prefill_only(draft: str, length: int) -> None:
    """`max_tokens` 0: the prompt is computed up to its last token, and nothing comes out."""
    rig = Rig(draft=draft)
    prompt = [1 + i % (VOCAB - 1) for i in range(length)]
    rig.submit("warm", prompt, 0)
    rig.submit("other", PROMPT, 20)
    rig.drain()
    finish = rig.finish("warm")
    assert (finish.reason, finish.completion_tokens) == (FinishReason.LENGTH, 0)
    assert (finish.prompt_tokens, finish.first_token) == (length, None)
    assert rig.text("warm") == ""
    assert rig.tokens("other") == reference(PROMPT, 20)
    assert rig.pool.free == rig.pool.num_blocks


def test_prefill_only_computes_each_position_once() -> None:
    rig = Rig(max_step_rows=8)
    rig.submit("warm", [1] * 30, 0)
    rig.drain()
    assert rig.target.rows == 29


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_short_prompts_and_ragged_drafts(batch: int, length: int, max_tokens: int) -> None:
    rig = Rig(draft="perfect", max_draft_tokens=8)
    prompts = {str(i): [1 + i % (VOCAB - 1), 2, 3][:length] for i in range(batch)}
    for i, prompt in prompts.items():
        rig.submit(i, prompt, max_tokens, speculation=SpeculationParams(int(i) % 6))
    rig.drain()
    for i, prompt in prompts.items():
        assert rig.tokens(i) == reference(prompt, max_tokens)


def _digits(number: int) -> list[int]:
    return [1 + number // (VOCAB - 1) ** i % (VOCAB - 1) for i in range(4)]
