"""Whole-engine runs over a model that answers from what it reads through the block table."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.outcome import FinishReason
from engine.request import SamplingParams, SpeculationParams
from tests.engine.fakes import BLOCK, EOS, VOCAB, Rig, reference

DRAFTS = ["none", "ngram", "model", "perfect", "junk", "ngram,model", "junk,perfect"]


def prompts_that_share(rng: random.Random) -> Iterator[list[int]]:
    """Beginnings and whole texts in common, of every length around that of a block."""
    texts = [[rng.randrange(1, VOCAB) for _ in range(20)] for _ in range(rng.randint(1, 4))]
    while True:
        prompt = rng.choice(texts)[: rng.randint(0, 20)]
        own = rng.choice([0, 0, rng.randint(0, 20 - len(prompt))])
        yield (prompt + [rng.randrange(1, VOCAB) for _ in range(own)]) or [1]


def traffic(seed: int, draft: str) -> Rig:
    """Random requests and cancels over a tight pool: each gets the reference, nothing leaks, and
    nobody finds what only others have computed."""
    rng = random.Random(seed)
    max_seqs = rng.randint(1, 8)
    rig = Rig(
        num_blocks=rng.randint(14, 30),
        prefix_cache=rng.random() < 0.8,
        draft=draft,
        rng=rng,
        draft_rows=rng.choice([0, 4, 16, 64]),
        max_draft_tokens=rng.choice([0, 1, 2, 4, 6]),
        max_seqs=max_seqs,
        max_step_rows=rng.randint(max_seqs, 24),
    )
    prompts = prompts_that_share(rng)
    pending = {
        str(i): (
            next(prompts),
            rng.randint(0, 30),
            rng.randrange(3),
            SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(4)),
            SpeculationParams(rng.choice([None, None, 0, 1, 3])),
            rng.random() < 0.7,
        )
        for i in range(rng.randint(1, 12))
    }
    tenants = {i: rng.choice(["a", "b"]) for i in pending}
    known = {i: p + reference(p, n, s, frozenset()) for i, (p, n, _, s, _, _) in pending.items()}
    expected = {
        i: reference(p, n, s, frozenset() if endless else frozenset({EOS}))
        for i, (p, n, _, s, _, endless) in pending.items()
    }
    cancelled: set[str] = set()
    for _ in range(5000):
        while pending and rng.random() < 0.5:
            i, (prompt, n, priority, sampling, speculation, endless) = pending.popitem()
            rig.submit(
                i,
                prompt,
                n,
                priority=priority,
                sampling=sampling,
                speculation=speculation,
                ignore_eos=endless,
                tenant=tenants[i],
            )
        doomed = rng.choice(rig.scheduler.live) if rig.scheduler.live else ""
        during = rng.random() < 0.5
        if doomed and rng.random() < 0.03:
            cancelled.add(doomed)
            if not during:
                rig.engine.cancel(doomed)
            rig.step((lambda d=doomed: rig.engine.cancel(d)) if during else (lambda: None))
        else:
            rig.step()
        if not pending and not rig.engine.busy:
            break
    assert not pending, "livelock"
    assert not rig.engine.busy, "livelock"
    assert rig.pool.free == rig.pool.num_blocks
    for i, want in expected.items():
        got = rig.tokens(i)
        others = [known[j] for j in known if j != i and tenants[j] == tenants[i]]
        prompt = known[i][: rig.finish(i).prompt_tokens]
        assert rig.finish(i).cached_tokens <= max((in_common(prompt, o) for o in others), default=0)
        if rig.finish(i).reason is FinishReason.CANCELLED:
            assert i in cancelled
            assert got == want[: len(got)]
        else:
            assert got == want
    return rig


def in_common(one: Seq[int], other: Seq[int]) -> int:
    """Tokens in full blocks that both begin with."""
    pairs = zip(batched(one), batched(other), strict=False)
    return BLOCK * sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def batched(tokens: Seq[int]) -> list[Seq[int]]:
    return [tokens[i : i + BLOCK] for i in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def perfect_draft(seed: int) -> None:
    """The target as its own draft, tight pool, cancels: every guess is accepted."""
    rng = random.Random(seed)
    prompts = prompts_that_share(rng)
    rig = Rig(
        num_blocks=rng.randint(16, 30),
        prefix_cache=rng.random() < 0.8,
        draft="perfect",
        draft_rows=rng.choice([6, 64]),
        max_draft_tokens=rng.choice([1, 3, 6]),
        max_seqs=6,
        max_step_rows=rng.randint(6, 24),
    )
    for i in range(8):
        rig.submit(str(i), next(prompts), 30, ignore_eos=True, priority=rng.randrange(3))
    for _ in range(5000):
        if not rig.engine.busy:
            break
        if rng.random() < 0.05 and rig.scheduler.live:
            rig.engine.cancel(rng.choice(rig.scheduler.live))
        rig.step()
    drafted, accepted = rig.totals()
    assert accepted == drafted > 0


def test_the_traffic_is_hard_enough() -> None:
    """What never happens in it is not tested by it."""
    rigs = [traffic(seed, DRAFTS[seed % len(DRAFTS)]) for seed in range(70)]
    reports = [report for rig in rigs for report in rig.observer.reports]
    assert sum(rig.copies for rig in rigs) > 10
    assert sum(r.preempted for r in reports) > 30
    assert sum(r.accepted for r in reports) > 300
    assert sum(r.drafted - r.accepted for r in reports) > 300
    assert sum(r.free_blocks == r.cached_blocks == 0 for r in reports) > 30
    assert sum(r.prefix_hits for r in reports) > 1000
    assert sum(r.cached_blocks > 0 == r.free_blocks for r in reports) > 100
    assert sum(sum(r.waiting) > 0 for r in reports) > 300


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), draft=st.sampled_from(DRAFTS))
def test_any_traffic_gives_the_reference_and_leaks_nothing(seed: int, draft: str) -> None:
    traffic(seed, draft)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_a_perfect_draft_is_always_accepted(seed: int) -> None:
    """Output cannot show a broken draft cache: the target hides it. Acceptance can."""
    perfect_draft(seed)
