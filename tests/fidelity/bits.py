"""Looks at every logit on its way to the sampler: tokens can agree by luck, bits cannot."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from engine.runner import PagedModel
from kernels.ops import Ops, SampleRows

Digests = dict[tuple[int, int], int]


class WatchedSampler:
    """`SampleRows` that notes a checksum of each row's bits by seed and position.

    A position may be drawn more than once, first behind drafts that turn out wrong; the last time
    is the one that is delivered. So of two live requests with one seed only one can be watched.
    """

    def __init__(self, sample_rows: SampleRows) -> None:
        self._sample_rows = sample_rows
        self._digests: Digests = {}

    def take(self) -> Digests:
        """What was noted since the last call."""
        taken, self._digests = self._digests, {}
        return taken

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor:
        rows = logits.contiguous().view(torch.uint8).numpy()
        for key, row in zip(
            zip(seeds.tolist(), positions.tolist(), strict=True), rows, strict=True
        ):
            self._digests[key] = zlib.crc32(row)
        return self._sample_rows(logits, temperature, top_k, top_p, min_p, seeds, positions)


def watch(model: PagedModel) -> WatchedSampler:
    """Put a watch between `model` and its sampler."""
    ops = model._ops
    sampler = WatchedSampler(ops.sample_rows)
    model._ops = Ops(
        **{**{name: getattr(ops, name) for name in Ops.__slots__}, "sample_rows": sampler}
    )
    return sampler
