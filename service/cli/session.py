"""One generation, all of its samples, over a `Session` stream, as a client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import status_pb2

from service.pb import draftwire_pb2 as pb
from service.pb import draftwire_pb2_grpc as pb_grpc

GENERATION_ID = "cli"
CANCEL_GRACE_S = 2.0
MOST_SAMPLES = 1024  # the server has its own limit, and says so


class Rejected(Exception):
    """The server refused the generation."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


@dataclass(slots=True)
class Result:
    """What came of a sample. `finished` is None if the stream ended before it did."""

    index: int = 0
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    prompt_parts: list[str] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    accepted: pb.Accepted | None = None
    finished: pb.Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def prompt_text(self) -> str:
        return "".join(self.prompt_parts)


async def run(
    channel: grpc.aio.Channel,
    params: pb.GenerationParams,
    on_text: Callable[[str], None],
    interrupt: asyncio.Event,
) -> list[Result]:
    """Run one generation to its end; a result per sample. Raises Rejected or AioRpcError.

    `on_text` gets the text of the first sample as it comes, behind the prompt's if that comes, too.
    When `interrupt` is set the generation is cancelled and its end awaited, within bounds.
    """
    call = pb_grpc.GenerationServiceStub(channel).Session()
    results = [Result(index) for index in range(min(max(1, params.n), MOST_SAMPLES))]
    sent = asyncio.Event()
    canceller = asyncio.create_task(_cancel_when(interrupt, call, sent))
    try:
        await call.write(pb.SessionRequest(generation_id=GENERATION_ID, start=params))
        sent.set()
        async for response in call:
            for event in response.events:
                _take(event, results, on_text)
            if all(result.finished is not None for result in results):
                await call.done_writing()  # the server ends the stream; read on to its status
    except asyncio.CancelledError:
        if not interrupt.is_set():
            raise
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        # A server that stops says so after the last end: it is no news to who has all ends.
        if any(result.finished is None for result in results):
            raise
    finally:
        canceller.cancel()
        call.cancel()  # does nothing to a call that has ended
    return results


def _take(event: pb.Event, results: Seq[Result], on_text: Callable[[str], None]) -> None:
    match event.WhichOneof("event"):
        case "accepted":
            for result in results:
                result.accepted = event.accepted
        case "delta":
            delta = event.delta
            result = results[delta.index]
            result.parts.append(delta.text)
            result.token_ids.extend(delta.token_ids)
            result.logprobs.extend(delta.logprobs)
            result.text_offsets.extend(delta.text_offsets)
            result.prompt_parts.append(delta.prompt_text)
            result.prompt_token_ids.extend(delta.prompt_token_ids)
            result.prompt_logprobs.extend(delta.prompt_logprobs)
            if not delta.index:
                on_text(delta.prompt_text + delta.text)
        case "finished":
            results[event.finished.index].finished = event.finished
        case "rejected" if results[0].accepted is None:  # else a cancel that came too late
            raise Rejected(event.rejected)


async def _cancel_when(interrupt: asyncio.Event, call: Any, sent: asyncio.Event) -> None:
    """Ask the server to cancel, so that the usage still comes; hang up if nothing does."""
    await interrupt.wait()
    with suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):  # just ended
        async with asyncio.timeout(CANCEL_GRACE_S):
            await sent.wait()
            await call.write(pb.SessionRequest(generation_id=GENERATION_ID, cancel=pb.Cancel()))
            await asyncio.sleep(CANCEL_GRACE_S)  # its end ends this task
    call.cancel()
