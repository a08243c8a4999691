"""The rule of acceptance, case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.outcome import Logprobs
from engine.types import Drawn, Proposal, Verdict
from engine.verify import ERRORS, RULED_OUT, UNUSABLE, verify

NAN, NONE_LEFT = ERRORS[UNUSABLE], ERRORS[RULED_OUT]

CASES = {
    "perfect": ((5, 6, 7), (5, 6, 7, 8), Verdict(3, 8)),
    "first is wrong": ((5, 6, 7), (4, 6, 7, 8), Verdict(0, 4)),
    "second is wrong": ((5, 6, 7), (5, 9, 7, 8), Verdict(1, 9)),
    "last is wrong": ((5, 6, 7), (5, 6, 1, 8), Verdict(2, 1)),
    "right again after a miss does not count": ((5, 6, 7), (1, 6, 7, 8), Verdict(0, 1)),
    "no drafts": ((), (3,), Verdict(0, 3)),
    "one, right": ((3,), (3, 4), Verdict(1, 4)),
    "one, wrong": ((3,), (2, 4), Verdict(0, 2)),
    "id 0 is a token like any other": ((0, 0), (0, 0, 0), Verdict(2, 0)),
    "does not sample": ((), (), Verdict(0, None)),
    "unusable, not reached": ((5, 6), (4, UNUSABLE, UNUSABLE), Verdict(0, 4)),
    "unusable at once": ((5, 6), (UNUSABLE, 6, 7), Verdict(error=NAN)),
    "unusable after a hit": ((5, 6), (5, UNUSABLE, 7), Verdict(0, 5)),
    "unusable after all": ((5, 6), (5, 6, UNUSABLE), Verdict(1, 6)),
    "unusable without drafts": ((), (UNUSABLE,), Verdict(error=NAN)),
    "ruled out at once": ((5, 6), (RULED_OUT, 6, 7), Verdict(error=NONE_LEFT)),
    "ruled out after a hit": ((5, 6), (5, RULED_OUT, 7), Verdict(0, 5)),
    "failed": ((5, 6), "RuntimeError: no", Verdict(error="RuntimeError: no")),
    "failed without sampling": ((), "OSError: no", Verdict(error="OSError: no")),
}


def drawn(result: tuple[int, ...] | str) -> Drawn | str:
    return result if isinstance(result, str) else Drawn(result)


@pytest.mark.parametrize("name", CASES)
def test_one(name: str) -> None:
    drafts, sampled, verdict = CASES[name]
    assert verify([Proposal(drafts, "test")], [drawn(sampled)]) == [verdict]


def test_a_mixed_batch_keeps_its_rows_apart() -> None:
    cases = list(CASES.values())
    proposals = [Proposal(drafts, "test") for drafts, _, _ in cases]
    assert verify(proposals, [drawn(s) for _, s, _ in cases]) == [v for _, _, v in cases]


def test_lists_that_do_not_match_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        verify([Proposal((1,))], [])


@given(
    drafts=st.lists(st.integers(0, 2), max_size=6).map(tuple),
    own=st.lists(st.integers(0, 2), min_size=7, max_size=7).map(tuple),
)
def test_what_is_emitted_is_always_the_targets_own(
    drafts: tuple[int, ...], own: tuple[int, ...]
) -> None:
    """Whatever was drafted: a prefix of the target's tokens, no shorter than need be."""
    logprobs = tuple(Logprobs(token, -float(row)) for row, token in enumerate(own))
    (verdict,) = verify([Proposal(drafts)], [Drawn(own[: len(drafts) + 1], logprobs)])
    emitted = (*drafts[: verdict.accepted], verdict.next_token)
    assert emitted == own[: len(emitted)]
    assert verdict.logprobs == logprobs[: len(emitted)]
    stopped_at_a_miss = verdict.accepted < len(drafts)
    assert not stopped_at_a_miss or drafts[verdict.accepted] != own[verdict.accepted]
