"""How near to the memory bus a pass of a real model comes: `python -m tests.bandwidth`.

A pass reads every weight once, and once the keys and values of each sequence. Those bytes over its
time are set against the rate at which all threads sum a tensor in huge pages. Arithmetic is the
other floor: each row costs a multiply-add for every weight, at a rate that the last shape shows,
where it is all that counts. Time is that of `PagedModel.run`: building the batch and drawing are
part of it.

Passes and sums take turns, so that what the neighbours of a shared machine do to one, they do to
the others; medians count. Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from engine.config import EngineConfig
from engine.pooled import load_models
from engine.request import SamplingParams
from engine.runner import PagedModel
from engine.types import Feed
from kernels.bench_linear import in_turns
from kernels.hugepages import zeros
from service.models import resolve

# (sequences, context of each, rows of each, sampled of each)
SHAPES = (
    (1, 200, 1, 1),
    (1, 200, 4, 4),
    (4, 200, 1, 1),
    (8, 200, 1, 1),
    (2, 200, 8, 8),
    (16, 200, 1, 1),
    (32, 200, 1, 1),
    (32, 300, 1, 1),
    (1, 0, 256, 1),
)
GREEDY = SamplingParams(0.0)


@dataclass(frozen=True, slots=True)
class Pass:
    """Medians. `share`: bytes read over time, of the rate of summing; `gmacs`: 10^9 multiply-adds
    of rows with weights a second."""

    rows: int
    sequences: int
    context: int
    ms: float
    mb: float
    share: float
    gmacs: float


def feeds(shape: Seq[int], block_size: int) -> list[Feed]:
    """Sequences of any tokens, each with blocks of its own."""
    sequences, context, rows, sampled = shape
    blocks = -(-(context + rows) // block_size)
    tokens = tuple(range(5, 5 + rows))
    return [
        Feed(tokens, context, range(i * blocks, (i + 1) * blocks), sampled, GREEDY)
        for i in range(sequences)
    ]


def weights_of(config: Any) -> int:
    """Multiply-adds of a row: the linear layers of a model of the Llama kind, its head included."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = config.hidden_size * (heads * head_dim + 3 * config.intermediate_size)
    return int(config.num_hidden_layers * layer + config.vocab_size * config.hidden_size)


def measure(
    model: PagedModel, kv_bytes: int, weights: int, block_size: int, rounds: int
) -> tuple[list[Pass], float]:
    """`kv_bytes` of a token, `weights` in number, two bytes each; also GB/s of summing."""
    stream = zeros((weights * 2 // 8,), torch.int64).fill_(1)
    batches = [feeds(shape, block_size) for shape in SHAPES]
    calls: list[Callable[[], object]] = [stream.sum, *((lambda b=b: model.run(b)) for b in batches)]
    summing, *seconds = map(median, in_turns(calls, rounds))
    rate = stream.nbytes / summing
    found = []
    for (sequences, context, rows, _), took in zip(SHAPES, seconds, strict=True):
        read = weights * 2 + kv_bytes * sequences * (context + rows)
        found.append(
            Pass(
                sequences * rows,
                sequences,
                context,
                round(took * 1e3, 2),
                round(read / 1e6),
                round(read / took / rate, 2),
                round(sequences * rows * weights / took / 1e9),
            )
        )
    return found, round(rate / 1e9, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    config = EngineConfig(
        str(resolve(args.model)),
        draft="none",
        kv_dtype=args.kv_dtype,
        kv_cache_mib=512,
        numerics="strict",
    )
    pooled = load_models(config, time.perf_counter).target
    cache = pooled.paged.cache
    blocks, _, _, block_size, _ = cache.k[0].shape
    pools = (*cache.k, *cache.v, *cache.k_scale, *cache.v_scale)
    kv_bytes = sum(pool.nbytes for pool in pools) // (blocks * block_size)
    weights = weights_of(pooled.loaded.config)
    passes, rate = measure(pooled.paged, kv_bytes, weights, block_size, args.rounds)
    print(f"{pooled.ops.isa}, {torch.get_num_threads()} threads, summing {rate} GB/s")
    print(f"{'rows':>5} {'sequences x context':>20} {'ms':>7} {'MB':>5} {'share':>6} {'GMAC/s':>7}")
    for p in passes:
        what = f"{p.sequences} x {p.context}"
        print(f"{p.rows:>5} {what:>20} {p.ms:>7.2f} {p.mb:>5.0f} {p.share:>6.2f} {p.gmacs:>7.0f}")
    facts = {"isa": pooled.ops.isa, "kv_dtype": args.kv_dtype, "stream_gbps": rate}
    print(json.dumps({**facts, "passes": [asdict(p) for p in passes]}))


if __name__ == "__main__":
    main()
