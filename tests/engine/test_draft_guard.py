"""A draft source that misbehaves costs its drafts, never a request."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import pairwise

import pytest

from engine.draft import DraftWrapper
from engine.draft_guard import GuardedDraft
from engine.draft_model import ModelDraft
from engine.draft_time import TimedDraft
from engine.draft_watch import WatchedDraft
from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict
from tests.engine.fakes import (
    VOCAB,
    HashModel,
    ManualClock,
    Rig,
    WrongDraft,
    hash_next,
    reference,
)
from tests.engine.test_draft_ngram import plan, sequence

STEP = plan((sequence([1], "a"), 2), (sequence([1], "b"), 0))
VERDICTS = [Verdict(0, 1)] * 2


NONSENSE = {
    "too many": Proposal((1,) * 100, "script"),
    "past the vocabulary": Proposal((VOCAB,), "script"),
    "negative": Proposal((-1,), "script"),
    "too few probabilities": Proposal((1,), "script", []),
    "too wide probabilities": Proposal((1,), "script", [[0.0] * (VOCAB + 1)]),
    "no number": Proposal(("x",), "script"),  # type: ignore[arg-type]
    "too few grades": Proposal((1, 1), "script", None, (1,)),
}


class Script:
    """Does in each step what it is told; "ok" proposes one token for the first sequence."""

    name = "script"
    errors = 0

    def __init__(self, deeds: Callable[[int], str]) -> None:
        self._deeds = deeds
        self.asked = 0
        self.told = 0

    def propose(self, plan: StepPlan) -> list[Proposal]:
        self.asked += 1
        fine = [Proposal((1,), self.name), *[NO_PROPOSAL] * (len(plan.work) - 1)]
        deed = self._deeds(self.asked)
        if deed == "raise":
            raise RuntimeError("no")
        if deed == "too few answers":
            return []
        return [NONSENSE.get(deed, fine[0]), *fine[1:]]

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        self.told += 1
        if self._deeds(self.asked) == "raise in observe":
            raise RuntimeError("no")

    def forget(self, request_id: str) -> None:
        if self._deeds(self.asked) == "raise in forget":
            raise RuntimeError("no")


FAULTS = ("raise", "too few answers", *NONSENSE, "raise in observe")


def step(guard: GuardedDraft) -> list[Proposal]:
    proposals = guard.propose(STEP)
    guard.observe(STEP, proposals, VERDICTS)
    return proposals


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_kept_from_the_step_and_counted(fault: str) -> None:
    guard = GuardedDraft(Script(lambda n: fault if n == 2 else "ok"), VOCAB)
    fine = [Proposal((1,), "script"), NO_PROPOSAL]
    assert step(guard) == fine
    assert step(guard) == (fine if fault == "raise in observe" else [NO_PROPOSAL] * 2)
    assert step(guard) == fine
    assert guard.errors == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_after_some_in_a_row_it_is_left_alone_and_then_tried_again(fault: str) -> None:
    source = Script(lambda n: fault if n <= 3 else "ok")
    guard = GuardedDraft(source, VOCAB, patience=3, rest=5)
    for _ in range(3):
        step(guard)
    assert (source.asked, guard.errors) == (3, 3)
    for _ in range(5):
        assert step(guard) == [NO_PROPOSAL] * 2
    assert source.asked == 3
    assert step(guard)[0].tokens == (1,)
    assert (source.asked, guard.errors) == (4, 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_failed_trial_doubles_the_rest_up_to_a_limit(fault: str) -> None:
    source = Script(lambda n: fault)
    guard = GuardedDraft(source, VOCAB, patience=2, rest=1)
    asked_at = []
    for number in range(350):
        before = source.asked
        step(guard)
        if source.asked > before:
            asked_at.append(number)
    gaps = [b - a - 1 for a, b in pairwise(asked_at)]
    assert gaps == [0, 1, 2, 4, 8, 16, 32, 64, 64, 64, 64]


def test_a_success_closes_the_breaker() -> None:
    source = Script(lambda n: "raise" if n % 2 else "ok")
    guard = GuardedDraft(source, VOCAB, patience=2, rest=50)
    for _ in range(20):
        step(guard)
    assert (source.asked, guard.errors) == (20, 10)


def test_it_is_told_nothing_while_it_rests() -> None:
    source = Script(lambda n: "raise")
    guard = GuardedDraft(source, VOCAB, patience=1, rest=10)
    for _ in range(5):
        step(guard)
    assert (source.asked, source.told) == (1, 0)


def test_failing_to_forget_is_an_error_like_others() -> None:
    guard = GuardedDraft(Script(lambda n: "raise in forget"), VOCAB)
    guard.forget("a")
    assert guard.errors == 1


@pytest.mark.parametrize("fault", [*FAULTS, "raise in forget"])
def test_no_request_notices(fault: str) -> None:
    rig = Rig(source=Script(lambda n: fault))
    for i in range(4):
        rig.submit(str(i), [1 + i, 2], 40)
    rig.drain()
    for i in range(4):
        assert rig.tokens(str(i)) == reference([1 + i, 2], 40)
    assert rig.engine._draft.errors >= 3
    assert max(r.draft_errors for r in rig.observer.reports) >= 3


def test_a_fault_in_the_middle_leaves_a_draft_model_usable() -> None:
    """Its cursor moves only with what was fed, so it is right again at once."""
    rig = Rig(draft="perfect")
    model, calls = rig.draft_model, 0
    run = model.run

    def sometimes(feeds: Seq[object]) -> list[tuple[int, ...]]:
        nonlocal calls
        calls += 1
        if calls % 7 == 3:
            raise MemoryError
        return run(feeds)  # type: ignore[arg-type]

    model.run = sometimes  # type: ignore[method-assign, assignment]
    for i in range(4):
        rig.submit(str(i), [1 + i, 2] * 5, 60, ignore_eos=True)
    rig.drain()
    for i in range(4):
        assert rig.tokens(str(i)) == reference([1 + i, 2] * 5, 60, stop_ids=frozenset())
    drafted, accepted = rig.totals()
    assert accepted == drafted > 20
    assert rig.engine._draft.errors > 3


def test_guesses_are_wrong_not_errors() -> None:
    rig = Rig(source=WrongDraft(random.Random(0)))
    rig.submit("a", [1, 2], 40, ignore_eos=True)
    rig.drain()
    assert rig.engine._draft.errors == 0


def test_too_slow_is_a_fault_like_others() -> None:
    """It counts, its drafts are dropped, and it is left alone for a while and then tried again."""
    clock = ManualClock()
    took = {2: 0.5, 4: 0.6, 5: 0.6}

    class Slow(Script):
        def propose(self, plan: StepPlan) -> list[Proposal]:
            proposals = super().propose(plan)
            clock.now += took.get(self.asked, 0.1)
            return proposals

    source = Slow(lambda n: "ok")
    guard = GuardedDraft(TimedDraft(source, clock, 0.5), VOCAB, patience=2, rest=3)
    drafted = [bool(step(guard)[0].tokens) for _ in range(10)]
    assert drafted == [True, True, True, False, False, False, False, False, True, True]
    assert guard.errors == 2
    assert source.asked == 7
    assert source.told == 5


def test_a_slow_draft_model_changes_nothing_and_is_used_again() -> None:
    """Its KV is as good after a step whose drafts were dropped."""
    clock = ManualClock()

    class Slow(DraftWrapper):
        calls = 0

        def propose(self, plan: StepPlan) -> list[Proposal]:
            self.calls += 1
            proposals = super().propose(plan)
            clock.now += 1.0 if self.calls % 3 == 0 else 0.1
            return proposals

    model = HashModel(hash_next, 64)
    slow = TimedDraft(Slow(ModelDraft(model, 64, 10_000)), clock, 0.5)
    rig = Rig(source=GuardedDraft(slow, VOCAB), num_blocks=64)
    for i in range(4):
        rig.submit(str(i), [1 + i, 2, 3], 60, ignore_eos=True)
    rig.drain()
    for i in range(4):
        assert rig.tokens(str(i)) == reference([1 + i, 2, 3], 60, stop_ids=frozenset())
    drafted, accepted = rig.totals()
    assert drafted == accepted > 60


def test_acceptance_that_collapses_is_a_fault_like_others() -> None:
    """It counts, the source is left alone, and tried again; one accepted draft, and all is well."""
    accepted = 1
    guard = GuardedDraft(WatchedDraft(Script(lambda n: "ok"), 20), VOCAB, patience=3, rest=50)

    def asked(steps: int) -> int:
        count = 0
        for _ in range(steps):
            proposals = guard.propose(STEP)
            count += bool(proposals[0].tokens)
            guard.observe(STEP, proposals, [Verdict(accepted, 1), Verdict(0, 1)])
        return count

    assert (asked(100), guard.errors) == (100, 0)
    accepted = 0
    assert (asked(19), guard.errors) == (19, 0)
    assert (asked(50), guard.errors) == (3, 3)
    assert (asked(4), guard.errors) == (1, 4)  # one trial, and twice the rest
    accepted = 1
    assert asked(200) == 100
    assert guard.errors == 4


def test_steps_without_its_drafts_say_nothing_of_a_source() -> None:
    watched = WatchedDraft(Script(lambda n: "ok"), 2)
    for _ in range(5):
        watched.observe(STEP, [Proposal((1,), "other"), NO_PROPOSAL], VERDICTS)
        watched.observe(STEP, [Proposal((1,), "script"), NO_PROPOSAL], [Verdict(error="x")] * 2)
    watched.observe(STEP, [Proposal((1,), "script"), NO_PROPOSAL], [Verdict(0, 1)] * 2)
    with pytest.raises(RuntimeError, match="2 proposals of script"):
        watched.observe(STEP, [Proposal((1,), "script"), NO_PROPOSAL], [Verdict(0, 1)] * 2)


def test_a_draft_cache_that_is_spoilt_is_noticed() -> None:
    """Nothing in the output tells; its drafts are no longer right."""
    model = HashModel(hash_next, 64)
    watched = WatchedDraft(ModelDraft(model, 64, 10_000), 30)
    guard = GuardedDraft(watched, VOCAB)
    rig = Rig(source=guard, num_blocks=64)
    wrong = HashModel(lambda tokens, sampling: (hash_next(tokens, sampling) + 1) % VOCAB, 64)
    rig.submit("a", [1, 2, 3], 60, ignore_eos=True)
    rig.drain()
    assert guard.errors == 0
    model.run = wrong.run  # type: ignore[method-assign]
    rig.submit("b", [1, 2, 3], 200, ignore_eos=True)
    rig.drain()
    assert 3 <= guard.errors <= 9
    assert rig.tokens("b") == reference([1, 2, 3], 200, stop_ids=frozenset())
    assert rig.finish("b").target_steps > 100
