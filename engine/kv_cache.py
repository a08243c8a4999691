"""The KV pool of one model: a K and a V tensor per layer, in huge pages."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.hugepages import zeros


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model needs per position. `bytes_per_token` counts K and V of all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """`k[layer]` (num_blocks, kv_heads, head_dim // 2, block_size, 2) and `v[layer]` (num_blocks,
    kv_heads, block_size, head_dim): the layout of `kernels`."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    @staticmethod
    def allocate(shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
        k_shape = (num_blocks, shape.kv_heads, shape.head_dim // 2, block_size, 2)
        v_shape = (num_blocks, shape.kv_heads, block_size, shape.head_dim)

        def pool(size: tuple[int, ...]) -> Tensor:
            if device.type == "cpu":
                return zeros(size, shape.dtype)
            return torch.zeros(size, dtype=shape.dtype, device=device)

        layers = range(shape.layers)
        return KVCache(tuple(pool(k_shape) for _ in layers), tuple(pool(v_shape) for _ in layers))

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks by (from, to). All are read before any is written; no two have the
        same `to`."""
        source, target = torch.tensor(pairs, device=self.k[0].device).T
        for pool in (*self.k, *self.v):
            pool[target] = pool[source]


def blocks_that_fit(shapes: list[KVShape], kv_cache_mib: int, block_size: int) -> int:
    """Blocks for which all pools together stay within `kv_cache_mib`."""
    return (kv_cache_mib << 20) // (block_size * sum(s.bytes_per_token for s in shapes))
