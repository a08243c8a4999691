"""Logprobs of the prompt: each token but the first once and in order, however it is computed."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.outcome import Logprobs
from engine.request import OutputParams, Request, SamplingParams, StopParams
from tests.engine.fakes import VOCAB, Rig, reference
from tests.engine.test_logits import ALONE
from tests.engine.test_logprobs import NEAR
from tests.engine.test_runner import TinyRig
from tests.engine.tiny import prompts, tiny

ASKED = OutputParams(prompt_logprobs=0)
NEVER = frozenset[int]()


def check(rig: Rig, name: str, prompt: Seq[int]) -> None:
    told = rig.prompt_logprobs(name)
    assert [entry.token for entry in told] == list(prompt[1:])
    assert [-entry.logprob for entry in told] == list(range(1, len(prompt)))


texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(texts, st.integers(0, 6), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(["none", "perfect", "junk", "ngram,model"]),
    st.booleans(),
    st.integers(8, 24),
    st.integers(14, 40),
)
def test_each_token_once(asked, draft, prefix_cache, rows, blocks) -> None:
    """Chunked, preempted, drafted, beside others; all begin alike, so that there are hits."""
    rig = Rig(
        draft=draft, prefix_cache=prefix_cache, max_step_rows=rows, num_blocks=blocks, draft_rows=24
    )
    shared = [1, 2, 3, 4, 5, 6, 0, 1]
    for i, (text, tokens, told) in enumerate(asked):
        output = ASKED if told else OutputParams()
        rig.submit(str(i), shared + text if i % 2 else text, tokens, ignore_eos=True, output=output)
        for _ in range(len(text) % 3):
            rig.step()
    rig.drain()
    for i, (text, tokens, told) in enumerate(asked):
        prompt = shared + text if i % 2 else text
        assert rig.tokens(str(i)) == reference(prompt, tokens, stop_ids=NEVER)
        check(rig, str(i), prompt if told else [])


def test_preempted_in_the_middle_of_the_prompt() -> None:
    """What was told is computed again, and not told again."""
    rig = Rig(num_blocks=12, max_step_rows=8)
    rig.submit("other", [1, 2, 3], 40, ignore_eos=True)
    for _ in range(7):
        rig.step()
    prompt = [i % 5 for i in range(36)]
    rig.submit("a", prompt, 3, ignore_eos=True, output=ASKED)
    while not any(report.preempted for report in rig.observer.reports):
        rig.step()
    assert 0 < len(rig.prompt_logprobs("a")) < 35
    rig.drain()
    check(rig, "a", prompt)


def test_what_is_cached_is_computed_again_and_stays_cached() -> None:
    rig = Rig(prefix_cache=True)
    prompt = [i % 5 for i in range(30)]
    for name, output, cached in (
        ("first", OutputParams(), 0),
        ("told", ASKED, 0),
        ("only told", ASKED, 0),
        ("last", OutputParams(), 28),
    ):
        rig.submit(name, prompt, 0 if name == "only told" else 4, ignore_eos=True, output=output)
        rig.drain()
        assert rig.finish(name).cached_tokens == cached
    check(rig, "told", prompt)
    check(rig, "only told", prompt)


@pytest.mark.parametrize("steps", range(5))
def test_cut_off_in_the_prompt(steps: int) -> None:
    rig = Rig(max_step_rows=8)
    prompt = [i % 5 for i in range(30)]
    rig.submit("a", prompt, 4, ignore_eos=True, output=ASKED)
    for _ in range(steps):
        rig.step()
    rig.engine.cancel("a")
    rig.drain()
    told = rig.prompt_logprobs("a")
    assert [-entry.logprob for entry in told] == list(range(1, min(8 * steps + 1, 30)))


# ---- a model ---------------------------------------------------------------------------------


@cache
def requests() -> tuple[Request, ...]:
    """Every third does not ask."""
    texts = prompts(15, random.Random(8))
    samplings = (
        SamplingParams(0.0),
        SamplingParams(0.8, seed=4),
        SamplingParams(0.9, seed=5, logits=ALONE["repetition"]),
        SamplingParams(0.0, logits=ALONE["banned"]),
    )
    outputs = (
        OutputParams(prompt_logprobs=3),
        OutputParams(prompt_logprobs=0, logprobs=2, processed_logprobs=True),
        OutputParams(),
    )
    return tuple(
        Request(
            str(i),
            tuple(text),
            StopParams(12 if i % 5 else 0),
            samplings[i % 4],
            output=outputs[i % 3],
            arrived=0.0,
        )
        for i, text in enumerate(texts)
    )


Outcome = dict[str, tuple[list[int], list[Logprobs], list[Logprobs]]]


def serve(rig: TinyRig, asked: Seq[Request]) -> Outcome:
    out: Outcome = {}
    for name, chunks in rig.chunks(asked).items():
        assert not any(c.finish.error for c in chunks if c.finish is not None)
        out[name] = (
            [x for c in chunks for x in c.tokens],
            [x for c in chunks for x in c.logprobs],
            [x for c in chunks for x in c.prompt_logprobs],
        )
    return out


@cache
def alone() -> Outcome:
    rig = TinyRig("llama", "none", rows=256)
    return {name: result for r in requests() for name, result in serve(rig, [r]).items()}


@pytest.mark.parametrize("asked", requests(), ids=lambda r: r.id)
def test_they_are_those_of_the_stock_model(asked: Request) -> None:
    told = alone()[asked.id][2]
    if asked.output.prompt_logprobs is None:
        assert not told
        return
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([asked.prompt]), use_cache=False).logits[0]
    assert [entry.token for entry in told] == list(asked.prompt[1:])
    for entry, row in zip(told, logits[:-1].double().log_softmax(-1), strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=NEAR)
        best = row.topk(asked.output.prompt_logprobs).values.tolist()
        assert entry.values == pytest.approx(best, abs=NEAR)


@pytest.mark.parametrize("drafted", [0, 1, 3, 8])
@pytest.mark.parametrize("drafts", ["ngram", "perfect", "ngram,model"])
@pytest.mark.parametrize("rows", [16, 160])
def test_drafts_chunks_and_company_change_no_bit(drafts: str, drafted: int, rows: int) -> None:
    """B014: also not of those who ask for nothing."""
    rig = TinyRig("llama", drafts, drafted=drafted, num_blocks=128, rows=rows)
    assert serve(rig, requests()) == alone()


def test_preemption_changes_no_bit() -> None:
    rig = TinyRig("llama", "ngram", num_blocks=10, prefix_cache=True)
    assert serve(rig, requests()) == alone()
    assert sum(r.preempted for r in rig.observer.reports) > 0


def test_asking_changes_no_token() -> None:
    silent = [replace(r, output=OutputParams()) for r in requests()]
    served = serve(TinyRig("llama", "ngram", num_blocks=128), silent)
    assert {n: out[0] for n, out in served.items()} == {n: out[0] for n, out in alone().items()}
