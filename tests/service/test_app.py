"""The process: exit codes, signals, the port file, and what is (not) imported."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.client import EngineListener
from engine.errors import ConfigError, ModelError
from service import app
from service.app import ERROR, MISCONFIGURED, OK, StopSignals, announced, serve
from service.logs import make_log
from service.pb import draftwire_pb2 as pb
from service.pb import draftwire_pb2_grpc as rpc
from service.settings import ServeSettings
from tests.service.fakes import ScriptedEngine, eventually
from tests.service.harness import Client, model_info


def scripted(
    model_dir: Path, change: Callable[[ScriptedEngine], None] = lambda engine: None
) -> Callable[[EngineListener], ScriptedEngine]:
    def make(listener: EngineListener) -> ScriptedEngine:
        engine = ScriptedEngine(listener, model_info(model_dir))
        change(engine)
        return engine

    return make


def settings(tmp_path: Path, **more: Any) -> ServeSettings:
    return ServeSettings(**{"listen": "127.0.0.1:0", "port_file": tmp_path / "port", **more})


async def test_it_serves_until_told_to_stop(model_dir: Path, tmp_path: Path) -> None:
    log, stop = io.StringIO(), StopSignals()
    chosen = settings(tmp_path, grace_s=5)
    task = asyncio.create_task(
        serve(chosen, scripted(model_dir), make_log("info", "json", log), stop)
    )
    await eventually(lambda: "ready" in log.getvalue() or task.done())
    address = (tmp_path / "port").read_text().strip()
    async with grpc.aio.insecure_channel(address) as channel:
        session = Client(rpc.GenerationServiceStub(channel).Session())
        await session.start("a")
        await session.event("accepted")
        stop.notice()
        await session.event("draining")
        stop.notice()  # a second signal: at once, although the grace period is not over
        assert await task == OK
    events = [json.loads(line)["event"] for line in log.getvalue().splitlines()]
    assert events[0] == "starting"
    assert [e for e in events if e in ("listening", "ready", "draining", "stopped")] == [
        "listening",
        "ready",
        "draining",
        "stopped",
    ]
    line = next(json.loads(x) for x in log.getvalue().splitlines() if '"ready"' in x)
    assert (line["address"], line["model"]) == (address, "scripted")
    assert line["seconds"] >= 0


async def test_a_busy_port_is_an_error_that_names_it(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        chosen = settings(tmp_path, listen=address)
        log = make_log("info", "json", io.StringIO())
        assert await serve(chosen, scripted(model_dir), log, StopSignals()) == ERROR
    error = capsys.readouterr().err
    assert address in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "port").exists()


async def test_a_model_that_cannot_work_is_exit_code_2(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(engine: ScriptedEngine) -> None:
        engine.start = lambda: engine.fail("weights are truncated")  # type: ignore[method-assign]

    log = make_log("info", "json", io.StringIO())
    code = await serve(settings(tmp_path), scripted(model_dir, fails), log, StopSignals())
    assert code == MISCONFIGURED
    assert capsys.readouterr().err == "draftwire: weights are truncated\n"


@pytest.mark.parametrize("error", [ConfigError("bad draft"), ModelError("no such model 'x'")])
def test_a_model_that_cannot_be_had_is_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: ConfigError,
) -> None:
    def factory(settings: ServeSettings) -> Any:
        raise error

    monkeypatch.setattr(app, "engine_factory", factory)
    assert app.run(settings(tmp_path)) == MISCONFIGURED
    assert f"draftwire: {error}\n" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    def ready_and_signal(engine: ScriptedEngine) -> None:
        start = engine.start

        def begin() -> None:
            start()
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()

        engine.start = begin  # type: ignore[method-assign]

    monkeypatch.setattr(
        app, "engine_factory", lambda settings: scripted(model_dir, ready_and_signal)
    )
    before = signal.getsignal(number)
    assert app.run(settings(tmp_path)) == OK
    assert signal.getsignal(number) == before
    assert '"event": "stopped"' in capsys.readouterr().err


IMPORTS = """
import sys
import service.app, service.server
heavy = {"torch", "transformers", "triton"} & set(sys.modules)
assert not heavy, heavy
import logging, structlog
assert not logging.getLogger().handlers
assert not structlog.is_configured()
from opentelemetry import trace
from opentelemetry.trace import ProxyTracerProvider
assert isinstance(trace.get_tracer_provider(), ProxyTracerProvider)
"""


def test_the_services_process_has_no_torch_and_importing_has_no_effect() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=60)


def test_spans_and_metrics_reach_a_collector(model_dir: Path, tmp_path: Path) -> None:
    """OTLP end to end: what a stopping server still had is flushed before it is gone."""
    from concurrent.futures import ThreadPoolExecutor

    from opentelemetry.proto.collector.metrics.v1 import (
        metrics_service_pb2,
        metrics_service_pb2_grpc,
    )
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    spans: list[str] = []
    metrics: set[str] = set()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            for resource in request.resource_spans:
                spans.extend(s.name for scope in resource.scope_spans for s in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            for resource in request.resource_metrics:
                metrics.update(m.name for scope in resource.scope_metrics for m in scope.metrics)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    collector = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), collector)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), collector)
    endpoint = f"http://127.0.0.1:{collector.add_insecure_port('127.0.0.1:0')}"
    collector.start()
    chosen = settings(tmp_path, telemetry="otlp", otlp_endpoint=endpoint)

    async def ten_requests() -> int:
        stop, log = StopSignals(), io.StringIO()
        made: list[ScriptedEngine] = []
        factory = scripted(model_dir, made.append)
        task = asyncio.create_task(serve(chosen, factory, make_log("info", "json", log), stop))
        await eventually(lambda: "ready" in log.getvalue() or task.done())
        made[0].play()
        async with grpc.aio.insecure_channel((tmp_path / "port").read_text().strip()) as channel:
            stub = rpc.GenerationServiceStub(channel)
            params = pb.GenerationParams(text="hi", stopping=pb.Stopping(max_tokens=3))
            calls = [stub.Complete(pb.CompleteRequest(params=params)) for _ in range(10)]
            for call in calls:
                await call
        stop.notice()
        return await task

    try:
        assert asyncio.run(ten_requests()) == OK
    finally:
        collector.stop(None).wait()
    assert sorted(set(spans)) == ["decode", "prefill", "queue", "text_completion smollm2-135m"]
    assert len(spans) == 40
    assert {
        "gen_ai.server.request.duration",
        "draftwire.steps",
        "rpc.server.call.duration",
    } < metrics


def test_a_dead_collector_holds_up_neither_requests_nor_the_stop(
    model_dir: Path, tmp_path: Path
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, never listening
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        chosen = settings(tmp_path, telemetry="otlp", otlp_endpoint=endpoint)

        async def one_request() -> float:
            stop, log = StopSignals(), io.StringIO()
            made: list[ScriptedEngine] = []
            factory = scripted(model_dir, made.append)
            task = asyncio.create_task(serve(chosen, factory, make_log("info", "json", log), stop))
            await eventually(lambda: "ready" in log.getvalue() or task.done())
            made[0].play()
            async with grpc.aio.insecure_channel((tmp_path / "port").read_text().strip()) as chan:
                params = pb.GenerationParams(text="hi", stopping=pb.Stopping(max_tokens=3))
                stub = rpc.GenerationServiceStub(chan)
                await stub.Complete(pb.CompleteRequest(params=params))
            loop = asyncio.get_running_loop()
            asked = loop.time()
            stop.notice()
            assert await task == OK
            return loop.time() - asked

        assert asyncio.run(one_request()) < 8


def test_the_port_file_goes_with_the_server_that_wrote_it(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    with announced("127.0.0.1:1", port_file):
        assert port_file.read_text().strip() == "127.0.0.1:1"
    assert not port_file.exists()
    with announced("127.0.0.1:1", port_file), announced("127.0.0.1:2", port_file):
        pass
    with announced("127.0.0.1:1", port_file):
        port_file.write_text("127.0.0.1:2\n")  # a successor's
    assert port_file.read_text().strip() == "127.0.0.1:2"
    with announced("127.0.0.1:1", None):
        pass
