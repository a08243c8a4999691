"""Before promising it: does a row have the same bits in any company?

Whole passes of a model over texts of its own: at once, in pieces, token by token, alone and between
neighbours, at the start and at the end of a batch, in other blocks. Where one logit differs in one
bit, the same request could give other bytes, and strict numerics is not promised.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_input import ModelInput
from engine.request import SamplingParams
from engine.runner import PagedModel
from engine.types import Feed

LENGTH = 37
PIECES = {
    "being computed in two pieces": (21, 16),
    "being computed in pieces": (5, 16, 13, 3),
    "being computed alone": (34, 1, 1, 1),
}
CROWDS = {
    "a neighbour": (1,),
    "neighbours that verify": (5, 5, 5),
    "a crowd": (1, 9, 40, 17, 3),
}
ENOUGH_BLOCKS = 16  # for all of them
VERIFIED = 4  # rows that are computed again in company


@dataclass(frozen=True, slots=True)
class _Text:
    ids: tuple[int, ...]
    blocks: tuple[int, ...]

    def feed(self, start: int, count: int, sample: int) -> Feed:
        ids = self.ids[start : start + count]
        return Feed(ids, start, self.blocks, sample, SamplingParams(0.0))


@dataclass(frozen=True, slots=True)
class _Probe:
    """Texts over the blocks of a pool, in descending order so that none follows from another."""

    paged: PagedModel
    vocab_size: int
    num_blocks: int
    block_size: int

    def texts(self, lengths: Seq[int]) -> list[_Text]:
        """As many of these lengths as fit."""
        found: list[_Text] = []
        first = 0
        for number, length in enumerate(lengths):
            end = first + -(-length // self.block_size)
            if end > self.num_blocks:
                break
            ids = tuple((i * 7919 + number * 104729) % self.vocab_size for i in range(length))
            found.append(_Text(ids, tuple(range(end - 1, first - 1, -1))))
            first = end
        return found

    def logits(self, feeds: Seq[Feed], first: int, count: int) -> Tensor:
        """Of `count` sampled rows from row `first` on."""
        with torch.inference_mode():
            batch = ModelInput.build(feeds, self.block_size, torch.device("cpu"))
            return self.paged.logits(batch)[first : first + count].clone()


def difference(paged: PagedModel, vocab_size: int, num_blocks: int, block_size: int) -> str:
    """What changes a row of `paged`, or nothing. Overwrites the KV pool.

    A pool too small for the neighbours is checked with those that fit.
    """
    probe = _Probe(paged, vocab_size, num_blocks, block_size)
    (own,) = probe.texts([min(LENGTH, num_blocks * block_size)])
    expected = probe.logits([own.feed(0, len(own.ids), len(own.ids))], 0, len(own.ids))
    for name, pieces in PIECES.items():
        if not _same_in_pieces(probe, own, pieces, expected):
            return name
    for name, crowd in CROWDS.items():
        _, *others = probe.texts([len(own.ids), *crowd])
        if not _same_in_company(probe, own, others, expected):
            return name
    return ""


def _same_in_pieces(probe: _Probe, own: _Text, pieces: Seq[int], expected: Tensor) -> bool:
    start = 0
    for piece in pieces:
        count = min(piece, len(own.ids) - start)
        if count < 1:
            break
        got = probe.logits([own.feed(start, count, count)], 0, count)
        if not torch.equal(got, expected[start : start + count]):
            return False
        start += count
    return True


def _same_in_company(probe: _Probe, own: _Text, others: Seq[_Text], expected: Tensor) -> bool:
    count = min(VERIFIED, len(own.ids))
    crowd = [other.feed(0, len(other.ids), 1) for other in others]
    mine = own.feed(len(own.ids) - count, count, count)
    return all(
        torch.equal(
            probe.logits([*crowd[:place], mine, *crowd[place:]], place, count), expected[-count:]
        )
        for place in (0, len(crowd))
    )
