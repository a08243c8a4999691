"""Too few blocks: the last in line gives way, and nobody can tell from its output."""

from __future__ import annotations

import random

import pytest

from engine.outcome import FinishReason
from engine.request import SamplingParams
from engine.types import Sequence
from tests.engine.fakes import BLOCK, VOCAB, Rig, reference

SEEDED = SamplingParams(temperature=0.8, seed=3)
DRAFTS = ["none", "junk", "perfect", "ngram,model", "ngram,suffix"]


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def running(rig: Rig, request_id: str) -> Sequence | None:
    return next((s for s in rig.scheduler.running if s.request.id == request_id), None)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SEEDED])
@pytest.mark.parametrize("at", [(1,), (7,), (BLOCK,), (BLOCK + 1,), (1, 1), (7, 13), (4, 5, 6)])
def test_a_resumed_sequence_goes_on_where_it_was(
    draft: str, sampling: SamplingParams, at: tuple[int, ...]
) -> None:
    rig = Rig(draft=draft, max_step_rows=10)
    prompt = prompt_of(random.Random(1), 13)
    rig.submit("victim", prompt, 30, sampling=sampling, ignore_eos=True)
    rig.submit("other", prompt[::-1], 30, ignore_eos=True)
    for count in at:
        while (seq := running(rig, "victim")) is None or seq.generated < count:
            rig.step()
        rig.scheduler._preempt(seq)
        rig.scheduler.check()
        assert (seq.computed, seq.drafted, seq.table.ids) == (0, 0, [])
    rig.drain()
    never = frozenset[int]()
    assert rig.tokens("victim") == reference(prompt, 30, sampling, never)
    assert rig.tokens("other") == reference(prompt[::-1], 30, stop_ids=never)
    assert rig.finish("victim").preemptions == len(at)
    assert rig.pool.free == rig.pool.num_blocks


@pytest.mark.parametrize("at", [0, 5, 11])
def test_in_the_middle_of_a_chunked_prompt(at: int) -> None:
    rig = Rig(max_step_rows=8, draft="perfect")
    prompt = prompt_of(random.Random(2), 60)
    rig.submit("a", prompt, 9)
    while (seq := running(rig, "a")) is None or seq.computed < at:
        rig.step()
    rig.scheduler._preempt(seq)
    rig.drain()
    assert rig.tokens("a") == reference(prompt, 9)
    drafted, accepted = rig.totals()
    assert accepted == drafted


@pytest.mark.parametrize("draft", DRAFTS)
def test_thirty_at_once_in_room_for_one(draft: str) -> None:
    """All end, the oldest first of its kind, and none is thrown out again and again."""
    blocks = -(-(32 + 64) * 12 // (BLOCK * 10))
    rig = Rig(num_blocks=blocks, draft=draft, max_seqs=30, max_step_rows=64)
    rng = random.Random(3)
    prompts = {str(i): prompt_of(rng, 32) for i in range(30)}
    for i, prompt in prompts.items():
        rig.submit(i, prompt, 64, ignore_eos=True)
        rig.clock.now += 0.001
    ended: list[str] = []
    silent = 0
    while rig.engine.busy:
        chunks = rig.step()
        silent = 0 if chunks else silent + 1
        assert silent < 5, "steps without a token"
        ended += [c.request_id for c in chunks if c.finish]
    assert ended == list(prompts)
    for i, prompt in prompts.items():
        assert rig.tokens(i) == reference(prompt, 64, stop_ids=frozenset())
        assert rig.finish(i).preemptions <= 3


def test_the_first_in_line_gets_on_in_every_step() -> None:
    """Others decode while it is still in its prompt; they must not take the blocks it needs."""
    rig = Rig(num_blocks=16, max_step_rows=8, max_seqs=4)
    rng = random.Random(4)
    for i in range(3):
        rig.submit(f"batch{i}", prompt_of(rng, 6), 40, priority=2, ignore_eos=True)
    while len(rig.scheduler.running) < 3:
        rig.step()
    rig.submit("first", prompt_of(rng, 30), 20, priority=0, ignore_eos=True)
    rig.step()
    while (seq := running(rig, "first")) is not None:
        before = seq.computed
        rig.step()
        assert seq.computed > before or seq.finish is not None
    assert rig.finish("first").reason is FinishReason.LENGTH
    assert rig.finish("first").preemptions == 0
    rig.drain()
    assert sum(rig.finish(f"batch{i}").preemptions for i in range(3)) > 0


def test_victims_are_the_last_in_line() -> None:
    rig = Rig(num_blocks=12, max_seqs=4, max_step_rows=24)
    rng = random.Random(5)
    for name, priority in (("batch", 2), ("standard", 1), ("interactive", 0)):
        rig.submit(name, prompt_of(rng, 8), 24, priority=priority, ignore_eos=True)
    rig.drain()
    preemptions = [rig.finish(n).preemptions for n in ("interactive", "standard", "batch")]
    assert preemptions[0] == 0 < preemptions[2]
    assert preemptions == sorted(preemptions)


@pytest.mark.parametrize("seed", range(20))
def test_drafts_cost_nobody_a_block(seed: int) -> None:
    """Rejected drafts give their blocks back, so wrong drafts change nothing about who runs."""

    def steps(most: int) -> list[tuple[int, int]]:
        rng = random.Random(seed)
        rig = Rig(num_blocks=14, draft="wrong", max_draft_tokens=most, max_step_rows=64)
        for i in range(8):
            rig.submit(str(i), prompt_of(rng, rng.randint(1, 12)), 30, ignore_eos=True)
            rig.clock.now += 0.001
        rig.drain()
        drafted, accepted = rig.totals()
        assert (drafted > 300, accepted) == (most > 0, 0)
        return [(r.sequences, r.preempted) for r in rig.observer.reports]

    assert steps(8) == steps(0)


def test_a_full_house_that_emptied_is_no_burden() -> None:
    rig = Rig(num_blocks=20, draft="perfect", max_draft_tokens=5)
    rng = random.Random(6)
    for i in range(50):
        rig.submit(str(i), prompt_of(rng, 10), 10, ignore_eos=True)
    rig.drain()
    rig.submit("big", prompt_of(rng, 40), 24, ignore_eos=True)
    rig.drain()
    assert rig.finish("big").preemptions == 0
    assert len(rig.tokens("big")) == 24
