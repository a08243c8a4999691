"""Generate and Complete."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from engine.outcome import FinishReason
from engine.request import Request
from engine.verify import ERRORS, RULED_OUT
from service.pb import draftwire_pb2 as pb
from tests.service.fakes import TIMEOUT_S, text_of
from tests.service.harness import Harness, details, params_of, rich, running


def generate(served: Harness, timeout: float | None = None, **params: Any) -> Any:
    return served.generations.Generate(
        pb.GenerateRequest(params=params_of(**params)), timeout=timeout
    )


def complete(served: Harness, timeout: float | None = None, **params: Any) -> Any:
    call = served.generations.Complete(
        pb.CompleteRequest(params=params_of(**params)), timeout=timeout
    )
    return asyncio.ensure_future(_awaited(call))


async def _awaited(call: Any) -> Any:
    return await call


async def test_generate_streams_accepted_deltas_finished(served: Harness) -> None:
    call = generate(served, max_tokens=4, seed=1)
    await served.engine.submitted()
    served.engine.step(2)
    served.engine.step(2)
    events = [event async for event in call]
    kinds = [e.WhichOneof("event") for e in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    assert "".join(e.delta.text for e in events) == text_of(4)
    assert events[0].accepted.seed == 1
    assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH
    assert await call.code() is grpc.StatusCode.OK


async def test_complete_gives_the_same_as_generate(served: Harness) -> None:
    call = complete(served, max_tokens=4, seed=1)
    await served.engine.submitted()
    served.engine.step(3)
    served.engine.step(3)
    response = await call
    assert (response.text, list(response.token_ids)) == (text_of(4), [0, 1, 2, 3])
    assert response.seed == 1
    assert response.finished.usage.completion_tokens == 4


# gRPC counts in milliseconds, and by another clock.
CLOCKS_S = 0.02


@pytest.mark.parametrize("timeout_s", [0.9, 1.003, 5.0, 10.001, 50.0, 99.95, 100.1, 600.0, 4000.0])
async def test_the_deadline_of_the_call_bounds_the_generation(
    served: Harness, timeout_s: float
) -> None:
    """It is 50 ms before the client's own, although the timeout was rounded up on its way."""
    begun = time.monotonic()
    call = generate(served, timeout=timeout_s)
    request = (await served.engine.submitted())[0]
    assert begun + timeout_s * 0.99 - 0.05 - CLOCKS_S < _deadline(request)
    assert _deadline(request) <= request.arrived + timeout_s - 0.05
    call.cancel()


def _deadline(request: Request) -> float:
    """The deadline, to be held between bounds that no delay can break.

    The timeout travels as a duration. It begins anew when the server has read the call, which is
    after the client began and before the request arrived. However long that took, the deadline is
    at least the time left after the beginning, and at most that after the arrival.
    """
    assert request.deadline is not None
    return request.deadline


@pytest.mark.parametrize(("call_s", "own_s", "earlier"), [(50.0, 3, 3.0), (3.0, 50, 2.95)])
async def test_the_earlier_deadline_wins(
    served: Harness, call_s: float, own_s: int, earlier: float
) -> None:
    params = params_of()
    params.timeout.CopyFrom(Duration(seconds=own_s))
    begun = time.monotonic()
    call = served.generations.Generate(pb.GenerateRequest(params=params), timeout=call_s)
    request = (await served.engine.submitted())[0]
    assert begun + earlier * 0.98 < _deadline(request) <= request.arrived + earlier
    call.cancel()


async def test_the_time_of_a_step_is_kept_free_within_reason(served: Harness) -> None:
    """The engine looks at deadlines between steps; but one slow step must not refuse everything."""
    now = time.monotonic()
    for step_s, taken in ((0.0, 0.0), (2.0, 2.0), (30.0, 5.0)):
        report = served.engine._report([], now)
        served.server._report(replace(report, ended=now + step_s))
        count = len(served.engine.requests)
        begun = time.monotonic()
        call = generate(served, timeout=20.0)
        request = (await served.engine.submitted(count + 1))[-1]
        usable = 20 - 0.2 - 0.05 - taken
        assert begun + usable - CLOCKS_S < _deadline(request) <= request.arrived + usable + 0.2
        call.cancel()


async def test_a_deadline_ends_generate_with_an_event(served: Harness) -> None:
    call = generate(served, timeout=60.0)
    await served.engine.submitted()
    served.engine.step(3)
    served.engine.clock = lambda: time.monotonic() + 61
    served.engine.step()
    events = [event async for event in call]
    assert events[-1].finished.reason == pb.FINISH_REASON_DEADLINE
    assert events[-1].finished.usage.completion_tokens == events[-2].delta.seq == 3
    assert await call.code() is grpc.StatusCode.OK


async def test_a_deadline_ends_complete_with_what_there_is(served: Harness) -> None:
    call = complete(served, timeout=60.0)
    await served.engine.submitted()
    served.engine.step(3)
    served.engine.clock = lambda: time.monotonic() + 61
    served.engine.step()
    response = await call
    assert response.finished.reason == pb.FINISH_REASON_DEADLINE
    assert response.text == text_of(3)


@pytest.mark.parametrize(
    ("reason", "more", "code", "retry"),
    [
        (FinishReason.DEADLINE, {}, "DEADLINE_EXCEEDED", False),
        (FinishReason.DRAINED, {}, "UNAVAILABLE", True),
        (FinishReason.ERROR, {"error": "lost", "retryable": True}, "UNAVAILABLE", True),
        (FinishReason.ERROR, {"error": "NaN"}, "INTERNAL", False),
        (FinishReason.ERROR, {"error": ERRORS[RULED_OUT]}, "INVALID_ARGUMENT", False),
    ],
)
async def test_complete_without_output_says_why(
    served: Harness, reason: FinishReason, more: dict[str, Any], code: str, retry: bool
) -> None:
    call = complete(served)
    request = (await served.engine.submitted())[0]
    served.engine.end(request.id, reason, **more)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode[code]
    found = details(rich(caught.value))
    assert found["ErrorInfo"]["domain"] == "draftwire"
    assert ("RetryInfo" in found) is retry


async def test_generate_reports_an_error_in_band(served: Harness) -> None:
    call = generate(served)
    request = (await served.engine.submitted())[0]
    served.engine.step()
    served.engine.end(request.id, FinishReason.ERROR, error="lost", retryable=True)
    events = [event async for event in call]
    assert events[-1].finished.reason == pb.FINISH_REASON_ERROR
    assert events[-1].finished.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert await call.code() is grpc.StatusCode.OK


async def test_prefill_only_ends_without_output(served: Harness) -> None:
    params = params_of()
    params.prefill_only = True
    call = served.generations.Complete(pb.CompleteRequest(params=params))
    waiting = asyncio.ensure_future(_awaited(call))
    request = (await served.engine.submitted())[0]
    assert request.prefill_only
    served.engine.step()
    response = await waiting
    assert (response.text, list(response.token_ids)) == ("", [])
    assert response.finished.reason == pb.FINISH_REASON_LENGTH
    assert response.finished.usage.prompt_tokens == 2


async def test_a_late_call_is_not_submitted(served: Harness) -> None:
    """Fewer than 50 ms are left: there is no time to end it properly."""
    call = served.generations.Complete(
        pb.CompleteRequest(params=params_of(text="z" * 200_000)), timeout=0.06
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() in (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert not served.engine.requests


@pytest.mark.parametrize("trusted", [True, False])
async def test_the_tenant_is_believed_only_when_trusted(model_dir: Path, trusted: bool) -> None:
    async with running(model_dir, trust_tenant=trusted) as served:
        stub = served.generations
        for metadata in [(("draftwire-tenant", "acme"),), ()]:
            call = stub.Generate(pb.GenerateRequest(params=params_of()), metadata=metadata)
            await call.read()
            call.cancel()
        session = await served.session(metadata=(("draftwire-tenant", "acme"),))
        await session.start("a")
        await session.event("accepted")
    tenants = [request.tenant for request in served.engine.requests]
    assert tenants == (["acme", "default", "acme"] if trusted else ["default"] * 3)


async def test_a_tenant_that_is_no_name_is_refused(model_dir: Path) -> None:
    async with running(model_dir, trust_tenant=True) as served:
        call = served.generations.Generate(
            pb.GenerateRequest(params=params_of()), metadata=(("draftwire-tenant", "t" * 129),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_over_the_limit_is_refused_and_the_server_lives(model_dir: Path) -> None:
    async with running(model_dir, max_message_mib=0.25) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.generations.Complete(
                pb.CompleteRequest(params=params_of(text="x" * (1 << 19)))
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call = complete(served, max_tokens=1)
        await served.engine.submitted()
        served.engine.step()
        async with asyncio.timeout(TIMEOUT_S):
            await call
