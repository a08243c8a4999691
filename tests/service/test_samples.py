"""n > 1: each sample has its index, its seed and its end, and all of them are one generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from engine.client import EngineState
from engine.outcome import FinishReason
from engine.request import Request
from service.pb import draftwire_pb2 as pb
from service.status import Reason
from tests.service.fakes import text_of
from tests.service.harness import Client, Harness, details, params_of, running


async def ends(session: Client, name: str, count: int) -> list[pb.Event]:
    """Events up to the last of `count` ends."""
    events = []
    while sum(e.WhichOneof("event") == "finished" for e in events) < count:
        events.append(await session.event())
    assert {e.generation_id for e in events} <= {name}
    return events


def by_index(events: list[Any]) -> dict[int, tuple[str, list[pb.Finished]]]:
    found: dict[int, tuple[str, list[pb.Finished]]] = {}
    for event in events:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            continue
        part = getattr(event, kind)
        text, ended = found.get(part.index, ("", []))
        assert not ended, "something after the end"
        found[part.index] = (text, [part]) if kind == "finished" else (text + part.text, [])
    return found


@pytest.mark.parametrize("n", [1, 2, 16])
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 2])
async def test_each_has_text_seed_and_one_end(served: Harness, n: int, seed: int) -> None:
    session = await served.session()
    await session.start("a", n=n, seed=seed, max_tokens=6)
    accepted = (await session.event("accepted")).accepted
    assert accepted.seed == seed
    requests = await served.engine.submitted(n)
    assert [r.sampling.seed for r in requests] == [(seed + i) % 2**64 for i in range(n)]
    assert len({r.id for r in requests}) == n
    assert {r.group for r in requests} == {requests[0].id if n > 1 else ""}
    assert sorted(requests, key=lambda r: (r.arrived, r.id)) == requests
    served.engine.step(2)
    served.engine.step(4)
    found = by_index(await ends(session, "a", n))
    assert sorted(found) == list(range(n))
    assert {text for text, _ in found.values()} == {text_of(6)}
    usage = [found[i][1][0].usage for i in range(n)]
    assert [u.completion_tokens for u in usage] == [6] * n
    assert [u.prompt_tokens for u in usage] == [accepted.prompt_tokens] + [0] * (n - 1)


async def test_generate_and_complete(served: Harness) -> None:
    params = params_of(n=3, seed=5, max_tokens=4)
    stream = served.generations.Generate(pb.GenerateRequest(params=params))
    whole = served.generations.Complete(pb.CompleteRequest(params=params))
    requests = await served.engine.submitted(6)
    served.engine.end(requests[1].id, FinishReason.EOS)
    served.engine.step(4)
    found = by_index([event async for event in stream])
    assert sorted(found) == [0, 1, 2]
    response = await whole
    others = list(response.samples)
    assert [r.seed for r in (response, *others)] == [5, 6, 7]
    assert [r.finished.index for r in (response, *others)] == [0, 1, 2]
    assert not any(r.samples for r in others)
    texts = [found[i][0] for i in range(3)], [r.text for r in (response, *others)]
    assert sorted(texts) == [["0 1 2 3 ", "", "0 1 2 3 "], ["0 1 2 3 "] * 3]


async def test_complete_fails_if_one_of_them_did(served: Harness) -> None:
    whole = served.generations.Complete(pb.CompleteRequest(params=params_of(n=3, max_tokens=4)))
    requests = await served.engine.submitted(3)
    served.engine.end(requests[2].id, FinishReason.ERROR, error="broken")
    served.engine.step(4)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await whole
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_a_cancel_ends_all_and_the_id_is_free_after_the_last(served: Harness) -> None:
    served.engine.hold_cancels = True
    session = await served.session()
    await session.start("a", n=3, max_tokens=50)
    await session.event("accepted")
    requests = await served.engine.submitted(3)
    served.engine.end(requests[0].id, FinishReason.EOS)
    assert (await session.event("finished")).finished.reason == pb.FINISH_REASON_EOS
    await session.cancel("a")
    await served.engine.freed(2)
    assert {name for name, _ in served.engine.cancels} == {r.id for r in requests[1:]}
    served.engine.end(requests[2].id, FinishReason.CANCELLED)
    assert (await session.event("finished")).finished.index == 2
    await session.start("a")
    refusal = (await session.event("rejected")).rejected
    assert details(refusal)["ErrorInfo"]["reason"] == Reason.DUPLICATE_GENERATION_ID.value
    served.engine.end(requests[1].id, FinishReason.CANCELLED)
    assert (await session.event("finished")).finished.index == 1
    await session.start("a")
    await session.event("accepted")


async def test_a_client_that_leaves_cancels_all(served: Harness) -> None:
    session = await served.session()
    await session.start("a", n=4, max_tokens=50)
    await session.event("accepted")
    session.call.cancel()
    await served.engine.freed(4)
    stream = served.generations.Generate(pb.GenerateRequest(params=params_of(n=4, max_tokens=50)))
    await stream.read()
    stream.cancel()
    await served.engine.freed(8)
    assert not served.engine.live


async def test_an_engine_that_dies_ends_each_of_them(served: Harness) -> None:
    session = await served.session()
    await session.start("a", n=3, max_tokens=50)
    await session.event("accepted")
    await served.engine.submitted(3)
    served.engine.die()
    found = by_index(await ends(session, "a", 3))
    assert [found[i][1][0].reason for i in range(3)] == [pb.FINISH_REASON_ERROR] * 3


@pytest.mark.parametrize("last", [1, 2, 3])
async def test_an_engine_that_dies_among_the_submits(served: Harness, last: int) -> None:
    """Refused if nothing was submitted; else each of them ends."""

    def die(request: Request) -> None:
        if len(served.engine.requests) == last - 1:
            served.engine.state = EngineState.RESTARTING

    served.engine.before_submit = die
    session = await served.session()
    await session.start("a", n=3, max_tokens=50)
    if last == 1:
        refusal = (await session.event("rejected")).rejected
        assert details(refusal)["ErrorInfo"]["reason"] == Reason.NOT_READY.value
        return
    await session.event("accepted")
    for request in list(served.engine.live.values()):
        served.engine.end(request.request.id, FinishReason.ERROR, error="died", retryable=True)
    found = by_index(await ends(session, "a", 3))
    assert [found[i][1][0].error.code for i in range(3)] == [
        grpc.StatusCode.UNAVAILABLE.value[0]
    ] * 3


async def test_places_in_the_queue(model_dir: Path) -> None:
    """All of them or none; the prompt counts once; an empty queue takes any."""
    async with running(model_dir, max_waiting=10, max_waiting_tokens=50) as served:
        session = await served.session()
        await session.start("a", text="x" * 40, n=16, max_tokens=5)
        await session.event("accepted")
        assert served.server._admission.waiting == 16
        await session.start("b")
        refusal = (await session.event("rejected")).rejected
        assert details(refusal)["ErrorInfo"]["reason"] == Reason.QUEUE_FULL.value
        served.engine.step(5)
        await ends(session, "a", 16)
        assert served.server._admission.waiting == 0
        await session.start("c", n=8)
        await session.event("accepted")
        await session.start("d", n=3)
        await session.event("rejected")
        assert len(served.engine.requests) == 16 + 8


async def test_each_is_recorded_once(served: Harness) -> None:
    session = await served.session()
    await session.start("a", n=3, max_tokens=5, timeout=Duration(seconds=60))
    await session.event("accepted")
    served.engine.step(5)
    await ends(session, "a", 3)
    logged = [line for line in served.logged() if line["event"] == "finished"]
    assert len({line["generation"] for line in logged}) == len(logged) == 3
    assert sorted(line["prompt_tokens"] for line in logged)[:2] == [0, 0]
    roots = [s for s in served.spans.get_finished_spans() if "scripted" in s.name]
    assert len(roots) == 3


async def test_the_first_tells_the_prompt(served: Harness) -> None:
    session = await served.session()
    await session.start("a", n=3, output=pb.Output(prompt_logprobs=1, logprobs=2))
    requests = await served.engine.submitted(3)
    assert [r.output.prompt_logprobs for r in requests] == [1, None, None]
    assert [r.output.logprobs for r in requests] == [2, 2, 2]
