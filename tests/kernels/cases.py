"""Paged attention problems with their dense form beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference

BLOCK = 16


@dataclass(frozen=True)
class Case:
    """Paged inputs. `keys` and `values` are dense: per sequence (context, kv_heads, D)."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    cu_query: Tensor
    context_lens: Tensor
    scale: float
    window: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def run(self, attention) -> Tensor:
        """What `attention` writes; it starts from NaN."""
        out = torch.full_like(self.q, torch.nan)
        attention(
            self.q,
            self.k_cache,
            self.v_cache,
            out,
            self.block_tables,
            self.cu_query,
            self.context_lens,
            self.scale,
            self.window,
            **self.scales,
        )
        return out

    @property
    def scales(self) -> dict[str, Tensor]:
        """What int8 KV has besides."""
        both = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: scale for name, scale in both.items() if scale is not None}

    def int8(self) -> Case:
        """The same with int8 KV, the dense form being what that holds; unused scales are NaN."""
        k_cache, v_cache = (
            torch.zeros_like(x, dtype=torch.int8) for x in (self.k_cache, self.v_cache)
        )
        shape = (len(k_cache), k_cache.shape[1], BLOCK)
        k_scale, v_scale = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        dense = []
        for table, k, v in zip(self.block_tables, self.keys, self.values, strict=True):
            at = torch.arange(len(k))
            slots = table[at // BLOCK] * BLOCK + at % BLOCK
            reference.write_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale)
            dense.append(
                [whole * scale[..., None] for whole, scale in map(reference.quantise, (k, v))]
            )
        return replace(
            self,
            k_cache=k_cache,
            v_cache=v_cache,
            k_scale=k_scale,
            v_scale=v_scale,
            keys=tuple(k for k, _ in dense),
            values=tuple(v for _, v in dense),
        )

    def only(self, sequences: list[int]) -> Case:
        """The same pages with only these sequences in the step, in this order."""
        starts = self.cu_query.tolist()
        counts = [starts[s + 1] - starts[s] for s in sequences]
        return replace(
            self,
            q=torch.cat([self.q[starts[s] : starts[s + 1]] for s in sequences]),
            block_tables=self.block_tables[sequences].contiguous(),
            cu_query=_offsets(counts),
            context_lens=self.context_lens[sequences].contiguous(),
        )

    def rows(self, sequence: int, first: int, last: int) -> Case:
        """One sequence fed only its rows `first` to `last`, the context ending there."""
        start, end = self.cu_query[sequence : sequence + 2].tolist()
        context = self.context_lens[sequence] - (end - start - last)
        return replace(
            self,
            q=self.q[start + first : start + last],
            block_tables=self.block_tables[sequence : sequence + 1],
            cu_query=_offsets([last - first]),
            context_lens=context.reshape(1),
        )


def make(
    contexts: list[int],
    queries: list[int],
    *,
    heads: int = 9,
    kv_heads: int = 3,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    seed: int = 0,
) -> Case:
    """Random tensors in shuffled pages; whatever no row may read is NaN."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    needed = [-(-c // BLOCK) for c in contexts]
    blocks = torch.randperm(sum(needed) + 2, generator=random).int()
    k_cache = torch.full((len(blocks), kv_heads, dim // 2, BLOCK, 2), torch.nan, dtype=dtype)
    v_cache = torch.full((len(blocks), kv_heads, BLOCK // 2, dim, 2), torch.nan, dtype=dtype)
    foreign = blocks[-1]
    tables = torch.full((len(contexts), max(needed) + 1), int(foreign), dtype=torch.int32)
    keys, values = [], []
    used = 0
    for s, context in enumerate(contexts):
        tables[s, : needed[s]] = blocks[used : used + needed[s]]
        used += needed[s]
        keys.append(normal(context, kv_heads, dim))
        values.append(normal(context, kv_heads, dim))
        for position in range(context):
            block, offset = tables[s, position // BLOCK], position % BLOCK
            pairs = keys[s][position].reshape(kv_heads, dim // 2, 2)
            k_cache[block, :, :, offset] = pairs
            v_cache[block, :, offset // 2, :, offset % 2] = values[s][position]
    return Case(
        q=normal(sum(queries), heads, dim),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        cu_query=_offsets(queries),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        scale=dim**-0.5,
        window=window,
        keys=tuple(keys),
        values=tuple(values),
    )


def expected(case: Case) -> Tensor:
    """Row by row, head by head, in double, from the dense form."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    starts = case.cu_query.tolist()
    heads, kv_heads = case.q.shape[1], case.v_cache.shape[1]
    for s, context in enumerate(case.context_lens.tolist()):
        for row in range(starts[s], starts[s + 1]):
            end = context - (starts[s + 1] - row) + 1
            begin = max(0, end - case.window) if case.window else 0
            for h in range(heads):
                kv = h // (heads // kv_heads)
                k = case.keys[s][begin:end, kv].double()
                v = case.values[s][begin:end, kv].double()
                weights = (k @ case.q[row, h].double() * case.scale).softmax(0)
                out[row, h] = weights @ v
    return out


def _offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


CONTEXTS = st.sampled_from([1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 300])


@st.composite
def cases(draw: st.DrawFn, max_queries: int = 20) -> Case:
    """Block and range edges, groups of 1 to 9, usual head sizes, windows, dtypes, int8 KV."""
    contexts = draw(st.lists(CONTEXTS, min_size=1, max_size=4))
    queries = [draw(st.integers(0, min(c, max_queries))) for c in contexts]
    if not any(queries):
        queries[0] = 1
    kv_heads = draw(st.integers(1, 3))
    case = make(
        contexts,
        queries,
        heads=kv_heads * draw(st.integers(1, 9)),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([32, 64, 80, 128])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        window=draw(st.sampled_from([0, 0, 1, 16, 17, 100])),
        seed=draw(st.integers(0, 2**31)),
    )
    return case.int8() if draw(st.booleans()) else case
