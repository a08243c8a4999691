"""Tables of costs: between their sizes, beyond them, and how they learn."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.row_cost import LONG_S, SIZES, check_costs, from_text, measure_costs, to_text
from engine.step_costs import FREE, CostTable, StepCosts
from engine.timed_model import TimedModel
from engine.types import Drawn, Feed

BLOCKS, BLOCK = 600, 16


def test_between_sizes_it_is_linear_and_beyond_them_it_goes_on() -> None:
    costs = StepCosts(CostTable(((1, 10.0), (2, 11.0), (4, 15.0))))
    assert [costs.seconds(rows) for rows in range(1, 7)] == [10, 11, 13, 15, 17, 19]
    assert costs.seconds(0) == 10


def test_one_size_says_the_same_of_all() -> None:
    costs = StepCosts(FREE)
    assert {costs.seconds(rows) for rows in (1, 7, 65536)} == {1.0}


def test_context_costs_what_is_read_and_what_more_rows_do() -> None:
    costs = StepCosts(CostTable(((1, 10.0), (2, 11.0)), per_position=0.5, per_score=0.25))
    assert costs.seconds(2, 100) == 61
    assert costs.per_draft(100) == 25


@given(
    true=st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4).map(sorted),
    rows=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4, unique=True),
)
def test_what_is_seen_often_is_what_it_comes_to_say(true: list[float], rows: list[int]) -> None:
    seconds = dict(zip((1, 2, 4, 8), true, strict=True))
    costs = StepCosts(CostTable(((1, 1.0), (2, 1.1), (4, 1.3), (8, 2.0))))
    for turn in range(6000):
        size = rows[turn % len(rows)]
        costs.observe(size, 0, seconds[size])
    for size in rows:
        assert costs.seconds(size) == pytest.approx(seconds[size], rel=0.15)


def test_a_slower_machine_slows_what_was_not_seen_too() -> None:
    costs = StepCosts(CostTable(((1, 1.0), (8, 2.0), (64, 9.0))))
    for _ in range(200):
        costs.observe(1, 0, 3.0)
    assert costs.seconds(1) == pytest.approx(3.0, rel=0.02)
    assert costs.seconds(64) == pytest.approx(27.0, rel=0.15)


def test_one_pass_that_had_to_wait_changes_little() -> None:
    costs = StepCosts(CostTable(((1, 1.0), (8, 2.0))))
    costs.observe(1, 0, 1000.0)
    assert costs.seconds(1) < 1.03
    for nonsense in (0.0, -1.0, float("inf"), float("nan")):
        costs.observe(1, 0, nonsense)
    assert costs.seconds(1) < 1.03


def test_rows_that_fit_a_time() -> None:
    costs = StepCosts(CostTable(((1, 10.0), (8, 11.0), (16, 19.0), (24, 27.0), (128, 131.0)), 0.01))
    assert costs.rows_within(51.0, 0, 0, 256) == 48
    assert costs.rows_within(51.0, 1000, 0, 256) == 38  # its context takes ten of them
    assert costs.rows_within(51.0, 0, 0, 20) == 20
    assert costs.rows_within(float("inf"), 0, 3, 256) == 256


def test_prompts_get_on_in_steps_that_are_too_long_already() -> None:
    """By as many rows as are about as cheap as they can be, beside all that decode."""
    costs = StepCosts(CostTable(((1, 10.0), (8, 11.0), (16, 19.0), (24, 27.0), (128, 131.0))))
    assert costs.rows_within(1.0, 0, 30, 256) == 49
    assert costs.rows_within(1.0, 0, 250, 256) == 256


class Timed:
    """A model that takes `start`, `each` row's and each position's time of a clock."""

    def __init__(
        self, start: float, each: float, position: float = 0.0, score: float = 0.0
    ) -> None:
        self._start, self._each, self._position, self._score = start, each, position, score
        self.now = 0.0
        self.passes = 0

    def run(self, feeds: list[Feed]) -> list[Drawn]:
        rows = sum(len(f.tokens) for f in feeds)
        self.now += self._start + self._each * rows
        self.now += self._position * sum(f.start for f in feeds)
        self.now += self._score * sum(f.start * (len(f.tokens) - 1) for f in feeds)
        self.passes += 1
        return [Drawn((0,) * f.sample) for f in feeds]


def test_what_is_measured_is_what_it_costs() -> None:
    model = Timed(1e-3, 1e-4, position=1e-6, score=2e-6)
    table = measure_costs(model, BLOCKS, BLOCK, lambda: model.now)
    assert [rows for rows, _ in table.seconds] == list(SIZES)
    for rows, seconds in table.seconds:
        assert seconds == pytest.approx(1e-3 + 1e-4 * rows)
    assert table.per_position == pytest.approx(1e-6)
    assert table.per_score == pytest.approx(2e-6)
    assert from_text(to_text(table)) == table


@given(late=st.dictionaries(st.sampled_from(SIZES), st.floats(1.0, 1.6)), seed=st.integers(0, 99))
def test_a_size_that_came_out_slow_makes_no_rows_look_cheap(
    late: dict[int, float], seed: int
) -> None:
    """By tiles of four rows up to eight, which stay; by the same for every row beyond."""
    rng, now = random.Random(seed), 0.0

    def seconds(rows: int) -> float:
        return 8.0 + 4 * (-(-rows // 4)) if rows <= 8 else 10.0 + rows * 0.75

    class Disturbed:
        def run(self, feeds: list[Feed]) -> list[Drawn]:
            nonlocal now
            rows = sum(len(f.tokens) for f in feeds)
            now += seconds(rows) * late.get(rows, 1.0) * rng.uniform(1.0, 1.02) / 1e4
            return [Drawn((0,) * f.sample) for f in feeds]

    table = dict(measure_costs(Disturbed(), BLOCKS, BLOCK, lambda: now).seconds)
    values = list(table.values())
    assert values == sorted(values)
    slopes = [(table[b] - table[a]) / (b - a) for a, b in pairwise(s for s in SIZES if s >= 8)]
    assert all(before <= after + 1e-12 for before, after in pairwise(slopes))
    if not late:
        for rows in SIZES:
            assert table[rows] * 1e4 == pytest.approx(seconds(rows), rel=0.05)


@pytest.mark.parametrize(("speed", "fine"), [(2.0, True), (1.0, True), (0.8, True), (0.6, False)])
def test_a_table_of_a_busy_machine_is_found_out(speed: float, fine: bool) -> None:
    model = Timed(1e-3, 1e-4)
    table = measure_costs(model, BLOCKS, BLOCK, lambda: model.now)
    later = Timed(speed * 1e-3, speed * 1e-4)
    with nullcontext() if fine else pytest.raises(ValueError, match="1 rows take"):
        check_costs(table, later, BLOCK, lambda: later.now)


def test_a_pool_of_one_block_measures_what_fits() -> None:
    model = Timed(1.0e-3, 0.0)
    table = measure_costs(model, 1, BLOCK, lambda: model.now)
    assert table.seconds[-1][0] == BLOCK
    assert table.per_position == table.per_score == 0


def test_a_slow_model_is_not_measured_for_long() -> None:
    model = Timed(LONG_S / 3, LONG_S / 30)
    table = measure_costs(model, BLOCKS, BLOCK, lambda: model.now)
    assert table.seconds[-1][0] == 24  # the first that takes too long
    assert model.now < 40 * LONG_S
    slow = Timed(100.0, 0.0)
    table = measure_costs(slow, BLOCKS, BLOCK, lambda: slow.now)
    assert (len(table.seconds), slow.passes) == (2, 2)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "[[], 0, 0]", "[[[2, 1.0]], 0, 0]", "[[[1, 0.0]], 0, 0]"),
        *("[[[1, 1], [1, 2]], 0, 0]", "[[[1, NaN]], 0, 0]", '[[["a", 1]], 0, 0]', "[[1], 0, 0]"),
        *("[[[1, 1.0]], null, 0]", "[[[1, 1.0]], 0]", "[" * 100_000, "[[[1, 1e300]], 0, 0]"),
        *("[[[1, 0.01], [1e999, 1]], 0, 0]", f"[[[1, 1], [2, 1{'0' * 400}]], 0, 0]"),
        *("[[[1, Infinity], [2, Infinity]], 0, 0]", "[[[1, 1.0]], NaN, 0]"),
        *("[[[1, 1.0]], 0, Infinity]", "[[[1, 1.0]], -1, 0]", "[[[1, 2.0], [2, 1.0]], 0, 0]"),
    ],
)
def test_a_spoilt_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of many kinds
        from_text(text)


def test_only_passes_whose_rows_are_all_drawn_from_teach() -> None:
    model = Timed(3.0, 0.0)
    costs = StepCosts(CostTable(((1, 1.0), (8, 1.0))))
    timed = TimedModel(model, costs, lambda: model.now)  # type: ignore[arg-type]

    def feed(rows: int, sample: int) -> Feed:
        return Feed((0,) * rows, 0, (0,), sample, SamplingParams(0.0))

    for _ in range(200):
        assert timed.run([feed(6, 1), feed(1, 1)]) == [Drawn((0,))] * 2
        timed.run([])
    assert costs.seconds(7) == 1.0
    for _ in range(200):
        timed.run([feed(6, 6), feed(1, 1)])
    assert costs.seconds(7) == pytest.approx(3.0, rel=0.05)


@given(
    taken=st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=6),
    seen=st.lists(st.tuples(st.integers(1, 200), st.floats(1e-9, 1e9)), max_size=300),
)
def test_whatever_is_seen_more_rows_take_no_less(
    taken: list[float], seen: list[tuple[int, float]]
) -> None:
    """Also beyond the last size, where two sizes that drifted apart would lead below nothing."""
    table = CostTable(tuple((2**i, s) for i, s in enumerate(sorted(taken))))
    costs = StepCosts(table)
    for rows, seconds in [*seen, *((24, costs.seconds(24) * 1.1) for _ in range(40))]:
        costs.observe(rows, 0, seconds)
    for a, b in pairwise(range(1, 300)):
        assert 0 < costs.seconds(a) <= costs.seconds(b) < float("inf")
    assert 1 <= costs.rows_within(0.1, 100, 3, 256) <= 256


def test_noise_does_not_move_it_far() -> None:
    rng = random.Random(1)
    costs = StepCosts(CostTable(((1, 1.0), (8, 2.0))))
    for _ in range(5000):
        costs.observe(
            *((1, 0, 1.0) if rng.random() < 0.5 else (8, 0, 2.0 * rng.choice([0.9, 1.1])))
        )
    assert costs.seconds(8) / costs.seconds(1) == pytest.approx(2.0, rel=0.1)
