"""Looks at every logit on its way to the sampler: tokens can agree by luck, bits cannot."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.model_input import Draws
from engine.runner import PagedModel
from engine.sampler import Sampler
from engine.types import Feed

Digests = dict[tuple[int, int], int]


class WatchedSampler:
    """`Sampler` that notes a checksum of each row's bits by seed and position.

    A position may be drawn more than once, first behind drafts that turn out wrong; the last time
    is the one that is delivered. So of two live requests with one seed only one can be watched.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._digests: Digests = {}

    def take(self) -> Digests:
        """What was noted since the last call."""
        taken, self._digests = self._digests, {}
        return taken

    def draw(
        self, feeds: Seq[Feed], logits: Tensor, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        """See `engine.sampler.Sampler`."""
        rows = logits.contiguous().view(torch.uint8).numpy()
        keys = zip(draws.seeds.tolist(), draws.positions.tolist(), strict=True)
        for key, row in zip(keys, rows, strict=True):
            self._digests[key] = zlib.crc32(row)
        return self._sampler.draw(feeds, logits, draws)


def watch(model: PagedModel) -> WatchedSampler:
    """Put a watch between `model` and its sampler."""
    model._sampler = WatchedSampler(model._sampler)
    return model._sampler
