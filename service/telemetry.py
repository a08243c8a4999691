"""OpenTelemetry providers and exporters. Nothing here is global; `shutdown` flushes within bounds.

Exporters run in threads of their own behind bounded queues: a slow or dead collector costs spans,
never a step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON, Sampler
from opentelemetry.trace import Tracer

NAME = "draftwire"
# One attempt and one retry at the collector fit; so does the flush of a stopping server.
EXPORT_TIMEOUT_S = 3.0
SHUTDOWN_S = 5.0


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A tracer and a meter, and the providers behind them."""

    tracer_provider: TracerProvider
    meter_provider: MeterProvider

    @property
    def tracer(self) -> Tracer:
        return self.tracer_provider.get_tracer(NAME)

    @property
    def meter(self) -> Meter:
        return self.meter_provider.get_meter(NAME)

    def shutdown(self) -> None:
        """Flush and stop the exporters; gives up after SHUTDOWN_S. Blocks."""
        # Daemons, so that a collector that hangs cannot keep the process.
        threads = [
            threading.Thread(target=stop, name="telemetry-shutdown", daemon=True)
            for stop in (self.tracer_provider.shutdown, self.meter_provider.shutdown)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SHUTDOWN_S)


def make_telemetry(
    kind: Literal["none", "console", "otlp"],
    version: str,
    endpoint: str = "",
    metrics_interval_s: float = 15.0,
) -> Telemetry:
    """Providers that export to nowhere, to stdout or to an OTLP collector over gRPC.

    `endpoint` empty: the standard OTEL_EXPORTER_OTLP_* variables decide. Without an exporter
    spans are not recorded, but they still have ids, which the log shows.
    """
    if kind == "none":
        return build(version, None, None, ALWAYS_OFF)
    if kind == "console":
        spans: SpanExporter = ConsoleSpanExporter()
        metrics: MetricExporter = ConsoleMetricExporter()
    else:
        where = {"endpoint": endpoint, "insecure": endpoint.startswith("http://")}
        given = where if endpoint else {}
        spans = OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S, **given)  # type: ignore[arg-type]
        metrics = OTLPMetricExporter(timeout=EXPORT_TIMEOUT_S, **given)  # type: ignore[arg-type]
    reader = PeriodicExportingMetricReader(metrics, metrics_interval_s * 1000)
    return build(version, spans, reader, DEFAULT_ON)


def build(
    version: str, spans: SpanExporter | None, reader: MetricReader | None, sampler: Sampler
) -> Telemetry:
    """Providers around the given exporter and reader."""
    resource = Resource.create({"service.name": NAME, "service.version": version})
    tracer_provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    if spans is not None:
        tracer_provider.add_span_processor(BatchSpanProcessor(spans))
    meter_provider = MeterProvider(
        [reader] if reader is not None else [], resource=resource, shutdown_on_exit=False
    )
    return Telemetry(tracer_provider, meter_provider)
