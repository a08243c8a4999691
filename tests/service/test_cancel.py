"""However a client leaves, its requests leave the engine at once and nothing is left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest

from engine.outcome import FinishReason
from service.pb import draftwire_pb2 as pb
from tests.service.fakes import TIMEOUT_S, eventually
from tests.service.harness import Harness, flood, params_of, rich

LEAVE = ["cancel", "close"]
LONG = "x" * 5000  # long enough to be tokenized in a thread


@contextmanager
def busy_tokenizer(harness: Harness) -> Iterator[None]:
    """All tokenizer threads are taken, so that what is long waits."""
    release = threading.Event()
    for _ in range(2):
        harness.server._executor.submit(release.wait)
    try:
        yield
    finally:
        release.set()


async def leave(how: str, call: grpc.aio.Call, channel: grpc.aio.Channel) -> None:
    if how == "cancel":
        call.cancel()
    else:
        await channel.close()


@asynccontextmanager
async def other_channel(harness: Harness) -> AsyncIterator[Harness]:
    """The same server seen from a connection of its own."""
    channel = grpc.aio.insecure_channel(harness.server.address)
    try:
        yield Harness(**{**vars(harness), "channel": channel})
    finally:
        await channel.close()


def call_tasks() -> set[str]:
    """Tasks that belong to calls; grpc's own, which wait for the next call, come and go."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    return {repr(t) for t in tasks if "AioServer." not in repr(t.get_coro())}


async def settled(baseline: int) -> None:
    """Until no more tasks are left than the `baseline`."""
    await eventually(lambda: len(call_tasks()) <= baseline)


@pytest.mark.parametrize("how", LEAVE)
async def test_leaving_while_tokens_are_awaited(served: Harness, how: str) -> None:
    async with other_channel(served) as other:
        client = await other.session()
        await client.start("a")
        await client.start("b")
        await client.event("accepted")
        await served.engine.submitted(2)
        await leave(how, client.call, other.channel)
        await served.engine.freed(2)
    assert not served.engine.live


@pytest.mark.parametrize("how", LEAVE)
async def test_leaving_while_a_write_is_blocked(served: Harness, how: str) -> None:
    async with other_channel(served) as other:
        client = await other.session()
        await client.start("a", max_tokens=4000)
        request = (await served.engine.submitted())[0]
        await flood(served, request.id)
        await leave(how, client.call, other.channel)
        await served.engine.freed()
    assert not served.engine.live


@pytest.mark.parametrize("how", LEAVE)
async def test_leaving_while_the_prompt_is_tokenized(served: Harness, how: str) -> None:
    baseline = len(call_tasks())
    async with other_channel(served) as other:
        with busy_tokenizer(served):
            client = await other.session()
            await client.start("a", text=LONG)
            await client.start("short")
            await client.event("accepted")  # of "short": the reader got past the long one
            call = other.generations.Generate(pb.GenerateRequest(params=params_of(LONG)))
            await asyncio.sleep(0.05)
            await leave(how, client.call, other.channel)
            call.cancel()
            await served.engine.freed(1)
    await settled(baseline)
    assert [r.prompt for r in served.engine.requests] == [tuple(served.engine.requests[0].prompt)]
    assert len(served.engine.requests) == 1  # the long ones never reached the engine


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_a_cancelled_simple_call_frees_its_request(served: Harness, method: str) -> None:
    request = {"Generate": pb.GenerateRequest, "Complete": pb.CompleteRequest}[method]
    call = getattr(served.generations, method)(request(params=params_of()))
    waiting = asyncio.ensure_future(_drain(call))
    await served.engine.submitted()
    served.engine.step()
    call.cancel()
    await served.engine.freed()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def _drain(call: grpc.aio.Call) -> None:
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


KILLED_CLIENT = """
import sys, grpc
from service.pb import draftwire_pb2 as pb, draftwire_pb2_grpc as rpc
channel = grpc.insecure_channel(sys.argv[1])
params = pb.GenerationParams(text="hi")
for event in rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(params=params)):
    print(event.WhichOneof("event"), flush=True)
"""


async def test_a_killed_client_frees_its_requests(served: Harness) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED_CLIENT, served.server.address, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    await served.engine.submitted()
    served.engine.step()
    async with asyncio.timeout(TIMEOUT_S):
        assert await process.stdout.readline() == b"accepted\n"
        assert await process.stdout.readline() == b"delta\n"
        process.kill()
        await process.wait()
        await served.engine.freed()
    assert not served.engine.live
    # and the freed place is usable at once
    client = await served.session()
    await client.start("next", max_tokens=1)
    await served.engine.submitted(2)
    served.engine.step()
    await client.until_finished("next")


async def test_cancel_op_ends_with_one_terminal_event_and_exact_usage(served: Harness) -> None:
    client = await served.session()
    await client.start("a")
    await served.engine.submitted()
    served.engine.step(7)
    await client.cancel("a")
    events = (await client.until_finished("a"))["a"]
    assert [e.WhichOneof("event") for e in events] == ["accepted", "delta", "finished"]
    finished = events[-1].finished
    assert finished.reason == pb.FINISH_REASON_CANCELLED
    assert finished.usage.completion_tokens == 7 == events[1].delta.seq


async def test_cancel_of_a_start_in_preparation(served: Harness) -> None:
    client = await served.session()
    with busy_tokenizer(served):
        await client.start("a", text=LONG[:3000])
        await client.cancel("a")
        await client.start("b")
        assert (await client.event("accepted")).generation_id == "b"
    events = (await client.until_finished("a"))["a"]
    assert [e.WhichOneof("event") for e in events] == ["accepted", "finished"]
    assert events[-1].finished.reason == pb.FINISH_REASON_CANCELLED


async def test_cancelling_one_does_not_disturb_its_neighbours(served: Harness) -> None:
    client = await served.session()
    for name in "abc":
        await client.start(name, max_tokens=20)
    await served.engine.submitted(3)
    served.engine.step(5)
    await client.cancel("b")
    await served.engine.freed()
    served.engine.step(15)
    found = await client.until_finished("a", "b", "c")
    reasons = {name: events[-1].finished.reason for name, events in found.items()}
    assert reasons == {
        "a": pb.FINISH_REASON_LENGTH,
        "b": pb.FINISH_REASON_CANCELLED,
        "c": pb.FINISH_REASON_LENGTH,
    }


async def test_a_cancel_that_comes_too_late_changes_nothing(served: Harness) -> None:
    client = await served.session()
    await client.start("a", max_tokens=1)
    await served.engine.submitted()
    served.engine.step()
    await client.until_finished("a")
    await client.cancel("a")
    rejected = (await client.event("rejected")).rejected
    assert rejected.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert not served.engine.cancels


@pytest.mark.parametrize("tokens_before", [0, 5])
async def test_an_inner_cancellation_still_gives_the_client_a_status(
    served: Harness, tokens_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CancelledError that is not this call's own must not leave the client waiting."""
    from service import router

    original = router.Outbox.wait
    waits = 0

    async def wait(self: router.Outbox) -> None:
        nonlocal waits
        if waits >= tokens_before and served.engine.requests:
            raise asyncio.CancelledError
        waits += 1
        await original(self)

    monkeypatch.setattr(router.Outbox, "wait", wait)
    call = served.generations.Generate(pb.GenerateRequest(params=params_of()))
    session = await served.session()
    await session.start("a")
    served.engine.play()
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert await session.done() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert rich(caught.value).details
    served.engine.pause()
    await served.engine.until(lambda: not served.engine.live)


async def test_an_inner_cancellation_of_a_start_rejects_just_that(served: Harness) -> None:
    def cancelled(request: object) -> None:
        raise asyncio.CancelledError

    client = await served.session()
    await client.start("a")
    await served.engine.submitted()
    served.engine.before_submit = cancelled
    await client.start("b")
    await client.event("accepted")
    event = await client.event("rejected")
    assert event.generation_id == "b"
    assert event.rejected.code == grpc.StatusCode.UNAVAILABLE.value[0]
    served.engine.before_submit = lambda request: None
    await client.start("b", max_tokens=1)
    await served.engine.submitted(2)
    served.engine.step()
    await client.until_finished("b")


async def test_many_cancelled_streams_leave_nothing(served: Harness) -> None:
    """2000 streams, cancelled at every stage, leave no task, no route and no waiting place."""
    baseline = len(call_tasks())
    served.engine.play(pause_s=0.002)
    limit = asyncio.Semaphore(50)

    async def one(n: int) -> None:
        async with limit:
            call = served.generations.Generate(pb.GenerateRequest(params=params_of()))
            for _ in range(n % 4):
                await call.read()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call.read()

    await asyncio.gather(*(one(n) for n in range(2000)))
    client = await served.session()
    await client.start("last", max_tokens=3)
    found = await client.until_finished("last")
    assert found["last"][-1].finished.reason == pb.FINISH_REASON_LENGTH
    await client.call.done_writing()
    assert await client.done() is grpc.StatusCode.OK
    served.engine.pause()
    await settled(baseline)
    assert not served.engine.live
    assert not served.server._router.live
    assert served.server._admission.waiting == 0
    spans = served.spans.get_finished_spans()
    roots = [s for s in spans if s.name.startswith("text_completion")]
    assert len(roots) == len({s.context.span_id for s in roots})
    submitted = len(served.engine.requests)
    assert submitted - 1 <= sum(r is FinishReason.CANCELLED for _, r in served.engine.cancels)
    assert len(roots) >= submitted
