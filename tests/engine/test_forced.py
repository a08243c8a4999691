"""Output that must begin with a text does, its last token may go beyond it, and drafts, company and
preemption change nothing."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Never

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.errors import InvalidRequest
from engine.forced import ForcedRule
from engine.grammar import Grammars
from engine.logits import logit_rules
from engine.outcome import FinishReason
from engine.request import (
    ForcedText,
    GrammarParams,
    LogitParams,
    Request,
    SamplingParams,
    StopParams,
)
from engine.token_bytes import TokenBytes
from service.tokenize import TextCodec
from tests.engine.test_grammar import EOS, VOCAB, finishes, grammars, text_of
from tests.engine.test_runner import TinyRig
from tests.engine.vocabularies import KINDS, byte_level, encode

WORDS = (b"", b"a", b"b", b"ab", b"abc", b"bc", b"c", b"cab")
VOCABULARY = TokenBytes(WORDS)
texts = st.text("abc", min_size=1, max_size=7)


def forced(text: str, tokenizer: Tokenizer | None = None) -> ForcedText:
    with ThreadPoolExecutor(1) as pool:
        codec = TextCodec(tokenizer or byte_level(), None, pool)
        return asyncio.run(codec.encode_forced(text))


def in_tokens(data: bytes, most: int) -> tuple[list[int], bytes]:
    """The longest tokens first, at most so many, and what is left, which is not empty."""
    tokens: list[int] = []
    while len(tokens) < most:
        fit = [i for i, w in enumerate(WORDS) if w and data.startswith(w) and len(w) < len(data)]
        if not fit:
            break
        tokens.append(max(fit, key=lambda i: len(WORDS[i])))
        data = data[len(WORDS[tokens[-1]]) :]
    return tokens, data


def expected(data: bytes, tokens: list[int], output: list[int]) -> set[int] | None:
    """What may come next; None where no row is drawn from."""
    if output[: len(tokens)] != tokens[: len(output)]:
        return None
    if len(output) < len(tokens):
        return {tokens[len(output)]}
    said = b"".join(WORDS[t] for t in output)
    if said.startswith(data):
        return set(range(8))
    rest = data[len(said) :]
    fit = {i for i, w in enumerate(WORDS) if w and (w.startswith(rest) or rest.startswith(w))}
    return fit if data.startswith(said) else None


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(0, 3), st.lists(st.integers(1, 7), max_size=6), st.integers(0, 2**32))
def test_exactly_the_tokens_that_fit_are_left(text, most, drafts, seed) -> None:
    tokens, rest = in_tokens(text.encode(), most)
    rule = ForcedRule(ForcedText(tuple(tokens), rest, len(text)), VOCABULARY)
    row = torch.randn(8, generator=torch.Generator().manual_seed(seed))

    def check(output: list[int]) -> None:
        wanted = expected(text.encode(), tokens, output)
        edited = row.clone()
        rule.edit(edited)
        kept = edited.isfinite()
        assert torch.equal(edited[kept], row[kept])
        assert wanted is None or {int(i) for i in torch.nonzero(kept)} == wanted

    for i, token in enumerate(drafts):
        check(drafts[:i])
        rule.push(token)
    for i in reversed(range(len(drafts))):
        rule.pop()
        check(drafts[:i])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.text(min_size=1, max_size=12))
def test_tokens_and_rest_are_the_text(kind, text) -> None:
    tokenizer = KINDS[kind]()
    made = forced(text, tokenizer)
    begun = tokenizer.decode(list(made.tokens), skip_special_tokens=True)
    assert made.rest
    assert begun + made.rest.decode() == text
    assert made.characters == len(text)


TEXTS = (
    "def f(x):\n    return",
    "yes",
    "the quick brown",
    " a",
    "\u00e9\u4f60\U0001f600!",
    "0123456789" * 4,
)
SAMPLINGS = (
    SamplingParams(0.0),
    SamplingParams(0.9, seed=3),
    SamplingParams(1.2, top_p=0.9, seed=4),
)


@cache
def requests() -> tuple[Request, ...]:
    prompts = ("x = 1\n", "Say it: ", "once upon a time " * 3)
    return tuple(
        Request(
            str(i),
            tuple(encode(byte_level(), prompts[i % 3])),
            StopParams(64, eos_ids=frozenset({EOS}), strings=("re",)),
            SAMPLINGS[i % 3],
            arrived=float(i),
            forced=forced(text),
        )
        for i, text in enumerate(TEXTS)
    )


def rig(drafts: str, **options: int) -> TinyRig:
    return TinyRig("llama", drafts, vocab=VOCAB, grammars=grammars(), **options)


@cache
def alone() -> dict[str, list[int]]:
    return {r.id: finishes(rig("none", max_seqs=1), [r])[r.id][0] for r in requests()}


def test_outputs_begin_with_it() -> None:
    for request, text in zip(requests(), TEXTS, strict=True):
        assert text_of(alone()[request.id]).startswith(text)


@pytest.mark.parametrize("drafted", range(9))
@pytest.mark.parametrize("drafts", ["ngram", "grammar,ngram", "grammar,perfect"])
def test_drafts_and_company_change_nothing(drafts: str, drafted: int) -> None:
    served = rig(drafts, drafted=drafted, num_blocks=160)
    done = finishes(served, list(requests()))
    assert {name: ids for name, (ids, _) in done.items()} == alone()


def test_preemption_changes_nothing() -> None:
    served = rig("grammar,ngram", num_blocks=16)
    done = finishes(served, list(requests()))
    assert {name: ids for name, (ids, _) in done.items()} == alone()
    assert sum(r.preempted for r in served.observer.reports) > 0


def test_forced_tokens_are_drafts_that_hold() -> None:
    served = rig("grammar", drafted=8, num_blocks=160)
    longest = requests()[5]
    _, finish = finishes(served, [longest])[longest.id]
    stats = dict(finish.by_source)["grammar"]
    assert stats.accepted == stats.drafted > 8


def test_a_token_may_go_beyond_it() -> None:
    """Where the model would say one token for the text and what follows it."""
    vocabulary = grammars().token_bytes()
    long = next(i for i in range(VOCAB) if len(vocabulary[i]) > 2 and vocabulary[i].isascii())
    begun = vocabulary[long][:-1].decode()
    asked = Request(
        "0",
        requests()[0].prompt,
        StopParams(4),
        SamplingParams(0.0, logits=LogitParams(bias=((long, 100.0),))),
        forced=ForcedText((), begun.encode(), len(begun)),
    )
    ids, _ = finishes(rig("none"), [asked])["0"]
    assert ids[0] == long


def test_with_a_grammar_both_hold() -> None:
    asked = Request(
        "0",
        requests()[0].prompt,
        StopParams(64, eos_ids=frozenset({EOS})),
        SamplingParams(0.9, seed=1),
        grammar=GrammarParams("regex", r"(yes|no), (please|thanks)", False),
        forced=forced("no, t"),
    )
    ids, finish = finishes(rig("grammar,ngram"), [asked])["0"]
    assert text_of(ids) == "no, thanks"
    assert finish.reason is FinishReason.EOS


def test_against_the_grammar_it_fails_alone() -> None:
    asked = Request(
        "bad",
        requests()[0].prompt,
        StopParams(64, eos_ids=frozenset({EOS})),
        SamplingParams(0.9, seed=1),
        grammar=GrammarParams("regex", r"yes|no", False),
        forced=forced("maybe"),
    )
    good = requests()[1]
    done = finishes(rig("grammar,ngram"), [asked, good])
    assert done["bad"][1].reason is FinishReason.ERROR
    assert done[good.id][0] == alone()[good.id]


def test_its_bytes_are_made_beside_the_steps() -> None:
    fresh = Grammars(byte_level(), VOCAB, (EOS,))
    called: list[int] = []
    done = threading.Event()
    assert not fresh.prepare(requests()[0], lambda: (called.append(1), done.set())[0])
    assert done.wait(30)
    assert called == [1]
    assert fresh.prepare(requests()[0], lambda: called.append(2))
    assert logit_rules(requests()[0], VOCAB, fresh) is not None


def test_a_vocabulary_that_cannot_be_read_is_told_once() -> None:
    class Unreadable(Grammars):
        def _load(self) -> Never:
            raise RuntimeError("not like this")

    grammars = Unreadable(byte_level(), VOCAB, (EOS,))
    done = threading.Event()
    assert not grammars.prepare(requests()[0], done.set)
    assert done.wait(30)
    assert grammars.prepare(requests()[0], done.clear)  # nothing is left to wait for
    with pytest.raises(InvalidRequest, match="no bytes: not like this"):
        logit_rules(requests()[0], VOCAB, grammars)
