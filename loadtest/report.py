"""What a run measured: a table for people, one JSON object for scripts.

Latencies are the client's own. `itl_s` is amortised: a step may commit several tokens, which then
arrive together, so a delta of n tokens that came dt after the one before counts as n gaps of dt/n.
The first delta has no gap before it; it counts in `ttft_s` alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest

import numpy as np
from rich.table import Table

from loadtest.client import Record
from service.pb import draftwire_pb2 as pb

PERCENTILES = (50, 90, 95, 99)
Percentiles = dict[str, float | None]


@dataclass(slots=True)
class SourceCount:
    """Drafts of one source over the whole run, and by their position in a proposal."""

    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, stats: pb.SourceStats) -> None:
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.drafted_at = _added(self.drafted_at, stats.drafted_at)
        self.accepted_at = _added(self.accepted_at, stats.accepted_at)


@dataclass(frozen=True, slots=True)
class Report:
    """Times in seconds. Everything but `requests` and the errors counts complete requests only."""

    workload: str
    concurrency: int
    requests: int
    errors: int
    errors_by_kind: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    output_tok_s: float
    requests_per_s: float
    ttft_s: Percentiles
    itl_s: Percentiles
    e2e_s: Percentiles
    target_steps: int
    tokens_per_target_step: float | None
    drafted: int
    accepted: int
    by_source: dict[str, SourceCount] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def summarise(
    records: Sequence[Record], *, workload: str, concurrency: int, requests: int
) -> Report:
    """Sum up one measured run of `requests` requests; those without a record ran out of time."""
    good = [record for record in records if not record.error]
    kinds = Counter(record.error for record in records if record.error)
    if missing := requests - len(records):
        kinds["TIMEOUT"] = missing
    duration = max(r.ended for r in records) - min(r.started for r in records) if records else 0.0
    finished = [record.finished for record in good if record.finished is not None]
    output_tokens = sum(end.usage.completion_tokens for end in finished)
    steps = sum(end.speculation.target_steps for end in finished)
    return Report(
        workload=workload,
        concurrency=concurrency,
        requests=requests,
        errors=requests - len(good),
        errors_by_kind=dict(kinds),
        duration_s=duration,
        prompt_tokens=sum(end.usage.prompt_tokens for end in finished),
        output_tokens=output_tokens,
        output_tok_s=output_tokens / duration if duration else 0.0,
        requests_per_s=len(good) / duration if duration else 0.0,
        ttft_s=percentiles(r.deltas[0][0] - r.started for r in good if r.deltas),
        itl_s=percentiles(gap for record in good for gap in gaps(record)),
        e2e_s=percentiles(r.ended - r.started for r in good),
        target_steps=steps,
        tokens_per_target_step=output_tokens / steps if steps else None,
        drafted=sum(end.speculation.drafted for end in finished),
        accepted=sum(end.speculation.accepted for end in finished),
        by_source=_by_source(good),
    )


def gaps(record: Record) -> Iterable[float]:
    """The amortised time between tokens, one number per token after the first delta."""
    for (before, _), (now, tokens) in pairwise(record.deltas):
        yield from [(now - before) / tokens] * tokens


def percentiles(values: Iterable[float]) -> Percentiles:
    """p50, p90, p95 and p99 (linear between ranks); None where there are no values."""
    sample = np.fromiter(values, dtype=float)
    if not sample.size:
        return {f"p{p}": None for p in PERCENTILES}
    return {f"p{p}": float(np.percentile(sample, p)) for p in PERCENTILES}


def table(report: Report) -> Table:
    """The report for a person."""
    shown = Table(title=f"{report.workload}, {report.concurrency} at once", show_header=False)
    shown.add_column(style="bold")
    shown.add_column(justify="right")
    errors = ", ".join(f"{kind} {count}" for kind, count in report.errors_by_kind.items())
    shown.add_row("requests", f"{report.requests} in {report.duration_s:.1f} s")
    shown.add_row("errors", f"{report.errors} ({errors})" if errors else "0")
    shown.add_row("output", f"{report.output_tokens} tokens, {report.output_tok_s:.1f} a second")
    for name, values in (("ttft", report.ttft_s), ("itl", report.itl_s), ("e2e", report.e2e_s)):
        ranks = " / ".join("-" if v is None else f"{v * 1e3:.1f}" for v in values.values())
        shown.add_row(f"{name} ms, p50 / p90 / p95 / p99", ranks)
    if report.tokens_per_target_step is not None:
        shown.add_row("tokens per target step", f"{report.tokens_per_target_step:.2f}")
    for source, count in report.by_source.items():
        shown.add_row(f"drafts accepted, {source}", f"{count.accepted} of {count.drafted}")
        pairs = zip_longest(count.accepted_at, count.drafted_at, fillvalue=0)
        shares = " ".join(f"{accepted / drafted:.2f}" for accepted, drafted in pairs if drafted)
        shown.add_row("  share by position", shares)
    return shown


def _by_source(records: Iterable[Record]) -> dict[str, SourceCount]:
    total: dict[str, SourceCount] = {}
    for record in records:
        if record.finished is None:
            continue
        for name, stats in record.finished.speculation.by_source.items():
            total.setdefault(name, SourceCount()).add(stats)
    return total


def _added(one: Iterable[int], other: Iterable[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
