"""Stopping: health first, then no new work, then the end of what runs, then everything is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from engine.outcome import FinishReason
from service.pb import draftwire_pb2 as pb
from tests.service.fakes import TIMEOUT_S, eventually, text_of
from tests.service.harness import NOT_SERVING, Harness, details, flood, params_of, rich, running


async def test_running_generations_end_within_the_grace_period(served: Harness) -> None:
    session = await served.session()
    for name in "abcde":
        await session.start(name, max_tokens=50)
    await served.engine.submitted(5)
    served.engine.step(10)
    stopping = asyncio.ensure_future(served.stop(grace_s=TIMEOUT_S))
    await served.healthy(NOT_SERVING)
    served.engine.step(40)
    found = await session.until_finished("a", "b", "c", "d", "e")
    for name in "abcde":
        assert found[name][-1].finished.reason == pb.FINISH_REASON_LENGTH
        assert found[name][-1].finished.usage.completion_tokens == 50
        assert "".join(e.delta.text for e in found[name]) == text_of(50)
    draining = found[""][0].draining
    assert draining.grace.seconds == TIMEOUT_S
    assert await session.done() is grpc.StatusCode.UNAVAILABLE  # it was not half-closed
    await stopping
    assert not served.engine.cancels


async def test_a_half_closed_session_ends_with_ok(served: Harness) -> None:
    session = await served.session()
    await session.start("a", max_tokens=5)
    await session.call.done_writing()
    await served.engine.submitted()
    stopping = asyncio.ensure_future(served.stop(grace_s=TIMEOUT_S))
    await served.healthy(NOT_SERVING)
    served.engine.step(5)
    await session.until_finished("a")
    assert await session.done() is grpc.StatusCode.OK
    await stopping


async def test_new_work_is_refused_while_draining(served: Harness) -> None:
    session = await served.session()
    await session.start("a", max_tokens=5)
    await served.engine.submitted()
    stopping = asyncio.ensure_future(served.stop(grace_s=TIMEOUT_S))
    await served.healthy(NOT_SERVING)
    await session.start("b")
    events = [await session.event() for _ in range(3)]
    assert [e.WhichOneof("event") for e in events] == ["accepted", "draining", "rejected"]
    found = details(events[-1].rejected)
    assert found["ErrorInfo"]["reason"] == "DRAINING"
    assert "RetryInfo" in found
    for call in (
        served.generations.Generate(pb.GenerateRequest(params=params_of())),
        served.generations.Session(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details(rich(caught.value))["ErrorInfo"]["reason"] == "DRAINING"
    served.engine.step(5)
    await stopping


async def test_what_outlives_the_grace_period_ends_with_drained(served: Harness) -> None:
    session = await served.session()
    stream = served.generations.Generate(pb.GenerateRequest(params=params_of()))
    unary = served.generations.Complete(pb.CompleteRequest(params=params_of()))
    waiting = asyncio.ensure_future(_awaited(unary))
    for name in "ab":
        await session.start(name)
    await served.engine.submitted(4)
    served.engine.step(2)
    await served.stop(grace_s=0.3)
    found = await session.until_finished("a", "b")
    for name in "ab":
        assert found[name][-1].finished.reason == pb.FINISH_REASON_DRAINED
        assert found[name][-1].finished.usage.completion_tokens == 2
    assert await session.done() is grpc.StatusCode.UNAVAILABLE
    assert [e async for e in stream][-1].finished.reason == pb.FINISH_REASON_DRAINED
    response = await waiting  # it has output, so it is worth returning
    assert response.finished.reason == pb.FINISH_REASON_DRAINED
    assert response.text == text_of(2)
    assert {reason for _, reason in served.engine.cancels} == {FinishReason.DRAINED}
    roots = [s for s in served.spans.get_finished_spans() if s.parent is None]
    assert len(roots) == 4


async def _awaited(call: grpc.aio.Call) -> pb.CompleteResponse:
    return await call


@pytest.mark.parametrize("stuck", [False, True])
async def test_clean_up_in_handlers_is_finished_before_the_stop_returns(
    served: Harness, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """Also of a call that has to be cut off, because its reader does not read."""

    from service.session import Session

    cleaned = 0
    close = Session._close

    async def slow_close(self: Session, reader: asyncio.Task[None]) -> None:
        nonlocal cleaned
        await close(self, reader)
        await asyncio.sleep(0.2)
        cleaned += 1

    monkeypatch.setattr(Session, "_close", slow_close)
    sessions = [await served.session() for _ in range(1 if stuck else 5)]
    for session in sessions:
        await session.start("a", max_tokens=4000)
        await session.event("accepted")
    if stuck:
        await flood(served, served.engine.requests[0].id)
    await served.stop(grace_s=0.05)
    assert cleaned == len(sessions)
    for session in sessions:
        assert await session.done() is grpc.StatusCode.UNAVAILABLE


async def test_a_second_signal_stops_at_once_and_still_says_so(served: Harness) -> None:
    session = await served.session()
    await session.start("a")
    await session.event("accepted")
    at_once = asyncio.Event()
    stopping = asyncio.ensure_future(served.server.stop(3600, at_once))
    assert (await session.event()).WhichOneof("event") == "draining"
    at_once.set()
    async with asyncio.timeout(TIMEOUT_S):
        await stopping
    assert (await session.event("finished")).finished.reason == pb.FINISH_REASON_DRAINED
    assert await session.done() is grpc.StatusCode.UNAVAILABLE
    assert not served.engine.live


async def test_an_engine_that_does_not_answer_cannot_hold_the_stop(served: Harness) -> None:
    served.engine.hold_cancels = True
    session = await served.session()
    await session.start("a")
    await session.event("accepted")
    async with asyncio.timeout(TIMEOUT_S):
        await served.stop(grace_s=0.1)
    assert not served.engine.live


async def test_a_reader_that_is_away_cannot_hold_the_stop(served: Harness) -> None:
    session = await served.session()
    await session.start("a", max_tokens=4000)
    request = (await served.engine.submitted())[0]
    await flood(served, request.id)
    async with asyncio.timeout(TIMEOUT_S):
        await served.stop(grace_s=0.1)
    await eventually(lambda: not served.engine.live)


def test_three_servers_in_a_row_in_one_process(model_dir: Path) -> None:
    async def once() -> None:
        async with running(model_dir) as served:
            session = await served.session()
            await session.start("a", max_tokens=2)
            await served.engine.submitted()
            served.engine.step(2)
            await session.until_finished("a")

    for _ in range(3):
        asyncio.run(once())
