"""Cancelling, at any point of a step: nothing more comes out, nothing stays behind."""

from __future__ import annotations

import random

import pytest

from engine.outcome import FinishReason
from tests.engine.fakes import VOCAB, Rig, reference

DRAFTS = ["none", "perfect", "junk", "ngram,model", "ngram,suffix"]


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("draft", DRAFTS)
def test_in_a_full_pool(draft: str) -> None:
    """Preemption without end, and one of eight is cancelled every few steps."""
    rng = random.Random(1)
    rig = Rig(num_blocks=18, draft=draft, rng=rng)
    prompts: dict[str, list[int]] = {}
    for number in range(1500):
        while len(rig.scheduler.live) < 8:
            name = str(len(prompts))
            prompts[name] = prompt_of(rng, rng.randint(1, 20))
            rig.submit(name, prompts[name], 24, ignore_eos=True)
        doomed = rng.choice(rig.scheduler.live)
        if number % 4 == 0:
            rig.engine.cancel(doomed)
        rig.step((lambda d=doomed: rig.engine.cancel(d)) if number % 4 == 2 else (lambda: None))
    rig.drain()
    reasons = {i: rig.finish(i).reason for i in prompts}
    for i, prompt in prompts.items():
        want = reference(prompt, 24, stop_ids=frozenset())
        got = rig.tokens(i)
        assert got == (want if reasons[i] is FinishReason.LENGTH else want[: len(got)])
    assert set(reasons.values()) == {FinishReason.LENGTH, FinishReason.CANCELLED}
    assert sum(rig.finish(i).preemptions for i in prompts) > 50
    assert rig.pool.free == rig.pool.num_blocks


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("step", range(1, 9))
def test_between_forward_and_commit(draft: str, step: int) -> None:
    """Prompt 100 in chunks of 32: at step 4 the last chunk is computed, but not yet taken over."""
    rig = Rig(draft=draft, max_step_rows=32)
    prompt = prompt_of(random.Random(2), 100)
    for _ in range(20):
        rig.submit("a", prompt, 50, ignore_eos=True)
        for _ in range(step - 1):
            rig.step()
        before = rig.tokens("a")
        chunks = rig.step(lambda: rig.engine.cancel("a"))
        assert [(c.request_id, c.tokens, c.text) for c in chunks] == [("a", (), "")]
        assert rig.finish("a").reason is FinishReason.CANCELLED
        assert rig.tokens("a") == before
        assert (before == []) == (step <= 4)
        assert rig.pool.free == rig.pool.num_blocks
        assert not rig.engine.busy
        rig.chunks.clear()


def test_of_a_neighbour_changes_nothing() -> None:
    rig = Rig(draft="perfect", num_blocks=40)
    rng = random.Random(3)
    prompts = {str(i): prompt_of(rng, 9) for i in range(6)}
    for i, prompt in prompts.items():
        rig.submit(i, prompt, 40, ignore_eos=True)
    for i in ("1", "4"):
        rig.step()
        rig.step(lambda i=i: rig.engine.cancel(i))
    rig.drain()
    for i in ("0", "2", "3", "5"):
        assert rig.tokens(i) == reference(prompts[i], 40, stop_ids=frozenset())
        drafts = rig.finish(i).drafts
        assert drafts.accepted == drafts.drafted > 0


def test_takes_effect_between_chunks() -> None:
    rig = Rig(num_blocks=1300, max_step_rows=64)
    rig.submit("long", [1] * 4000, 1000)
    rig.submit("queued", [1] * 4000, 1000)
    rig.step()
    rig.step()
    rig.engine.cancel("long")
    rig.engine.cancel("queued")
    assert rig.target.rows == 128
    rig.drain(limit=1)
    assert rig.target.rows == 128
    assert rig.pool.free == rig.pool.num_blocks


def test_during_a_chunk_costs_no_further_one() -> None:
    rig = Rig(num_blocks=1300, max_step_rows=64)
    rig.submit("long", [1] * 4000, 1000)
    rig.step()
    rig.step(lambda: rig.engine.cancel("long"))
    assert not rig.engine.busy
    assert rig.target.rows == 128


@pytest.mark.parametrize("draft", DRAFTS)
def test_typing_on_again_and_again(draft: str) -> None:
    """Start, cancel somewhere, start with one more character, read it all: under one id."""
    rng = random.Random(4)
    rig = Rig(draft=draft, rng=rng, num_blocks=30)
    prefix = prompt_of(rng, 18)
    for _ in range(200):
        rig.submit("a", prefix, 30, ignore_eos=True)
        for _ in range(rng.randint(0, 8)):
            rig.step()
        rig.engine.cancel("a")
        prefix = [*prefix[-30:], rng.randrange(1, VOCAB)]
        rig.submit("b", prefix, 8, ignore_eos=True)
        rig.drain(limit=100)
        assert rig.tokens("b") == reference(prefix, 8, stop_ids=frozenset())
        rig.chunks.clear()


@pytest.mark.parametrize("draft", DRAFTS)
def test_an_id_may_be_used_again_at_once(draft: str) -> None:
    """Even in the same batch of commands: no draft source may mix up the two."""
    rig = Rig(draft=draft)
    for i in range(50):
        prompt = [1 + i % 6] * (1 + 7 * (i % 4)) + [1 + i % 5]
        rig.submit("a", prompt, 30, ignore_eos=True)
        for _ in range(i % 5):
            rig.step()
        rig.engine.cancel("a")
    rig.submit("a", [1, 2], 30, ignore_eos=True)
    rig.drain()
    tokens = [t for c in rig.chunks["a"] if c.finish is None for t in c.tokens]
    assert rig.engine._draft.errors == 0
    last = rig.chunks["a"][-1]
    assert last.finish is not None
    assert (tokens + list(last.tokens))[-30:] == reference([1, 2], 30, stop_ids=frozenset())


def test_three_thousand_times_without_a_trace() -> None:
    rng = random.Random(5)
    rig = Rig(draft="ngram,model", rng=rng, num_blocks=40)
    for i in range(3000):
        rig.submit(str(i), prompt_of(rng, rng.randint(1, 12)), 40)
        for _ in range(rng.randint(0, 2)):
            rig.step()
        if rng.random() < 0.9:
            live = rig.scheduler.live
            rig.engine.cancel(rng.choice(live) if live else "nobody")
    for i in rig.scheduler.live:
        rig.engine.cancel(i)
    rig.drain(limit=2)
    assert rig.pool.free == rig.pool.num_blocks
    assert (rig.scheduler.running, rig.scheduler.waiting, rig.scheduler.live) == ([], 0, [])
    assert rig.scheduler.waiting_by_class == (0, 0, 0)
    ngram = rig.draft.sources[0]  # type: ignore[attr-defined]
    assert ngram._indexes == {}
    rig.submit("control", [1, 2, 3], 20)
    rig.drain()
    assert rig.tokens("control") == reference([1, 2, 3], 20)


def test_of_what_is_not_there_is_no_matter() -> None:
    rig = Rig()
    rig.engine.cancel("nobody")
    assert not rig.engine.busy
    rig.submit("a", [1], 3, ignore_eos=True)
    rig.drain()
    rig.engine.cancel("a")
    assert not rig.engine.busy


def test_nothing_is_kept_of_who_was_cancelled_during_the_pass() -> None:
    """The source sees the verdict after it was told to forget."""
    rig = Rig(draft="wrong")
    for number in range(20):
        rig.submit(str(number), prompt_of(random.Random(number), 10), 50, ignore_eos=True)
        for _ in range(4):
            rig.step()
        rig.step(lambda own=str(number): rig.engine.cancel(own))
    assert rig.draft._acceptance._own == {}
