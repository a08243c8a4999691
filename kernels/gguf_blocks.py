"""Quantised weights as GGUF files hold them, taken apart: codes, scales and shifts.

The layouts are those of ggml (block_q4_0 and so on in its ggml-common.h), which `gguf.quants` knows
how to turn into numbers; here they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# As `Format` in cpu/dense.h numbers them.
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SUPER = 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight (rows, depth): scale * code + shift, where without shifts a code of `zero` is zero.

    `codes` uint8 (rows, depth). `scales` and `shifts` fp16 (rows, depth / 32); of the formats with
    `factors` (rows, depth / 256), and each group's are these times its `factors` and, subtracted,
    its `shift_factors`, bytes (rows, depth / group), signed where there are no shifts.
    """

    format: str
    zero: int
    group: int
    codes: Tensor
    scales: Tensor
    shifts: Tensor | None
    factors: Tensor | None = None
    shift_factors: Tensor | None = None


def take_apart(kind: str, raw: Tensor) -> Blocks:
    """`raw` uint8 (rows, bytes of a row). Raises ValueError for a format that is not known."""
    if kind not in FORMATS:
        raise ValueError(f"weights of the format {kind} are not known")
    return _TAKE_APART[kind](raw)


def _q4_0(raw: Tensor) -> Blocks:
    scale, qs = _fields(raw, 2, 16)
    return Blocks("Q4_0", 8, 32, _nibbles(qs), _half(scale), None)


def _q4_1(raw: Tensor) -> Blocks:
    scale, shift, qs = _fields(raw, 2, 2, 16)
    return Blocks("Q4_1", 0, 32, _nibbles(qs), _half(scale), _half(shift))


def _q5_0(raw: Tensor) -> Blocks:
    scale, high, qs = _fields(raw, 2, 4, 16)
    return Blocks("Q5_0", 16, 32, _nibbles(qs) | _bits(high) << 4, _half(scale), None)


def _q5_1(raw: Tensor) -> Blocks:
    scale, shift, high, qs = _fields(raw, 2, 2, 4, 16)
    return Blocks("Q5_1", 0, 32, _nibbles(qs) | _bits(high) << 4, _half(scale), _half(shift))


def _q8_0(raw: Tensor) -> Blocks:
    scale, qs = _fields(raw, 2, 32)
    return Blocks("Q8_0", 128, 32, _row(qs ^ 128), _half(scale), None)


def _q4_k(raw: Tensor) -> Blocks:
    scale, shift, both, qs = _fields(raw, 2, 2, 12, 128)
    return _super("Q4_K", _nibbles(_split(qs, 4, 32)), scale, shift, both)


def _q5_k(raw: Tensor) -> Blocks:
    scale, shift, both, high, qs = _fields(raw, 2, 2, 12, 32, 128)
    fifth = high.unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    codes = _nibbles(_split(qs, 4, 32)) | _row(fifth) << 4
    return _super("Q5_K", codes, scale, shift, both)


def _q6_k(raw: Tensor) -> Blocks:
    low, high, factors, scale = _fields(raw, 128, 64, 16, 2)
    upper = _split(high, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    codes = _nibbles(_split(low, 2, 64)) | _row(upper) << 4
    return Blocks("Q6_K", 32, 16, codes, _half(scale), None, _row(factors))


_TAKE_APART: dict[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _fields(raw: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Each (rows, blocks, size)."""
    return torch.split(raw.view(len(raw), -1, sum(sizes)), list(sizes), 2)


def _row(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)


def _split(field: Tensor, *sizes: int) -> Tensor:
    return field.reshape(*field.shape[:-1], *sizes)


def _half(field: Tensor) -> Tensor:
    return _row(field.contiguous().view(torch.float16))


def _nibbles(field: Tensor) -> Tensor:
    """The low halves of each run of bytes, then the high ones."""
    return _row(torch.stack((field & 15, field >> 4), -2))


def _bits(field: Tensor) -> Tensor:
    return _row(field.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1)


def _super(kind: str, codes: Tensor, scale: Tensor, shift: Tensor, both: Tensor) -> Blocks:
    """`both` holds eight factors of scales and eight of shifts, of six bits each."""
    d, m, high = _split(both, 3, 4).unbind(-2)
    factors = torch.cat((d & 63, high & 15 | d >> 2 & 48), -1)
    of_shifts = torch.cat((m & 63, high >> 4 | m >> 2 & 48), -1)
    plain = _half(scale), _half(shift)
    return Blocks(kind, 0, 32, codes, *plain, _row(factors), _row(of_shifts))
