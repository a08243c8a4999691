"""What ends without a step is told before the next one, which may take long."""

from __future__ import annotations

from engine.host import Host, Inbox, LastReport
from engine.messages import Cancel, Stepped, Stop, Submit
from engine.outcome import FinishReason
from engine.request import Request, SamplingParams, StopParams
from tests.engine.fakes import Rig


def test_cancelled_and_expired_are_collected_without_a_pass() -> None:
    rig = Rig()
    rig.submit("a", [1, 2], 20)
    rig.submit("b", [1, 2], 20, deadline=0.5)
    rig.step()
    runs = rig.target.runs
    rig.engine.cancel("a")
    rig.clock.now = 1.0
    ended = rig.engine.collect()
    assert {c.request_id: c.finish.reason for c in ended if c.finish} == {
        "a": FinishReason.CANCELLED,
        "b": FinishReason.DEADLINE,
    }
    assert rig.engine.collect() == []
    assert rig.target.runs == runs
    assert rig.pool.free == rig.pool.num_blocks
    assert not rig.engine.busy


def test_the_host_sends_an_end_before_it_steps() -> None:
    rig = Rig()
    inbox = Inbox()
    sent: list[tuple[int, Stepped]] = []

    def send(message: Stepped) -> None:
        sent.append((rig.target.runs, message))
        if len(sent) == 1:
            inbox.put(Cancel("a"))
        if len(sent) == 4:
            inbox.put(Stop())

    for name in ("a", "b"):
        stopping, greedy = StopParams(100), SamplingParams(temperature=0.0)
        inbox.put(Submit(Request(name, (1, 2), stopping, greedy)))
    Host(rig.engine, LastReport(), inbox, send).run()
    runs, message = sent[1]
    assert [c.request_id for c in message.chunks] == ["a"]
    assert runs == sent[0][0], "no pass between the cancellation and its end"
    ends = [c for _, m in sent for c in m.chunks if c.finish]
    assert [(c.request_id, c.finish.reason) for c in ends if c.finish] == [
        ("a", FinishReason.CANCELLED),
        ("b", FinishReason.DRAINED),
    ]
