"""The composition root: the one place that knows every concrete class, and the order of stopping.

start   bind → health NOT_SERVING → engine in the background → health SERVING once it is ready
stop    health NOT_SERVING → new requests refused, sessions told → running generations end, up
        to the grace period → the rest end with DRAINED → server → engine → records → telemetry
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import grpc

from engine.client import EngineClient, EngineListener
from engine.observer import StepReport
from engine.outcome import FinishReason
from service.admission import Admission
from service.caller import Callers
from service.checks import Limits
from service.generations import Generations
from service.grammars import GrammarChecks
from service.handlers import Calls
from service.harmless import Harmless
from service.health import Health, add_reflection
from service.lifecycle import Lifecycle
from service.metrics import CallMetrics, GenerationMetrics, RecordingMetrics, StepMetrics
from service.model_service import ModelService
from service.pb import draftwire_pb2 as pb
from service.record import Log, Recorder
from service.recording import FileRecordings, NoRecordings, Recordings
from service.recording_writer import Losses, Writer
from service.router import Router
from service.segments import Segments
from service.servicer import GenerationService
from service.settings import ServeSettings
from service.spans import SpanSource
from service.telemetry import Telemetry
from service.tokenize import load_codec

ClientFactory = Callable[[EngineListener], EngineClient]

TOKENIZER_THREADS = 2
# For what follows a generation's end: its last event on the wire, its record.
LAST_WORDS_S = 2.0
AT_ONCE_S = 0.5
# For calls without generations (health watches).
STOP_GRACE_S = 0.1
# For records that wait for the disk, however much of the grace is left.
MOST_FLUSH_S = 5.0


class BindError(Exception):
    """The address cannot be listened on."""


class Server:
    """Everything behind one address. Make it on the event loop; `start`, then `stop`, once each."""

    def __init__(
        self,
        settings: ServeSettings,
        make_client: ClientFactory,
        telemetry: Telemetry,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._executor = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize")
        self._harmless = Harmless(log, clock)
        self._steps = StepMetrics(telemetry.meter)
        self._services = tuple(pb.DESCRIPTOR.services_by_name.values())
        self._admission = Admission(settings.max_waiting, settings.max_waiting_tokens, clock)
        self._health = Health(self._service_names)
        recorder = Recorder(
            spans=SpanSource(telemetry.tracer, clock, wall),
            metrics=GenerationMetrics(telemetry.meter, settings.model),
            harmless=self._harmless,
            log=log,
            model=settings.model,
            clock=clock,
        )
        self.lifecycle = Lifecycle(
            admission=self._admission,
            health=self._health,
            recorder=recorder,
            load_codec=lambda directory: load_codec(directory, self._executor),
            log=log,
            clock=clock,
        )
        self._router = Router(self.lifecycle, self._report)
        self._client = make_client(self._router)
        self._grammars = GrammarChecks()
        self._recordings = self._make_recordings(log, wall)
        generations = Generations(
            client=self._client,
            router=self._router,
            admission=self._admission,
            limits=_limits(settings),
            grammars=self._grammars,
            recorder=recorder,
            recordings=self._recordings,
            clock=clock,
            ids=_unique_ids(),
            seeds=lambda: secrets.randbits(64),
        )
        self._generation_service = GenerationService(
            generations=generations,
            callers=Callers(settings.trust_tenant, clock, lambda: self._step_s),
            max_streams=settings.max_streams,
            max_generations_per_session=settings.max_generations_per_session,
            log=log,
        )
        self._calls = Calls(CallMetrics(telemetry.meter), self._harmless, log, clock)
        self._server = self._make_server()
        self._watch: asyncio.Task[None] | None = None
        self._step_s = 0.0
        self.address = ""
        self.stopped = False

    async def start(self) -> None:
        """Listen and start the engine; returns before the engine is ready.

        Raises BindError, and ConfigError if it cannot record where it is to.
        """
        self._recordings.start()
        self.address = _bind(self._server, self._settings.listen)
        self.lifecycle.address = self.address
        await self._health.set_serving(False)
        await self._server.start()
        self._watch = asyncio.create_task(self.lifecycle.run())
        self._client.start()

    async def stop(self, grace_s: float, at_once: asyncio.Event) -> None:
        """Stop in order. `at_once`, when set, ends the waiting for generations."""
        self.stopped = True
        over = self._clock() + grace_s
        self.lifecycle.stopping = True
        self._admission.draining = True
        await self._health.shut_down()
        self._generation_service.drain(grace_s)
        await _first(grace_s, self._router.idle.wait(), at_once.wait())
        for request_id in self._router.live:
            self._client.cancel(request_id, FinishReason.DRAINED)
        await _first(AT_ONCE_S if at_once.is_set() else LAST_WORDS_S, self._ended())
        await self._server.stop(None if at_once.is_set() else STOP_GRACE_S)
        await asyncio.to_thread(self._client.stop)
        await _first(LAST_WORDS_S, self._ended())
        left = min(max(over - self._clock(), LAST_WORDS_S), MOST_FLUSH_S)
        await self._dispose(AT_ONCE_S if at_once.is_set() else left)

    async def abandon(self) -> None:
        """Undo a `start` that raised."""
        await self._server.stop(None)
        await self._dispose(0.0)

    async def _ended(self) -> None:
        await self._router.idle.wait()
        await self._calls.quiet.wait()

    async def _dispose(self, flush_s: float) -> None:
        self._router.close()
        await asyncio.to_thread(self._recordings.close, flush_s)
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self._grammars.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._telemetry.shutdown)

    def _make_recordings(self, log: Log, wall: Callable[[], float]) -> Recordings:
        root = self._settings.record
        if root is None:
            return NoRecordings()
        metrics = RecordingMetrics(self._telemetry.meter)
        losses = Losses(metrics, self._harmless, log, self._clock)
        store = Segments(root, self._settings.record_mib << 20, wall)
        return FileRecordings(Writer(store, losses, metrics, self._harmless), str(root), wall)

    def _report(self, report: StepReport) -> None:
        self._step_s = report.ended - report.started
        with self._harmless:
            self._steps.step(report)

    @property
    def _service_names(self) -> tuple[str, ...]:
        return tuple(service.full_name for service in self._services)

    def _make_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=server_options(self._settings))
        model_service = ModelService(
            self._admission, _limits(self._settings), _wire_limits(self._settings)
        )
        behaviours = {
            "GenerationService": self._generation_service.behaviours,
            "ModelService": model_service.behaviours,
        }
        for service in self._services:
            handlers = self._calls.handlers(service, behaviours[service.name])
            server.add_registered_method_handlers(service.full_name, handlers)
        self._health.add_to(server)
        if self._settings.reflection:
            add_reflection(server, self._service_names)
        return server


def server_options(settings: ServeSettings) -> list[tuple[str, int]]:
    """Channel arguments. Keepalive pings are welcome as often as the setting says, with or without
    calls; gRPC's own default cuts a client that pings more than once in five minutes."""
    return [
        ("grpc.so_reuseport", 0),  # a busy port is an error, not a share of its connections
        ("grpc.max_receive_message_length", int(settings.max_message_mib * (1 << 20))),
        ("grpc.max_send_message_length", -1),
        # Room beside the generation calls for health, reflection and model calls.
        ("grpc.max_concurrent_streams", settings.max_streams + 128),
        ("grpc.http2.min_ping_interval_without_data_ms", int(settings.min_ping_interval_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _bind(server: grpc.aio.Server, listen: str) -> str:
    host, _, _ = listen.rpartition(":")
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise BindError(f"cannot listen on {listen}: is the port in use?") from error
    return f"{host}:{port}"


def _unique_ids() -> Callable[[], str]:
    """Request ids that stay unique over restarts of the server, as log lines need."""
    start, numbers = secrets.token_hex(4), count(1)
    return lambda: f"{start}-{next(numbers)}"


def _limits(settings: ServeSettings) -> Limits:
    return Limits(settings.max_stop_strings, settings.max_stop_length, settings.max_prompt_bytes)


def _wire_limits(settings: ServeSettings) -> pb.Limits:
    return pb.Limits(
        max_stop_strings=settings.max_stop_strings,
        max_stop_length=settings.max_stop_length,
        max_generations_per_session=settings.max_generations_per_session,
        max_message_bytes=int(settings.max_message_mib * (1 << 20)),
    )


async def _first(timeout_s: float, *waits: Awaitable[object]) -> None:
    """Until one of `waits` is over or the time is."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
