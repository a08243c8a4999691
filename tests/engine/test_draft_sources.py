"""Several sources together, and what a request says about them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from engine.draft_choice import DraftChoice
from engine.request import SpeculationParams
from engine.step_costs import FREE, StepCosts
from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict
from tests.engine.fakes import Rig, reference
from tests.engine.test_draft_ngram import plan, sequence


class Constant:
    """Proposes `token` for the sequences named, as often as it may; remembers what it was told."""

    errors = 2

    def __init__(self, name: str, token: int, only: Seq[str] = ()) -> None:
        self.name = name
        self._token = token
        self._only = only
        self.caps: list[list[int]] = []
        self.observed: list[list[str]] = []
        self.forgotten: list[str] = []

    def propose(self, plan: StepPlan) -> list[Proposal]:
        self.caps.append([w.draft_cap for w in plan.work])
        return [
            Proposal((self._token,) * w.draft_cap, self.name)
            if w.draft_cap and (not self._only or w.seq.request.id in self._only)
            else NO_PROPOSAL
            for w in plan.work
        ]

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        self.observed.append([p.source for p in proposals])

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def test_whoever_gets_furthest_wins_and_the_first_of_equals() -> None:
    first, second = Constant("first", 1, only=["a"]), Constant("second", 2)
    both = DraftChoice([first, second], costs=StepCosts(FREE))
    step = plan((sequence([1], "a"), 3), (sequence([1], "b"), 2), (sequence([1], "c"), 0))
    proposals = both.propose(step)
    assert proposals == [Proposal((1, 1, 1), "first"), Proposal((2, 2), "second"), NO_PROPOSAL]
    assert (first.caps, second.caps) == ([[3, 2, 0]], [[3, 2, 0]])
    both.observe(step, proposals, [Verdict(0, 5)] * 3)
    both.forget("a")
    for source in (first, second):
        assert source.observed == [["first", "second", ""]]
        assert source.forgotten == ["a"]
    assert both.errors == 4


def test_no_sources_no_guesses() -> None:
    assert DraftChoice([], costs=StepCosts(FREE)).propose(plan((sequence([1]), 3))) == [NO_PROPOSAL]


@pytest.mark.parametrize(
    ("speculation", "sources"),
    [
        (SpeculationParams(), {"ngram", "model"}),
        (SpeculationParams(sources=frozenset({"ngram"})), {"ngram"}),
        (SpeculationParams(sources=frozenset({"model"})), {"model"}),
        (SpeculationParams(sources=frozenset({"suffix"})), set()),
        (SpeculationParams(max_draft_tokens=0), set()),
    ],
)
def test_a_request_chooses(speculation: SpeculationParams, sources: set[str]) -> None:
    """Beside one that chooses otherwise."""
    rig = Rig(draft="ngram,model")
    prompt = [1, 2, 3, 1, 2, 3, 1]
    rig.submit("a", prompt, 60, speculation=speculation, ignore_eos=True)
    rig.submit("all", prompt[1:], 60, ignore_eos=True)
    rig.drain()
    assert {name for name, _ in rig.finish("a").by_source} <= sources
    assert bool(rig.finish("a").by_source) == bool(sources)
    assert {name for name, _ in rig.finish("all").by_source} <= {"ngram", "model"}
    assert rig.finish("all").by_source
    never = frozenset[int]()
    assert rig.tokens("a") == reference(prompt, 60, stop_ids=never)
    assert rig.tokens("all") == reference(prompt[1:], 60, stop_ids=never)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_request_may_want_fewer(most: int) -> None:
    rig = Rig(draft="perfect", max_draft_tokens=4)
    rig.submit("a", [1, 2], 41, speculation=SpeculationParams(most), ignore_eos=True)
    rig.drain()
    assert rig.finish("a").target_steps == -(-41 // (most + 1))


def test_a_request_cannot_have_more_than_the_engine_allows() -> None:
    rig = Rig(draft="perfect", max_draft_tokens=2)
    rig.submit("a", [1, 2], 30, speculation=SpeculationParams(50), ignore_eos=True)
    rig.drain()
    assert rig.finish("a").target_steps == 10
