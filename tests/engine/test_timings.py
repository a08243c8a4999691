"""Times and usage, to the step: a forward pass takes 10 ms here and nothing else takes any."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from engine.outcome import FinishReason, SourceStats
from engine.types import Drawn, Feed, Model
from tests.engine.fakes import ManualClock, Rig

PASS = 0.010


class Slow:
    """A model whose passes take time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.clock = ManualClock()

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        self.clock.now += PASS
        return self._model.run(feeds)


class SlowRig(Rig):
    """Time passes in the target only."""

    def __init__(self, **settings: object) -> None:
        models: list[Slow] = []

        def wrap(model: Model) -> Model:
            models.append(Slow(model))
            return models[0]

        super().__init__(wrap=wrap, **settings)  # type: ignore[arg-type]
        models[0].clock = self.clock

    def advance(self, steps: int = 10_000) -> None:
        while steps and self.engine.busy:
            steps -= 1
            for chunk in self.engine.step():
                self.chunks.setdefault(chunk.request_id, []).append(chunk)


@pytest.mark.parametrize("drafted", [0, 4])
def test_queue_prefill_and_decode(drafted: int) -> None:
    rows, chunks = (24, 1) if drafted else (8, 3)
    rig = SlowRig(draft="perfect", max_draft_tokens=drafted, max_seqs=1, max_step_rows=rows)
    rig.submit("first", [1, 2], 10, ignore_eos=True)
    rig.submit("second", [1] * 20, 11, ignore_eos=True)
    rig.advance()
    per_step = drafted + 1
    first_steps, second_steps = -(-10 // per_step), -(-11 // per_step)
    first, second = rig.finish("first"), rig.finish("second")
    assert (first.arrived, first.scheduled) == (0.0, 0.0)
    assert first.first_token == first.prefilled == pytest.approx(PASS)
    assert first.finished == pytest.approx(first_steps * PASS)
    assert second.scheduled == pytest.approx(first.finished)
    assert second.scheduled is not None
    assert second.first_token == second.prefilled == pytest.approx(second.scheduled + chunks * PASS)
    assert second.prefilled is not None  # with the last chunk of the prompt come the first tokens
    assert second.finished == pytest.approx(second.prefilled + (second_steps - 1) * PASS)
    assert (first.target_steps, second.target_steps) == (first_steps, second_steps)
    right = 11 - second_steps
    assert (second.drafts.drafted, second.drafts.accepted) == (right, right)
    assert sum(second.drafts.accepted_at) == right


def test_a_preemption_does_not_touch_the_first_token() -> None:
    rig = SlowRig(draft="perfect", max_draft_tokens=4)
    rig.submit("a", [1, 2, 3], 21, ignore_eos=True)
    rig.advance(2)
    rig.scheduler._preempt(rig.scheduler.running[0])
    rig.advance()
    finish = rig.finish("a")
    assert finish.preemptions == 1
    assert finish.scheduled == 0.0
    assert finish.first_token == finish.prefilled == pytest.approx(PASS)
    assert (finish.completion_tokens, finish.target_steps) == (21, 5)
    assert finish.finished == pytest.approx(5 * PASS)


def test_a_step_report_adds_up() -> None:
    rig = SlowRig(draft="perfect", max_draft_tokens=3, max_step_rows=8)
    rig.submit("a", [1] * 12, 9, ignore_eos=True)
    rig.submit("b", [2], 5, ignore_eos=True)
    rig.advance()
    reports = rig.observer.reports
    assert [r.number for r in reports] == list(range(1, len(reports) + 1))
    assert all(r.ended - r.started == pytest.approx(PASS) for r in reports)
    assert all(dict(r.phases)["forward"] == pytest.approx(PASS) for r in reports)
    assert all(set(dict(r.phases)) == {"plan", "propose", "forward", "commit"} for r in reports)
    finishes = [rig.finish("a"), rig.finish("b")]
    assert sum(r.emitted for r in reports) == 14
    assert sum(r.accepted for r in reports) == sum(f.drafts.accepted for f in finishes)
    assert sum(r.drafted for r in reports) == sum(f.drafts.drafted for f in finishes)
    for report in reports:
        for _, stats in report.by_source:
            assert sum(stats.drafted_at) == stats.drafted
            assert sum(stats.accepted_at) == stats.accepted
            assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)
    assert sum(r.prefill_rows for r in reports) == 12 + 1 - 2
    assert sum(r.rows for r in reports) == rig.target.rows
    assert all(r.used_blocks + r.free_blocks == rig.pool.num_blocks for r in reports)
    assert reports[-1].used_blocks == 0
    assert reports[-1].waiting == (0, 0, 0)


def test_cancelled_usage_is_exact() -> None:
    rig = SlowRig(draft="perfect", max_draft_tokens=2)
    rig.submit("a", [1, 2, 3], 100, ignore_eos=True)
    rig.advance(4)
    rig.engine.cancel("a")
    rig.advance()
    finish = rig.finish("a")
    assert (finish.prompt_tokens, finish.completion_tokens) == (3, 12)
    assert finish.drafts == SourceStats(8, 8, (4, 4), (4, 4))
    assert finish.finished == pytest.approx(4 * PASS)


@pytest.mark.parametrize("late_by", [0.001, 0.005, 0.009])
def test_a_deadline_that_passes_during_a_step(late_by: float) -> None:
    """The tokens of that step come first, then the end; both in order."""
    rig = SlowRig()
    rig.submit("a", [1, 2, 3], 100, ignore_eos=True, deadline=3 * PASS + late_by)
    rig.submit("b", [1, 2], 10, ignore_eos=True)
    rig.advance()
    finish = rig.finish("a")
    assert finish.reason is FinishReason.DEADLINE
    assert finish.completion_tokens in (3, 4)
    assert len(rig.tokens("b")) == 10
