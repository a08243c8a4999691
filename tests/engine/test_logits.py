"""Logits processing: each rule and any mix of them is what a plain loop over one sequence says,
whatever is drafted, in whatever company."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.logits import logit_rules
from engine.model_input import ModelInput
from engine.request import LogitParams, Request, SamplingParams, StopParams
from engine.types import Feed
from engine.verify import ERRORS, RULED_OUT
from kernels import reference
from tests.engine.test_runner import TinyRig
from tests.engine.tiny import BLOCK, VOCAB, paged, prompts, tiny

TOKENS = 24


def plain(row: Tensor, request: Request, output: Seq[int]) -> Tensor:
    """What the rules of `request` make of a row, told as simply as can be."""
    p, out = request.sampling.logits, row.clone()
    seen, counts = {*request.prompt, *output}, Counter(output)
    for token in range(len(row)):
        x = out[token]
        if token in seen:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        if counts[token]:
            x = x - (counts[token] * p.frequency_penalty + p.presence_penalty)
        out[token] = x + dict(p.bias).get(token, 0.0)
    ends = request.stopping.stop_ids | request.stopping.eos_ids
    for token in range(len(row)):
        too_early = token in ends and len(output) < request.stopping.min_tokens
        not_allowed = p.allowed is not None and token not in p.allowed
        text = (*output, token)
        bad = any(text[-len(word) :] == word for word in p.bad_words)
        if too_early or not_allowed or token in p.banned or bad:
            out[token] = -math.inf
    if p.typical_p < 1 and request.sampling.temperature > 0:
        out = plain_typical(out, p.typical_p, request.sampling.temperature)
    return out


def plain_typical(row: Tensor, p: float, temperature: float) -> Tensor:
    mass = (row.double() / temperature).softmax(0).tolist()
    entropy = -sum(m * math.log(m) for m in mass if m)
    order = sorted(
        (i for i, m in enumerate(mass) if m), key=lambda i: abs(-math.log(mass[i]) - entropy)
    )
    out, total = torch.full_like(row, -math.inf), 0.0
    for token in order:
        out[token] = row[token]
        total += mass[token]
        if total >= p:
            break
    return out


def request(
    params: LogitParams,
    *,
    prompt: Seq[int] = (1, 2, 3),
    stopping: StopParams | None = None,
    sampling: SamplingParams | None = None,
    name: str = "0",
) -> Request:
    sampling = replace(sampling or SamplingParams(0.8, seed=5), logits=params)
    return Request(name, tuple(prompt), stopping or StopParams(TOKENS), sampling, arrived=0.0)


tokens = st.integers(0, 11)
params = st.builds(
    LogitParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.5]),
    bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3).map(
        lambda d: tuple(sorted(d.items()))
    ),
    allowed=st.none() | st.sets(tokens, min_size=2).map(lambda s: tuple(sorted(s))),
    banned=st.sets(tokens, max_size=2).map(lambda s: tuple(sorted(s))),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    typical_p=st.sampled_from([1.0, 0.9, 0.3]),
)


@settings(max_examples=200, deadline=None)
@given(
    params,
    st.lists(tokens, min_size=1, max_size=8),
    st.lists(tokens, max_size=8),
    st.lists(tokens, max_size=8),
    st.integers(0, 9),
    st.integers(0, 2**32),
)
def test_rows_are_what_a_plain_loop_says(params, prompt, output, drafts, least, seed) -> None:
    stopping = StopParams(99, frozenset({4}), frozenset({0}), min_tokens=least)
    asked = request(params, prompt=prompt, stopping=stopping)
    rules = logit_rules(asked, 12)
    logits = torch.randn(len(drafts) + 1, 12, generator=torch.Generator().manual_seed(seed)) * 4
    expected = torch.stack([plain(r, asked, output + drafts[:j]) for j, r in enumerate(logits)])
    if rules is None:
        assert torch.equal(expected, logits)
        return
    rules.advance(output)
    for _ in range(2):  # what drafts brought is gone again
        rows = logits.clone()
        rules.apply(rows, drafts)
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


def test_nothing_asked_for_costs_nothing() -> None:
    assert logit_rules(request(LogitParams()), 12) is None


def test_a_rule_that_fails_leaves_no_draft_behind() -> None:
    asked = request(LogitParams(frequency_penalty=1.0))
    rules = logit_rules(asked, 12)
    assert rules is not None
    with pytest.raises(IndexError):
        rules.apply(torch.zeros(1, 12), (7, 7))  # fewer rows than drafts
    row = torch.zeros(1, 12)
    rules.apply(row, ())
    assert torch.equal(row, torch.zeros(1, 12))


ALONE = {
    "repetition": LogitParams(repetition_penalty=1.5),
    "presence": LogitParams(presence_penalty=1.5),
    "frequency": LogitParams(frequency_penalty=-2.0),
    "bias": LogitParams(bias=((3, 5.0), (9, -100.0))),
    "allowed": LogitParams(allowed=tuple(range(0, VOCAB, 3))),
    "banned": LogitParams(banned=tuple(range(0, VOCAB, 2))),
    "bad words": LogitParams(bad_words=(*tuple((i,) for i in range(20)), (30, 31), (40, 41, 42))),
    "typical": LogitParams(typical_p=0.4),
}


def mixed(seed: int) -> LogitParams:
    draw = random.Random(seed)
    some = draw.sample(sorted(ALONE), draw.randint(2, 6))
    default, merged = LogitParams(), LogitParams()
    for name in some:
        fields = (
            f for f in LogitParams.__slots__ if getattr(ALONE[name], f) != getattr(default, f)
        )
        merged = replace(merged, **{f: getattr(ALONE[name], f) for f in fields})
    return merged


CASES = {**ALONE, **{f"mix {seed}": mixed(seed) for seed in range(8)}}
SAMPLINGS = (SamplingParams(0.0), SamplingParams(0.9, seed=3), SamplingParams(1.1, 0, 0.95, seed=4))


@cache
def requests() -> tuple[Request, ...]:
    texts = prompts(len(CASES), random.Random(11))
    stopping = StopParams(TOKENS, frozenset({7, 8}), min_tokens=6)
    return tuple(
        request(
            params,
            prompt=texts[i],
            stopping=stopping,
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
            name=str(i),
        )
        for i, params in enumerate(CASES.values())
    )


@cache
def by_hand() -> tuple[tuple[int, ...], ...]:
    """Token by token: one row of logits, the plain loop, the sampler's definition."""
    model = paged(tiny("llama"), 16)
    return tuple(tuple(_by_hand(model, r)) for r in requests())


def _by_hand(model, asked: Request) -> list[int]:
    output: list[int] = []
    s = asked.sampling
    while len(output) < asked.stopping.max_tokens:
        text = (*asked.prompt, *output)
        feed = Feed(text, 0, range(16), 1, s)
        with torch.inference_mode():
            batch = ModelInput.build([feed], BLOCK, torch.device("cpu"))
            row = plain(model.logits(batch)[0], asked, output)
        columns = (s.temperature, s.top_k, s.top_p, s.min_p, s.seed, len(text))
        drawn = reference.sample_rows(row[None], *(torch.tensor([c]) for c in columns))
        output.append(int(drawn))
        if output[-1] in asked.stopping.stop_ids:
            break
    return output


@pytest.mark.parametrize("drafted", range(9))
@pytest.mark.parametrize("drafts", ["ngram", "perfect"])
def test_drafts_and_company_change_nothing(drafts: str, drafted: int) -> None:
    rig = TinyRig("llama", drafts, drafted=drafted, num_blocks=128, rows=160)
    assert dict(zip(CASES, map(tuple, rig.serve(requests())), strict=True)) == dict(
        zip(CASES, by_hand(), strict=True)
    )
    assert (sum(r.accepted for r in rig.observer.reports) > 0) == (drafted > 0)


def test_preemption_changes_nothing() -> None:
    rig = TinyRig("llama", "ngram", num_blocks=20)
    assert tuple(map(tuple, rig.serve(requests()))) == by_hand()
    assert sum(r.preempted for r in rig.observer.reports) > 0


def test_every_case_does_something() -> None:
    bare = [
        replace(r, stopping=StopParams(TOKENS), sampling=replace(r.sampling, logits=LogitParams()))
        for r in requests()
    ]
    without = TinyRig("llama", "none", num_blocks=128).serve(bare)
    for name, own, other in zip(CASES, by_hand(), without, strict=True):
        assert list(own) != other, name


def test_what_is_ruled_out_never_comes_and_min_tokens_hold() -> None:
    for asked, output in zip(requests(), by_hand(), strict=True):
        p = asked.sampling.logits
        assert not {*output} & {*p.banned}
        assert p.allowed is None or {*output} <= {*p.allowed}
        for word in p.bad_words:
            assert all(output[i : i + len(word)] != word for i in range(len(output)))
        assert not {*output[: asked.stopping.min_tokens]} & asked.stopping.stop_ids


def test_a_request_with_nothing_to_choose_fails_alone() -> None:
    rig = TinyRig("llama", "none")
    hopeless = LogitParams(allowed=(5,), bad_words=((5,),))
    rig.engine.submit(request(hopeless, name="0"))
    rig.engine.submit(request(LogitParams(), name="1"))
    ends = {}
    while rig.engine.busy:
        for chunk in rig.engine.step():
            if chunk.finish is not None:
                ends[chunk.request_id] = chunk.finish
    assert ends["0"].error == ERRORS[RULED_OUT]
    assert ends["1"].completion_tokens == TOKENS
