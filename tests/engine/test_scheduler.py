"""Rows: who gets how many, in which order, and never more than a step may have."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from engine.request import SamplingParams, SpeculationParams
from engine.types import StepPlan
from tests.engine.fakes import VOCAB, Rig, reference


def plans_of(rig: Rig) -> list[StepPlan]:
    """Every plan from now on, as it was made."""
    plans: list[StepPlan] = []
    plan = rig.scheduler.plan

    def recorded(now: float) -> StepPlan:
        plans.append(plan(now))
        return plans[-1]

    rig.scheduler.plan = recorded  # type: ignore[method-assign]
    return plans


def rows(plan: StepPlan) -> dict[str, int]:
    return {w.seq.request.id: w.count for w in plan.work}


def caps(plan: StepPlan) -> dict[str, int]:
    return {w.seq.request.id: w.draft_cap for w in plan.work}


@pytest.mark.parametrize("draft", ["none", "junk", "perfect"])
@pytest.mark.parametrize("most", [8, 9, 16, 24])
def test_no_step_has_more_rows_than_allowed(draft: str, most: int) -> None:
    rig = Rig(draft=draft, max_step_rows=most, max_draft_tokens=6, num_blocks=40)
    plans = plans_of(rig)
    rng = random.Random(most)
    for i in range(20):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))]
        rig.submit(str(i), prompt, 12, ignore_eos=True)
    rig.drain()
    for plan in plans:
        assert plan.rows + sum(w.draft_cap for w in plan.work) <= most
        assert len(plan.work) <= rig.config.max_seqs
        assert all(w.draft_cap == 0 for w in plan.work if not w.samples)
    assert max(r.rows for r in rig.observer.reports) <= most
    assert sum(p.rows for p in plans) <= rig.target.rows


def test_a_prompt_is_fed_in_chunks_beside_running_decodes() -> None:
    rig = Rig(max_step_rows=8)
    rig.submit("a", [1, 2, 3], 30, ignore_eos=True)
    rig.submit("b", [3, 2, 1], 30, ignore_eos=True)
    rig.step()
    plans = plans_of(rig)
    rig.submit("long", [1 + i % 6 for i in range(20)], 3, ignore_eos=True)
    for _ in range(4):
        rig.step()
    assert [rows(p) for p in plans] == [
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 2},
    ]
    assert [w.samples for p in plans for w in p.work if w.seq.request.id == "long"] == [
        False,
        False,
        False,
        True,
    ]


def test_a_long_prompt_ahead_does_not_keep_short_ones() -> None:
    """4000 tokens first, then five of ten: they decode long before its first token; and those
    that run already get a token in every step."""
    rig = Rig(num_blocks=1200, max_step_rows=64)
    rig.submit("running", [1], 200, ignore_eos=True)
    rig.step()
    rig.submit("long", [1 + i % 6 for i in range(4000)], 4, priority=2, ignore_eos=True)
    rig.step()
    for i in range(5):
        rig.submit(f"short{i}", [1 + i] * 10, 4, priority=1, ignore_eos=True)
    while rig.engine.busy:
        ids = [c.request_id for c in rig.step()]
        assert "running" in ids or rig.chunks["running"][-1].finish is not None
    long = rig.finish("long")
    assert long.first_token is not None
    for i in range(5):
        short = rig.finish(f"short{i}")
        assert short.first_token is not None
        assert short.first_token - short.arrived < 0.25 * (long.first_token - long.arrived)


@pytest.mark.parametrize("later", [2, 1, 0])
def test_the_first_prompt_in_line_has_half_of_the_rows(later: int) -> None:
    """However many shorter ones come after it; a higher class is in line before it."""
    rig = Rig(num_blocks=400, max_step_rows=20, max_seqs=20)
    rig.submit("first", [1] * 200, 4, priority=1, ignore_eos=True)
    for i in range(100):
        rig.submit(f"later{i}", [2] * 15, 1, priority=later, ignore_eos=True)
    plans = plans_of(rig)
    for _ in range(10):
        rig.step()
        shares = rows(plans[-1])
        assert sum(shares.values()) == 20
        assert shares.get("first", 0) == {2: 20, 1: 10, 0: 0}[later]


def test_equal_prompts_are_served_in_the_order_of_arrival() -> None:
    rig = Rig(num_blocks=400, max_step_rows=16)
    for i in range(8):
        rig.submit(str(i), [1 + i % 6] * 40, 1, ignore_eos=True)
        rig.clock.now += 0.001
    rig.drain()
    times = [rig.finish(str(i)).first_token or 0.0 for i in range(8)]
    assert times == sorted(times)
    assert times[0] < times[-1] / 3


def test_first_the_class_then_the_arrival() -> None:
    rig = Rig(max_seqs=1, num_blocks=100)
    rig.submit("seated", [1], 2, ignore_eos=True)
    rig.step()
    for name, priority in [("b1", 2), ("s1", 1), ("b2", 2), ("i1", 0), ("s2", 1), ("i2", 0)]:
        rig.submit(name, [1], 1, priority=priority, ignore_eos=True)
        rig.clock.now += 0.001
    rig.drain()
    started = sorted(rig.chunks, key=lambda i: rig.finish(i).scheduled or 0.0)
    assert started == ["seated", "i1", "i2", "s1", "s2", "b1", "b2"]


def test_waiting_is_counted_by_class() -> None:
    rig = Rig(max_seqs=1)
    for i in range(6):
        rig.submit(str(i), [1], 5, priority=i % 3)
    assert rig.scheduler.waiting_by_class == (2, 2, 2)
    rig.step()
    assert rig.scheduler.waiting_by_class == (1, 2, 2)
    rig.engine.cancel("4")
    assert rig.scheduler.waiting_by_class == (1, 1, 2)
    rig.drain()
    assert rig.scheduler.waiting_by_class == (0, 0, 0)


def test_seats_are_limited() -> None:
    rig = Rig(max_seqs=3)
    for i in range(10):
        rig.submit(str(i), [1, 2], 8, ignore_eos=True)
    while rig.engine.busy:
        rig.step()
        assert len(rig.scheduler.running) <= 3
    assert max(r.sequences for r in rig.observer.reports) == 3


@pytest.mark.parametrize(
    ("draft_rows", "most", "shares"),
    [
        (4, 6, [0, 0, 0, 0]),
        (5, 6, [1, 0, 0, 0]),
        (10, 6, [2, 2, 1, 1]),
        (12, 6, [2, 2, 2, 2]),
        (64, 3, [3, 3, 3, 3]),
        (64, 0, [0, 0, 0, 0]),
    ],
)
def test_rows_for_drafts_are_shared_evenly(draft_rows: int, most: int, shares: list[int]) -> None:
    rig = Rig(draft_rows=draft_rows, max_draft_tokens=most, max_step_rows=24)
    for i in range(4):
        rig.submit(str(i), [1 + i], 40, ignore_eos=True)
    rig.step()
    plans = plans_of(rig)
    rig.step()
    assert list(caps(plans[0]).values()) == shares


def test_what_one_may_not_use_goes_to_those_after_it() -> None:
    rig = Rig(draft_rows=11, max_draft_tokens=6)
    rig.submit("a: off", [1], 40, ignore_eos=True, speculation=SpeculationParams(0))
    rig.submit("b: two", [2], 40, ignore_eos=True, speculation=SpeculationParams(2))
    rig.submit("c: last token", [4], 2, ignore_eos=True)
    rig.submit("d: all", [3], 40, ignore_eos=True)
    rig.step()
    plans = plans_of(rig)
    rig.step()
    assert list(caps(plans[0]).values()) == [0, 2, 0, 5]


def test_drafts_take_only_rows_that_prompts_leave() -> None:
    rig = Rig(max_step_rows=8, max_draft_tokens=6)
    rig.submit("a", [1], 40, ignore_eos=True)
    rig.step()
    plans = plans_of(rig)
    rig.submit("long", [1] * 12, 3, ignore_eos=True)
    rig.step()
    rig.step()
    assert [caps(p) for p in plans] == [{"a": 0, "long": 0}, {"a": 1, "long": 1}]


def test_nobody_is_planned_twice_or_left_out() -> None:
    rig = Rig(num_blocks=200, max_step_rows=24)
    plans = plans_of(rig)
    for i in range(8):
        rig.submit(str(i), [1 + i % 6] * (1 + i), 20, ignore_eos=True)
    rig.drain()
    for plan in plans[1:]:
        ids = [w.seq.request.id for w in plan.work]
        assert len(ids) == len(set(ids))
    assert len(plans[2].work) == 8


def test_seeds_and_temperature_travel_with_the_request() -> None:
    rig = Rig(draft="model")
    params = [SamplingParams(t, seed=s) for t in (0.0, 0.8) for s in (0, 1, 2)]
    for i, sampling in enumerate(params):
        rig.submit(str(i), [1, 2, 3], 30, sampling=sampling)
    rig.drain()
    for i, sampling in enumerate(params):
        assert rig.tokens(str(i)) == reference([1, 2, 3], 30, sampling)


def crowd(waiting: int) -> Rig:
    """Eight run, so many wait, each with a deadline of its own."""
    rig = Rig(num_blocks=400, max_step_rows=24, prefix_cache=True)
    for i in range(8):
        rig.submit(f"running{i}", [1], 150, priority=0, ignore_eos=True)
    rig.step()
    for i in range(waiting):
        rig.submit(str(i), [1, 2], 4, priority=i % 3, deadline=1e6 + i % 97)
    return rig


def best(deed: Callable[[], object], times: int = 30) -> float:
    """Seconds that `deed` takes at best, which is what the machine's noise leaves alone."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        deed()
        taken.append(time.perf_counter() - start)
    return min(taken)


def test_who_waits_costs_the_step_nothing() -> None:
    few, many = crowd(0), crowd(10_000)
    assert best(many.engine.step) < best(few.engine.step) + 0.001


def test_coming_and_going_cost_the_same_however_many_wait() -> None:
    def come_and_go(rig: Rig) -> None:
        now = rig.clock.now
        for i in range(20):
            rig.submit(f"late{i}", [1, 2], 4, deadline=now + 1)
            rig.submit(f"cut{i}", [1, 2], 4, priority=i % 3, deadline=1e6 + 50)
            rig.engine.cancel(f"cut{i}")
        rig.clock.now += 2
        assert len(rig.engine.collect()) == 40
        rig.clock.now = now

    few, many = crowd(100), crowd(10_000)
    assert best(lambda: come_and_go(many)) < 3 * best(lambda: come_and_go(few))


def test_a_prompt_gets_no_more_rows_than_a_step_has_time_for() -> None:
    """What is asked for: the time, the context there is, who decodes, and the most rows."""
    asked: list[tuple[float, int, int, int]] = []

    def rows_within(*question: object) -> int:
        asked.append(question)  # type: ignore[arg-type]
        return 7

    rig = Rig(max_step_rows=24, rows_within=rows_within)
    rig.submit("a", [1, 2, 3], 40, ignore_eos=True)
    rig.step()
    rig.step()
    assert asked == [(pytest.approx(0.09), 0, 0, 24)]  # none of a step in which all decode
    rig.submit("b", [1] * 20, 40, ignore_eos=True)
    rig.step()
    rig.step()
    assert [r.rows for r in rig.observer.reports] == [3, 1, 7, 7]
    assert [question[1:] for question in asked[1:]] == [(4, 1, 24), (5 + 6, 1, 24)]
