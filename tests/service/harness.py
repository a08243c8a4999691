"""A real server on a port of its own over a scripted engine, and clients for it."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.client import EngineListener
from engine.types import ModelInfo
from service.logs import make_log
from service.pb import draftwire_pb2 as pb
from service.pb import draftwire_pb2_grpc as rpc
from service.server import Server
from service.settings import ServeSettings
from service.telemetry import Telemetry, build
from tests.service.fakes import TIMEOUT_S, ScriptedEngine

BOS, IM_START, IM_END = "<|bos|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def write_model(directory: Path, chat: bool = True) -> Path:
    """Tokenizer files of a byte-level model: one id per byte, then three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (BOS, IM_START, IM_END)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": BOS, "special": True}
    config: dict[str, Any] = {"bos_token": bos, "eos_token": IM_END}
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def model_info(directory: Path, **changes: Any) -> ModelInfo:
    values: dict[str, Any] = {
        "model": "scripted",
        "architecture": "ScriptedForCausalLM",
        "directory": str(directory),
        "context_limit": 4096,
        "vocab_size": 300,
        "eos_ids": (258,),
        "dtype": "float32",
        "device": "cpu",
        "draft_sources": ("ngram",),
        "max_draft_tokens": 6,
        "block_size": 16,
        "num_blocks": 512,
        "fingerprint": "f00d",
        "not_strict_because": "scripted",
        "kv_dtype": "int8",
    }
    return ModelInfo(**{**values, **changes})


@dataclass
class Harness:
    server: Server
    engine: ScriptedEngine
    channel: grpc.aio.Channel
    spans: InMemorySpanExporter
    reader: InMemoryMetricReader
    log: io.StringIO
    info: ModelInfo

    @property
    def generations(self) -> Any:
        return rpc.GenerationServiceStub(self.channel)

    @property
    def models(self) -> Any:
        return rpc.ModelServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    async def serving(self, service: str = "") -> None:
        """Until health says SERVING."""
        await self.healthy(SERVING, service)

    async def healthy(self, status: int, service: str = "") -> None:
        call = self.health.Watch(health_pb2.HealthCheckRequest(service=service))
        async with asyncio.timeout(TIMEOUT_S):
            async for response in call:
                if response.status == status:
                    break
        call.cancel()

    async def session(self, **options: Any) -> Client:
        return Client(self.generations.Session(**options))

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    async def stop(self, grace_s: float = 0.0) -> None:
        await self.server.stop(grace_s, asyncio.Event())


class Client:
    """One session stream as a client sees it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._events: list[pb.Event] = []
        self.frames: list[pb.SessionResponse] = []

    async def start(self, name: str, **params: Any) -> None:
        await self.send(generation_id=name, start=params_of(**params))

    async def cancel(self, name: str) -> None:
        await self.send(generation_id=name, cancel=pb.Cancel())

    async def send(self, **fields: Any) -> None:
        await self.call.write(pb.SessionRequest(**fields))

    async def frame(self) -> pb.SessionResponse:
        async with asyncio.timeout(TIMEOUT_S):
            frame = await self.call.read()
        assert frame is not grpc.aio.EOF
        self.frames.append(frame)
        return frame

    async def event(self, kind: str = "") -> pb.Event:
        """The next event, which must be a `kind`."""
        while not self._events:
            self._events += (await self.frame()).events
        event = self._events.pop(0)
        if kind:
            assert event.WhichOneof("event") == kind, event
        return event

    async def until_finished(self, *names: str) -> dict[str, list[pb.Event]]:
        """Events by generation, until each of `names` has finished."""
        found: dict[str, list[pb.Event]] = {name: [] for name in names}
        ended: set[str] = set()
        while ended < set(names):
            event = await self.event()
            found.setdefault(event.generation_id, []).append(event)
            if event.WhichOneof("event") == "finished":
                ended.add(event.generation_id)
        return found

    async def done(self) -> grpc.StatusCode:
        """The status. It comes after the last message, so those are read (and kept) first."""
        async with asyncio.timeout(TIMEOUT_S):
            with suppress(grpc.aio.AioRpcError):
                while (frame := await self.call.read()) is not grpc.aio.EOF:
                    self.frames.append(frame)
                    self._events += frame.events
            return await self.call.code()


async def flood(harness: Harness, request_id: str) -> int:
    """Say more than gRPC takes from the one open session, whose writer is then stuck in a write.

    Returns how many tokens were said, each with a text of 64 KiB.
    """
    (session,) = harness.server._generation_service._sessions
    said = 0
    async with asyncio.timeout(TIMEOUT_S):
        untouched = 0  # turns of the loop in a row in which nothing was taken
        while untouched < 50:
            if session._outbox._marked:
                untouched += 1
            else:
                untouched = 0
                harness.engine.say(request_id, (said,), "x" * 65536)
                said += 1
            await asyncio.sleep(0.001)
    return said


def params_of(text: str = "hi", **fields: Any) -> pb.GenerationParams:
    """Params with a text prompt; `max_tokens` and the like may be given directly."""
    stopping = {k: fields.pop(k) for k in ("max_tokens", "stop") if k in fields}
    sampling = {k: fields.pop(k) for k in ("temperature", "seed") if k in fields}
    params = pb.GenerationParams(text=text, **fields)
    if stopping:
        params.stopping.MergeFrom(pb.Stopping(**stopping))
    if sampling:
        params.sampling.MergeFrom(pb.Sampling(**sampling))
    return params


def details(status: status_pb2.Status) -> dict[str, Any]:
    """The details of a rich status by type name."""
    found: dict[str, Any] = {}
    for any_ in status.details:
        kind = getattr(error_details_pb2, any_.TypeName().rpartition(".")[2])()
        any_.Unpack(kind)
        found[any_.TypeName().rpartition(".")[2]] = MessageToDict(kind)
    return found


def rich(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The rich status of a failed call; it must agree with the plain one."""
    trailing = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    return status


def fields_of(status: status_pb2.Status) -> list[str]:
    """Field paths of the BadRequest in a status."""
    violations = details(status).get("BadRequest", {}).get("fieldViolations", [])
    return [violation.get("field", "") for violation in violations]


def memory_telemetry(
    exporter: SpanExporter,
) -> tuple[Telemetry, InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    telemetry = build("test", None, reader, ALWAYS_ON)
    telemetry.tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    return telemetry, reader


@asynccontextmanager
async def running(
    directory: Path,
    *,
    ready: bool = True,
    engine: Callable[[ScriptedEngine], None] = lambda engine: None,
    telemetry: Callable[[Telemetry], Telemetry] = lambda telemetry: telemetry,
    info: dict[str, Any] | None = None,
    options: tuple[tuple[str, Any], ...] = (),
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> AsyncIterator[Harness]:
    """A server, SERVING if `ready`; `engine` and `telemetry` may change theirs before the start."""
    made: list[ScriptedEngine] = []
    described = model_info(directory, **(info or {}))

    def make_client(listener: EngineListener) -> ScriptedEngine:
        made.append(ScriptedEngine(listener, described, hold_start=not ready))
        engine(made[0])
        return made[0]

    exporter = InMemorySpanExporter()
    built, reader = memory_telemetry(exporter)
    log = io.StringIO()
    chosen = ServeSettings(**{"listen": "127.0.0.1:0", "model": "scripted", **settings})
    lines = make_log("debug", "json", log)
    server = Server(chosen, make_client, telemetry(built), lines, clock=clock)
    await server.start()
    channel = grpc.aio.insecure_channel(server.address, options=options)
    harness = Harness(server, made[0], channel, exporter, reader, log, described)
    try:
        if ready:
            await harness.serving()
        yield harness
    finally:
        await channel.close()
        if not server.stopped:
            await harness.stop()
