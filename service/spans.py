"""One span per generation, with children for where its time went.

    {text_completion|chat} MODEL        started when the request came, ended with its last token
    ├── queue                           arrived → scheduled
    ├── prefill                         scheduled → prefilled
    └── decode                          prefilled → finished

Children are made at the end from the engine's times, so nothing is held open across threads. The
parent is the caller's span, from `traceparent` in the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from engine.outcome import Finish, FinishReason
from engine.request import Request
from service.convert import Parsed
from service.status import Refused

Parent = Context

# Codes that say that the server failed, by the semantic conventions for RPC server spans.
SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


def parent_from(metadata: Iterable[tuple[str, str | bytes]]) -> Parent:
    """The caller's trace context; an empty one if there is none, or none that makes sense."""
    carrier = {k: v for k, v in metadata if isinstance(v, str) and k.startswith("trace")}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


class GenerationSpan:
    """The span of one generation. Ended exactly once, by one of the three last methods."""

    def __init__(self, span: Span, to_ns: Callable[[float], int], tracer: Tracer) -> None:
        self._span = span
        self._to_ns = to_ns
        self._tracer = tracer

    def ids(self) -> tuple[str, str]:
        """Trace id and span id in hex, for the log."""
        context = self._span.get_span_context()
        return trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)

    def parsed(self, parsed: Parsed) -> None:
        self._set(_sampling_attributes(parsed))

    def accepted(self, request: Request) -> None:
        self._set(
            {
                "gen_ai.request.max_tokens": request.stopping.max_tokens,
                "gen_ai.request.seed": str(request.sampling.seed),  # 64 bits, unsigned
                "gen_ai.usage.input_tokens": len(request.prompt),
            }
        )

    def finished(self, finish: Finish, fingerprint: str) -> None:
        self._set(_finish_attributes(finish, fingerprint))
        for name, start, end in phases(finish):
            child = self._tracer.start_span(
                name,
                context=trace.set_span_in_context(self._span, Context()),
                start_time=self._to_ns(start),
            )
            child.end(self._to_ns(end))
        if finish.reason is FinishReason.ERROR:
            self._span.set_attribute("error.type", "retryable" if finish.retryable else "internal")
            self._span.set_status(Status(StatusCode.ERROR, finish.error))
        self._span.end(self._to_ns(finish.finished))

    def refused(self, refusal: Refused, at: float) -> None:
        self._set(
            {"error.type": refusal.reason.value, "rpc.response.status_code": refusal.code.name}
        )
        if refusal.code in SERVER_ERRORS:
            self._span.set_status(Status(StatusCode.ERROR, str(refusal)))
        self._span.end(self._to_ns(at))

    def broken_off(self, error_type: str, at: float, failed: bool) -> None:
        """It ended before it was accepted: the client left, or (`failed`) the server erred."""
        self._span.set_attribute("error.type", error_type)
        if failed:
            self._span.set_status(Status(StatusCode.ERROR, error_type))
        self._span.end(self._to_ns(at))

    def _set(self, attributes: Mapping[str, AttributeValue]) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)


class SpanSource:
    """Starts spans. `clock` is the monotonic one of `Finish`, `wall` gives seconds since 1970."""

    def __init__(
        self, tracer: Tracer, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._tracer = tracer
        self._clock = clock
        self._wall = wall

    def begin(
        self, operation: str, model: str, parent: Parent, attributes: Mapping[str, str], at: float
    ) -> GenerationSpan:
        offset = self._wall() - self._clock()

        def to_ns(seconds: float) -> int:
            return int((seconds + offset) * 1e9)

        span = self._tracer.start_span(
            f"{operation} {model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "draftwire",
                "gen_ai.request.model": model,
                **attributes,
            },
            start_time=to_ns(at),
        )
        return GenerationSpan(span, to_ns, self._tracer)


def phases(finish: Finish) -> list[tuple[str, float, float]]:
    """(name, start, end) of the phases that were reached; they follow each other without a gap."""
    scheduled = finish.finished if finish.scheduled is None else finish.scheduled
    found = [("queue", finish.arrived, scheduled)]
    if finish.scheduled is not None:
        prefilled = finish.finished if finish.prefilled is None else finish.prefilled
        found.append(("prefill", scheduled, prefilled))
    if finish.prefilled is not None:
        found.append(("decode", finish.prefilled, finish.finished))
    return found


def _sampling_attributes(parsed: Parsed) -> dict[str, AttributeValue]:
    sampling, logits = parsed.sampling, parsed.sampling.logits
    return {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.presence_penalty": logits.presence_penalty,
        "gen_ai.request.frequency_penalty": logits.frequency_penalty,
        "draftwire.request.min_p": sampling.min_p,
        "draftwire.request.seeded": parsed.seeded,
        "draftwire.priority": parsed.priority,
        "draftwire.prefill_only": parsed.prefill_only,
    }


def _finish_attributes(finish: Finish, fingerprint: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.finish_reasons": [finish.reason.value.lower()],
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": finish.cached_tokens,
        "draftwire.finish_reason": finish.reason.value,
        "draftwire.target_steps": finish.target_steps,
        "draftwire.preemptions": finish.preemptions,
        "draftwire.fingerprint": fingerprint,
    }
    if finish.first_token is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = finish.first_token - finish.arrived
    for source, stats in finish.by_source:
        attributes[f"draftwire.drafts.{source}.proposed"] = stats.drafted
        attributes[f"draftwire.drafts.{source}.accepted"] = stats.accepted
    return attributes
