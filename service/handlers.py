"""From behaviours to gRPC method handlers: parsing, statuses, and one measure per call.

Behaviours are coroutines that use the read/write API of their context. Whatever they raise becomes
a status that the client gets:

    Refused                          its code with rich details
    CancelledError, call cancelled   re-raised (swallowing it leaks inside grpc)
    CancelledError from inside       UNAVAILABLE; re-raised, the client would wait for ever
    ExecuteBatchError                the client is gone; re-raised
    any other exception              INTERNAL without its text, which goes to the log
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from service.harmless import Harmless
from service.metrics import CallMetrics
from service.record import Log
from service.status import Reason, Refused, invalid, refused, trailers

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour = Callable[[Any, Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request whose bytes are not the message they should be.

    `first` is its field 1 if that can still be read as a string, "" otherwise.
    """

    first: str

    def refusal(self) -> Refused:
        return invalid([("", "the message cannot be parsed (is every string valid UTF-8?)")])


class Calls:
    """Runs behaviours. `quiet` is set while none runs, clean-up included."""

    def __init__(
        self, metrics: CallMetrics, harmless: Harmless, log: Log, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._harmless = harmless
        self._log = log
        self._clock = clock
        self._running = 0
        self.quiet = asyncio.Event()
        self.quiet.set()

    def handlers(
        self, service: ServiceDescriptor, behaviours: Mapping[str, Behaviour]
    ) -> dict[str, Handler]:
        """Method handlers of a service; every method of it must have a behaviour."""
        return {
            method.name: self._handler(service, method, behaviours[method.name])
            for method in service.methods
        }

    def _handler(
        self, service: ServiceDescriptor, method: MethodDescriptor, behaviour: Behaviour
    ) -> Handler:
        name = f"{service.full_name}/{method.name}"

        async def handle(request: Any, context: Context) -> Any:
            return await self.run(name, behaviour, request, context)

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[method.client_streaming, method.server_streaming]
        return make(
            handle,
            request_deserializer=deserializer(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    async def run(self, name: str, behaviour: Behaviour, request: Any, context: Context) -> Any:
        started = self._clock()
        outcome = "UNKNOWN"
        self._running += 1
        self.quiet.clear()
        try:
            response = await _checked(behaviour, request, context)
            outcome = "OK"
        except BaseException as error:
            refusal = self._refusal(name, error)
            outcome = "CANCELLED" if refusal is None else refusal.code.name
            if refusal is None:
                raise
            await context.abort(refusal.code, str(refusal), trailers(refusal.status))
        else:
            return response
        finally:
            self._running -= 1
            if not self._running:
                self.quiet.set()
            with self._harmless:
                self._metrics.called(name, outcome, self._clock() - started)

    def _refusal(self, name: str, error: BaseException) -> Refused | None:
        """What the client is told; None if the client is gone and the error is to be re-raised."""
        if isinstance(error, Refused):
            return error
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return None
            self._log.warning("interrupted", method=name)
            return refused(Reason.INTERRUPTED, "the call was interrupted", retry_after_s=1.0)
        if isinstance(error, grpc.aio.InternalError) or not isinstance(error, Exception):
            return None
        self._log.error("call failed", method=name, exc_info=error)
        return refused(Reason.INTERNAL, "internal error")


async def _checked(behaviour: Behaviour, request: Any, context: Context) -> Any:
    if isinstance(request, Malformed):
        raise request.refusal()
    return await behaviour(request, context)


def deserializer(message: type[Message]) -> Callable[[bytes], Message | Malformed]:
    """Parses requests. Raising here would give the client INTERNAL; this gives `Malformed`."""

    def parse(raw: bytes) -> Message | Malformed:
        try:
            return message.FromString(raw)
        except DecodeError:
            return Malformed(_first_string(raw))

    return parse


def _first_string(raw: bytes) -> str:
    """Field 1 of a message whose strings cannot all be read."""
    try:
        fields: Any = UnknownFieldSet(Empty.FromString(raw))
        return str(next(f.data.decode() for f in fields if f.field_number == 1))
    except (DecodeError, UnicodeDecodeError, StopIteration, AttributeError):
        return ""
