"""Opens generations and sees each one to its end, whatever becomes of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.client import EngineClient
from engine.errors import EngineDead
from engine.outcome import Finish, FinishReason, TokenChunk
from engine.request import Request
from service.admission import Admission, ServedModel
from service.chat import ChatError
from service.checks import Chat, Limits
from service.convert import Parsed, parse
from service.echo import Echo
from service.generation import Generation, Sample, samples_of
from service.grammars import GrammarChecks
from service.pb import draftwire_pb2 as pb
from service.record import Record, Recorder
from service.recording import Recordings
from service.router import Mailbox, Outbox, Router
from service.spans import Parent
from service.status import ENGINE_RETRY_S, Reason, Refused, invalid, refused


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `deadline` is that of the call (monotonic seconds) where it bounds a generation."""

    tenant: str
    parent: Parent
    deadline: float | None = None


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
        recordings: Recordings,
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
        self._recordings = recordings
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

        def begin(request_id: str) -> Record:
            return self._recorder.begin(request_id, chat, caller.parent, caller.tenant, arrived)

        record = begin(self._ids())
        try:
            parsed, request, echo = await self._prepare(params, root, caller, record, arrived)
            requests = samples_of(request, parsed.samples)
            tickets = self._admission.enter(request, len(requests))
            records = [record, *(begin(other.id) for other in requests[1:])]
            for other in records[1:]:
                other.parsed(parsed)
            mailboxes = [Mailbox(name, outbox, index) for index in range(len(requests))]
            info = self._admission.ready_model().info
            recording = self._recordings.begin(params, requests, info)
            parts = zip(requests, mailboxes, tickets, records, strict=True)
            return self._submit([Sample(*part, recording) for part in parts], echo)
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

    async def _prepare(
        self,
        params: pb.GenerationParams,
        root: str,
        caller: Caller,
        record: Record,
        arrived: float,
    ) -> tuple[Parsed, Request, Echo]:
        model = self._admission.open_for_business()
        codec = model.codec
        parsed = parse(params, root, model.info, self._limits, codec.chat, self._seeds())
        record.parsed(parsed)
        if parsed.grammar is not None:
            path = ".".join(part for part in (parsed.root, parsed.grammar_field) if part)
            await self._grammars.check(parsed.grammar, path, model.info)
        prompt = await _encode(parsed, model)
        if parsed.forced_text:
            parsed = replace(parsed, forced=await codec.encode_forced(parsed.forced_text))
        if parsed.bad_words:
            parsed = parsed.with_bad_words(await codec.encode_words(parsed.bad_words))
        request = parsed.request(record.id, prompt, model.info, arrived, caller.tenant)
        echo = await _echo(parsed, prompt, model) if parsed.echo else Echo()
        return parsed, _within(request, caller.deadline, self._clock()), echo

    def _submit(self, samples: Sequence[Sample], echo: Echo) -> Generation:
        for sample in samples:
            self._router.add(sample.request.id, sample)
            sample.record.accepted(sample.request)
        try:
            self._client.submit(samples[0].request)
        except BaseException as error:
            for sample in samples:
                self._router.remove(sample.request.id)
                sample.ticket.leave()
            for sample in samples[1:]:
                sample.record.abandoned()
            if isinstance(error, EngineDead):
                raise refused(
                    Reason.NOT_READY, "the engine is not ready", retry_after_s=ENGINE_RETRY_S
                ) from error
            raise
        for sample in samples[1:]:
            self._submit_another(sample)
        return Generation(samples, self._client.cancel, echo)

    def _submit_another(self, sample: Sample) -> None:
        """The generation has begun: if the engine dies now, this is the end of the sample."""
        request = sample.request
        try:
            self._client.submit(request)
        except EngineDead as error:
            self._router.remove(request.id)
            finish = Finish(
                FinishReason.ERROR,
                error=str(error),
                retryable=True,
                arrived=request.arrived,
                finished=self._clock(),
            )
            sample.deliver(TokenChunk(request.id, 0, (), "", finish))


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


async def _echo(parsed: Parsed, prompt: tuple[int, ...], model: ServedModel) -> Echo:
    if isinstance(parsed.prompt, str):
        return Echo(parsed.prompt, prompt)
    return Echo(await model.codec.decode(prompt, parsed.output.keep_special_tokens), prompt)


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
