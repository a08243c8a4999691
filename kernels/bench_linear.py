"""How fast linear layers are, all of a model's in a row: `python -m kernels.bench linear`.

A step of few rows reads every weight once, 270 MB for SmolLM2-135M in bf16 with its head, so its
floor is weight bytes / memory bandwidth; the bandwidth is measured in the same run by summing the
same weights. A step of many rows costs 2 x rows x weights of arithmetic; where that begins to count
depends on the instruction set: from about 4 rows on with AVX2 (bf16 widened, 16 multiply-adds a
cycle and core), 10 with AVX512_BF16, 40 with AMX. All layers in turn, so that none of them is in a
cache when its turn comes. Arguments are ready beforehand, as they are in a pass; there, threads
start once for all layers, here once for each.

Against oneDNN with weights reordered for it, which is what the layers of torch cost at best: in
bf16 where it has that for the CPU, else in float32. The two take turns, and the least time of each
counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.dense import BoundLinear, PackedWeight
from kernels.cpu.library import Library
from kernels.hugepages import zeros

LAYERS = 30
BODY = ((576, 960), (576, 576), (576, 3072), (1536, 576))
HEAD = (576, 49_152)
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
MOST_HEAD_ROWS = 64  # no more rows are sampled at a time


@dataclass(frozen=True, slots=True)
class Linears:
    """All linear layers for `rows` rows. `stream_ms` is what reading the weights takes."""

    rows: int
    ms: float
    library_ms: float
    stream_ms: float

    @property
    def ratio(self) -> float:
        return round(self.library_ms / self.ms, 2)


def linears(library: Library, repetitions: int) -> list[Linears]:
    """Times by rows."""
    threads = torch.get_num_threads()
    shapes = [*BODY * LAYERS, HEAD]
    weights = [torch.randn(n, k, dtype=torch.bfloat16) / k**0.5 for k, n in shapes]
    ours = [PackedWeight.pack(w) for w in weights]
    dtype = library_dtype()
    theirs = [torch.ops.mkldnn._reorder_linear_weight(w.to(dtype), None) for w in weights]
    del weights
    body = sum(w.nbytes for w in ours[:-1])
    stream = zeros(((body + ours[-1].nbytes) // 8,), torch.int64).fill_(1)
    found = []
    for rows in ROWS:
        count = len(shapes) - (rows > MOST_HEAD_ROWS)
        inputs = {k: torch.randn(rows, k) for k, _ in shapes}
        converted = {k: x.to(dtype) for k, x in inputs.items()}
        bound = [BoundLinear(library, inputs[w.depth], w, threads) for w in ours[:count]]

        def own(bound: list[BoundLinear] = bound) -> None:
            for layer in bound:
                layer()

        def other(inputs: dict[int, Tensor] = converted, count: int = count) -> None:
            for (k, _), w in zip(shapes[:count], theirs, strict=False):
                torch.ops.mkldnn._linear_pointwise(inputs[k], w, None, "none", [], "")

        read = stream if count == len(shapes) else stream[: body // 8]
        best = map(min, in_turns((own, other, read.sum), repetitions))
        found.append(Linears(rows, *(round(s * 1e3, 2) for s in best)))
    return found


def library_dtype() -> torch.dtype:
    """What oneDNN computes in on this CPU."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def in_turns(calls: Sequence[Callable[[], object]], repetitions: int) -> list[list[float]]:
    """Seconds of each in turns, after one round that warms up."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repetitions + 1):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [own[1:] for own in times]
