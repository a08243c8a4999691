"""A source that does not pay for a sequence is left alone there, and only there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.draft_gate import GatedDraft
from engine.draft_model import ModelDraft
from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict
from tests.engine.fakes import HashModel, Rig, hash_next, reference

REST = 24
DOUBT = 40  # steps, at most, until a hopeless source first rests


class Always:
    """Proposes as much as it may."""

    name = "always"
    errors = 0

    def __init__(self) -> None:
        self.seen = 0
        self.forgotten: list[str] = []

    def propose(self, plan: StepPlan) -> list[Proposal]:
        return [
            Proposal((1,) * w.draft_cap, self.name) if w.draft_cap else NO_PROPOSAL
            for w in plan.work
        ]

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        self.seen += 1

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def plan_of(*names: str) -> StepPlan:
    rig = Rig()
    for name in names:
        rig.submit(name, [1, 2], 20)
    plan = rig.scheduler.plan(0.0)
    return replace(plan, work=tuple(replace(w, draft_cap=3) for w in plan.work))


def drafted(gate: GatedDraft, plan: StepPlan, accepted: dict[str, int]) -> list[str]:
    """One step: who drafted."""
    proposals = gate.propose(plan)
    names = [w.seq.request.id for w in plan.work]
    gate.observe(plan, proposals, [Verdict(accepted[n], 0) for n in names])
    return [n for n, p in zip(names, proposals, strict=True) if p.tokens]


def test_who_does_not_pay_rests_and_is_tried_again() -> None:
    gate, plan = GatedDraft(Always(), 0.5, REST), plan_of("good", "bad")
    steps = [drafted(gate, plan, {"good": 2, "bad": 0}) for _ in range(200)]
    assert all("good" in step for step in steps)
    tries = [i for i, step in enumerate(steps) if "bad" in step]
    first = next(i for i, step in enumerate(steps) if "bad" not in step)
    assert 1 < first < DOUBT
    later = [b - a for a, b in itertools.pairwise(tries) if a >= first]
    assert later
    assert set(later) == {REST + 1}


def test_who_pays_again_goes_on() -> None:
    gate, plan = GatedDraft(Always(), 0.5, REST), plan_of("a")
    for _ in range(REST + DOUBT):
        drafted(gate, plan, {"a": 0})
    while not drafted(gate, plan, {"a": 3}):
        pass
    assert all(drafted(gate, plan, {"a": 3}) for _ in range(50))


def test_the_source_hears_all_and_the_end_clears_the_record() -> None:
    source = Always()
    gate, plan = GatedDraft(source, 0.5, REST), plan_of("a")
    while drafted(gate, plan, {"a": 0}):
        assert source.seen < DOUBT
    assert source.seen > 1
    assert not drafted(gate, plan, {"a": 0})
    gate.forget("a")
    assert source.forgotten == ["a"]
    assert drafted(gate, plan, {"a": 0})


def test_a_model_that_rests_keeps_its_cache_in_step() -> None:
    """Forced rests in the middle, a perfect draft: nothing it drafts is ever rejected."""
    rig = Rig(draft="none", num_blocks=64)
    model = HashModel(hash_next, 64)
    gate = GatedDraft(ModelDraft(model, 24, 10_000), worth=100.0, rest=REST)
    rig.engine._draft = gate
    rig.submit("a", [1, 2, 3], 120, ignore_eos=True)
    rig.drain()
    reports = rig.observer.reports
    drafted_total = sum(r.drafted for r in reports)
    assert drafted_total == sum(r.accepted for r in reports) > 8
    assert sum(r.drafted == 0 for r in reports) > REST
    assert rig.tokens("a") == reference([1, 2, 3], 120, stop_ids=frozenset())
