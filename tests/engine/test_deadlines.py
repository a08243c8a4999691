"""Past its deadline a generation ends, with what it has; one that never began costs no row."""

from __future__ import annotations

import pytest

from engine.outcome import FinishReason
from tests.engine.fakes import Rig, reference


def test_expired_in_the_queue_is_never_computed() -> None:
    rig = Rig(max_seqs=1)
    rig.submit("busy", [1], 200, ignore_eos=True)
    rig.step()
    for i in range(5):
        rig.submit(f"late{i}", [2] * 10, 5, deadline=rig.clock.now + 0.5)
    rig.drain()
    assert rig.target.rows == 200
    for i in range(5):
        late = rig.finish(f"late{i}")
        assert late.reason is FinishReason.DEADLINE
        assert (late.scheduled, late.first_token, late.completion_tokens) == (None, None, 0)
        assert late.finished - late.arrived == pytest.approx(0.5, abs=0.011)


def test_already_expired_at_submit() -> None:
    rig = Rig()
    rig.submit("late", [1], 5, deadline=rig.clock.now)
    rig.drain(limit=1)
    assert rig.finish("late").reason is FinishReason.DEADLINE
    assert rig.target.runs == 0


@pytest.mark.parametrize("draft", ["none", "perfect"])
def test_expired_in_the_middle_keeps_what_it_has(draft: str) -> None:
    rig = Rig(draft=draft)
    rig.submit("a", [1, 2], 100, ignore_eos=True, deadline=0.095)
    rig.submit("b", [1, 3], 100, ignore_eos=True, deadline=1e9)
    rig.drain()
    finish, got = rig.finish("a"), rig.tokens("a")
    assert finish.reason is FinishReason.DEADLINE
    assert 9 <= len(got) < 100
    assert got == reference([1, 2], 100, stop_ids=frozenset())[: len(got)]
    assert rig.finish("b").reason is FinishReason.LENGTH
    assert rig.pool.free == rig.pool.num_blocks


def test_expired_in_the_prompt_or_while_preempted() -> None:
    rig = Rig(max_step_rows=8)
    rig.submit("prompt", [1] * 60, 5, deadline=0.035)
    rig.submit("preempted", [1], 50, deadline=0.085, ignore_eos=True)
    rig.step()
    rig.step()
    rig.scheduler._preempt(rig.scheduler.running[-1])
    while rig.engine.busy:
        for seq in list(rig.scheduler.running):
            if seq.request.id == "preempted":
                rig.scheduler._preempt(seq)
        rig.step()
    for name in ("prompt", "preempted"):
        assert rig.finish(name).reason is FinishReason.DEADLINE
    assert rig.finish("prompt").completion_tokens == 0
    assert rig.pool.free == rig.pool.num_blocks


def test_the_deadline_of_an_ended_request_does_not_end_its_successor() -> None:
    rig = Rig()
    rig.submit("a", [1], 50, deadline=0.05, ignore_eos=True)
    rig.step()
    rig.engine.cancel("a")
    rig.step()
    rig.chunks.clear()
    rig.submit("a", [1], 50, deadline=10.0, ignore_eos=True)
    rig.drain()
    assert rig.finish("a").reason is FinishReason.LENGTH


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    """A day's deadline on thousands of short requests, some under the same id."""
    rig = Rig()
    rig.submit("long", [1], 240, deadline=2.0, ignore_eos=True)
    for i in range(2000):
        rig.submit(str(i % 1000), [1], 1, deadline=86_400.0)
        rig.step()
    assert len(rig.scheduler._deadlines) < 200
    assert rig.finish("long").reason is FinishReason.DEADLINE
