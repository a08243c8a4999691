"""Prompt lookup: what followed the longest, latest match, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from hypothesis import given
from hypothesis import strategies as st

from engine.draft_ngram import SIZES, NgramDraft, NgramIndex
from engine.request import Request, StopParams
from engine.types import BlockTable, Sequence, StepPlan, Work
from tests.engine.fakes import PlainText

tokens_of = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def naive(tokens: Seq[int], limit: int, sizes: Seq[int] = SIZES) -> tuple[int, ...]:
    """The definition, by search."""
    for size in sorted(sizes, reverse=True):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                out = list(tokens)
                for position in range(end, end + limit):
                    out.append(out[position])
                return tuple(out[len(tokens) :])
    return ()


def sequence(tokens: list[int], name: str = "a") -> Sequence:
    request = Request(name, tuple(tokens), StopParams(100))
    return Sequence(request, tokens, BlockTable(4), PlainText())


def plan(*work: tuple[Sequence, int]) -> StepPlan:
    """Work that feeds the last token and may draft so many."""
    return StepPlan(1, tuple(Work(s, len(s.tokens) - 1, 1, cap) for s, cap in work))


@given(tokens=tokens_of, limit=st.integers(1, 8), cuts=st.sets(st.integers(1, 30)))
def test_equals_a_search(tokens: list[int], limit: int, cuts: set[int]) -> None:
    """However the tokens arrived, a few at a time."""
    index = NgramIndex(SIZES)
    for cut in sorted(c for c in cuts if c < len(tokens)):
        assert index.continuation(tokens[:cut], limit)[0] == naive(tokens[:cut], limit)
    assert index.continuation(tokens, limit)[0] == naive(tokens, limit)


@given(tokens=tokens_of, sizes=st.sets(st.integers(1, 6), min_size=1))
def test_other_sizes(tokens: list[int], sizes: set[int]) -> None:
    draft = NgramDraft(tuple(sizes))
    (proposal,) = draft.propose(plan((sequence(tokens), 4)))
    assert proposal.tokens == naive(tokens, 4, tuple(sizes))


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert naive([1, 2, 3, 7, 2, 3, 8, 3, 9, 1, 2, 3], 1) == (7,)
    assert naive([2, 3, 7, 2, 3, 8, 2, 3], 1) == (8,)
    index = NgramIndex(SIZES)
    assert index.continuation([1, 2, 3, 7, 2, 3, 8, 3, 9, 1, 2, 3], 1) == ((7,), 1)
    assert NgramIndex(SIZES).continuation([2, 3, 7, 2, 3, 8, 2, 3], 2) == ((8, 2), 0)


def test_a_repetition_goes_on_past_the_end() -> None:
    assert NgramIndex(SIZES).continuation([5, 1, 2, 1, 2], 6)[0] == (1, 2, 1, 2, 1, 2)
    assert NgramIndex(SIZES).continuation([4, 4, 4], 3)[0] == (4, 4, 4)


def test_the_cap_is_kept_and_zero_is_no_proposal() -> None:
    draft = NgramDraft()
    seqs = [sequence([1, 2, 1, 2, 1], str(cap)) for cap in range(5)]
    proposals = draft.propose(plan(*((s, cap) for cap, s in enumerate(seqs))))
    assert [len(p.tokens) for p in proposals] == [0, 1, 2, 3, 4]
    assert [p.source for p in proposals] == ["", "ngram", "ngram", "ngram", "ngram"]


def test_nothing_known_is_no_proposal() -> None:
    (proposal,) = NgramDraft().propose(plan((sequence([1, 2, 3]), 4)))
    assert (proposal.tokens, proposal.source) == ((), "")


def test_sequences_do_not_see_each_other() -> None:
    draft = NgramDraft()
    draft.propose(plan((sequence([1, 2, 3, 1, 2], "a"), 2)))
    (proposal,) = draft.propose(plan((sequence([1, 2], "b"), 2)))
    assert proposal.tokens == ()


def test_forgetting_drops_all_that_is_kept() -> None:
    draft = NgramDraft()
    draft.propose(plan((sequence([1, 2, 1], "a"), 2), (sequence([1, 2], "b"), 2)))
    draft.forget("a")
    draft.forget("never seen")
    assert list(draft._indexes) == ["b"]
    (proposal,) = draft.propose(plan((sequence([3, 4], "a"), 2)))
    assert proposal.tokens == ()
