"""A draft model's own KV: with the target itself as draft, every guess must be accepted.

The output cannot show a broken draft cache, because the target hides it. Acceptance can.
"""

from __future__ import annotations

import random

import pytest

from engine.draft_model import ModelDraft
from engine.request import SamplingParams, SpeculationParams
from tests.engine.fakes import VOCAB, HashModel, Rig, choice, hash_next, reference

NEVER = frozenset[int]()


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def rig_with(rows: int, context_limit: int = 10_000, **settings: int) -> tuple[Rig, HashModel]:
    """A perfect draft with its own row budget and context limit; and the model it runs."""
    blocks = settings.pop("num_blocks", 64)
    model = HashModel(hash_next, blocks)
    draft = choice([ModelDraft(model, rows, context_limit)])
    return Rig(source=draft, num_blocks=blocks, **settings), model


def all_accepted(rig: Rig) -> int:
    """How many were drafted; each must have been right."""
    drafted, accepted = rig.totals()
    assert accepted == drafted
    return drafted


def test_drafting_that_comes_and_goes_with_the_load() -> None:
    """Two and five live by turns: at five there are no rows for drafts, and it falls behind."""
    rng = random.Random(1)
    rig, _ = rig_with(rows=24, draft_rows=5, num_blocks=200)
    prompts: dict[str, list[int]] = {}
    for phase in range(12):
        while len(rig.scheduler.live) < (5 if phase % 2 else 2):
            name = str(len(prompts))
            prompts[name] = prompt_of(rng, rng.randint(1, 9))
            rig.submit(name, prompts[name], 400, ignore_eos=True)
        for _ in range(10):
            rig.step()
        assert (rig.observer.reports[-1].drafted > 0) == (phase % 2 == 0)
        for extra in rig.scheduler.live[2:]:
            rig.engine.cancel(extra)
    for name, prompt in prompts.items():
        got = rig.tokens(name)
        assert got == reference(prompt, len(got), stop_ids=NEVER)
    assert all_accepted(rig) > 100


@pytest.mark.parametrize("rows", [1, 5, 8, 29, 30])
def test_catching_up_within_its_rows(rows: int) -> None:
    """A prompt of 30: until the draft has seen it all it makes no guess, and then good ones."""
    rig, model = rig_with(rows=rows)
    rig.submit("a", prompt_of(random.Random(2), 30), 60, ignore_eos=True)
    seen, silent = 0, 0
    while rig.engine.busy:
        rig.step()
        report = rig.observer.reports[-1]
        assert model.rows - seen <= rows + report.drafted
        seen = model.rows
        silent += report.drafted == 0
    if rows > 1:  # with a single row it falls behind the target for ever
        assert all_accepted(rig) > 10
    # The target meanwhile moves on by one token a step.
    assert silent >= -(-30 // rows) - 1


def test_rows_go_to_the_first_in_line_first() -> None:
    rig, model = rig_with(rows=10)
    for i in range(3):
        rig.submit(str(i), prompt_of(random.Random(i), 7), 30, ignore_eos=True)
        rig.clock.now += 0.001
    rig.step()
    drafted = [s.drafted for s in rig.scheduler.running]
    assert drafted[0] >= 7
    assert drafted[1] == 3
    assert drafted[2] == 0
    rig.drain()
    assert all_accepted(rig) > 30
    assert model.runs > 0


@pytest.mark.parametrize("length", [*range(58, 67), 200])
def test_past_its_context_the_sequence_goes_on_without(length: int) -> None:
    """The draft ends at 64, the target at 256: same ids, and "drafted" rises no more."""
    prompt = prompt_of(random.Random(length), length)
    rig, _ = rig_with(rows=256, context_limit=64, num_blocks=200, max_step_rows=256)
    rig.submit("other", [1, 2, 3], 50, ignore_eos=True)
    rig.submit("a", prompt, 50, ignore_eos=True)
    highest = -1
    while rig.engine.busy:
        rig.step()
        for seq in rig.scheduler.running:
            if seq.request.id == "a":
                highest = max(highest, seq.drafted)
                drafted = seq.by_source.get("model")
                if seq.computed > 64 and drafted is not None:
                    assert drafted.drafted <= 64 - length
    assert highest <= 64
    assert rig.tokens("a") == reference(prompt, 50, stop_ids=NEVER)
    assert rig.tokens("other") == reference([1, 2, 3], 50, stop_ids=NEVER)
    assert rig.finish("other").drafts.drafted > 30
    all_accepted(rig)
    assert rig.engine._draft.errors == 0


@pytest.mark.parametrize("drafted", [1, 4])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.01, seed=1), SamplingParams(temperature=1.0, seed=2)]
)
def test_always_wrong_changes_nothing(drafted: int, sampling: SamplingParams) -> None:
    """The replacement is the target's own token of that row; cursors count what was committed."""
    rig = Rig(draft="wrong", max_draft_tokens=drafted, num_blocks=200)
    rng = random.Random(3)
    prompts = {str(i): prompt_of(rng, rng.randint(1, 12)) for i in range(20)}
    for i, prompt in prompts.items():
        rig.submit(i, prompt, 30, sampling=sampling, ignore_eos=True)
    while rig.engine.busy:
        rig.step()
        for seq in rig.scheduler.running:
            if seq.generated:
                assert seq.computed == len(seq.request.prompt) + seq.generated - 1
    assert rig.totals()[0] > 500
    assert rig.totals()[1] == 0
    for i, prompt in prompts.items():
        assert rig.tokens(i) == reference(prompt, 30, sampling, NEVER)
        assert rig.finish(i).target_steps == 30


@pytest.mark.parametrize("draft", ["junk", "junk,perfect"])
def test_none_some_and_all_in_one_step(draft: str) -> None:
    """Eight sequences, 500 steps, each of them with drafts or without as it comes."""
    rng = random.Random(4)
    rig = Rig(draft=draft, rng=rng, num_blocks=200)
    prompts: dict[str, list[int]] = {}
    for _ in range(500):
        while len(rig.scheduler.live) < 8:
            name = str(len(prompts))
            prompts[name] = prompt_of(rng, rng.randint(1, 6))
            rig.submit(name, prompts[name], 40, speculation=SpeculationParams(rng.randint(0, 5)))
        emitted = {c.request_id: len(c.tokens) for c in rig.step()}
        assert all(emitted.get(s.request.id) for s in rig.scheduler.running if s.generated)
    rig.drain()
    for name, prompt in prompts.items():
        assert rig.tokens(name) == reference(prompt, 40)


def test_a_second_source_does_not_confuse_the_first() -> None:
    """Where the other one's guess is taken the draft falls behind, and catches up."""
    rig = Rig(draft="junk,perfect", rng=random.Random(5))
    for i in range(6):
        rig.submit(str(i), [1 + i, 2], 60, ignore_eos=True)
    rig.drain()
    stats = dict(pair for i in range(6) for pair in rig.finish(str(i)).by_source)
    assert stats["model"].drafted == stats["model"].accepted > 5
    assert stats["junk"].drafted > stats["junk"].accepted
