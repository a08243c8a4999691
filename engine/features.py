"""What the last layer of the target gave for every position, kept in the blocks of its KV.

A draft head reads these instead of computing anything of the text itself (EAGLE, Li et al. 2024).
They live as long as the KV that was computed with them, so that a head can catch up whenever it is
worth it: after a preemption, a prefix that was there, or a hundred steps without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.model_input import ModelInput
from engine.runner import OpenNetwork
from kernels.hugepages import zeros


class FeaturePool:
    """`rows` (num_blocks * block_size + 1, hidden), by slot; the last one is nobody's, and zero."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = (num_blocks * block_size + 1, hidden)
        on_cpu = device.type == "cpu"
        self.rows = zeros(size, dtype) if on_cpu else torch.zeros(size, dtype=dtype, device=device)
        self._block_size = block_size

    def write(self, slots: Tensor, hidden: Tensor) -> None:
        """`hidden` (T, hidden) of the positions in `slots` (T)."""
        self.rows[slots] = hidden.to(self.rows.dtype)

    def before(self, batch: ModelInput) -> Tensor:
        """(T, hidden): of the position before that of each row; zeros where there is none."""
        slots = torch.empty_like(batch.slots)
        slots[1:] = batch.slots[:-1]
        first = batch.cu_query[:-1].long()
        position = batch.positions[first] - 1
        size = self._block_size
        block = batch.block_tables.gather(1, (position.clamp(min=0) // size)[:, None])[:, 0]
        slots[first] = torch.where(position < 0, len(self.rows) - 1, block * size + position % size)
        return self.rows[slots]

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks by (from, to), as `KVCache.copy_blocks` does."""
        source, target = torch.tensor(pairs, device=self.rows.device).T
        by_block = self.rows[:-1].view(-1, self._block_size, self.rows.shape[1])
        by_block[target] = by_block[source]


class Tapped:
    """`Network` that keeps what its last layer gives for every row."""

    def __init__(self, network: OpenNetwork, features: FeaturePool) -> None:
        self._network = network
        self._features = features

    def logits(self, batch: ModelInput) -> Tensor:
        """See `engine.runner.Network`."""
        logits = self._network.logits(batch)
        self._features.write(batch.slots, self._network.hidden(len(batch.slots)))
        return logits
