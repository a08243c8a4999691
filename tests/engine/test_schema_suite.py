"""JSON-Schema-Test-Suite: what compiled schemas let through, and outputs of a random model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from llguidance import LLMatcher

from engine.errors import InvalidRequest
from engine.outcome import FinishReason
from engine.request import GrammarParams, Request, SamplingParams, StopParams
from tests.engine.test_grammar import finishes, text_of
from tests.engine.test_runner import TinyRig
from tests.engine.test_schema import VOCAB, grammars
from tests.engine.vocabularies import END, byte_level, encode
from tests.schemas.corpus import Group, suite
from tests.schemas.judge import Closer, wrong

(EOS,) = (byte_level().token_to_id(END),)
TOKENS = 60


@cache
def compiled() -> tuple[list[tuple[Group, LLMatcher]], Counter[str]]:
    """Groups whose schema is accepted, and why the others are not."""
    accepted, refused = [], Counter()
    for group in suite():
        try:
            matcher = grammars().matcher(GrammarParams("json_schema", group.schema.text))
            accepted.append((group, matcher))
        except InvalidRequest as error:
            refused[str(error)] += 1
    return accepted, refused


def lets_through(matcher: LLMatcher, value: object) -> bool:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    ids = encode(byte_level(), text)
    copy = matcher.deep_copy()
    return bool(copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting())


def test_nothing_invalid_is_let_through() -> None:
    accepted, refused = compiled()
    through = [
        (group.schema.name, value)
        for group, matcher in accepted
        for value in group.invalid
        if lets_through(matcher, value)
    ]
    assert through == []
    assert len(accepted) >= 165
    assert sum(refused.values()) <= 225
    assert all(refused)


def test_most_of_what_is_valid_can_come() -> None:
    """Not all: keys come in the order of the schema, leap seconds never."""
    answers = [
        lets_through(matcher, value) for group, matcher in compiled()[0] for value in group.valid
    ]
    assert sum(answers) / len(answers) > 0.85


def requests(every: int) -> Iterator[Request]:
    for i, (group, _) in enumerate(compiled()[0][::every]):
        yield Request(
            str(i),
            (5, 6 + i % 90),
            StopParams(TOKENS, eos_ids=frozenset({EOS})),
            SamplingParams(1.0 if i % 3 else 0.0, seed=i),
            grammar=GrammarParams("json_schema", group.schema.text),
            arrived=float(i),
        )


@pytest.fixture(scope="module")
def outputs() -> list[tuple[list[int], str]]:
    """Ids and reason of every fourth schema's output, without drafts."""
    return served("none", 0)


def served(drafts: str, drafted: int) -> list[tuple[list[int], str]]:
    rig = TinyRig("llama", drafts, vocab=VOCAB, grammars=grammars(), drafted=drafted)
    done = finishes(rig, list(requests(4)))
    assert (sum(r.accepted for r in rig.observer.reports) > 50) == (drafted > 0)
    return [(ids, str(end.reason)) for ids, end in done.values()]


def test_outputs_are_valid_or_the_beginning_of_something_valid(
    outputs: list[tuple[list[int], str]],
) -> None:
    closer = Closer(byte_level(), (EOS,), VOCAB)
    whole = closed = 0
    for (group, matcher), (ids, reason) in zip(compiled()[0][::4], outputs, strict=True):
        if reason == FinishReason.EOS:
            whole += 1
            text = text_of(ids)
        else:
            assert reason == FinishReason.LENGTH, group.schema.name
            ending = closer.close(matcher, ids)
            if ending is None:
                continue
            closed += 1
            text = ending
        assert wrong(group.schema.text, text) == "", (group.schema.name, text)
    assert len(outputs) >= 40
    assert whole >= 20
    assert closed >= 3


def test_drafts_change_nothing(outputs: list[tuple[list[int], str]]) -> None:
    assert served("grammar,ngram", 4) == outputs
