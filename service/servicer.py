"""draftwire.v1.GenerationService: translates between calls and generations; it does not think.

What a call says at its end:

    Session    OK after a half-close, once every generation has ended; UNAVAILABLE if the server
               stops
    Generate   OK after `finished`, whatever the reason: once accepted, the end is an event
    Complete   the response, whatever the reason, if it holds output or the end was an ordinary
               one; else the status that fits: ERROR always (UNAVAILABLE if retryable, INTERNAL if
               not), DEADLINE without output DEADLINE_EXCEEDED, DRAINED without output UNAVAILABLE
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from engine.outcome import Finish, FinishReason, Logprobs, TokenChunk
from service.caller import Callers
from service.events import finished, generate_responses, token_logprobs
from service.generation import Generation
from service.generations import Generations
from service.handlers import Behaviour, Context
from service.pb import draftwire_pb2 as pb
from service.record import Log
from service.router import Outbox
from service.session import Session
from service.status import ENGINE_RETRY_S, Reason, failure, refused

NEEDS_OUTPUT = (FinishReason.DEADLINE, FinishReason.DRAINED)


class GenerationService:
    """The three methods, as behaviours for `Calls`."""

    def __init__(
        self,
        *,
        generations: Generations,
        callers: Callers,
        max_streams: int,
        max_generations_per_session: int,
        log: Log,
    ) -> None:
        self._generations = generations
        self._callers = callers
        self._max_streams = max_streams
        self._max_generations = max_generations_per_session
        self._log = log
        self._sessions: set[Session] = set()
        self._open = 0
        self._grace_s: float | None = None

    @property
    def behaviours(self) -> Mapping[str, Behaviour]:
        return {"Session": self.session, "Generate": self.generate, "Complete": self.complete}

    def drain(self, grace_s: float) -> None:
        """Refuse new calls and tell every session; they end once their generations have."""
        self._grace_s = grace_s
        for session in self._sessions:
            session.drain(grace_s)

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """A place among the calls that may be open at a time."""
        if self._grace_s is not None:
            raise refused(
                Reason.DRAINING, "the server is about to stop", retry_after_s=ENGINE_RETRY_S
            )
        if self._open >= self._max_streams:
            raise refused(
                Reason.TOO_MANY_STREAMS,
                f"{self._open} calls are open, the limit",
                retry_after_s=ENGINE_RETRY_S,
                quota="max_streams",
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def session(self, _: object, context: Context) -> None:
        with self._stream():
            caller = self._callers.of(context, bounded=False)
            session = Session(context, caller, self._generations, self._max_generations, self._log)
            self._sessions.add(session)
            try:
                await session.run()
            finally:
                self._sessions.discard(session)

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        with self._stream():
            outbox = Outbox()
            caller = self._callers.of(context, bounded=True)
            generation = await self._generations.open(request.params, "params", caller, "", outbox)
            try:
                await context.write(pb.GenerateResponse(accepted=generation.accepted()))
                for part in generation.echo.deltas():
                    await context.write(pb.GenerateResponse(delta=part))
                live = generation.size
                while live:
                    index, chunk = await outbox.chunk()
                    for response in generate_responses(chunk, index):
                        await context.write(response)
                    live -= chunk.finish is not None
            finally:
                generation.close()

    async def complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        with self._stream():
            outbox = Outbox()
            caller = self._callers.of(context, bounded=True)
            generation = await self._generations.open(request.params, "params", caller, "", outbox)
            try:
                responses = await _responses(outbox, generation)
            finally:
                generation.close()
            first = responses[0]
            first.samples.extend(responses[1:])
            first.prompt_text = generation.echo.text
            first.prompt_token_ids.extend(generation.echo.token_ids)
            return first


async def _responses(outbox: Outbox, generation: Generation) -> list[pb.CompleteResponse]:
    """By sample. Raises Refused if one of them failed."""
    chunks: list[list[TokenChunk]] = [[] for _ in range(generation.size)]
    live = generation.size
    while live:
        index, chunk = await outbox.chunk()
        chunks[index].append(chunk)
        live -= chunk.finish is not None
    return [_response(i, _joined(own), generation.seed(i)) for i, own in enumerate(chunks)]


def _response(index: int, chunk: TokenChunk, seed: int) -> pb.CompleteResponse:
    assert chunk.finish is not None
    if _is_failure(chunk.finish):
        raise failure(chunk.finish)
    return pb.CompleteResponse(
        text=chunk.text,
        token_ids=chunk.tokens,
        finished=finished(chunk.finish, index),
        seed=seed,
        logprobs=token_logprobs(chunk.logprobs),
        prompt_logprobs=token_logprobs(chunk.prompt_logprobs),
        text_offsets=chunk.text_offsets,
    )


def _joined(chunks: Iterable[TokenChunk]) -> TokenChunk:
    """All chunks of a sample as one."""
    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    prompt: list[Logprobs] = []
    offsets: list[int] = []
    text: list[str] = []
    finish: Finish | None = None
    for chunk in chunks:
        tokens += chunk.tokens
        logprobs += chunk.logprobs
        prompt += chunk.prompt_logprobs
        offsets += chunk.text_offsets
        text.append(chunk.text)
        finish = chunk.finish
    told = tuple(logprobs), tuple(prompt), tuple(offsets)
    return TokenChunk("", 0, tuple(tokens), "".join(text), finish, *told)


def _is_failure(finish: Finish) -> bool:
    if finish.reason is FinishReason.ERROR:
        return True
    return finish.reason in NEEDS_OUTPUT and finish.completion_tokens == 0
