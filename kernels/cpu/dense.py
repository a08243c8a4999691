"""Linear layers in C++: weights packed once, a row of the result the same in any company."""

from __future__ import annotations

from ctypes import Structure, byref, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.library import Library
from kernels.hugepages import zeros

WIDTH = 16  # columns of a block
DEPTH = 32  # what a depth is a multiple of
ROWS = 16  # what the rows of a buffer are a multiple of


class Projection(Structure):
    """`Projection` of dense.h."""

    _fields_ = [
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int),
        ("depth", c_int),
        ("blocks", c_void_p),
    ]


class _LinearCall(Structure):
    """`LinearCall` of dense.h."""

    _fields_ = [
        ("projection", Projection),
        ("x", c_void_p),
        ("x_row", c_int64),
        ("y", c_void_p),
        ("y_row", c_int64),
        ("rows", c_int),
    ]


class Weight(Protocol):
    """What a linear layer multiplies with; (columns, depth), padded to what the kernels take."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def columns(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def padded_columns(self) -> int: ...
    @property
    def padded_depth(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

    def as_argument(self) -> Projection:
        """`Projection` of dense.h; it points into this."""
        ...


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight (columns, depth) as the kernels read it; `packed` lies in huge pages.

    `packed` (blocks, depth / 2, 16, 2) of bf16 or (blocks, depth, 16) of float32, padded with
    zeros; `bias` (padded columns) float32 or None.
    """

    packed: Tensor
    bias: Tensor | None
    columns: int
    depth: int

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """Of a bf16 or float32 weight as `nn.Linear` holds it."""
        columns, depth = weight.shape
        if weight.dtype not in (torch.bfloat16, torch.float32) or depth % 2:
            raise ValueError(f"cannot pack {weight.dtype} of depth {depth}")
        blocks, deep = -(-columns // WIDTH), -(-depth // DEPTH) * DEPTH
        pair = 2 if weight.dtype == torch.bfloat16 else 1
        packed = zeros((blocks, deep // pair, WIDTH, pair), weight.dtype)
        view, whole = packed[:, : depth // pair], columns // WIDTH
        paired = weight.reshape(columns, depth // pair, pair)
        full = paired[: whole * WIDTH].reshape(whole, WIDTH, depth // pair, pair)
        view[:whole] = full.transpose(1, 2)
        if rest := columns % WIDTH:
            view[whole, :, :rest] = paired[-rest:].transpose(0, 1)
        if bias is None:
            return PackedWeight(packed, None, columns, depth)
        wide = torch.zeros(blocks * WIDTH)
        wide[:columns] = bias
        return PackedWeight(packed, wide, columns, depth)

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def padded_columns(self) -> int:
        return len(self.packed) * WIDTH

    @property
    def padded_depth(self) -> int:
        return -(-self.depth // DEPTH) * DEPTH

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def as_argument(self) -> Projection:
        """`Projection` of dense.h."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return Projection(
            self.packed.data_ptr(), bias, self.padded_columns, self.padded_depth, None
        )


class BoundLinear:
    """x W^T + bias of one x and one weight, to be computed as often as is called for."""

    def __init__(self, library: Library, x: Tensor, weight: Weight, threads: int) -> None:
        """x (rows, depth); rounded to bfloat16 where the instruction set multiplies pairs of it."""
        kind = weight.dtype if library.pairs else torch.float32
        padded = (0, weight.padded_depth - weight.depth, 0, -len(x) % ROWS)
        wide = torch.nn.functional.pad(x.to(kind), padded) if any(padded) else x.to(kind)
        self._x = wide.contiguous()
        self._y = torch.empty(len(wide), weight.padded_columns)
        self._call = _LinearCall(
            weight.as_argument(),
            self._x.data_ptr(),
            self._x.stride(0),
            self._y.data_ptr(),
            self._y.stride(0),
            len(x),
        )
        self._result = self._y[: len(x), : weight.columns]
        self._library = library
        self._weight = weight
        self._threads = threads

    def __call__(self) -> Tensor:
        """(rows, columns) float32, valid until the next call."""
        self._library.native.draftwire_linear(
            self._library.table,
            byref(self._call),
            self._weight.dtype.itemsize,
            self._threads,
        )
        return self._result


def linear(library: Library, x: Tensor, weight: Weight, threads: int) -> Tensor:
    """x (..., depth) -> (..., columns) = x W^T + bias in x's dtype, sums in float32.

    x is rounded to bfloat16 first where the instruction set multiplies pairs of it.
    """
    rows = x.reshape(-1, weight.depth)
    result: Tensor = BoundLinear(library, rows, weight, threads)().to(x.dtype)
    return result.reshape(*x.shape[:-1], weight.columns)
