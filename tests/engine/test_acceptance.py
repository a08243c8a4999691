"""Estimates of acceptance come to be what is true, of each source, grade, position and sequence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.acceptance import PRIORS, Acceptance
from engine.types import NO_PROPOSAL, Proposal, Verdict


def tell(
    acceptance: Acceptance, rng: random.Random, true: list[float], times: int, name: str = "",
    source: str = "ngram", grade: int = 0,
) -> None:  # fmt: skip
    """`times` proposals, each draft of which is right with the probability of its position."""
    for number in range(times):
        accepted = 0
        while accepted < len(true) and rng.random() < true[accepted]:
            accepted += 1
        proposal = Proposal((1,) * len(true), source, None, (grade,) * len(true))
        acceptance.learn(name or str(number), proposal, Verdict(accepted, 5))


def survival(acceptance: Acceptance, name: str, source: str, grade: int, count: int) -> list[float]:
    proposal = Proposal((1,) * count, source, None, (grade,) * count)
    return acceptance.of_proposal(name, proposal)


@given(seed=st.integers(0, 999), true=st.lists(st.floats(0.2, 0.95), min_size=1, max_size=5))
@settings(max_examples=20)
def test_of_a_source_by_position(seed: int, true: list[float]) -> None:
    acceptance = Acceptance()
    tell(acceptance, random.Random(seed), true, 3000)
    expected, left = [], 1.0
    for probability in true:
        left *= probability
        expected.append(left)
    got = survival(acceptance, "new", "ngram", 0, len(true))
    assert got == pytest.approx(expected, abs=0.12)
    assert got == sorted(got, reverse=True)


def test_grades_and_sources_are_told_apart() -> None:
    acceptance, rng = Acceptance(), random.Random(1)
    for _ in range(40):
        tell(acceptance, rng, [0.1], 10, grade=0)
        tell(acceptance, rng, [0.9], 10, grade=3)
        tell(acceptance, rng, [0.5], 10, source="model")
    one, three = (survival(acceptance, "new", "ngram", grade, 1)[0] for grade in (0, 3))
    assert (one, three) == (pytest.approx(0.1, abs=0.08), pytest.approx(0.9, abs=0.08))
    assert survival(acceptance, "new", "model", 0, 1)[0] == pytest.approx(0.5, abs=0.1)


def test_a_sequence_may_be_worse_or_better_than_others() -> None:
    acceptance, rng = Acceptance(), random.Random(2)
    for _ in range(100):
        tell(acceptance, rng, [0.6], 5)
        tell(acceptance, rng, [0.02], 1, "bad")
        tell(acceptance, rng, [0.95], 1, "good")
    bad, new, good = (survival(acceptance, n, "ngram", 0, 1)[0] for n in ("bad", "new", "good"))
    assert bad < 0.15
    assert good > 0.8
    assert bad < new < good
    acceptance.forget("bad")
    assert survival(acceptance, "bad", "ngram", 0, 1) == [new]
    acceptance.forget("bad")


def test_text_that_changes_is_followed() -> None:
    acceptance, rng = Acceptance(), random.Random(3)
    tell(acceptance, rng, [0.9], 2000)
    tell(acceptance, rng, [0.1], 800)
    assert survival(acceptance, "new", "ngram", 0, 1)[0] < 0.3


def test_what_was_never_seen_has_some_hope() -> None:
    acceptance = Acceptance()
    for source, by_grade in PRIORS.items():
        for grade, prior in enumerate([*by_grade, by_grade[-1]]):
            first = survival(acceptance, "a", source, grade, 1)[0]
            assert first == pytest.approx(min(prior, 0.98))
    assert 0 < survival(acceptance, "a", "another", 7, 20)[-1] < 1


def test_nothing_proposed_teaches_nothing() -> None:
    acceptance = Acceptance()
    before = survival(acceptance, "a", "ngram", 0, 3)
    acceptance.learn("a", NO_PROPOSAL, Verdict(0, 5))
    assert survival(acceptance, "a", "ngram", 0, 3) == before


def test_draws_that_are_still_to_be_made_are_of_any_grade() -> None:
    acceptance, rng = Acceptance(), random.Random(4)
    for _ in range(100):
        tell(acceptance, rng, [0.2], 10, source="model", grade=0)
        tell(acceptance, rng, [0.8], 10, source="model", grade=9)
    low, high = (survival(acceptance, "new", "model", grade, 1)[0] for grade in (0, 9))
    assert low < 0.3 < 0.7 < high
    assert acceptance.of_draws("new", "model", 1)[0] == pytest.approx(0.5, abs=0.1)


def test_the_grades_of_one_proposal_may_differ() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.learn("a", Proposal((1, 2), "table", None, (9, 1, 5)), Verdict(1, 5))
        acceptance.forget("a")
    first, second = acceptance.of_proposal("b", Proposal((1, 2), "table", None, (9, 1)))
    assert first > 0.9
    assert second < 0.2


def test_draws_that_are_not_verified_count_as_what_they_looked_like() -> None:
    """Half of the second draws are poor, and left out: the good ones alone do not decide."""
    acceptance = Acceptance()
    for turn in range(400):
        good = turn % 2 == 0
        proposal = Proposal((1, 2), "head", None, (9, 9 if good else 0))
        verified = proposal if good else Proposal((1,), "head", None, (9,))
        if not good:
            acceptance.left_out(proposal, 1)
        acceptance.learn("a", verified, Verdict(len(verified.tokens), 5))
    first, both = acceptance.of_draws("b", "head", 2)
    assert first > 0.95
    assert both == pytest.approx(0.5, abs=0.1)
