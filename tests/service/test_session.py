"""The session stream: order, frames, ids, endings, slow readers."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from engine.outcome import FinishReason
from service.pb import draftwire_pb2 as pb
from service.session import MAX_REPLIES
from tests.service.fakes import eventually, text_of
from tests.service.harness import Client, Harness, details, fields_of, flood, running

CODE = {code.name: code.value[0] for code in grpc.StatusCode}


def text_in(events: list[pb.Event]) -> str:
    return "".join(event.delta.text for event in events)


def ids_in(events: list[pb.Event]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


async def rejected(client: Client, name: str) -> Any:
    event = await client.event("rejected")
    assert event.generation_id == name
    return event.rejected


async def test_events_of_a_generation_come_in_order(served: Harness) -> None:
    client = await served.session()
    await client.start("a", max_tokens=3, seed=7)
    accepted = (await client.event("accepted")).accepted
    assert (accepted.seed, accepted.prompt_tokens, accepted.queue_position) == (7, 2, 0)
    for n in range(3):
        served.engine.step()
        delta = (await client.event("delta")).delta
        assert (delta.text, list(delta.token_ids), delta.seq) == (text_of(1, n), [n], n + 1)
    finished = (await client.event("finished")).finished
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 3)
    assert finished.speculation.by_source["ngram"].accepted == 3
    assert finished.timings.total_s >= finished.timings.ttft_s >= finished.timings.queue_s
    await client.call.done_writing()
    assert await client.done() is grpc.StatusCode.OK


async def test_a_step_is_one_message_for_all_generations_of_a_stream(served: Harness) -> None:
    client = await served.session()
    names = [f"g{n}" for n in range(5)]
    for name in names:
        await client.start(name, max_tokens=50)
    for _ in names:
        await client.event("accepted")
    for n in range(10):
        served.engine.step(3)
        frame = await client.frame()
        assert sorted(event.generation_id for event in frame.events) == names
        assert {event.delta.seq for event in frame.events} == {3 * (n + 1)}


async def test_replies_do_not_wait_for_a_step(served: Harness) -> None:
    client = await served.session()
    await client.start("a")
    await client.event("accepted")
    await client.start("a")
    await rejected(client, "a")
    assert served.engine.steps == 0


async def test_generations_ahead_are_counted_by_class(served: Harness) -> None:
    client = await served.session()
    positions = []
    batch, interactive = pb.PRIORITY_BATCH, pb.PRIORITY_INTERACTIVE
    for n, priority in enumerate([batch, 0, interactive, batch]):
        await client.start(str(n), priority=priority)
        positions.append((await client.event("accepted")).accepted.queue_position)
    assert positions == [0, 0, 0, 3]
    assert [r.priority for r in served.engine.requests] == [2, 1, 0, 2]


async def test_a_seed_is_drawn_reported_and_used_when_none_is_given(served: Harness) -> None:
    client = await served.session()
    seeds = []
    for name in "ab":
        await client.start(name)
        seeds.append((await client.event("accepted")).accepted.seed)
    assert seeds == [request.sampling.seed for request in served.engine.requests]
    assert seeds[0] != seeds[1]


async def test_half_close_lets_running_generations_end(served: Harness) -> None:
    client = await served.session()
    await client.start("a", max_tokens=4)
    await client.start("b", text="y" * 3000, max_tokens=4)  # still being tokenized, maybe
    await client.call.done_writing()
    await served.engine.submitted(2)
    served.engine.step(2)
    served.engine.step(2)
    found = await client.until_finished("a", "b")
    assert text_in(found["a"]) == text_in(found["b"]) == text_of(4)
    assert await client.done() is grpc.StatusCode.OK


async def test_half_close_of_an_idle_session_ends_it(served: Harness) -> None:
    client = await served.session()
    await client.call.done_writing()
    assert await client.done() is grpc.StatusCode.OK


async def test_a_live_id_is_refused_and_its_generation_unharmed(served: Harness) -> None:
    client = await served.session()
    await client.start("a", max_tokens=2)
    await client.event("accepted")
    await client.start("a", max_tokens=2)
    status = await rejected(client, "a")
    assert status.code == CODE["INVALID_ARGUMENT"]
    assert fields_of(status) == ["generation_id"]
    assert details(status)["ErrorInfo"]["reason"] == "DUPLICATE_GENERATION_ID"
    served.engine.step(2)
    found = await client.until_finished("a")
    assert text_in(found["a"]) == text_of(2)
    assert len(served.engine.requests) == 1


async def test_ids_are_free_again_after_the_end_and_on_other_streams(served: Harness) -> None:
    one, two = await served.session(), await served.session()
    await one.start("a", max_tokens=1)
    await two.start("a", max_tokens=1)
    await served.engine.submitted(2)
    served.engine.step()
    await one.until_finished("a")
    await two.until_finished("a")
    await one.start("a", max_tokens=1)
    await served.engine.submitted(3)
    served.engine.step()
    await one.until_finished("a")
    assert len({request.id for request in served.engine.requests}) == 3


async def test_an_id_is_taken_until_its_end_is_on_the_wire(served: Harness) -> None:
    """Else `accepted` of the second "a" could overtake `finished` of the first."""
    client = await served.session()
    await client.start("a", max_tokens=4000)
    request = (await served.engine.submitted())[0]
    await flood(served, request.id)
    served.engine.end(request.id, FinishReason.EOS)
    await client.start("a")
    (session,) = served.server._generation_service._sessions
    await eventually(lambda: len(session._replies) == 1)
    kinds = []
    while "finished" not in kinds:
        kinds.append((await client.event()).WhichOneof("event"))
    assert kinds.index("rejected") < kinds.index("finished")
    assert kinds.count("accepted") == 1


@pytest.mark.parametrize(
    ("fields", "code", "path"),
    [
        ({"generation_id": "x", "cancel": pb.Cancel()}, "INVALID_ARGUMENT", "generation_id"),
        ({"generation_id": "x"}, "INVALID_ARGUMENT", "op"),
        ({"start": pb.GenerationParams(text="hi")}, "INVALID_ARGUMENT", "generation_id"),
        ({"cancel": pb.Cancel()}, "INVALID_ARGUMENT", "generation_id"),
        (
            {"generation_id": "i" * 129, "start": pb.GenerationParams(text="hi")},
            "INVALID_ARGUMENT",
            "generation_id",
        ),
    ],
)
async def test_a_bad_op_is_refused_and_the_stream_goes_on(
    served: Harness, fields: dict[str, Any], code: str, path: str
) -> None:
    client = await served.session()
    await client.send(**fields)
    status = await rejected(client, fields.get("generation_id", "")[:128])
    assert status.code == CODE[code]
    assert fields_of(status) == [path]
    await client.start("i" * 128, max_tokens=1)
    await served.engine.submitted()
    served.engine.step()
    await client.until_finished("i" * 128)


async def test_a_refused_start_does_not_disturb_its_neighbours(served: Harness) -> None:
    client = await served.session()
    await client.start("good", max_tokens=4)
    await served.engine.submitted()
    served.engine.step(2)
    await client.start("bad", temperature=-1.0)
    await client.start("other")
    await served.engine.submitted(2)
    served.engine.step(2)
    found = await client.until_finished("good")
    assert text_in(found["good"]) == text_of(4)
    assert [e.WhichOneof("event") for e in found["bad"]] == ["rejected"]


async def test_a_session_has_a_limit_of_live_generations(model_dir: Path) -> None:
    async with running(model_dir, max_generations_per_session=2) as served:
        client = await served.session()
        for name in "abc":
            await client.start(name, max_tokens=1)
        await served.engine.submitted(2)
        events = [await client.event() for _ in range(3)]
        refused = next(e for e in events if e.WhichOneof("event") == "rejected")
        assert refused.generation_id == "c"
        assert refused.rejected.code == CODE["RESOURCE_EXHAUSTED"]
        found = details(refused.rejected)
        subject = found["QuotaFailure"]["violations"][0]["subject"]
        assert subject == "max_generations_per_session"
        assert "RetryInfo" in found
        served.engine.step()
        await client.until_finished("a", "b")
        await client.start("c")
        await client.event("accepted")


ENDINGS: list[tuple[FinishReason, dict[str, Any], str]] = [
    (FinishReason.STOP, {"matched": "\n\n"}, "stop"),
    (FinishReason.STOP, {"matched": 17}, "stop_token_id"),
    (FinishReason.EOS, {}, ""),
    (FinishReason.LENGTH, {}, ""),
    (FinishReason.CONTEXT, {}, ""),
    (FinishReason.DEADLINE, {}, ""),
    (FinishReason.TIME_BUDGET, {}, ""),
    (FinishReason.DRAINED, {}, ""),
    (FinishReason.ERROR, {"error": "NaN in the logits"}, ""),
    (FinishReason.ERROR, {"error": "child died", "retryable": True}, ""),
]


@pytest.mark.parametrize(("reason", "more", "matched"), ENDINGS)
async def test_every_ending_is_exactly_one_event(
    served: Harness, reason: FinishReason, more: dict[str, Any], matched: str
) -> None:
    client = await served.session()
    await client.start("a")
    request = (await served.engine.submitted())[0]
    served.engine.step(2)
    served.engine.end(request.id, reason, **more)
    events = (await client.until_finished("a"))["a"]
    await client.call.done_writing()
    assert await client.done() is grpc.StatusCode.OK
    assert [e.WhichOneof("event") for e in events].count("finished") == 1
    assert not client._events
    finished = events[-1].finished
    assert finished.reason == pb.FinishReason.Value(f"FINISH_REASON_{reason}")
    assert finished.WhichOneof("matched") == (matched or None)
    assert finished.usage.completion_tokens == 2 == len(ids_in(events))
    if reason is FinishReason.ERROR:
        retryable = bool(more.get("retryable"))
        assert finished.error.code == CODE["UNAVAILABLE" if retryable else "INTERNAL"]
        assert ("RetryInfo" in details(finished.error)) is retryable
        assert more["error"] in finished.error.message
    else:
        assert not finished.HasField("error")


async def test_text_released_at_the_end_still_comes(served: Harness) -> None:
    """Held back text (of a stop string that did not come) is delivered with the last chunk."""
    client = await served.session()
    await client.start("a")
    request = (await served.engine.submitted())[0]
    served.engine.say(request.id, (1,), "")
    await client.event("accepted")
    delta = await client.event("delta")
    assert (delta.delta.text, delta.delta.seq) == ("", 1)
    served.engine.say(request.id, (), "tail", reason=FinishReason.EOS)
    delta = await client.event("delta")
    assert (delta.delta.text, list(delta.delta.token_ids), delta.delta.seq) == ("tail", [], 1)
    await client.event("finished")


async def test_a_slow_reader_gets_everything_in_merged_deltas(model_dir: Path) -> None:
    """20,000 tokens while nothing is read: memory stays flat, neighbours keep their pace."""
    async with running(model_dir, info={"context_limit": 1 << 17, "num_blocks": 1 << 14}) as served:
        slow, fast = await served.session(), await served.session()
        await slow.start("slow", max_tokens=20_000 + 1000)
        request = (await served.engine.submitted())[0]
        said = await flood_one(served, request.id)
        await fast.start("fast", max_tokens=20_000)
        await fast.event("accepted")
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for n in range(200):
            served.engine.step(100)
            assert (await fast.event("delta")).delta.seq == 100 * (n + 1)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 8 << 20
        served.engine.end(request.id, FinishReason.EOS)
        events = (await slow.until_finished("slow"))["slow"]
        deltas = [e.delta for e in events if e.WhichOneof("event") == "delta"]
        assert len(deltas) < said + 50  # and not 200 more: they were merged
        assert deltas[-1].seq == said + 20_000 == len(ids_in(events))
        assert text_in(events).replace("x", "") == text_of(20_000, said)


async def flood_one(served: Harness, request_id: str) -> int:
    sessions = served.server._generation_service._sessions
    others = [s for s in sessions if not s._live]
    for session in others:
        sessions.discard(session)
    try:
        return await flood(served, request_id)
    finally:
        sessions.update(others)


async def test_what_piled_up_leaves_in_messages_that_clients_accept(served: Harness) -> None:
    """100 generations pile up 6 MiB for a slow reader, whose limit for a message is 4 MiB."""
    client = await served.session()
    await client.start("blocker", max_tokens=4000)
    request = (await served.engine.submitted())[0]
    await flood(served, request.id)
    names = [str(n) for n in range(100)]
    for name in names:
        await client.start(name)
    requests = await served.engine.submitted(101)
    for started in requests[1:]:
        served.engine.say(started.id, (1,), "y" * 65536, reason=FinishReason.EOS)
    found = await client.until_finished(*names)
    assert {text_in(found[name]) for name in names} == {"y" * 65536}
    assert max(frame.ByteSize() for frame in client.frames) < 1 << 20


async def test_replies_that_piled_up_leave_in_messages_that_clients_accept(
    served: Harness,
) -> None:
    """As many refusals as are kept, each of the largest kind: 4 MiB and more, in order."""
    client = await served.session()
    await client.start("blocker", max_tokens=4000)
    request = (await served.engine.submitted())[0]
    await flood(served, request.id)
    (session,) = served.server._generation_service._sessions
    bad = pb.GenerationParams(text="hi")
    bad.speculation.sources.extend(["\U0001f600" * 40] * 32)
    names = [f"{n:0128d}" for n in range(MAX_REPLIES - 1)]
    for name in names:
        await client.send(generation_id=name, start=bad)
    await eventually(lambda: len(session._replies) == len(names))
    assert sum(reply.ByteSize() for reply in session._replies) > 4 << 20
    await client.start("late", max_tokens=1)
    late = (await served.engine.submitted(2))[1]
    served.engine.say(late.id, (1,), "z", reason=FinishReason.EOS)
    found = await client.until_finished("late")
    assert [e.WhichOneof("event") for e in found["late"]] == ["accepted", "delta", "finished"]
    assert [name for name in found if name in set(names)] == names
    assert all([e.WhichOneof("event") for e in found[name]] == ["rejected"] for name in names)
    assert max(frame.ByteSize() for frame in client.frames) < 1 << 20


async def test_unread_replies_stop_the_reading_of_ops(served: Harness) -> None:
    """A client that only writes cannot make the server keep replies without end."""
    client = await served.session()
    await client.start("a", max_tokens=4000)
    request = (await served.engine.submitted())[0]
    await flood(served, request.id)
    (session,) = served.server._generation_service._sessions

    nagging = True

    async def nag() -> None:
        while nagging:
            await client.cancel("nobody")

    task = asyncio.create_task(nag())
    await eventually(lambda: len(session._replies) >= MAX_REPLIES)
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert len(session._replies) == MAX_REPLIES
    nagging = False
    served.engine.end(request.id, FinishReason.EOS)
    found = await client.until_finished("a")  # and once it reads, all goes on
    assert found["a"][-1].finished.reason == pb.FINISH_REASON_EOS
    await task


async def test_bytes_that_do_not_parse_are_refused_by_id(served: Harness) -> None:
    raw = served.channel.stream_stream("/draftwire.v1.GenerationService/Session")
    call = raw()
    good = pb.SessionRequest(generation_id="good", start=pb.GenerationParams(text="hi"))
    await call.write(good.SerializeToString())
    bad = pb.SessionRequest(generation_id="bad", start=pb.GenerationParams(text="hi?"))
    await call.write(bad.SerializeToString().replace(b"hi?", b"\xff\xfe?"))
    client = Client(call)
    frames = []
    while len(frames) < 2:
        frames += pb.SessionResponse.FromString(await call.read()).events
    assert [(e.generation_id, e.WhichOneof("event")) for e in frames] == [
        ("good", "accepted"),
        ("bad", "rejected"),
    ]
    assert frames[1].rejected.code == CODE["INVALID_ARGUMENT"]
    await call.write(b"\xff\xff\xff")  # whose is it? then the stream cannot go on
    assert await client.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await served.engine.freed(1)


async def test_the_timeout_is_the_generations_and_not_the_streams(served: Harness) -> None:
    client = await served.session(timeout=1000)
    await client.start("a", timeout=Duration(seconds=5))
    await client.start("b")
    requests = await served.engine.submitted(2)
    assert requests[0].deadline == pytest.approx(requests[0].arrived + 5)
    assert requests[1].deadline is None


async def test_calls_open_at_a_time_are_limited(model_dir: Path) -> None:
    async with running(model_dir, max_streams=2) as served:
        sessions = [await served.session() for _ in range(2)]
        for n, session in enumerate(sessions):
            await session.start(str(n))
            await session.event("accepted")
        third = await served.session()
        assert await third.done() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await sessions[0].call.done_writing()
        served.engine.end(served.engine.requests[0].id, FinishReason.EOS)
        assert await sessions[0].done() is grpc.StatusCode.OK
        fourth = await served.session()
        await fourth.start("x")
        await fourth.event("accepted")
