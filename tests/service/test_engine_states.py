"""What clients see of the engine's life: not ready, dead, back again, gone; and of its limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from engine.outcome import FinishReason
from service.pb import draftwire_pb2 as pb
from tests.service.fakes import TIMEOUT_S
from tests.service.harness import (
    NOT_SERVING,
    SERVING,
    Harness,
    details,
    params_of,
    rich,
    running,
    write_model,
)

SERVICES = ("", "draftwire.v1.GenerationService", "draftwire.v1.ModelService")


async def refusal(served: Harness) -> Any:
    """The status of a Complete that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.generations.Complete(pb.CompleteRequest(params=params_of()))
    return rich(caught.value)


async def test_before_the_engine_is_ready(model_dir: Path) -> None:
    async with running(model_dir, ready=False) as served:
        for name in SERVICES:
            check = await served.health.Check(health_pb2.HealthCheckRequest(service=name))
            assert check.status == NOT_SERVING
        status = await refusal(served)
        assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert details(status)["ErrorInfo"]["reason"] == "NOT_READY"
        assert "RetryInfo" in details(status)
        session = await served.session()  # a session may wait for it
        await session.start("a")
        event = await session.event("rejected")
        assert event.rejected.code == grpc.StatusCode.UNAVAILABLE.value[0]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.models.GetModelInfo(pb.GetModelInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        served.engine.ready()
        await served.serving()
        await session.start("a", max_tokens=1)
        await session.event("accepted")


async def test_every_generation_hears_of_the_engines_death_and_the_stream_lives_on(
    served: Harness,
) -> None:
    session = await served.session()
    stream = served.generations.Generate(pb.GenerateRequest(params=params_of()))
    unary = asyncio.ensure_future(
        _awaited(served.generations.Complete(pb.CompleteRequest(params=params_of())))
    )
    for name in "abc":
        await session.start(name)
    await served.engine.submitted(5)
    served.engine.step(3)
    served.engine.die()
    found = await session.until_finished("a", "b", "c")
    for events in found.values():
        finished = events[-1].finished
        assert finished.reason == pb.FINISH_REASON_ERROR
        assert finished.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert "RetryInfo" in details(finished.error)
        assert finished.usage.completion_tokens == 3
    assert [e async for e in stream][-1].finished.reason == pb.FINISH_REASON_ERROR
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unary
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    # while it is being replaced, requests are refused; afterwards the same session goes on
    await served.healthy(NOT_SERVING)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.models.GetModelInfo(pb.GetModelInfoRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await session.start("a")
    assert (await session.event()).rejected.code == grpc.StatusCode.UNAVAILABLE.value[0]
    served.engine.ready()
    await served.serving()
    await session.start("a", max_tokens=2)
    await served.engine.submitted(6)
    served.engine.step(2)
    found = await session.until_finished("a")
    assert found["a"][-1].finished.reason == pb.FINISH_REASON_LENGTH


async def _awaited(call: Any) -> Any:
    return await call


async def test_a_submit_that_finds_the_engine_dead_is_refused(served: Harness) -> None:
    from engine.errors import EngineDead

    def dead(request: object) -> None:
        raise EngineDead("just now")

    served.engine.before_submit = dead
    status = await refusal(served)
    assert details(status)["ErrorInfo"]["reason"] == "NOT_READY"
    assert served.server._admission.waiting == 0
    assert not served.server._router.live


async def test_a_bug_is_internal_without_its_text_and_is_logged(served: Harness) -> None:
    def bug(request: object) -> None:
        raise RuntimeError("secret detail")

    served.engine.before_submit = bug
    status = await refusal(served)
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in str(status)
    session = await served.session()
    await session.start("a")
    event = await session.event("rejected")
    assert event.rejected.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in str(event)
    assert served.log.getvalue().count("secret detail") >= 2
    served.engine.before_submit = lambda request: None
    await session.start("a")
    await session.event("accepted")


async def test_health_follows_the_engine_for_many_watchers_at_once(served: Harness) -> None:
    """20 watches and 20 checks while generations run: all see every state, quickly."""
    watches = [
        served.health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[n % 3]))
        for n in range(20)
    ]
    session = await served.session()
    for n in range(8):
        await session.start(str(n), max_tokens=4000)
    served.engine.play(pause_s=0.02)

    async def all_see(status: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            for seen in await asyncio.gather(*(watch.read() for watch in watches)):
                assert seen.status == status

    await all_see(SERVING)
    loop = asyncio.get_running_loop()

    async def check() -> float:
        start = loop.time()
        await served.health.Check(health_pb2.HealthCheckRequest())
        return loop.time() - start

    assert max(await asyncio.gather(*(check() for _ in range(20)))) < 2.0
    served.engine.pause()
    served.engine.die()
    await all_see(NOT_SERVING)
    served.engine.ready()
    await all_see(SERVING)
    stopping = asyncio.ensure_future(served.stop())
    await all_see(NOT_SERVING)
    await stopping


async def test_health_of_an_unknown_service(served: Harness) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_tokenizer_that_cannot_be_loaded_is_a_failure(tmp_path: Path) -> None:
    broken = write_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    async with running(broken, ready=False) as served:
        served.engine.ready()
        async with asyncio.timeout(TIMEOUT_S):
            await served.server.lifecycle.failed.wait()
        assert "tokenizer" in served.server.lifecycle.cause
        check = await served.health.Check(health_pb2.HealthCheckRequest())
        assert check.status == NOT_SERVING


async def test_an_engine_that_failed_for_good_is_reported(model_dir: Path) -> None:
    async with running(model_dir, ready=False) as served:
        served.engine.fail("no such model")
        async with asyncio.timeout(TIMEOUT_S):
            await served.server.lifecycle.failed.wait()
        assert served.server.lifecycle.cause == "no such model"


async def test_the_queue_is_bounded_in_requests(model_dir: Path) -> None:
    async with running(model_dir, max_waiting=3) as served:
        session = await served.session()
        for name in "abc":
            await session.start(name, max_tokens=5)
            await session.event("accepted")
        await session.start("d")
        found = details((await session.event("rejected")).rejected)
        assert found["ErrorInfo"]["reason"] == "QUEUE_FULL"
        assert found["QuotaFailure"]["violations"][0]["subject"] == "max_waiting"
        assert 0 < float(found["RetryInfo"]["retryDelay"].removesuffix("s")) <= 30
        served.engine.step()  # all three get their first token: they wait no longer
        for _ in "abc":
            await session.event("delta")
        await session.start("d")
        await session.event("accepted")


async def test_the_queue_is_bounded_in_tokens(model_dir: Path) -> None:
    async with running(model_dir, max_waiting_tokens=100) as served:
        session = await served.session()
        await session.start("long", text="x" * 500)  # an empty queue takes any
        await session.event("accepted")
        await session.start("b", text="x")
        found = details((await session.event("rejected")).rejected)
        assert found["QuotaFailure"]["violations"][0]["subject"] == "max_waiting_tokens"
        await session.cancel("long")
        await session.event("finished")
        for name in ("b", "c"):
            await session.start(name, text="x" * 50)
            await session.event("accepted")
        await session.start("d", text="x")
        assert (await session.event("rejected")).generation_id == "d"


async def test_a_chunk_for_nobody_is_ignored(served: Harness) -> None:
    """A late chunk of a request whose end was already delivered."""
    session = await served.session()
    await session.start("a", max_tokens=2)
    request = (await served.engine.submitted())[0]
    live = served.engine.live[request.id]
    served.engine.step(2)
    await session.until_finished("a")
    served.engine.live[request.id] = live
    served.engine.say(request.id, (9,), "late")
    served.engine.end(request.id, FinishReason.EOS)
    await session.start("b", max_tokens=1)
    await served.engine.submitted(2)
    served.engine.step()
    assert [e.WhichOneof("event") for e in (await session.until_finished("b"))["b"]] == [
        "accepted",
        "delta",
        "finished",
    ]
