"""Structured output: the mask is the grammar's, the output ends where the grammar does, and drafts,
company and preemption change nothing."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.grammar import TOO_SLOW, Grammars
from engine.grammar_check import what_is_wrong
from engine.grammar_mask import PIECE, GrammarMask, keep
from engine.logits import logit_rules
from engine.outcome import Finish, FinishReason
from engine.request import GrammarParams, LogitParams, Request, SamplingParams, StopParams
from tests.engine.test_runner import TinyRig
from tests.engine.vocabularies import END, KINDS, byte_level, encode

VOCAB = 420
(EOS,) = (byte_level().token_to_id(END),)
TOKENS = 48


@cache
def grammars() -> Grammars:
    return Grammars(byte_level(), VOCAB, (EOS,))


def text_of(ids: Seq[int]) -> str:
    return str(byte_level().decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True)
class Case:
    """A grammar and whether a text is one of its."""

    params: GrammarParams
    accepts: Callable[[str], bool]


def regex(pattern: str, longest: bool = False) -> Case:
    accepts = re.compile(pattern).fullmatch
    return Case(GrammarParams("regex", pattern, longest), lambda text: bool(accepts(text)))


def person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["first_name", "kind", "scores"]
        and value["first_name"] in ("Ada", "Grace")
        and value["kind"] in ("alpha_one", "alpha_two", "beta")
        and len(value["scores"]) <= 2
        and all(isinstance(score, int) and 0 <= score < 100 for score in value["scores"])
    )


PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"enum": ["Ada", "Grace"]},
        "kind": {"enum": ["alpha_one", "alpha_two", "beta"]},
        "scores": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 2,
        },
    },
    "required": ["first_name", "kind", "scores"],
    "additionalProperties": False,
}
CASES = {
    "schema": Case(GrammarParams("json_schema", json.dumps(PERSON)), person),
    "date": regex(r"born on [0-9]{4}-[0-9]{2}-[0-9]{2} \(UTC\)"),
    "words": regex(r"([a-z]{1,3} ){1,4}"),
    "longest": regex(r"(ab|cd){1,5}", longest=True),
    "choice": Case(
        GrammarParams("lark", 'start: "yes" | "yes, please" | "no"'),
        ("yes", "yes, please", "no").__contains__,
    ),
    "unicode": regex("(세계|ř|👍🏽){1,4}!"),
    "sums": Case(
        GrammarParams("lark", 'start: sum\nsum: n | "(" sum "+" n ")"\nn: /[1-9][0-9]?/'),
        lambda text: bool(re.fullmatch(r"[()+0-9]+", text)) and eval(text) > 0,
    ),
}
SAMPLINGS = (
    SamplingParams(0.0),
    SamplingParams(0.9, seed=3),
    SamplingParams(1.2, 0, 0.95, seed=4),
    SamplingParams(1.0, seed=5, logits=LogitParams(frequency_penalty=0.5, typical_p=0.9)),
)


@cache
def requests(count: int = 28) -> tuple[Request, ...]:
    draw, cases = random.Random(5), list(CASES.values())
    return tuple(
        Request(
            str(i),
            tuple(draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 40))),
            StopParams(TOKENS, eos_ids=frozenset({EOS})),
            SAMPLINGS[i % len(SAMPLINGS)],
            grammar=cases[i % len(cases)].params,
            arrived=float(i),
        )
        for i in range(count)
    )


def rig(drafts: str, **options: int) -> TinyRig:
    return TinyRig("llama", drafts, vocab=VOCAB, grammars=grammars(), **options)


def finishes(rig: TinyRig, asked: Seq[Request]) -> dict[str, tuple[list[int], Finish]]:
    """Output ids and end of each."""
    done = {}
    for name, chunks in rig.chunks(asked).items():
        (end,) = (chunk.finish for chunk in chunks if chunk.finish is not None)
        done[name] = [token for chunk in chunks for token in chunk.tokens], end
    return done


@cache
def plainly() -> tuple[tuple[int, ...], ...]:
    """Without drafts, one after another."""
    alone = rig("none", num_blocks=128, drafted=0)
    return tuple(tuple(alone.serve([replace(request, id="0")])[0]) for request in requests())


def test_finished_outputs_match_and_end_with_eos() -> None:
    done = finishes(rig("none", num_blocks=128), requests())
    accepts = [case.accepts for case in CASES.values()]
    complete = 0
    for i, request in enumerate(requests()):
        ids, finish = done[request.id]
        if finish.reason is FinishReason.EOS:
            complete += 1
            assert ids[-1] == EOS
            assert accepts[i % len(accepts)](text_of(ids)), text_of(ids)
        else:
            assert finish.reason is FinishReason.LENGTH
    assert complete >= len(requests()) - 6


@pytest.mark.parametrize("drafted", range(9))
@pytest.mark.parametrize("drafts", ["grammar,ngram", "model", "grammar", "junk"])
def test_drafts_and_company_change_nothing(drafts: str, drafted: int) -> None:
    drafting = rig(drafts, drafted=drafted, num_blocks=256, rows=200)
    assert tuple(map(tuple, drafting.serve(requests()))) == plainly()
    used = sum(r.drafted for r in drafting.observer.reports)
    assert (used > 0) == (drafted > 0)


def test_what_is_forced_is_accepted_and_costs_no_step_of_its_own() -> None:
    wordy = [CASES[name].params for name in ("schema", "date", "choice")]
    asked = [r for r in requests() if r.grammar in wordy]
    steps = {}
    for drafts in ("none", "grammar"):
        served = rig(drafts, drafted=8)
        done = finishes(served, asked)
        steps[drafts] = sum(finish.target_steps for _, finish in done.values())
        drafted = sum(r.drafted for r in served.observer.reports)
        accepted = sum(r.accepted for r in served.observer.reports)
        assert drafted == accepted
        assert (drafted > 40) == (drafts == "grammar")
    assert steps["grammar"] < 0.7 * steps["none"]


def test_preemption_changes_nothing() -> None:
    small = rig("grammar,ngram", num_blocks=20)
    assert tuple(map(tuple, small.serve(requests()))) == plainly()
    assert sum(r.preempted for r in small.observer.reports) > 0


def ambiguous(count: int, prefix: str = "hello ") -> str:
    """A small Lark grammar of which some masks take ages: it reads in `count` squared ways."""
    ways = range(count)
    rules = (f'r{i}: /[a-z ]/ r{i} | s "{i}" | "b{i}"' for i in ways)
    head = f'start: "{prefix}" s\ns: "b" | ' + " | ".join(f"/[a-z ]/ r{i}" for i in ways)
    return "\n".join([head, *rules])


def test_a_grammar_that_is_too_slow_is_given_up_once_for_all() -> None:
    """The first mask that takes too long is the last: neither this sequence nor another one of the
    same grammar asks for one again."""
    made = Grammars(byte_level(), VOCAB, (EOS,))
    params = GrammarParams("lark", ambiguous(30))
    ticks = iter([0.0, 0.01, 1.0, 1.05, 2.0, 9.0])
    pace = made.pace(params)
    assert pace is made.pace(params)
    one, other = (GrammarMask(made.matcher(params), (EOS,), pace=pace) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.grammar_mask.time.thread_time", lambda: next(ticks))
        assert any(edited(one))
        assert any(edited(other))
        assert any(edited(one))  # this one took seven seconds
        assert not any(edited(one))
        assert not any(edited(other))  # no more ticks are asked for
    assert one.fault == other.fault == TOO_SLOW


@pytest.mark.parametrize("count", [40, 400])
def test_no_mask_takes_long_behind_a_cheap_beginning(count: int) -> None:
    """Either the check before admission finds it out, or the limits for one token end it."""
    made = Grammars(byte_level(), VOCAB, (EOS,))
    params = GrammarParams("lark", ambiguous(count))
    if what_is_wrong(made, params.kind, params.text):
        return
    rule = GrammarMask(made.matcher(params), (EOS,), pace=made.pace(params))
    begun = time.process_time()
    for token in byte_level().encode("hello my dear").ids:
        rule.edit(torch.zeros(VOCAB))
        rule.push(token)
    assert time.process_time() - begun < 5


def test_schemas_inside_lark_are_refused() -> None:
    made = Grammars(byte_level(), VOCAB, (EOS,))
    with pytest.raises(InvalidRequest, match="%json is not supported"):
        made.matcher(GrammarParams("lark", 'start: %json {"type": "string"}'))


def mask(case: str = "words", **limits: int) -> GrammarMask:
    made = Grammars(byte_level(), VOCAB, (EOS,), **limits) if limits else grammars()
    params = CASES[case].params
    return GrammarMask(made.matcher(params), (EOS,), params.longest)


def edited(rule: GrammarMask) -> list[bool]:
    row = torch.zeros(VOCAB)
    rule.edit(row)
    return row.isfinite().tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.integers(0, 2**32),
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), max_size=6),
)
def test_drafts_of_any_kind_leave_the_masks_as_they_are(case, seed, junk) -> None:
    """One walk with excursions before each step, legal ones and nonsense, and one without."""
    draw = random.Random(seed)
    straight, winding = mask(case), mask(case)
    for step in range(30):
        drafts = list(winding.forced(draw.randint(0, 8)))
        drafts += [t for more in junk[step : step + 1] for t in more]
        legal = winding.legal(drafts)
        for token in drafts:
            winding.push(token)
            if draw.random() < 0.5:
                edited(winding)
        for _ in drafts:
            winding.pop()
        allowed = edited(straight)
        assert edited(winding) == allowed
        assert winding.fault == straight.fault == ""
        assert not drafts or (legal > 0) or not allowed[drafts[0]]
        token = draw.choice([i for i, ok in enumerate(allowed) if ok])
        if token == EOS:
            break
        straight.push(token)
        winding.push(token)


def test_tokens_after_the_end_are_dropped() -> None:
    """Case B019: fifteen drafts that go on after a complete answer."""
    rule = mask("choice")
    answer = byte_level().encode("no", add_special_tokens=False).ids
    after = [EOS, *byte_level().encode("\n or yes", add_special_tokens=False).ids, EOS]
    assert rule.legal([*answer, *after]) == len(answer) + 1
    for token in answer + after:
        rule.push(token)
        edited(rule)
    for _ in answer + after:
        rule.pop()
    assert rule.forced(15) == ()
    for token in answer:
        rule.push(token)
    assert rule.forced(15) == (EOS,)
    assert [i for i, ok in enumerate(edited(rule)) if ok] == [EOS]
    assert rule.fault == ""


def test_the_end_comes_whatever_else_is_asked_for() -> None:
    """`min_tokens`, bans and bias against the end of a grammar that can only end."""
    (asked,) = (requests()[4],)
    asked = replace(
        asked,
        id="0",
        stopping=StopParams(TOKENS, eos_ids=frozenset({EOS}), min_tokens=TOKENS),
        sampling=SamplingParams(0.7, logits=LogitParams(banned=(EOS,), bias=((EOS, -100.0),))),
    )
    ids, finish = finishes(rig("ngram"), [asked])["0"]
    assert finish.reason is FinishReason.EOS
    assert text_of(ids) == "yes, please" or text_of(ids) == "no"


def test_longest_goes_on_as_long_as_it_may() -> None:
    asked = [r for r in requests() if r.grammar and r.grammar.longest]
    for ids, finish in finishes(rig("grammar,ngram"), asked).values():
        assert finish.reason is FinishReason.EOS
        assert len(text_of(ids)) == 10


DEEP = GrammarParams("lark", 'start: r0{1000}\nr0: r1{1000}\nr1: r2{1000}\nr2: "a"')


@pytest.mark.parametrize("drafts", ["none", "grammar,ngram"])
def test_a_grammar_that_runs_into_its_limits_ends_its_request_alone(drafts: str) -> None:
    limited = Grammars(byte_level(), VOCAB, (EOS,), most_items=300)
    served = TinyRig("llama", drafts, vocab=VOCAB, grammars=limited)
    good = replace(requests()[4], id="good")
    bad = [replace(requests()[i], id=f"bad{i}", grammar=DEEP) for i in range(8)]
    done = finishes(served, [*bad[:4], good, *bad[4:]])
    assert tuple(done["good"][0]) == plainly()[4]
    for request in bad:
        _, finish = done[request.id]
        assert finish.reason is FinishReason.ERROR
        assert "Too many items" in finish.error
    # One after another: a request that fails must not look like a broken device.
    for i, request in enumerate(bad):
        assert finishes(served, [request])[f"bad{i}"][1].reason is FinishReason.ERROR


def test_a_matcher_that_failed_on_a_draft_goes_on_without_it() -> None:
    """Here the failing matcher is one that was misled, since it cannot go back."""
    rule, other = mask(), mask()
    for token in byte_level().encode("ab ", add_special_tokens=False).ids:
        rule.push(token)
        other.push(token)
    rule._matcher.consume_token(EOS + 1)
    assert rule._matcher.is_error()
    assert edited(rule) == edited(other)
    rule.pop()
    rule._matcher.consume_token(EOS + 1)
    rule.pop()
    other.pop()
    other.pop()
    assert edited(rule) == edited(other)
    assert rule.fault == ""


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        ("json_schema", "{", "no JSON"),
        ("json_schema", '{"type": "nope"}', "Invalid type"),
        ("json_schema", '{"enum": []}', "Unsatisfiable"),
        ("json_schema", '{"not": {"type": "string"}}', "Unimplemented"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x"}', "retrieving"),
        ("regex", "[a-", "invalid regex"),
        ("regex", "(?=a)", "invalid regex"),
        ("lark", "start: missing", "unknown name"),
        ("lark", "begin: /a/", "start"),
        ("lark", 'start: "a" <|nope|>', "unknown special token"),
        ("prose", "be nice", "unknown kind"),
    ],
)
def test_what_does_not_compile_is_refused_by_name(kind: str, text: str, cause: str) -> None:
    asked = replace(requests()[0], id="0", grammar=GrammarParams(kind, text))
    with pytest.raises(InvalidRequest, match=cause):
        logit_rules(asked, VOCAB, grammars())
    _, finish = finishes(rig("none"), [asked])["0"]
    assert finish.reason is FinishReason.ERROR
    assert cause in finish.error


def test_an_engine_without_grammars_says_so() -> None:
    _, finish = finishes(TinyRig("llama", "none", vocab=VOCAB), [requests()[0]])["0"]
    assert finish.error == "this engine has no grammars"


def test_the_oldest_grammar_goes_first() -> None:
    few = Grammars(byte_level(), VOCAB, (EOS,), kept=2)
    a, b, c = (GrammarParams("regex", pattern) for pattern in "abc")
    first = few.matcher(a)
    few.matcher(b)
    assert few.matcher(a) is first
    few.matcher(c)
    assert few.matcher(a) is first
    assert few._find(("regex", "b")) is None


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_any_kind_of_tokenizer_works_or_says_that_it_does_not(kind: str) -> None:
    tokenizer = KINDS[kind]()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    end = tokenizer.token_to_id(END)
    made = Grammars(tokenizer, size, (end,))
    params = GrammarParams("lark", 'start: "def f(x): return" | "a b"')
    if kind == "metaspace":  # not read by llguidance 1.9
        with pytest.raises(InvalidRequest, match="decoder"):
            made.matcher(params)
        return
    rule = GrammarMask(made.matcher(params), (end,))
    for token in (*encode(tokenizer, "def f(x): return"), end):
        row = torch.zeros(size)
        rule.edit(row)
        if kind == "byte-level":
            assert row[token].isfinite()
        allowed = row.isfinite().nonzero()[:, 0].tolist()
        if allowed == [end]:
            break
        rule.push(token if token in allowed else allowed[-1])
    assert rule.fault == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [VOCAB, 2 * PIECE, 2 * PIECE + 13])
def test_tokens_without_a_bit_are_forbidden(size: int, dtype: torch.dtype) -> None:
    draw = np.random.default_rng(1)
    allowed = draw.random(size) < 0.5
    bits = np.packbits(allowed, bitorder="little")
    row = torch.from_numpy(draw.standard_normal(size, np.float32)).to(dtype)
    wanted = row.masked_fill(torch.from_numpy(~allowed), float("-inf"))
    keep(row, np.append(bits, np.uint8(0)))  # the library's masks are of whole words
    assert torch.equal(row, wanted)
