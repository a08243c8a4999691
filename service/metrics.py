"""Metrics: generations and calls as they end, steps as the engine reports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from engine.observer import StepReport
from engine.outcome import Finish, FinishReason
from service.status import Reason

Attributes = dict[str, str | int]

CLASS_NAMES = ("interactive", "standard", "batch")

# Bounds that the semantic conventions recommend, in seconds.
REQUEST_S = [0.01 * 2**n for n in range(14)]
FIRST_TOKEN_S = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
]  # fmt: skip
PER_TOKEN_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
CALL_S = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
# Our own.
WAIT_S = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
PHASE_S = [0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


class GenerationMetrics:
    """Durations, tokens and endings of generations."""

    def __init__(self, meter: Meter, model: str) -> None:
        self._base: Attributes = {
            "gen_ai.provider.name": "draftwire",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "From arrival to the end of a generation.",
            explicit_bucket_boundaries_advisory=REQUEST_S,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From arrival to the first token.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_S,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per token after the first one.",
            explicit_bucket_boundaries_advisory=PER_TOKEN_S,
        )
        self._wait = meter.create_histogram(
            "draftwire.queue.wait",
            "s",
            "From arrival to the first step.",
            explicit_bucket_boundaries_advisory=WAIT_S,
        )
        self._tokens = meter.create_counter(
            "draftwire.tokens", "{token}", "Tokens of ended generations: input, cached, output."
        )
        self._ended = meter.create_counter(
            "draftwire.generations", "{generation}", "Ended generations by finish reason."
        )
        self._refused = meter.create_counter(
            "draftwire.refusals", "{request}", "Requests refused before acceptance, by reason."
        )

    def finished(self, operation: str, priority: int, finish: Finish) -> None:
        base = {**self._base, "gen_ai.operation.name": operation}
        failed = finish.reason is FinishReason.ERROR
        kind = {"error.type": "retryable" if finish.retryable else "internal"} if failed else {}
        total = finish.finished - finish.arrived
        self._duration.record(max(total, 0.0), {**base, **kind})
        if finish.first_token is not None:
            self._first_token.record(max(finish.first_token - finish.arrived, 0.0), base)
            if finish.completion_tokens > 1:
                rest = finish.finished - finish.first_token
                self._per_token.record(max(rest, 0.0) / (finish.completion_tokens - 1), base)
        by_class: Attributes = {"draftwire.class": CLASS_NAMES[priority]}
        if finish.scheduled is not None:
            self._wait.record(max(finish.scheduled - finish.arrived, 0.0), by_class)
        self._ended.add(1, {**by_class, "draftwire.finish_reason": finish.reason.value})
        self._tokens.add(finish.prompt_tokens, {"draftwire.token.type": "input"})
        self._tokens.add(finish.cached_tokens, {"draftwire.token.type": "cached"})
        self._tokens.add(finish.completion_tokens, {"draftwire.token.type": "output"})

    def refused(self, reason: Reason) -> None:
        self._refused.add(1, {"draftwire.refusal.reason": reason.value})


class CallMetrics:
    """Duration of every call."""

    def __init__(self, meter: Meter) -> None:
        self._duration = meter.create_histogram(
            "rpc.server.call.duration",
            "s",
            "Duration of incoming calls.",
            explicit_bucket_boundaries_advisory=CALL_S,
        )

    def called(self, method: str, code: str, seconds: float) -> None:
        """`method` is pkg.Service/Method, `code` the name of the gRPC status code."""
        attributes: Attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "rpc.response.status_code": code,
        }
        if code != "OK":
            attributes["error.type"] = code
        self._duration.record(seconds, attributes)


class RecordingMetrics:
    """What of the recorded generations was kept."""

    def __init__(self, meter: Meter) -> None:
        self._written = meter.create_counter(
            "draftwire.records.written", "{record}", "Recorded generations that were written."
        )
        self._dropped = meter.create_counter(
            "draftwire.records.dropped", "{record}", "Those that were not, by reason."
        )

    def written(self) -> None:
        self._written.add(1)

    def dropped(self, reason: str) -> None:
        self._dropped.add(1, {"draftwire.drop.reason": str(reason)})


class StepMetrics:
    """Steps come 20 to 100 times a second, so totals are kept as integers and read on export.

    `step` is called by one thread; the exporter's thread reads.
    """

    def __init__(self, meter: Meter) -> None:
        self._totals: dict[tuple[str, tuple[tuple[str, str | int], ...]], int] = {}
        self._last: StepReport | None = None
        self._rows = meter.create_histogram(
            "draftwire.step.rows",
            "{row}",
            "Rows fed in a step, drafts included.",
            explicit_bucket_boundaries_advisory=ROWS,
        )
        self._phases = meter.create_histogram(
            "draftwire.step.phase.duration",
            "s",
            "Time of a step by phase.",
            explicit_bucket_boundaries_advisory=PHASE_S,
        )
        counters = (
            ("draftwire.steps", "{step}", "Steps."),
            ("draftwire.step.tokens", "{token}", "Output tokens that steps gave."),
            ("draftwire.drafts.proposed", "{token}", "Draft tokens verified, by source."),
            ("draftwire.drafts.accepted", "{token}", "Draft tokens accepted, by source."),
            ("draftwire.drafts.proposed_at", "{token}", "The same by source and position."),
            ("draftwire.drafts.accepted_at", "{token}", "Accepted, by source and position."),
            ("draftwire.drafts.errors", "{error}", "Failures of draft sources."),
            ("draftwire.preemptions", "{preemption}", "Sequences that lost their blocks."),
            ("draftwire.prefix.queries", "{token}", "Tokens looked up in the prefix cache."),
            ("draftwire.prefix.hits", "{token}", "Tokens whose KV the prefix cache had."),
        )
        for name, unit, description in counters:
            meter.create_observable_counter(name, [self._observe_total(name)], unit, description)
        gauges = (
            ("draftwire.queue.depth", "{request}", "Waiting requests by class.", self._queue),
            ("draftwire.kv.blocks", "{block}", "KV blocks: used, cached, free.", self._blocks),
            ("draftwire.sequences", "{sequence}", "Sequences in the last step.", self._sequences),
        )
        for name, unit, description, read in gauges:
            meter.create_observable_gauge(name, [self._observe_last(read)], unit, description)

    def step(self, report: StepReport) -> None:
        last = self._last
        self._last = report
        self._rows.record(report.rows)
        for phase, seconds in report.phases:
            self._phases.record(seconds, {"draftwire.phase": phase})
        self._add("draftwire.steps", 1)
        self._add("draftwire.step.tokens", report.emitted)
        self._add("draftwire.preemptions", report.preempted)
        self._add("draftwire.prefix.queries", report.prefix_queries)
        self._add("draftwire.prefix.hits", report.prefix_hits)
        for source, stats in report.by_source:
            self._add("draftwire.drafts.proposed", stats.drafted, ("draftwire.source", source))
            self._add("draftwire.drafts.accepted", stats.accepted, ("draftwire.source", source))
            for name, counts in (("proposed", stats.drafted_at), ("accepted", stats.accepted_at)):
                for position, count in enumerate(counts):
                    at = ("draftwire.source", source), ("draftwire.position", position)
                    self._add(f"draftwire.drafts.{name}_at", count, *at)
        # The engine reports a running total, which starts over with a new engine.
        before = last.draft_errors if last is not None and last.number < report.number else 0
        self._add("draftwire.drafts.errors", max(report.draft_errors - before, 0))

    def _add(self, name: str, amount: int, *attributes: tuple[str, str | int]) -> None:
        key = (name, attributes)
        self._totals[key] = self._totals.get(key, 0) + amount

    def _observe_total(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterator[Observation]:
            for (metric, attributes), total in list(self._totals.items()):
                if metric == name:
                    yield Observation(total, dict(attributes))

        return observe

    def _observe_last(
        self, read: Callable[[StepReport], Iterator[Observation]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterator[Observation]:
            if self._last is not None:
                yield from read(self._last)

        return observe

    @staticmethod
    def _queue(report: StepReport) -> Iterator[Observation]:
        for name, depth in zip(CLASS_NAMES, report.waiting, strict=True):
            yield Observation(depth, {"draftwire.class": name})

    @staticmethod
    def _blocks(report: StepReport) -> Iterator[Observation]:
        yield Observation(report.used_blocks, {"draftwire.kv.state": "used"})
        yield Observation(report.cached_blocks, {"draftwire.kv.state": "cached"})
        yield Observation(report.free_blocks, {"draftwire.kv.state": "free"})

    @staticmethod
    def _sequences(report: StepReport) -> Iterator[Observation]:
        yield Observation(report.sequences)
