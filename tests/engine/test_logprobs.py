"""Logprobs: what a plain log-softmax says of each token, the same bits whatever is drafted and
whoever is there, and as many as tokens wherever the output ends."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import engine.runner
from engine.logprobs import logprobs
from engine.outcome import FinishReason, Logprobs
from engine.request import LogitParams, OutputParams, Request, SamplingParams, StopParams
from tests.engine.fakes import EOS, Rig, letters, reference
from tests.engine.test_logits import plain
from tests.engine.test_runner import TinyRig
from tests.engine.tiny import VOCAB, prompts, tiny

TOKENS = 20
NEAR = 1e-4
RULES = LogitParams(repetition_penalty=1.4, bias=((5, 3.0), (6, -3.0)), banned=(9, 10, 11))
OUTPUTS = {
    "own": OutputParams(logprobs=0),
    "top": OutputParams(logprobs=5),
    "all of them": OutputParams(logprobs=VOCAB + 3),
    "processed": OutputParams(logprobs=7, processed_logprobs=True),
}
SAMPLINGS = {
    "greedy": SamplingParams(0.0),
    "greedy with rules": SamplingParams(0.0, logits=RULES),
    "sampled": SamplingParams(0.7, top_k=20, top_p=0.9, seed=3),
    "sampled with rules": SamplingParams(1.2, seed=8, logits=RULES),
    "few allowed": SamplingParams(1.0, seed=1, logits=LogitParams(allowed=(4, 8, 15))),
}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 2.0]), min_size=1, max_size=9),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.5, 1.7]),
    st.data(),
)
def test_a_row_is_what_a_plain_loop_says(row, count, temperature, data) -> None:
    row[data.draw(st.integers(0, len(row) - 1))] = 1.0
    token = data.draw(st.sampled_from([i for i, x in enumerate(row) if x > -math.inf]))
    scaled = [x / (temperature or 1.0) for x in row]
    total = math.log(sum(map(math.exp, scaled)))
    order = sorted((i for i, x in enumerate(row) if x > -math.inf), key=lambda i: (-row[i], i))
    got = logprobs(torch.tensor(row), token, count, temperature)
    assert (got.token, got.ids) == (token, tuple(order[:count]))
    assert got.logprob == pytest.approx(scaled[token] - total)
    assert got.values == pytest.approx([scaled[i] - total for i in got.ids])


@cache
def requests() -> tuple[Request, ...]:
    """Every output with every sampling, then some who do not ask."""
    asked = [(s, o) for s in SAMPLINGS.values() for o in OUTPUTS.values()]
    asked += [(s, OutputParams()) for s in SAMPLINGS.values()]
    texts = prompts(len(asked), random.Random(5), 40)
    return tuple(
        Request(str(i), tuple(text), StopParams(TOKENS), sampling, output=output, arrived=0.0)
        for i, (text, (sampling, output)) in enumerate(zip(texts, asked, strict=True))
    )


Outcome = dict[str, tuple[list[int], list[Logprobs]]]


def serve(rig: TinyRig, asked: Seq[Request]) -> Outcome:
    out: Outcome = {}
    for name, chunks in rig.chunks(asked).items():
        assert not any(c.finish.error for c in chunks if c.finish is not None)
        out[name] = ([x for c in chunks for x in c.tokens], [x for c in chunks for x in c.logprobs])
    return out


@cache
def alone() -> Outcome:
    """Each by itself, without drafts."""
    rig = TinyRig("llama", "none")
    return {name: result for r in requests() for name, result in serve(rig, [r]).items()}


@cache
def stock_rows(prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    """The stock model's logits at each output position."""
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float()


@pytest.mark.parametrize("asked", requests(), ids=lambda r: f"{r.id}")
def test_they_are_those_of_the_stock_model(asked: Request) -> None:
    tokens, told = alone()[asked.id]
    count = asked.output.logprobs
    if count is None:
        assert not told
        return
    assert [entry.token for entry in told] == tokens
    for j, (entry, row) in enumerate(
        zip(told, stock_rows(asked.prompt, tuple(tokens)), strict=True)
    ):
        if asked.output.processed_logprobs:
            row = plain(row, asked, tokens[:j]) / (asked.sampling.temperature or 1.0)
        logs = row.double().log_softmax(0)
        assert entry.logprob == pytest.approx(float(logs[entry.token]), abs=NEAR)
        assert entry.values == tuple(sorted(entry.values, reverse=True))
        assert len(entry.ids) == len({*entry.ids}) == min(count, int(logs.isfinite().sum()))
        best = logs.topk(len(entry.ids)).values
        assert entry.values == pytest.approx(best.tolist(), abs=NEAR)
        assert entry.values == pytest.approx([float(logs[i]) for i in entry.ids], abs=NEAR)


def test_the_cases_tell_apart_what_is_asked_for() -> None:
    """Rules and temperature must show, or the test above could not fail."""
    asked = next(
        r
        for r in requests()
        if r.output.processed_logprobs and r.sampling == SAMPLINGS["sampled with rules"]
    )
    raw = replace(asked, output=replace(asked.output, processed_logprobs=False))
    (tokens, other) = serve(TinyRig("llama", "none"), [raw])[asked.id]
    assert tokens == alone()[asked.id][0]
    assert all(a.logprob != b.logprob for a, b in zip(other, alone()[asked.id][1], strict=True))


@pytest.mark.parametrize("drafted", range(9))
@pytest.mark.parametrize("drafts", ["ngram", "perfect"])
def test_drafts_and_company_change_no_bit(drafts: str, drafted: int) -> None:
    rig = TinyRig("llama", drafts, drafted=drafted, num_blocks=128, rows=160)
    assert serve(rig, requests()) == alone()
    assert (sum(r.accepted for r in rig.observer.reports) > 0) == (drafted > 0)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_changes_no_bit(prefix_cache: bool) -> None:
    rig = TinyRig("llama", "ngram", num_blocks=14, prefix_cache=prefix_cache)
    assert serve(rig, requests()) == alone()
    assert sum(r.preempted for r in rig.observer.reports) > 0


def test_who_does_not_ask_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(engine.runner, "rows_to_tell", refuse)
    monkeypatch.setattr(engine.runner, "tell", refuse)
    silent = [replace(r, output=OutputParams()) for r in requests()]
    tokens = {name: tokens for name, (tokens, _) in alone().items()}
    served = serve(TinyRig("llama", "ngram", num_blocks=128), silent)
    assert {name: out for name, (out, _) in served.items()} == tokens


# ---- as many as tokens, wherever it ends -------------------------------------------------------

PROMPT = [3, 1, 4, 1, 5]
GREEDY = reference(PROMPT, 40, stop_ids=frozenset())
ASKED = OutputParams(logprobs=0)


def check(rig: Rig, name: str) -> None:
    told = rig.logprobs(name)
    assert [entry.token for entry in told] == rig.tokens(name)
    assert [-entry.logprob for entry in told] == [len(PROMPT) + i for i in range(len(told))]
    assert rig.finish(name).completion_tokens == len(told)


@pytest.mark.parametrize("drafted", range(9))
@pytest.mark.parametrize("draft", ["perfect", "junk", "model"])
@settings(max_examples=25, deadline=None)
@given(
    max_tokens=st.integers(1, 30),
    stop_ids=st.frozensets(st.integers(0, 6), max_size=1),
    strings=st.tuples(st.integers(0, 30), st.integers(1, 4)).map(
        lambda cut: (letters(GREEDY[cut[0] : sum(cut)]),)
    )
    | st.just(()),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
    context=st.integers(len(PROMPT), 40),
)
def test_as_many_as_tokens(
    draft, drafted, max_tokens, stop_ids, strings, ignore_eos, include_stop, context
) -> None:
    rig = Rig(draft=draft, max_draft_tokens=drafted, context_limit=context)
    rig.submit(
        "a",
        PROMPT,
        max_tokens,
        stop_ids=stop_ids,
        strings=strings,
        ignore_eos=ignore_eos,
        output=replace(ASKED, include_stop=include_stop),
    )
    rig.drain()
    check(rig, "a")


def test_a_stop_string_inside_accepted_drafts() -> None:
    """B003: what follows it is in neither list."""
    stop = letters(GREEDY[4:6])
    assert letters(GREEDY).index(stop) == 4
    rig = Rig(draft="perfect", max_draft_tokens=8)
    rig.submit("a", PROMPT, 30, strings=(stop,), ignore_eos=True, output=ASKED)
    rig.drain()
    assert rig.finish("a").matched == stop
    assert rig.tokens("a") == GREEDY[:6]
    check(rig, "a")


@pytest.mark.parametrize("drafted", [0, 4])
@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_cut_off(drafted: int, steps: int, reason: FinishReason) -> None:
    rig = Rig(draft="perfect", max_draft_tokens=drafted)
    deadline = 0.01 * steps if reason is FinishReason.DEADLINE else None
    rig.submit("a", PROMPT, 30, ignore_eos=True, output=ASKED, deadline=deadline)
    for _ in range(steps - 1):
        rig.step()
    if deadline is None:
        rig.step(lambda: rig.engine.cancel("a"))
    rig.drain()
    assert rig.finish("a").reason is reason
    check(rig, "a")


def test_an_end_of_sequence_at_once() -> None:
    first = next(n for n in range(1, 100) if reference([n % 7, n // 7, 1], 1) == [EOS])
    rig = Rig()
    rig.submit("a", [first % 7, first // 7, 1], 5, output=ASKED)
    rig.drain()
    assert [entry.token for entry in rig.logprobs("a")] == rig.tokens("a") == [EOS]
