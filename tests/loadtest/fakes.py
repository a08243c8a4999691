"""A server that speaks the wire and answers from a script: no engine, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from service.pb import draftwire_pb2 as pb
from service.pb import draftwire_pb2_grpc as pb_grpc


class Over(Enum):
    """How a stream ends."""

    ENDED = "ended"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Script:
    """What happens to a generation: its deltas one by one, then its end.

    `reject` refuses it, `hold` waits for a cancel after the deltas, `breaks` aborts the whole
    stream there, `leaves` after the end.
    """

    deltas: tuple[tuple[str, tuple[int, ...]], ...] = (("Hello", (1, 2)), (", wörld", (3, 4, 5)))
    reason: Any = pb.FINISH_REASON_LENGTH
    error: status_pb2.Status | None = None
    reject: status_pb2.Status | None = None
    hold: bool = False
    breaks: bool = False
    leaves: bool = False
    seed: int = 2**63 + 1
    stop: str | None = None


class WatchedHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """Tells when somebody watches."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> None:
        self.watched.set()
        await super().Watch(request, context)


@dataclass(slots=True)
class FakeServer(pb_grpc.GenerationServiceServicer, pb_grpc.ModelServiceServicer):
    """`script` decides by params; what clients sent and how many run at once is kept."""

    script: Callable[[pb.GenerationParams], Script] = lambda _: Script()
    requests: list[pb.GenerationParams] = field(default_factory=list)
    sessions: int = 0
    live: int = 0
    most_live: int = 0
    holding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    health: WatchedHealth = field(default_factory=WatchedHealth)
    target: str = ""

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[pb.SessionResponse]:
        self.sessions += 1
        out: asyncio.Queue[pb.Event | Over] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, out))
        try:
            while not isinstance(event := await out.get(), Over):
                yield pb.SessionResponse(events=[event])
            if event is Over.BROKEN:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        finally:
            if not reader.done():
                self.dropped.set()
            reader.cancel()

    async def _read(self, requests: Any, out: asyncio.Queue[pb.Event | Over]) -> None:
        cancels: dict[str, asyncio.Event] = {}
        async with asyncio.TaskGroup() as group:
            async for request in requests:
                if request.WhichOneof("op") == "start":
                    cancelled = cancels[request.generation_id] = asyncio.Event()
                    group.create_task(
                        self._generate(request.generation_id, request.start, cancelled, out)
                    )
                else:
                    cancels[request.generation_id].set()
        await out.put(Over.ENDED)

    async def _generate(
        self,
        name: str,
        params: pb.GenerationParams,
        cancelled: asyncio.Event,
        out: asyncio.Queue[pb.Event | Over],
    ) -> None:
        self.requests.append(params)
        script = self.script(params)
        if script.reject is not None:
            await out.put(pb.Event(generation_id=name, rejected=script.reject))
            return
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        accepted = pb.Accepted(seed=script.seed, prompt_tokens=7)
        await out.put(pb.Event(generation_id=name, accepted=accepted))
        if params.output.echo:
            for piece, tokens in (params.text, (9, 8)), ("!", (7,)):
                echoed = pb.Delta(prompt_text=piece, prompt_token_ids=tokens)
                await out.put(pb.Event(generation_id=name, delta=echoed))
        sent = 0
        for text, ids in script.deltas:
            await asyncio.sleep(0)
            sent += len(ids)
            delta = _delta(params.output, text, ids, sent)
            await out.put(pb.Event(generation_id=name, delta=delta))
        if script.breaks:
            await out.put(Over.BROKEN)
        reason = script.reason
        if script.hold:
            self.holding.release()
            await cancelled.wait()
            reason = pb.FINISH_REASON_CANCELLED
        self.live -= 1
        await out.put(pb.Event(generation_id=name, finished=_finished(script, reason, sent)))
        if script.leaves:
            await out.put(Over.BROKEN)

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model="fake", vocab_size=100)

    async def serving(self, yes: bool = True) -> None:
        status = health_pb2.HealthCheckResponse
        await self.health.set("", status.SERVING if yes else status.NOT_SERVING)


def _delta(asked: pb.Output, text: str, ids: tuple[int, ...], sent: int) -> pb.Delta:
    delta = pb.Delta(text=text, token_ids=ids, seq=sent)
    if asked.HasField("logprobs"):
        top = [pb.TokenLogprob(token_id=i, logprob=-0.5) for i in range(asked.logprobs)]
        delta.logprobs.extend(pb.TokenLogprobs(token_id=i, logprob=-1.5, top=top) for i in ids)
    if asked.HasField("prompt_logprobs"):
        delta.prompt_logprobs.add(token_id=ids[0], logprob=-2.5)
    if asked.text_offsets:
        delta.text_offsets.extend(10 * i for i in ids)
    return delta


def _finished(script: Script, reason: Any, tokens: int) -> pb.Finished:
    ngram = pb.SourceStats(drafted=6, accepted=3, drafted_at=[3, 3], accepted_at=[2, 1])
    return pb.Finished(
        reason=reason,
        usage=pb.Usage(prompt_tokens=7, completion_tokens=tokens),
        timings=pb.Timings(queue_s=0.25, ttft_s=0.5, total_s=1.5),
        speculation=pb.SpeculationStats(
            drafted=6, accepted=3, target_steps=2, by_source={"ngram": ngram}
        ),
        error=script.error,
        stop=script.stop,
    )


def status(code: str, message: str, *details: Any) -> status_pb2.Status:
    """A google.rpc.Status with packed details."""
    made = status_pb2.Status(code=code_pb2.Code.Value(code), message=message)
    for detail in details:
        made.details.add().Pack(detail)
    return made


@asynccontextmanager
async def serve(fake: FakeServer) -> AsyncIterator[FakeServer]:
    """Run the fake on a free port of 127.0.0.1 and say SERVING; `fake.target` tells where."""
    server = grpc.aio.server()
    pb_grpc.add_GenerationServiceServicer_to_server(fake, server)
    pb_grpc.add_ModelServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await fake.serving()
    try:
        yield fake
    finally:
        await server.stop(grace=None)
