"""Spans, metrics and log lines of generations; and that none of it can do any harm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.outcome import Finish, FinishReason
from service.logs import OncePerMinute
from service.pb import draftwire_pb2 as pb
from service.spans import parent_from, phases
from service.telemetry import Telemetry
from tests.service.fakes import ScriptedEngine, text_of
from tests.service.harness import Harness, params_of, running

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
TRACEPARENT = ("traceparent", f"00-{TRACE}-{CALLER}-01")


def roots(served: Harness) -> list[ReadableSpan]:
    names = ("text_completion", "chat")
    return [s for s in served.spans.get_finished_spans() if s.name.startswith(names)]


def children(served: Harness, root: ReadableSpan) -> list[ReadableSpan]:
    spans = served.spans.get_finished_spans()
    return [s for s in spans if s.parent and s.parent.span_id == root.context.span_id]


def points(reader: InMemoryMetricReader, name: str) -> list[Any]:
    data = reader.get_metrics_data()
    if data is None:
        return []
    return [
        point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]


def total(reader: InMemoryMetricReader, name: str, **attributes: Any) -> int:
    wanted = {key.replace("__", "."): value for key, value in attributes.items()}
    return sum(
        getattr(point, "value", getattr(point, "count", 0))
        for point in points(reader, name)
        if wanted.items() <= point.attributes.items()
    )


async def finish_one(served: Harness, name: str = "a", **params: Any) -> None:
    session = await served.session()
    await session.start(name, **params)
    await session.event("accepted")
    served.engine.step(params.get("max_tokens", 1))
    await session.until_finished(name)


async def test_one_span_with_its_phases_and_attributes(served: Harness) -> None:
    await finish_one(served, max_tokens=6, seed=2**64 - 1, temperature=0.5)
    (root,) = roots(served)
    assert (root.name, root.kind) == ("text_completion scripted", SpanKind.SERVER)
    assert root.parent is None
    found = dict(root.attributes or {})
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "draftwire",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("length",),
        "draftwire.finish_reason": "LENGTH",
        "draftwire.tenant": "default",
        "draftwire.priority": 1,
        "draftwire.fingerprint": "f00d",
        "draftwire.target_steps": 1,
        "draftwire.drafts.ngram.proposed": 2,
        "draftwire.drafts.ngram.accepted": 1,
    }
    assert expected.items() <= found.items()
    phases = sorted(children(served, root), key=lambda s: s.start_time or 0)
    assert [s.name for s in phases] == ["queue", "prefill", "decode"]
    assert phases[0].start_time == root.start_time
    assert phases[-1].end_time == root.end_time
    for one, next_one in pairwise(phases):
        assert one.end_time == next_one.start_time


async def test_a_chat_is_named_so(served: Harness) -> None:
    messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    call = served.generations.Generate(
        pb.GenerateRequest(params=pb.GenerationParams(messages=messages))
    )
    await call.read()
    call.cancel()
    await served.engine.freed()
    await asyncio.sleep(0)
    assert [s.name for s in roots(served)] == ["chat scripted"]


@pytest.mark.parametrize("method", ["Session", "Generate", "Complete"])
async def test_the_callers_span_is_the_parent(served: Harness, method: str) -> None:
    if method == "Session":
        session = await served.session(metadata=(TRACEPARENT,))
        await session.start("a", max_tokens=1)
        await served.engine.submitted()
        served.engine.step()
        await session.until_finished("a")
    else:
        request = getattr(pb, f"{method}Request")(params=params_of(max_tokens=1))
        call = getattr(served.generations, method)(request, metadata=(TRACEPARENT,))
        waiting = asyncio.ensure_future(_read_all(call))
        await served.engine.submitted()
        served.engine.step()
        await waiting
    (root,) = roots(served)
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == CALLER
    for child in children(served, root):
        assert child.context.trace_id == root.context.trace_id
    (line,) = [line for line in served.logged() if line["event"] == "finished"]
    assert line["trace_id"] == TRACE
    assert line["span_id"] == f"{root.context.span_id:016x}"


async def _read_all(call: Any) -> None:
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


@pytest.mark.parametrize("bad", ["", "junk", "00-0-0-01", f"00-{'0' * 32}-{CALLER}-01"])
async def test_a_traceparent_that_makes_no_sense_is_ignored(served: Harness, bad: str) -> None:
    session = await served.session(metadata=(("traceparent", bad),))
    await session.start("a", max_tokens=1)
    await served.engine.submitted()
    served.engine.step()
    await session.until_finished("a")
    assert roots(served)[0].parent is None
    assert parent_from((("traceparent", b"\xff"),)) == {}


async def test_twenty_streams_do_not_mix(served: Harness) -> None:
    async def one(n: int) -> None:
        parent = ("traceparent", f"00-{n + 1:032x}-{n + 1:016x}-01")
        session = await served.session(metadata=(parent,))
        await session.start("a", max_tokens=3 + n)
        await session.until_finished("a")

    waiting = asyncio.gather(*(one(n) for n in range(20)))
    await served.engine.submitted(20)
    served.engine.play()
    await waiting
    assert len(roots(served)) == 20
    for root in roots(served):
        n = root.context.trace_id - 1
        assert root.parent is not None
        assert root.parent.span_id == n + 1
        assert (root.attributes or {})["gen_ai.usage.output_tokens"] == 3 + n
        names = [s.name for s in children(served, root)]
        assert sorted(names) == ["decode", "prefill", "queue"]
        for child in children(served, root):
            assert root.start_time <= child.start_time <= child.end_time <= root.end_time  # type: ignore[operator]


async def test_every_way_to_end_is_one_ended_span_with_its_status(model_dir: Path) -> None:
    """Finished, cancelled in queue and in decode, deadline, refused three ways, engine error."""
    async with running(model_dir, max_waiting=20) as served:
        engine = served.engine
        session = await served.session()
        await session.start("queued")
        await session.event("accepted")
        await session.cancel("queued")
        await session.event("finished")
        for name in ("decoding", "failing", "lost"):
            await session.start(name)
            await session.event("accepted")
        engine.step(3)
        ids = list(engine.live)
        await session.cancel("decoding")
        await engine.freed(2)
        engine.end(ids[1], FinishReason.ERROR, error="NaN")
        engine.end(ids[2], FinishReason.ERROR, error="gone", retryable=True)
        await session.start("late", timeout=Duration(nanos=1))
        await engine.submitted(5)
        engine.step()
        await session.until_finished("decoding", "failing", "lost", "late")
        await session.start("bad", temperature=-1.0)
        await session.event("rejected")
        await session.start("x")
        await session.start("x")  # refused before it gets anywhere
        await engine.submitted(6)
        engine.die()
        await session.until_finished("x")
        await session.start("refused")  # the engine is not ready
        await served.healthy(2)
        await session.event("rejected")
        endings = {
            (attributes.get("draftwire.finish_reason"), attributes.get("error.type")): span.status
            for span in roots(served)
            for attributes in [span.attributes or {}]
        }
        assert len(roots(served)) == 9
        assert {key: status.status_code for key, status in endings.items()} == {
            ("CANCELLED", None): StatusCode.UNSET,
            ("ERROR", "internal"): StatusCode.ERROR,
            ("ERROR", "retryable"): StatusCode.ERROR,
            ("DEADLINE", None): StatusCode.UNSET,
            (None, "INVALID_REQUEST"): StatusCode.UNSET,
            (None, "DUPLICATE_GENERATION_ID"): StatusCode.UNSET,
            (None, "NOT_READY"): StatusCode.ERROR,
        }
        assert all(span.end_time is not None for span in roots(served))


async def test_metrics_count_what_usage_says(served: Harness) -> None:
    session = await served.session()
    for n in range(4):
        await session.start(str(n), text="x" * (n + 1), max_tokens=2 + n)
        await session.event("accepted")
    await session.start("bad", temperature=-1.0)
    await session.event("rejected")
    for _ in range(5):
        served.engine.step()
    found = await session.until_finished(*map(str, range(4)))
    await session.call.done_writing()
    await session.done()
    usages = [found[str(n)][-1].finished.usage for n in range(4)]
    reader = served.reader
    output = sum(u.completion_tokens for u in usages)
    assert total(reader, "draftwire.tokens", draftwire__token__type="input") == sum(
        u.prompt_tokens for u in usages
    )
    assert total(reader, "draftwire.tokens", draftwire__token__type="output") == output
    assert total(reader, "draftwire.step.tokens") == output
    assert total(reader, "draftwire.generations", draftwire__finish_reason="LENGTH") == 4
    assert total(reader, "draftwire.refusals", draftwire__refusal__reason="INVALID_REQUEST") == 1
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        assert total(reader, f"gen_ai.server.{name}") == 4, name
    assert total(reader, "draftwire.queue.wait", draftwire__class="standard") == 4
    assert total(reader, "draftwire.steps") == 5
    assert total(reader, "draftwire.step.rows") == 5
    assert total(reader, "draftwire.step.phase.duration", draftwire__phase="forward") == 5
    assert total(reader, "draftwire.prefix.queries") == 15
    assert total(reader, "draftwire.prefix.hits") == 10
    for state, blocks in {"used": 4, "cached": 10, "free": 50}.items():
        assert total(reader, "draftwire.kv.blocks", draftwire__kv__state=state) == blocks
    assert total(reader, "draftwire.drafts.proposed", draftwire__source="ngram") == 10
    assert total(reader, "draftwire.drafts.accepted", draftwire__source="ngram") == 5
    for name, counts in (("proposed_at", (5, 5)), ("accepted_at", (5, 0))):
        for position, count in enumerate(counts):
            where = {"draftwire__source": "ngram", "draftwire__position": position}
            assert total(reader, f"draftwire.drafts.{name}", **where) == count
    assert total(reader, "draftwire.queue.depth", draftwire__class="standard") == 0


async def test_cancelled_streams_are_counted_as_cancelled(served: Harness) -> None:
    """The outcome is the engine's word, not a flag of the call."""
    served.engine.play(pause_s=0.002)

    async def one(n: int) -> None:
        call = served.generations.Generate(pb.GenerateRequest(params=params_of(max_tokens=4000)))
        for _ in range(1 + n % 3):
            await call.read()
        call.cancel()

    await asyncio.gather(*(one(n) for n in range(50)))
    await served.engine.freed(50)
    served.engine.pause()
    await asyncio.sleep(0)
    assert total(served.reader, "draftwire.generations", draftwire__finish_reason="CANCELLED") == 50
    assert total(served.reader, "draftwire.generations") == 50
    reasons = [(s.attributes or {})["draftwire.finish_reason"] for s in roots(served)]
    assert reasons == ["CANCELLED"] * 50
    lines = [line for line in served.logged() if line["event"] == "finished"]
    assert [line["reason"] for line in lines] == ["CANCELLED"] * 50


async def test_calls_are_measured_by_method_and_status(served: Harness) -> None:
    await served.models.GetModelInfo(pb.GetModelInfoRequest())
    with pytest.raises(grpc.aio.AioRpcError):
        await served.generations.Complete(pb.CompleteRequest())
    call = served.generations.Generate(pb.GenerateRequest(params=params_of()))
    await call.read()
    call.cancel()
    await served.engine.freed()
    await served.server._calls.quiet.wait()
    found = {
        (p.attributes["rpc.method"], p.attributes["rpc.response.status_code"]): p.count
        for p in points(served.reader, "rpc.server.call.duration")
    }
    assert found == {
        ("draftwire.v1.ModelService/GetModelInfo", "OK"): 1,
        ("draftwire.v1.GenerationService/Complete", "INVALID_ARGUMENT"): 1,
        ("draftwire.v1.GenerationService/Generate", "CANCELLED"): 1,
    }


def test_phases_follow_each_other_and_stop_where_the_generation_did() -> None:
    def spans(**times: float) -> list[tuple[str, float, float]]:
        return phases(Finish(FinishReason.CANCELLED, arrived=1.0, finished=9.0, **times))

    assert spans() == [("queue", 1, 9)]
    assert spans(scheduled=2.0) == [("queue", 1, 2), ("prefill", 2, 9)]
    assert spans(scheduled=2.0, prefilled=4.0) == [
        ("queue", 1, 2),
        ("prefill", 2, 4),
        ("decode", 4, 9),
    ]


async def test_latencies_are_per_token_not_per_chunk(model_dir: Path) -> None:
    """10 ms a step, 4 tokens a step: TTFT is the first step's end, the rest is shared by tokens."""
    now = 1000.0

    def manual(engine: ScriptedEngine) -> None:
        engine.clock = lambda: now

    async with running(model_dir, engine=manual, clock=lambda: now) as served:
        session = await served.session()
        await session.start("a", max_tokens=9)
        await session.event("accepted")
        for _ in range(3):
            now += 0.010
            served.engine.step(4)
        finished = (await session.until_finished("a"))["a"][-1].finished
        assert finished.timings.ttft_s == pytest.approx(0.010)
        assert finished.timings.total_s == pytest.approx(0.030)
        (first,) = points(served.reader, "gen_ai.server.time_to_first_token")
        (per_token,) = points(served.reader, "gen_ai.server.time_per_output_token")
        assert first.sum == pytest.approx(0.010)
        assert per_token.sum == pytest.approx((0.030 - 0.010) / 8)


class RaisingExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        raise RuntimeError("the collector is on fire")


async def test_an_exporter_that_raises_is_harmless(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def on_fire(telemetry: Telemetry) -> Telemetry:
        telemetry.tracer_provider.add_span_processor(SimpleSpanProcessor(RaisingExporter()))
        return telemetry

    with caplog.at_level(logging.CRITICAL, "opentelemetry"):
        async with running(model_dir, telemetry=on_fire) as served:
            await finish_one(served, max_tokens=3)


class Raising:
    """A tracer or a meter of which every span and instrument raises when it is used."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._real, name)
        if name.startswith("create_observable"):
            return made

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise ValueError("negative delta")

        if name.startswith("create_"):
            return lambda *args, **kwargs: type(
                "Instrument", (), {"record": fail, "add": fail, "set": fail}
            )()
        return fail


async def test_when_all_telemetry_raises_generations_are_right(model_dir: Path) -> None:
    class Broken(Telemetry):
        tracer = property(lambda self: Raising(self.tracer_provider.get_tracer("x")))  # type: ignore[assignment]
        meter = property(lambda self: Raising(self.meter_provider.get_meter("x")))  # type: ignore[assignment]

    def broken(telemetry: Telemetry) -> Telemetry:
        return Broken(telemetry.tracer_provider, telemetry.meter_provider)

    async with running(model_dir, telemetry=broken) as served:
        session = await served.session()
        for name in "abc":
            await session.start(name, max_tokens=40)
            await session.event("accepted")
        for _ in range(20):
            served.engine.step(2)
        found = await session.until_finished("a", "b", "c")
        for name in "abc":
            assert "".join(e.delta.text for e in found[name]) == text_of(40)
        await session.start("bad", temperature=-1.0)
        assert (await session.event()).rejected.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        failures = [line for line in served.logged() if line["event"] == "telemetry failed"]
        assert len(failures) == 1  # at most one a minute
        assert "negative delta" in failures[0]["error"]


async def test_prompts_and_outputs_are_never_logged(served: Harness) -> None:
    secret = "s3cr3t-prompt"
    session = await served.session()
    await session.start("a", text=secret)
    request = (await served.engine.submitted())[0]
    served.engine.say(request.id, (1,), "s3cr3t-output", reason=FinishReason.EOS)
    await session.until_finished("a")
    await session.start("b", text=secret, temperature=-1.0)
    await session.event("rejected")
    served.engine.before_submit = lambda request: 1 // 0  # type: ignore[assignment,return-value]
    await session.start("c", text=secret)
    await session.event("rejected")
    spans = "".join(span.to_json() for span in served.spans.get_finished_spans())
    assert "ZeroDivisionError" in served.log.getvalue()
    for where in (served.log.getvalue(), spans):
        assert "s3cr3t" not in where


def test_a_librarys_repeated_line_is_let_through_once_a_minute() -> None:
    now = 0.0
    once = OncePerMinute(lambda: now)
    line = logging.LogRecord("otel", logging.ERROR, "", 0, "failed to %s", ("export",), None)
    other = logging.LogRecord("otel", logging.ERROR, "", 0, "queue full", (), None)
    assert [once.filter(line), once.filter(line), once.filter(other)] == [True, False, True]
    now = 60.0
    assert once.filter(line)
