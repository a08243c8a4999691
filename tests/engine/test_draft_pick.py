"""The pick is the best there is, by trying all."""

from __future__ import annotations

import itertools
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.draft_pick import Chain, pick

survivals = st.lists(st.floats(0.01, 1.0), max_size=3).map(lambda s: sorted(s, reverse=True))


@given(
    chains=st.lists(st.tuples(survivals, st.sampled_from([0.0, 0.0, 0.05])), max_size=4),
    steps=st.lists(st.floats(0.0, 1.0), min_size=13, max_size=13),
    alike=st.booleans(),
)
def test_no_other_choice_gives_more_tokens_per_second(
    chains: list[tuple[list[float], float]], steps: list[float], alike: bool
) -> None:
    """Whatever rows cost, as long as a draft costs the same in all chains."""
    made = [Chain(s, 0.05 if alike else each) for s, each in chains]
    costs = list(itertools.accumulate(steps, initial=1.0))

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = len(made) + sum(sum(c.survival[:n]) for c, n in zip(made, lengths, strict=True))
        more = sum(c.each * n for c, n in zip(made, lengths, strict=True))
        return tokens / (costs[sum(lengths)] + more)

    picked = pick(made, len(made), costs.__getitem__, inf)
    assert all(n <= len(c.survival) for n, c in zip(picked.lengths, made, strict=True))
    assert picked.rate == pytest.approx(rate(picked.lengths))
    assert picked.rate >= rate((0,) * len(made)) - 1e-9
    if alike:
        every = itertools.product(*(range(len(c.survival) + 1) for c in made))
        assert picked.rate >= max(map(rate, every)) - 1e-9


def test_a_bump_in_the_costs_is_looked_past() -> None:
    """The second draft costs nothing more once the first has been paid for."""
    costs = [1.0, 1.6, 1.6]
    assert pick([Chain([0.5, 0.45])], 1, costs.__getitem__, inf).lengths == (2,)
    assert pick([Chain([0.5])], 1, costs.__getitem__, inf).lengths == (0,)


def test_the_likely_ones_of_one_go_before_the_unlikely_of_another() -> None:
    costs = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    picked = pick([Chain([0.9, 0.85, 0.8]), Chain([0.3, 0.1])], 2, costs.__getitem__, inf)
    assert picked.lengths == (3, 0)
    assert picked.least == 0.8


def test_nothing_pays() -> None:
    picked = pick([Chain([0.5]), Chain([])], 2, [1.0, 2.0].__getitem__, inf)
    assert (picked.lengths, picked.rate) == ((0, 0), 2.0)
    assert picked.least > 1


def test_no_step_is_made_longer_than_it_may_be() -> None:
    costs = [1.0, 1.1, 1.2, 1.3]
    assert pick([Chain([0.9] * 3)], 1, costs.__getitem__, 1.25).lengths == (2,)
