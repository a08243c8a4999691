from __future__ import annotations

import numpy as np
import pytest

from loadtest.statistics import ratio_of_rates, spread


def test_spread() -> None:
    values = spread([3.0, 1.0, 2.0, 10.0])
    assert (values.median, values.least, values.most) == (2.5, 1.0, 10.0)
    assert values.relative == 9.0 / 2.5
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_equal_blocks_have_a_ratio_without_width() -> None:
    got = ratio_of_rates([(20, 1.0), (40, 2.0)], [(10, 1.0), (20, 2.0)])
    assert (got.ratio, got.low, got.high) == (2.0, 2.0, 2.0)


def test_the_interval_ignores_what_slows_both_and_shows_what_slows_one() -> None:
    rng = np.random.default_rng(1)
    weather = rng.uniform(1, 5, 200)
    both = ratio_of_rates([(1, w) for w in weather], [(1, w * 1.02) for w in weather])
    assert both.ratio == pytest.approx(1.02)
    assert both.high - both.low < 1e-9
    own = rng.uniform(1, 5, 200)
    apart = ratio_of_rates([(1, w) for w in weather], [(1, w) for w in own])
    assert apart.high - apart.low > 0.1


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for trial in range(100):
        a = [(1.0, t) for t in rng.gamma(20, 1 / 20, 40)]
        b = [(1.0, t) for t in 1.05 * rng.gamma(20, 1 / 20, 40)]
        interval = ratio_of_rates(a, b, seed=trial)
        hits += interval.low <= 1.05 <= interval.high
    assert 85 <= hits <= 100


def test_the_same_seed_gives_the_same_interval() -> None:
    rng = np.random.default_rng(3)
    a = [(1.0, float(t)) for t in rng.uniform(1, 2, 20)]
    b = [(1.0, float(t)) for t in rng.uniform(1, 2, 20)]
    assert ratio_of_rates(a, b, seed=5) == ratio_of_rates(a, b, seed=5)
    assert ratio_of_rates(a, b, seed=5) != ratio_of_rates(a, b, seed=6)


@pytest.mark.parametrize(
    ("a", "b"),
    [([], []), ([(1, 1)], [(1, 1)]), ([(1, 1)] * 3, [(1, 1)] * 2), ([(0, 1)] * 2, [(1, 1)] * 2)],
)
def test_what_is_no_comparison_is_refused(
    a: list[tuple[float, float]], b: list[tuple[float, float]]
) -> None:
    with pytest.raises(ValueError, match=r"pairs|positive"):
        ratio_of_rates(a, b)
