"""Quantised weights as the kernels read them: 4 to 8 bits and their scales, a block at a time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from ctypes import Array, Structure, addressof, c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.dense import DEPTH, WIDTH, Projection
from kernels.gguf_blocks import FORMATS, SUPER, Blocks
from kernels.hugepages import zeros


class _Block(Structure):
    """`QuantisedBlock` of dense.h."""

    _fields_ = [("at", c_void_p), ("format", c_int)]


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight (columns, depth) of blocks of 16 columns, which need not be of one format.

    Multiplied with, it has the values, and gives the bits, of its bfloat16 self.
    """

    memory: tuple[Tensor, ...]  # kept alive: what `table` points into
    table: Array[_Block]
    bias: Tensor | None
    columns: int
    depth: int
    dtype = torch.bfloat16

    @staticmethod
    def pack(blocks: Blocks) -> QuantisedWeight:
        """Columns are a weight's rows in `blocks`."""
        columns, depth = blocks.codes.shape
        packed = _packed(blocks)
        number = FORMATS.index(blocks.format)
        memory = zeros(packed.shape, torch.uint8).copy_(packed)
        size = memory.shape[1]
        at = memory.data_ptr()
        table = (_Block * len(memory))(*(_Block(at + i * size, number) for i in range(len(memory))))
        return QuantisedWeight((memory,), table, None, columns, depth)

    @staticmethod
    def join(weights: Seq[QuantisedWeight], bias: Tensor | None = None) -> QuantisedWeight:
        """The columns of all, one after the other; those of all but the last are whole blocks."""
        tables = [block for w in weights for block in w.table]
        return _of(weights, tables, bias)

    @staticmethod
    def alternate(weights: Seq[QuantisedWeight], bias: Tensor | None = None) -> QuantisedWeight:
        """A block of each in turn; they are of the same size."""
        tables = [block for turn in zip(*(w.table for w in weights), strict=True) for block in turn]
        return _of(weights, tables, bias)

    @property
    def padded_columns(self) -> int:
        return len(self.table) * WIDTH

    @property
    def padded_depth(self) -> int:
        return -(-self.depth // DEPTH) * DEPTH

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory)

    def as_argument(self) -> Projection:
        """`Projection` of dense.h."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return Projection(None, bias, self.padded_columns, self.padded_depth, addressof(self.table))


def _of(weights: Seq[QuantisedWeight], tables: Seq[_Block], bias: Tensor | None) -> QuantisedWeight:
    columns = sum(w.columns for w in weights)
    memory = tuple(memory for w in weights for memory in w.memory)
    table = (_Block * len(tables))(*tables)
    wide = None
    if bias is not None:
        wide = torch.zeros(len(tables) * WIDTH)
        wide[:columns] = bias
    return QuantisedWeight(memory, table, wide, columns, weights[0].depth)


def _packed(blocks: Blocks) -> Tensor:
    """uint8 (blocks, bytes of a block), as quantised.h reads them."""
    groups = _codes(blocks)  # (blocks, groups, bytes)
    plain = blocks.factors is None
    own = (blocks.scales, blocks.shifts) if plain else (blocks.factors, blocks.shift_factors)
    heads = [_by_block(t) for t in own if t is not None]
    groups = torch.cat((*heads, groups), 2)
    if plain:
        return groups.flatten(1)
    count = SUPER // blocks.group
    supers = groups.view(len(groups), -1, count * groups.shape[2])
    heads = [_by_block(t) for t in (blocks.scales, blocks.shifts) if t is not None]
    return torch.cat((*heads, supers), 2).flatten(1)


def _by_block(values: Tensor) -> Tensor:
    """(rows, groups) -> uint8 (blocks, groups, 16 values' bytes)."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % WIDTH))
    by_group = padded.view(-1, WIDTH, padded.shape[1]).transpose(1, 2)
    return by_group.contiguous().view(torch.uint8)


def _codes(blocks: Blocks) -> Tensor:
    padded = torch.nn.functional.pad(blocks.codes, (0, 0, 0, -len(blocks.codes) % WIDTH))
    # (blocks, halves, columns, groups, pairs, 2) -> (blocks, groups, pairs, halves, columns, 2)
    shape = (-1, 2, WIDTH // 2, padded.shape[1] // blocks.group, blocks.group // 2, 2)
    ordered = padded.reshape(shape).permute(0, 3, 4, 1, 2, 5)
    if not blocks.format.startswith("Q4"):
        return ordered.flatten(2)
    first, other = ordered.unbind(3)
    nibbles: Tensor = first | other << 4
    return nibbles.flatten(2)
