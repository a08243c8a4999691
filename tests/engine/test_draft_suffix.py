"""What was said before, by whom it may be said again, and no more of it than fits."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draft_suffix import SuffixDraft
from engine.outcome import FinishReason
from engine.request import Request, StopParams
from engine.suffix_index import (
    DOUBT,
    GRAM,
    LATEST,
    LEAST,
    LONGEST,
    NO_GUESS,
    Guess,
    RecentTexts,
    SuffixIndex,
)
from engine.types import BlockTable, Proposal, Sequence, Verdict
from tests.engine.fakes import PlainText, Rig, choice, reference
from tests.engine.test_draft_ngram import plan

Text = list[int | None]  # None: the end of a document


def by_search(text: Seq[int | None], tail: Seq[int], limit: int) -> tuple[Guess, int]:
    """The definition, over a whole text; and how many matches there are of the longest."""
    places, longest = list[int](), 0
    ends = [
        at
        for at in range(len(text) - 1, GRAM - 1, -1)
        if text[at - GRAM : at] == list(tail[-GRAM:]) and text[at] is not None
    ]
    if len(tail) < GRAM:
        return NO_GUESS, 0
    for at in ends[:LATEST]:
        length = max(
            n for n in range(GRAM, len(tail) + 1) if text[max(0, at - n) : at] == list(tail[-n:])
        )
        if length > longest:
            places, longest = [], length
        if length == longest:
            places.append(at)
    out, shares, survival, score, found = list[int](), list[float](), 1.0, 0.0, len(places)
    for depth in range(limit if places else 0):
        nexts = [(*text, *out)[at + depth] for at in places]
        token = max(nexts, key=nexts.count)
        share = nexts.count(token) / (len(nexts) + DOUBT / (longest + depth))
        survival *= share
        if token is None or survival < LEAST:
            break
        out.append(token)
        shares.append(share)
        score += survival
        places = [at for at, n in zip(places, nexts, strict=True) if n == token]
    return Guess(tuple(out), tuple(shares), score), found


def same(one: Guess, other: Guess) -> bool:
    return one.tokens == other.tokens and one[1:] == (
        pytest.approx(other.shares),
        pytest.approx(other.score),
    )


few = st.lists(st.integers(0, 2), max_size=40)


@given(tokens=few, cuts=st.sets(st.integers(0, 40)), limit=st.integers(1, 9))
def test_own_text_equals_a_search(tokens: list[int], cuts: set[int], limit: int) -> None:
    """However it arrived, a few tokens at a time."""
    index = SuffixIndex()
    for cut in sorted({*cuts, len(tokens)}):
        text = tokens[:cut]
        index.extend(text[len(index) :])
        guess = index.guess(text[-LONGEST:], limit)
        assert same(guess, by_search(text, text[-LONGEST:], limit)[0])


@given(
    documents=st.lists(few, max_size=8),
    tail=st.lists(st.integers(0, 2), max_size=LONGEST),
    most=st.integers(1, 120),
    limit=st.integers(1, 9),
)
def test_recent_texts_equal_a_search(
    documents: list[list[int]], tail: list[int], most: int, limit: int
) -> None:
    """Over as many of the latest documents as fit, each to its end."""
    recent = RecentTexts(most)
    held: list[list[int]] = []
    for document in documents:
        recent.add(document)
        held.append(document[max(0, len(document) - most + 1) :])
        while sum(len(d) + 1 for d in held) > most:
            held.pop(0)
        text: Text = [token for d in held for token in (*d, None)]
        assert recent.tokens == len(text) <= most
        assert same(recent.guess(tail, limit), by_search(text, tail, limit)[0])


def test_nothing_of_what_was_dropped_is_left() -> None:
    rng = random.Random(2)
    recent = RecentTexts(300)
    for _ in range(400):
        recent.add([rng.randrange(1000) for _ in range(rng.randint(0, 120))])
    index = recent._index
    assert len(index._text) == len(index._before) <= 300
    assert len(index._last) <= 300
    assert all(index._dropped <= at < index._dropped + 300 for at in index._last.values())


def test_how_likely_a_guess_is() -> None:
    """The share of the matches that went on so; a single match is not certain, less so a short
    one."""
    recent = RecentTexts(1000)
    for _ in range(3):
        recent.add([1, 2, 3, 4, 5])
    recent.add([1, 2, 3, 7])
    guess = recent.guess([1, 2, 3], 8)
    assert guess.tokens == (4, 5)
    assert guess.shares == (pytest.approx(3 / (4 + 2 / 3)), pytest.approx(3 / (3 + 2 / 4)))
    recent.add([9, 1, 2, 3, 8])
    assert recent.guess([9, 1, 2, 3], 8).tokens == (8,)
    assert recent.guess([5, 9, 1, 2, 3], 8).shares == (pytest.approx(1 / (1 + 2 / 4)),)


def test_a_repetition_goes_on_past_the_end() -> None:
    index = SuffixIndex()
    index.extend([5, 1, 2, 1, 2, 1, 2])
    assert index.guess([5, 1, 2, 1, 2, 1, 2], 6).tokens == (1, 2, 1, 2, 1, 2)


# ---- the source --------------------------------------------------------------------------------


def running(
    name: str, prompt: Seq[int], output: Seq[int] = (), tenant: str = "t", salt: str = ""
) -> Sequence:
    request = Request(name, tuple(prompt), StopParams(10_000), tenant=tenant, cache_salt=salt)
    return Sequence(request, [*prompt, *output], BlockTable(4), PlainText())


def guess(draft: SuffixDraft, seq: Sequence, cap: int = 8) -> Proposal:
    return draft.propose(plan((seq, cap)))[0]


def served(draft: SuffixDraft, *seqs: Sequence) -> None:
    draft.propose(plan(*((seq, 2) for seq in seqs)))
    for seq in seqs:
        draft.forget(seq.request.id)


def test_an_output_is_known_to_later_requests_of_its_tenant() -> None:
    draft = SuffixDraft()
    served(draft, running("a", [1, 2, 3], [10, 11, 12, 13, 14]))
    proposal = guess(draft, running("b", [9, 10, 11, 12]), 1)
    assert (proposal.tokens, proposal.source, proposal.grades) == ((13,), "suffix", (6,))
    # It began after the end of its prompt.
    assert guess(draft, running("c", [8, 1, 2, 3])).tokens == (10, 11, 12, 13, 14)


def test_prompts_are_not() -> None:
    draft = SuffixDraft()
    prompt = list(range(50, 80))
    served(draft, running("a", prompt, [1, 2, 3]))
    assert guess(draft, running("b", prompt[:10])).tokens == ()


def test_who_asks_for_isolation_neither_gives_nor_takes() -> None:
    draft = SuffixDraft()
    served(draft, running("a", [1, 2, 3], [4, 5, 6, 7], salt="s"))
    assert draft._recent == {}
    assert guess(draft, running("b", [3, 4, 5, 6])).tokens == ()
    served(draft, running("c", [1, 2, 3], [4, 5, 6, 7]))
    assert guess(draft, running("d", [3, 4, 5, 6])).tokens == (7,)
    assert guess(draft, running("e", [3, 4, 5, 6], salt="s")).tokens == ()
    own = [3, 4, 5, 6, 3, 4, 5]
    assert guess(draft, running("f", own, salt="s"), 1).tokens == (6,)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_no_tenant_sees_anothers_text(seed: int) -> None:
    """Tenants say the same tokens but for those that are theirs alone, in any order of events;
    whoever wants to be alone has tokens of its own."""
    rng = random.Random(seed)
    draft = SuffixDraft(tokens=rng.choice([40, 500]), tenants=rng.choice([1, 2, 5]))
    live: list[Sequence] = []

    def theirs(owner: int) -> int:
        return rng.choice([1, 2, 3, 10 + owner])

    owners: dict[str, int] = {}
    for number in range(60):
        owner, salted = rng.randrange(4), rng.random() < 0.2
        mark = 10 + number if salted else owner
        name = str(number)
        seq = running(name, [theirs(mark)], tenant=f"t{owner}", salt=name if salted else "")
        owners[name] = 10 + mark
        live.append(seq)
        for proposal, asked in zip(
            draft.propose(plan(*((s, rng.randint(0, 8)) for s in live))), live, strict=True
        ):
            assert set(proposal.tokens) <= {1, 2, 3, owners[asked.request.id]}
        for s in live:
            s.tokens.extend(theirs(owners[s.request.id] - 10) for _ in range(rng.randint(0, 6)))
        if rng.random() < 0.7:
            draft.forget(live.pop(rng.randrange(len(live))).request.id)


def test_endless_input_takes_bounded_memory() -> None:
    rng = random.Random(3)
    draft = SuffixDraft(tokens=500, tenants=3)
    for number in range(1500):
        tenant = f"t{rng.randrange(40)}"
        output = [rng.randrange(50) for _ in range(rng.randint(0, 60))]
        served(draft, running(str(number), [1, 2], output, tenant))
        assert len(draft._recent) <= 3
        assert all(r.tokens <= 500 for r in draft._recent.values())
    served(draft, running("long", [1], [rng.randrange(50) for _ in range(5000)], "t0"))
    assert draft._recent["t0"].tokens <= 500
    assert draft._live == {}


def test_who_was_served_last_stays() -> None:
    draft = SuffixDraft(tenants=2)
    for number, tenant in enumerate("abac"):
        served(draft, running(str(number), [1], [2, 3, 4], tenant))
    assert list(draft._recent) == ["a", "c"]


def test_ends_without_output_leave_nothing() -> None:
    draft = SuffixDraft()
    served(draft, running("a", [1, 2, 3]))
    draft.forget("a")
    draft.forget("never seen")
    assert (draft._recent, draft._live) == ({}, {})
    assert guess(draft, running("b", [1, 2, 3], [])).tokens == ()


def test_what_was_never_asked_for_is_kept_too() -> None:
    """Where drafts would not pay nobody is asked for any (`engine.draft_choice`)."""
    draft = SuffixDraft()
    seq = running("a", [1, 2, 3], [4, 5, 6, 7])
    draft.observe(plan((seq, 0)), [Proposal()], [Verdict(0, 1)])
    draft.forget("a")
    assert guess(draft, running("b", [3, 4, 5, 6])).tokens == (7,)


# ---- in an engine ------------------------------------------------------------------------------


def test_the_second_time_is_fast_and_cancelled_ones_count_what_they_had() -> None:
    rig = Rig(source=choice([SuffixDraft()]), num_blocks=128)
    never = frozenset[int]()
    expected = reference([1, 2, 3, 4], 60, stop_ids=never)
    for name, tenant in (("first", "a"), ("second", "a"), ("other", "b")):
        rig.submit(name, [1, 2, 3, 4], 60, ignore_eos=True, tenant=tenant)
        rig.drain()
        assert rig.tokens(name) == expected
    first, second, other = (rig.finish(n).target_steps for n in ("first", "second", "other"))
    assert second < 25 < first
    assert other == first  # nothing is to be seen of what tenant a was served
    rig.submit("cut", [4, 3, 2, 1], 60, ignore_eos=True, tenant="c")
    for _ in range(40):
        rig.step()
    rig.engine.cancel("cut")
    rig.submit("again", [4, 3, 2, 1], 20, ignore_eos=True, tenant="c")
    rig.drain()
    assert rig.finish("again").target_steps < 12
    assert rig.tokens("again") == reference([4, 3, 2, 1], 20, stop_ids=never)


def test_nothing_is_kept_twice_of_who_was_cancelled_during_the_pass() -> None:
    draft = SuffixDraft()
    rig = Rig(source=choice([draft]))
    rig.submit("a", [1, 2, 3], 60, ignore_eos=True)
    for _ in range(9):
        rig.step()
    rig.step(lambda: rig.engine.cancel("a"))
    tokens = len(rig.tokens("a"))
    assert rig.chunks["a"][-1].finish is not None
    assert rig.chunks["a"][-1].finish.reason is FinishReason.CANCELLED
    assert draft._recent["default"].tokens == 3 + tokens + 1
    assert draft._live == {}


def test_a_thousand_requests_that_come_and_go() -> None:
    rng = random.Random(6)
    draft = SuffixDraft(tokens=400, tenants=3)
    rig = Rig(source=choice([draft]), num_blocks=60)
    for number in range(1000):
        rig.submit(
            str(number), [rng.randrange(7) for _ in range(rng.randint(1, 9))], 30,
            tenant=f"t{rng.randrange(5)}", cache_salt=rng.choice(["", "", "s"]),
        )  # fmt: skip
        for _ in range(rng.randint(0, 2)):
            rig.step()
        if rng.random() < 0.8 and rig.scheduler.live:
            rig.engine.cancel(rng.choice(rig.scheduler.live))
    rig.drain()
    assert draft._live == {}
    assert len(draft._recent) <= 3
    assert all(r.tokens <= 400 for r in draft._recent.values())
    assert rig.engine._draft.errors == 0
