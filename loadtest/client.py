"""The client under load: connections, each with one `Session` stream that carries many generations.

No queue and no task per generation: the reader of a stream writes what comes, and when, into the
generation's record. Client and server often share a machine, so the client has to be cheap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import code_pb2

from service.pb import draftwire_pb2 as pb
from service.pb import draftwire_pb2_grpc as pb_grpc

CLOSE_S = 2.0
COMPLETE = frozenset({"STOP", "EOS", "LENGTH", "CONTEXT"})
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # or all channels of the process share one connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
)


@dataclass(slots=True)
class Record:
    """One generation as its client saw it; times in seconds of the injected clock.

    `deltas` holds (time of arrival, tokens) of every delta with tokens. `error` is the kind of
    failure, empty for a generation that ran to its end.
    """

    started: float
    ended: float = 0.0
    deltas: list[tuple[float, int]] = field(default_factory=list)
    finished: pb.Finished | None = None
    error: str = ""


class Stream:
    """One connection with one `Session` stream; opened when needed, again after it broke."""

    def __init__(self, target: str, clock: Callable[[], float]) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._stub = pb_grpc.GenerationServiceStub(self._channel)
        self._clock = clock
        self._live: dict[str, tuple[Record, asyncio.Future[None]]] = {}
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()  # gRPC takes one write of a stream at a time

    async def generate(self, generation_id: str, params: pb.GenerationParams) -> Record:
        """Run one generation to its end, whatever that is; what the server does never raises."""
        record = Record(started=self._clock())
        ended = asyncio.get_running_loop().create_future()
        request = pb.SessionRequest(generation_id=generation_id, start=params)
        async with self._writing:
            call = self._open()
            self._live[generation_id] = record, ended
            # If the stream has ended, its reader fails everything that was on it.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(request)
        await ended
        return record

    async def close(self) -> None:
        """Hang up; what still runs is cancelled."""
        if self._reader is not None:
            if not self._live and not self._reader.done():
                await self._call.done_writing()
                await asyncio.wait([self._reader], timeout=CLOSE_S)
            self._call.cancel()
            await self._reader
        await self._channel.close()

    def _open(self) -> Any:
        if self._reader is None or self._reader.done():
            self._call = self._stub.Session()
            self._reader = asyncio.create_task(self._read(self._call))
        return self._call

    async def _read(self, call: Any) -> None:
        kind = "STREAM_ENDED"
        try:
            async for response in call:
                now = self._clock()
                for event in response.events:
                    self._take(event, now)
        except grpc.aio.AioRpcError as error:
            kind = error.code().name
        except asyncio.CancelledError:
            kind = "CANCELLED"
        finally:
            for generation_id in tuple(self._live):
                self._end(generation_id, self._clock(), kind)

    def _take(self, event: pb.Event, now: float) -> None:
        if event.generation_id not in self._live:
            return
        record, _ = self._live[event.generation_id]
        match event.WhichOneof("event"):
            case "delta":
                if event.delta.token_ids:
                    record.deltas.append((now, len(event.delta.token_ids)))
            case "finished":
                record.finished = event.finished
                self._end(event.generation_id, now, _kind(event.finished))
            case "rejected":
                self._end(event.generation_id, now, _code(event.rejected.code))

    def _end(self, generation_id: str, now: float, error: str) -> None:
        record, ended = self._live.pop(generation_id)
        if not ended.done():  # else whoever waited has given up
            record.ended, record.error = now, error
            ended.set_result(None)


def _kind(finished: pb.Finished) -> str:
    reason = _name(pb.FinishReason, finished.reason).removeprefix("FINISH_REASON_")
    if reason in COMPLETE:
        return ""
    return f"{reason}/{_code(finished.error.code)}" if finished.HasField("error") else reason


def _code(code: int) -> str:
    return _name(code_pb2.Code, code)


def _name(enum: Any, value: int) -> str:
    """The name of an enum value; its number if this client is too old to know it."""
    return str(enum.Name(value)) if value in enum.values() else str(value)
