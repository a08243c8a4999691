"""A real server over the real engine with a model of hashes, in threads of this process."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.client import EngineListener
from engine.core import Engine
from engine.host import LastReport
from engine.outcome import FinishReason
from engine.thread import ThreadClient
from engine.types import Drawn, Feed, Model, ModelInfo
from service.logs import make_log
from service.pb import draftwire_pb2 as pb
from service.pb import draftwire_pb2_grpc as rpc
from service.server import Server
from service.settings import ServeSettings
from tests.engine.fakes import BLOCK, EOS, VOCAB, Rig
from tests.service.fakes import TIMEOUT_S
from tests.service.harness import Client, memory_telemetry, model_info

BLOCKS = 1024


class Gate:
    """Holds the model up after so many passes, if it is told to."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._open = threading.Event()
        self.held = threading.Event()

    def hold_after(self, passes: int) -> None:
        self._left = passes
        self._open.clear()
        self.held.clear()

    def release(self) -> None:
        self._left = None
        self._open.set()

    def __call__(self, model: Model) -> Model:
        return _Gated(model, self)

    def enter(self) -> None:
        if self._left == 0:
            self.held.set()
            assert self._open.wait(TIMEOUT_S)
        elif self._left is not None:
            self._left -= 1


@dataclass(frozen=True)
class _Gated:
    model: Model
    gate: Gate

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        self.gate.enter()
        return self.model.run(feeds)


class CountingClient(ThreadClient):
    """Knows how often it was told to cancel."""

    cancels = 0

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        super().cancel(request_id, reason)
        self.cancels += 1


@dataclass
class Hashed:
    server: Server
    client: CountingClient
    channel: grpc.aio.Channel
    gate: Gate

    @property
    def target(self) -> str:
        return self.server.address

    @property
    def generations(self) -> Any:
        return rpc.GenerationServiceStub(self.channel)

    def session(self) -> Client:
        return Client(self.generations.Session())

    async def stop(self) -> None:
        await self.server.stop(0.0, asyncio.Event())


def ids_of(*ids: int, n: int = 1, seed: int | None = None, **stopping: Any) -> pb.GenerationParams:
    """Params with a prompt of ids; the rest is of `stopping`."""
    params = pb.GenerationParams(token_ids=pb.TokenIds(ids=ids), stopping=pb.Stopping(**stopping))
    if n > 1:
        params.n = n
    if seed is not None:
        params.sampling.seed = seed
    return params


@asynccontextmanager
async def hashing(
    directory: Path, *, info: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Hashed]:
    """A server that is ready. Token t of its vocabulary of seven is a letter; 0 ends an output."""
    gate = Gate()
    facts: dict[str, Any] = {
        "vocab_size": VOCAB,
        "eos_ids": (EOS,),
        "block_size": BLOCK,
        "num_blocks": BLOCKS,
        "strict": True,
        "not_strict_because": "",
        **(info or {}),
    }
    described = model_info(directory, **facts)

    def make_engine(_: LastReport) -> tuple[Engine, ModelInfo]:
        return Rig(num_blocks=BLOCKS, draft="ngram", wrap=gate).engine, described

    made: list[CountingClient] = []

    def make_client(listener: EngineListener) -> CountingClient:
        made.append(CountingClient(make_engine, listener))
        return made[0]

    telemetry, _ = memory_telemetry(InMemorySpanExporter())
    chosen = ServeSettings(**{"listen": "127.0.0.1:0", "model": "hash", **settings})
    log = make_log("debug", "json", io.StringIO())
    server = Server(chosen, make_client, telemetry, log, clock=time.monotonic)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        served = Hashed(server, made[0], channel, gate)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while server._admission.model is None:  # noqa: ASYNC110 - nobody announces it
                    await asyncio.sleep(0.002)
            yield served
        finally:
            gate.release()
            if not server.stopped:
                await served.stop()
