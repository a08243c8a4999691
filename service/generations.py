"""Opens generations and sees each one to its end, whatever becomes of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.client import EngineClient
from engine.errors import EngineDead
from engine.types import FinishReason, Request, TokenChunk
from service.admission import Admission, ServedModel, Ticket
from service.chat import ChatError
from service.checks import Chat, Limits
from service.convert import Parsed, parse
from service.grammars import GrammarChecks
from service.pb import draftwire_pb2 as pb
from service.record import Record, Recorder
from service.router import Mailbox, Outbox, Router
from service.spans import Parent
from service.status import ENGINE_RETRY_S, Reason, Refused, invalid, refused


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `deadline` is that of the call (monotonic seconds) where it bounds a generation."""

    tenant: str
    parent: Parent
    deadline: float | None = None


class Generation:
    """A submitted generation: takes chunks from the router until the last one.

    `close` is the reader's goodbye: it cancels in the engine what has not ended; the end is still
    awaited and recorded, so usage is exact.
    """

    def __init__(
        self,
        request: Request,
        mailbox: Mailbox,
        ticket: Ticket,
        record: Record,
        cancel: Callable[[str, FinishReason], None],
    ) -> None:
        self._request = request
        self._mailbox: Mailbox | None = mailbox
        self._ticket = ticket
        self._record = record
        self._cancel = cancel
        self._ended = False

    def accepted(self) -> pb.Accepted:
        return pb.Accepted(
            seed=self.seed,
            prompt_tokens=len(self._request.prompt),
            queue_position=self._ticket.position,
        )

    @property
    def seed(self) -> int:
        return self._request.sampling.seed

    def deliver(self, chunk: TokenChunk) -> None:
        self._ticket.leave()
        if chunk.finish is not None:
            self._ended = True
            self._record.finished(chunk.finish)
        if self._mailbox is not None:
            self._mailbox.put(chunk)

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End it early; the last chunk says so, unless it has ended by itself."""
        if not self._ended:
            self._cancel(self._request.id, reason)

    def close(self) -> None:
        self._mailbox = None
        self.cancel()


class Generations:
    """Checks, admits and submits. `ids` gives unique request ids, `seeds` random 64-bit seeds."""

    def __init__(
        self,
        *,
        client: EngineClient,
        router: Router,
        admission: Admission,
        limits: Limits,
        grammars: GrammarChecks,
        recorder: Recorder,
        clock: Callable[[], float],
        ids: Callable[[], str],
        seeds: Callable[[], int],
    ) -> None:
        self._client = client
        self._router = router
        self._admission = admission
        self._limits = limits
        self._grammars = grammars
        self._recorder = recorder
        self._clock = clock
        self._ids = ids
        self._seeds = seeds

    async def open(
        self, params: pb.GenerationParams, root: str, caller: Caller, name: str, outbox: Outbox
    ) -> Generation:
        """Start a generation whose output goes to `outbox` under `name`.

        `root` is the path of `params` in the client's message. Raises Refused. If this is
        cancelled, nothing has been submitted.
        """
        arrived = self._clock()
        chat = params.WhichOneof("prompt") == "messages"
        record = self._recorder.begin(self._ids(), chat, caller.parent, caller.tenant, arrived)
        try:
            return await self._open(params, root, caller, record, arrived, Mailbox(name, outbox))
        except Refused as refusal:
            record.refused(refusal)
            raise
        except asyncio.CancelledError:
            record.abandoned()
            raise
        except Exception as error:
            record.failed(error)
            raise

    def refuse(self, params: pb.GenerationParams, caller: Caller, refusal: Refused) -> None:
        """Record a start that was refused before `open`."""
        chat = params.WhichOneof("prompt") == "messages"
        record = self._recorder.begin(
            self._ids(), chat, caller.parent, caller.tenant, self._clock()
        )
        record.refused(refusal)

    async def _open(
        self,
        params: pb.GenerationParams,
        root: str,
        caller: Caller,
        record: Record,
        arrived: float,
        mailbox: Mailbox,
    ) -> Generation:
        model = self._admission.open_for_business()
        codec = model.codec
        parsed = parse(params, root, model.info, self._limits, codec.chat, self._seeds())
        record.parsed(parsed)
        if parsed.grammar is not None:
            path = ".".join(part for part in (parsed.root, parsed.grammar_field) if part)
            await self._grammars.check(parsed.grammar, path, model.info)
        prompt = await _encode(parsed, model)
        if parsed.bad_words:
            parsed = parsed.with_bad_words(await codec.encode_words(parsed.bad_words))
        request = parsed.request(record.id, prompt, model.info, arrived, caller.tenant)
        request = _within(request, caller.deadline, self._clock())
        return self._submit(request, mailbox, record)

    def _submit(self, request: Request, mailbox: Mailbox, record: Record) -> Generation:
        ticket = self._admission.enter(request)
        generation = Generation(request, mailbox, ticket, record, self._client.cancel)
        self._router.add(request.id, generation)
        record.accepted(request)
        try:
            self._client.submit(request)
        except BaseException as error:
            self._router.remove(request.id)
            ticket.leave()
            if isinstance(error, EngineDead):
                raise refused(
                    Reason.NOT_READY, "the engine is not ready", retry_after_s=ENGINE_RETRY_S
                ) from error
            raise
        return generation


async def _encode(parsed: Parsed, model: ServedModel) -> tuple[int, ...]:
    prompt = parsed.prompt
    if isinstance(prompt, tuple):
        return prompt
    try:
        if isinstance(prompt, Chat):
            return await model.codec.encode_chat(prompt.messages)
        return await model.codec.encode(prompt)
    except ChatError as error:
        raise invalid([(f"{parsed.root}.messages", str(error))]) from error


def _within(request: Request, deadline: float | None, now: float) -> Request:
    """The earlier of the request's and the call's deadline holds.

    A call without time left is refused; a request's own time only begins with its acceptance.
    """
    if deadline is None:
        return request
    if deadline <= now:
        raise refused(Reason.DEADLINE, "the deadline passed before the request was accepted")
    own = request.deadline
    return replace(request, deadline=deadline if own is None else min(own, deadline))
