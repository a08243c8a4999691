"""What is kept of each generation: a span, metrics and one log line. Never its text."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from engine.outcome import Finish, FinishReason
from engine.request import Request
from service.convert import Parsed
from service.harmless import Harmless
from service.metrics import GenerationMetrics
from service.spans import GenerationSpan, Parent, SpanSource
from service.status import Reason, Refused

Log = structlog.typing.FilteringBoundLogger


class Record:
    """From the arrival of one generation to exactly one of finished, refused, abandoned, failed.

    No method raises: what telemetry does is no concern of the generation.
    """

    def __init__(
        self,
        generation_id: str,
        operation: str,
        log: Log,
        harmless: Harmless,
        metrics: GenerationMetrics,
        clock: Callable[[], float],
        fingerprint: Callable[[], str],
    ) -> None:
        self.id = generation_id
        self._operation = operation
        self._log = log
        self._harmless = harmless
        self._metrics = metrics
        self._clock = clock
        self._fingerprint = fingerprint
        self._span: GenerationSpan | None = None
        self._priority = 1

    def begin(self, spans: SpanSource, model: str, parent: Parent, tenant: str, at: float) -> None:
        with self._harmless:
            attributes = {"gen_ai.response.id": self.id, "draftwire.tenant": tenant}
            self._span = spans.begin(self._operation, model, parent, attributes, at)
            trace_id, span_id = self._span.ids()
            self._log = self._log.bind(
                generation=self.id, trace_id=trace_id, span_id=span_id, tenant=tenant
            )

    def parsed(self, parsed: Parsed) -> None:
        self._priority = parsed.priority
        with self._harmless:
            if self._span is not None:
                self._span.parsed(parsed)

    def accepted(self, request: Request) -> None:
        with self._harmless:
            if self._span is not None:
                self._span.accepted(request)

    def finished(self, finish: Finish) -> None:
        span, self._span = self._span, None
        with self._harmless:
            if span is not None:
                span.finished(finish, self._fingerprint())
        with self._harmless:
            self._metrics.finished(self._operation, self._priority, finish)
        with self._harmless:
            self._log_finish(finish)

    def refused(self, refusal: Refused) -> None:
        span, self._span = self._span, None
        with self._harmless:
            if span is not None:
                span.refused(refusal, self._clock())
        with self._harmless:
            self._metrics.refused(refusal.reason)
        with self._harmless:
            self._log.info("refused", reason=refusal.reason.value)

    def abandoned(self) -> None:
        """The client left before the generation was accepted."""
        self._break_off("cancelled", failed=False)

    def failed(self, error: Exception) -> None:
        """The server erred before the generation was accepted."""
        self._break_off(type(error).__name__, failed=True)
        with self._harmless:
            self._metrics.refused(Reason.INTERNAL)

    def _break_off(self, error_type: str, failed: bool) -> None:
        span, self._span = self._span, None
        with self._harmless:
            if span is not None:
                span.broken_off(error_type, self._clock(), failed)

    def _log_finish(self, finish: Finish) -> None:
        write = self._log.warning if finish.reason is FinishReason.ERROR else self._log.info
        drafts = finish.drafts
        write(
            "finished",
            reason=finish.reason.value,
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            cached_tokens=finish.cached_tokens,
            drafted=drafts.drafted,
            accepted=drafts.accepted,
            total_s=round(finish.finished - finish.arrived, 4),
            **({"error": finish.error} if finish.error else {}),
        )


class Recorder:
    """Begins records. `model` is the name that is served; `fingerprint` is set once it is known."""

    def __init__(
        self,
        *,
        spans: SpanSource,
        metrics: GenerationMetrics,
        harmless: Harmless,
        log: Log,
        model: str,
        clock: Callable[[], float],
    ) -> None:
        self._spans = spans
        self._metrics = metrics
        self._harmless = harmless
        self._log = log
        self._model = model
        self._clock = clock
        self.fingerprint = ""

    def begin(
        self, generation_id: str, chat: bool, parent: Parent, tenant: str, at: float
    ) -> Record:
        record = Record(
            generation_id,
            "chat" if chat else "text_completion",
            self._log,
            self._harmless,
            self._metrics,
            self._clock,
            lambda: self.fingerprint,
        )
        record.begin(self._spans, self._model, parent, tenant, at)
        return record
