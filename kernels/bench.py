"""How fast the kernels are against what the machine can do: `python -m kernels.bench`.

Attention of a decoding step reads every KV byte of every sequence once and does little with it, so
its floor is KV bytes / memory bandwidth: for SmolLM2-135M (30 layers, 3 KV heads of 64, bf16) a
position costs 23 KB, and 32 sequences of 300 positions 221 MB a step. With 5 queries per sequence
(verifying 4 drafts) it reads the same bytes and does five times the arithmetic: what that costs on
top says how near the kernel is to being bound by arithmetic. Bandwidth is measured in the same run,
by summing a buffer of huge pages as large as the KV, with the same threads; scattered 2 KiB pages
do not quite reach what that stream does.

A sampled row reads its logits (vocabulary 49,152: 192 KiB, from L2 or L3) once for the maximum and
once for the noise; top-p sums masses in a third pass. Greedy needs the first alone.

Linear layers: `kernels.bench_linear`.

Every number is the best of its repetitions: the others measure what else the machine was doing.
Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kernels.bench_linear import library_dtype, linears
from kernels.hugepages import zeros
from kernels.ops import Ops, load_ops
from kernels.reference import BLOCK

HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY = 9, 3, 64, 30, 49_152
SHAPES = [(n, context, queries) for n, context in ((32, 300), (8, 2000)) for queries in (1, 5)]
PARTS = ("linear", "attention", "sampling")
SAMPLING = {"greedy": (0.0, 1.0), "T=0.8": (0.8, 1.0), "T=0.8 top_p=0.95": (0.8, 0.95)}


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer of one step; `gbps` counts KV bytes, `stream_gbps` is the machine's."""

    sequences: int
    context: int
    queries: int
    ms_per_layer: float
    gbps: float
    stream_gbps: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """Microseconds per row of 64 rows in one call."""

    name: str
    us_per_row: float


def best_seconds(call: Callable[[], object], repetitions: int) -> float:
    """The least time of `call` after one that warms up."""
    call()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def attention(ops: Ops, sequences: int, context: int, queries: int, repetitions: int) -> Attention:
    """All layers in turn, so that no layer's KV is in a cache when its turn comes."""
    pages = -(-context // BLOCK)
    blocks = sequences * pages
    pools = [
        (
            zeros((blocks, KV_HEADS, DIM // 2, BLOCK, 2), torch.bfloat16).normal_(),
            zeros((blocks, KV_HEADS, BLOCK // 2, DIM, 2), torch.bfloat16).normal_(),
        )
        for _ in range(LAYERS)
    ]
    tables = torch.randperm(blocks).int().reshape(sequences, pages)
    starts = (torch.arange(sequences + 1) * queries).int()
    lengths = torch.full((sequences,), context, dtype=torch.int32)
    q = torch.randn(sequences * queries, HEADS, DIM).bfloat16()
    out = torch.empty_like(q)

    def step() -> None:
        for k, v in pools:
            ops.paged_attention(q, k, v, out, tables, starts, lengths, DIM**-0.5)

    size = sequences * context * KV_HEADS * DIM * 2 * 2
    buffer = zeros((size * LAYERS // 8,), torch.int64).fill_(1)
    seconds = best_seconds(step, repetitions) / LAYERS
    stream = best_seconds(buffer.sum, repetitions)
    return Attention(
        sequences,
        context,
        queries,
        round(seconds * 1e3, 4),
        round(size / seconds / 1e9, 2),
        round(buffer.nbytes / stream / 1e9, 2),
    )


def sampling(ops: Ops, name: str, logits: Tensor, repetitions: int) -> Sampling:
    """Rows shaped like a model's: a few candidates far above the rest."""
    rows = len(logits)
    temperature, top_p = (torch.full((rows,), x, dtype=torch.float64) for x in SAMPLING[name])
    zero, index = torch.zeros(rows), torch.arange(rows)

    def call() -> Tensor:
        return ops.sample_rows(logits, temperature, zero, top_p, zero, index, index)

    return Sampling(name, round(best_seconds(call, repetitions) / rows * 1e6, 2))


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("parts", nargs="*", choices=(*PARTS, "all"), default="all")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    ops = load_ops("cpu")
    print(f"{ops.name}/{ops.isa}, {options.threads} threads")
    measures = {
        "linear": lambda: report_linears(ops, options.repetitions),
        "attention": lambda: report_attention(ops, options.repetitions),
        "sampling": lambda: report_sampling(ops, options.repetitions),
    }
    parts = PARTS if "all" in options.parts else options.parts
    found = {part: measures[part]() for part in parts}
    facts = {
        "library_dtype": str(library_dtype()),
        "isa": ops.isa,
        "version": ops.version,
        "threads": options.threads,
    }
    print(json.dumps({**facts, **found}))


def report_linears(ops: Ops, repetitions: int) -> list[dict[str, object]]:
    """Prints as it goes."""
    if ops.library is None:
        return []
    print(f"{'rows':>20} {'ms':>8} {'oneDNN':>9} {'ratio':>6} {'stream':>7} {'of it':>7}")
    found: list[dict[str, object]] = []
    for each in linears(ops.library, repetitions):
        found.append({**asdict(each), "ratio": each.ratio})
        part = each.stream_ms / each.ms
        print(
            f"{each.rows:>20} {each.ms:>8.1f} {each.library_ms:>9.1f} {each.ratio:>6.2f}"
            f" {each.stream_ms:>7.1f} {part:>7.2f}"
        )
    return found


def report_attention(ops: Ops, repetitions: int) -> list[dict[str, object]]:
    """Prints as it goes."""
    print(f"{'sequences x context':>20} {'queries':>8} {'ms/layer':>9} {'GB/s':>6} {'stream':>7}")
    found = []
    for shape in SHAPES:
        a = attention(ops, *shape, repetitions)
        found.append(asdict(a))
        what = f"{a.sequences} x {a.context}"
        print(
            f"{what:>20} {a.queries:>8} {a.ms_per_layer:>9.3f} {a.gbps:>6.1f} {a.stream_gbps:>7.1f}"
        )
    return found


def report_sampling(ops: Ops, repetitions: int) -> list[dict[str, object]]:
    """Prints as it goes."""
    logits = torch.randn(64, VOCABULARY) * 2.5 - 3
    logits[:, ::1000] += 10
    found = []
    for name in SAMPLING:
        s = sampling(ops, name, logits, repetitions)
        found.append(asdict(s))
        print(f"{s.name:>20} {s.us_per_row:>8.1f} us/row")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
