"""One Session call: a reader applies ops, a writer sends events, many generations in between.

Replies to ops go out at once; the output of all generations that an engine step advanced leaves in
one message. A start is prepared in a task of its own, so that a long prompt does not hold up the
ops behind it. However the call ends, `run` cancels what is still live in the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration

from service.events import session_events
from service.generation import Generation
from service.generations import Caller, Generations
from service.handlers import Context, Malformed
from service.pb import draftwire_pb2 as pb
from service.record import Log
from service.router import Outbox
from service.status import ENGINE_RETRY_S, Reason, Refused, invalid, refused

MAX_ID = 128
# Clients accept messages of 4 MiB; what piled up for a slow reader is split well below.
FRAME_BYTES = 1 << 19
# Replies that a client has not read yet; at so many its ops are not read either.
MAX_REPLIES = 1024


@dataclass(slots=True)
class Slot:
    """A live generation id: `generation` is None while its start is being prepared."""

    generation: Generation | None = None
    cancelled: bool = False
    ended: int = 0  # samples whose end was sent


class Session:
    """One call of GenerationService.Session."""

    def __init__(
        self,
        context: Context,
        caller: Caller,
        generations: Generations,
        max_generations: int,
        log: Log,
    ) -> None:
        self._context = context
        self._caller = caller
        self._generations = generations
        self._max_generations = max_generations
        self._log = log
        self._outbox = Outbox()
        self._replies: deque[pb.Event] = deque()
        self._room = asyncio.Event()
        self._live: dict[str, Slot] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self._draining = False

    def drain(self, grace_s: float) -> None:
        """Tell the client that the server is about to stop; end once nothing is live."""
        grace = Duration()
        grace.FromNanoseconds(int(grace_s * 1e9))
        self._draining = True
        self._reply(pb.Event(draining=pb.Draining(grace=grace)))

    async def run(self) -> None:
        """Serve the call to its end. Raises Refused for a status other than OK."""
        reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _: self._outbox.wake())
        try:
            while True:
                if events := self._frame():
                    await self._context.write(pb.SessionResponse(events=events))
                elif reader.done() and not self._live:
                    return reader.result()
                elif self._draining and not self._live:
                    raise refused(
                        Reason.DRAINING, "the server is stopping", retry_after_s=ENGINE_RETRY_S
                    )
                elif reader.done() and reader.exception() is not None:
                    return reader.result()
                else:
                    await self._outbox.wait()
        finally:
            await self._close(reader)

    async def _close(self, reader: asyncio.Task[None]) -> None:
        for slot in self._live.values():
            if slot.generation is not None:
                slot.generation.close()
        tasks = [reader, *self._starts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- writing -----------------------------------------------------------------------------

    def _reply(self, event: pb.Event) -> None:
        self._replies.append(event)
        self._outbox.wake()

    def _reject(self, generation_id: str, refusal: Refused) -> None:
        self._reply(pb.Event(generation_id=generation_id[:MAX_ID], rejected=refusal.status))

    def _frame(self) -> list[pb.Event]:
        """What there is to say: replies, then output, oldest first."""
        events: list[pb.Event] = []
        size = 0
        while size < FRAME_BYTES and self._replies:
            events.append(self._replies.popleft())
            size += events[-1].ByteSize()
        self._room.set()
        # Output only once all replies are out: `accepted` precedes the output of its generation.
        while size < FRAME_BYTES and (mailbox := self._outbox.next()) is not None:
            chunk = mailbox.take()
            if chunk is None:
                continue
            for event in session_events(chunk, mailbox.index):
                events.append(event)
                size += event.ByteSize()
            if chunk.finish is not None:
                self._sample_ended(mailbox.name)
        return events

    def _sample_ended(self, name: str) -> None:
        """Only with the last one may the id be used again: its `finished` precedes what follows."""
        slot = self._live[name]
        slot.ended += 1
        if slot.generation is not None and slot.ended == slot.generation.size:
            del self._live[name]

    # ---- reading -----------------------------------------------------------------------------

    async def _read(self) -> None:
        """Apply ops until the client half-closes."""
        while (request := await self._context.read()) is not grpc.aio.EOF:
            if isinstance(request, Malformed):
                self._malformed(request)
            else:
                self._apply(request)
            while len(self._replies) >= MAX_REPLIES:
                self._room.clear()
                await self._room.wait()

    def _malformed(self, request: Malformed) -> None:
        """Refuse just this op if it can be told whose it is, else the stream."""
        if not request.first:
            raise request.refusal()
        self._reject(request.first, request.refusal())

    def _apply(self, request: pb.SessionRequest) -> None:
        name = request.generation_id
        try:
            if not 1 <= len(name) <= MAX_ID:
                raise invalid([("generation_id", f"must have 1 to {MAX_ID} characters")])
            match request.WhichOneof("op"):
                case "start":
                    self._admit(name)
                    self._begin(name, request.start)
                case "cancel":
                    self._cancel(name)
                case _:
                    raise invalid([("op", "one of start and cancel is required")])
        except Refused as refusal:
            if request.WhichOneof("op") == "start":
                self._generations.refuse(request.start, self._caller, refusal)
            self._reject(name, refusal)

    def _admit(self, name: str) -> None:
        if name in self._live:
            message = f"generation_id {name!r} is in use on this session"
            raise refused(
                Reason.DUPLICATE_GENERATION_ID, message, violations=[("generation_id", message)]
            )
        if len(self._live) >= self._max_generations:
            raise refused(
                Reason.SESSION_FULL,
                f"{len(self._live)} generations are live on this session, the limit",
                retry_after_s=ENGINE_RETRY_S,
                quota="max_generations_per_session",
            )

    def _begin(self, name: str, params: pb.GenerationParams) -> None:
        slot = self._live[name] = Slot()
        task = asyncio.create_task(self._start(name, slot, params))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _start(self, name: str, slot: Slot, params: pb.GenerationParams) -> None:
        try:
            generation = await self._generations.open(
                params, "start", self._caller, name, self._outbox
            )
        except Refused as refusal:
            self._abort_start(name, refusal)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the session ends
            message = "the start was interrupted"
            self._abort_start(
                name, refused(Reason.INTERRUPTED, message, retry_after_s=ENGINE_RETRY_S)
            )
        except Exception as error:
            self._log.error("start failed", exc_info=error)
            self._abort_start(name, refused(Reason.INTERNAL, "internal error"))
        else:
            slot.generation = generation
            self._reply(pb.Event(generation_id=name, accepted=generation.accepted()))
            for part in generation.echo.deltas():
                self._reply(pb.Event(generation_id=name, delta=part))
            if slot.cancelled:
                generation.cancel()

    def _abort_start(self, name: str, refusal: Refused) -> None:
        del self._live[name]
        self._reject(name, refusal)

    def _cancel(self, name: str) -> None:
        slot = self._live.get(name)
        if slot is None:
            message = f"no generation {name!r} is live on this session"
            raise refused(
                Reason.UNKNOWN_GENERATION_ID, message, violations=[("generation_id", message)]
            )
        slot.cancelled = True
        if slot.generation is not None:
            slot.generation.cancel()
