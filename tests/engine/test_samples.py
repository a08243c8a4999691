"""Samples of one prompt: it is computed once, held once, and each of them is what it is alone."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import OutputParams, Request, SamplingParams, StopParams
from tests.engine.fakes import BLOCK, VOCAB, Rig, reference
from tests.engine.test_logprobs import serve
from tests.engine.test_runner import TinyRig
from tests.engine.tiny import prompts

NEVER = frozenset[int]()


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(1.0, seed=seed)


def submit(rig: Rig, prompt: Seq[int], samples: int, tokens: int, name: str = "a") -> None:
    for i in range(samples):
        rig.submit(f"{name}.{i}", prompt, tokens, sampling=seeded(i), ignore_eos=True, group=name)


def check(rig: Rig, prompt: Seq[int], samples: int, tokens: int, name: str = "a") -> None:
    for i in range(samples):
        wanted = reference(prompt, tokens, seeded(i), NEVER)
        assert rig.tokens(f"{name}.{i}") == wanted
        assert rig.finish(f"{name}.{i}").completion_tokens == tokens


@pytest.mark.parametrize("length", range(1, 40))
@pytest.mark.parametrize("samples", [1, 2, 8])
def test_the_prompt_is_computed_and_held_once(length: int, samples: int) -> None:
    """In chunks, without a prefix cache. Each has blocks of its own for its output alone."""
    rig = Rig(max_step_rows=12, num_blocks=64)
    prompt, tokens = [i % VOCAB for i in range(length)], 6
    submit(rig, prompt, samples, tokens)
    used = 0
    for _ in range(200):
        if not rig.engine.busy:
            break
        rig.step()
        used = max(used, rig.pool.num_blocks - rig.pool.free)
    check(rig, prompt, samples, tokens)
    assert rig.target.rows == length - 1 + samples * tokens
    full = (length - 1) // BLOCK
    assert used <= full + samples * (rig.pool.blocks_for(length + tokens) - full)
    assert rig.finish("a.0").cached_tokens == 0
    assert {rig.finish(f"a.{i}").cached_tokens for i in range(1, samples)} <= {length - 1}
    assert rig.pool.free == rig.pool.num_blocks


def step_with_room(rig: Rig) -> None:
    """Nobody begins where there is no room."""
    before = set(rig.scheduler.running)
    rig.step()
    assert not (set(rig.scheduler.running) - before and rig.observer.reports[-1].preempted)


def drain_with_room(rig: Rig) -> None:
    for _ in range(2000):
        if not rig.engine.busy:
            return
        step_with_room(rig)
    raise AssertionError("livelock")


ops = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
        st.integers(1, 5),
        st.integers(1, 8),
        st.sets(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(
    ops,
    st.sampled_from(["none", "perfect", "junk", "ngram,model"]),
    st.booleans(),
    st.integers(8, 24),
    st.integers(9, 40),
)
def test_each_is_what_it_is_alone(groups, draft, prefix_cache, rows, blocks) -> None:
    """In a tight pool, preempted, drafted, in company; whoever of them is cancelled, and when."""
    rig = Rig(draft=draft, prefix_cache=prefix_cache, max_step_rows=rows, num_blocks=blocks)
    cancels: list[list[str]] = [[] for _ in range(7)]
    for g, (prompt, samples, tokens, cut) in enumerate(groups):
        submit(rig, prompt, samples, tokens, str(g))
        for sample, step in cut:
            cancels[step].append(f"{g}.{sample}")
    for names in cancels:
        for name in names:
            rig.engine.cancel(name)
        step_with_room(rig)
    drain_with_room(rig)
    assert rig.engine._draft.errors == 0
    for g, (prompt, samples, tokens, _) in enumerate(groups):
        for i in range(samples):
            name, wanted = f"{g}.{i}", reference(prompt, tokens, seeded(i), NEVER)
            got = rig.tokens(name)
            assert got == wanted[: len(got)]
            assert rig.finish(name).reason == ("LENGTH" if len(got) == tokens else "CANCELLED")
    assert rig.pool.free == rig.pool.num_blocks


@pytest.mark.parametrize("steps", range(6))
def test_the_next_takes_over_from_the_first(steps: int) -> None:
    """Cancelled while it computes the prompt (3 steps), when it alone holds it, and after that."""
    rig = Rig(max_step_rows=8)
    prompt = [i % VOCAB for i in range(24)]
    submit(rig, prompt, 3, 6)
    for _ in range(steps):
        rig.step()
    rig.engine.cancel("a.0")
    rig.drain()
    for i in (1, 2):
        assert rig.tokens(f"a.{i}") == reference(prompt, 6, seeded(i), NEVER)
    again = steps < 4  # nobody else held the prompt
    assert rig.finish("a.1").cached_tokens == (0 if again else 23)
    assert rig.finish("a.2").cached_tokens == 23


def test_others_are_served_while_samples_wait() -> None:
    rig = Rig(max_seqs=2, max_step_rows=8)
    submit(rig, [i % VOCAB for i in range(80)], 4, 3)
    rig.submit("other", [1, 2], 3, ignore_eos=True)
    for _ in range(8):
        rig.step()
    assert rig.finish("other").completion_tokens == 3
    rig.drain()


@pytest.mark.parametrize("drafts", ["none", "ngram", "perfect"])
@pytest.mark.parametrize("blocks", [128, 12])
def test_a_model_says_the_same(drafts: str, blocks: int) -> None:
    """Drafts of a model among them: their KV is shared and copied, too."""

    def requests(grouped: bool) -> list[Request]:
        return [
            Request(
                str(g * 4 + i),
                tuple(text),
                StopParams(20),
                SamplingParams(0.9, seed=i),
                output=OutputParams(logprobs=2),
                arrived=float(g),
                group=str(g) if grouped else "",
            )
            for g, text in enumerate(prompts(3, random.Random(6)))
            for i in range(4)
        ]

    rig = TinyRig("llama", "none")
    alone = {name: out for r in requests(False) for name, out in serve(rig, [r]).items()}
    rig = TinyRig("llama", drafts, num_blocks=blocks)
    assert serve(rig, requests(True)) == alone
    if drafts == "perfect":
        assert sum(r.accepted for r in rig.observer.reports) == sum(
            r.drafted for r in rig.observer.reports
        )
