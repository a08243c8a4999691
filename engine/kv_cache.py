"""The KV pool of one model: K and V of each layer, and their scales if they are int8."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.hugepages import zeros


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model needs per position. `bytes_per_token` counts K and V of all layers, with what
    int8 has besides: a float32 scale for each head."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def scaled(self) -> bool:
        return self.dtype == torch.int8

    @property
    def bytes_per_token(self) -> int:
        per_head = self.head_dim * self.dtype.itemsize + 4 * self.scaled
        return 2 * self.layers * self.kv_heads * per_head


@dataclass(frozen=True, slots=True)
class KVCache:
    """`k[layer]` (num_blocks, kv_heads, head_dim // 2, block_size, 2), `v[layer]` (num_blocks,
    kv_heads, block_size // 2, head_dim, 2): the layout of `kernels`. int8 has scales (num_blocks,
    kv_heads, block_size) for each, others none. In huge pages."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    k_scale: tuple[Tensor, ...] = ()
    v_scale: tuple[Tensor, ...] = ()

    @staticmethod
    def allocate(shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
        head = (num_blocks, shape.kv_heads)
        k_shape = (*head, shape.head_dim // 2, block_size, 2)
        v_shape = (*head, block_size // 2, shape.head_dim, 2)

        def pools(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
            if device.type == "cpu":
                return tuple(zeros(size, dtype) for _ in range(shape.layers))
            return tuple(torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers))

        scales = [pools((*head, block_size), torch.float32) for _ in range(2 * shape.scaled)]
        return KVCache(pools(k_shape, shape.dtype), pools(v_shape, shape.dtype), *scales)

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Of K and of V."""
        return (self.k_scale[layer], self.v_scale[layer]) if self.k_scale else (None, None)

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks by (from, to). All are read before any is written; no two have the
        same `to`."""
        source, target = torch.tensor(pairs, device=self.k[0].device).T
        for pool in (*self.k, *self.v, *self.k_scale, *self.v_scale):
            pool[target] = pool[source]
