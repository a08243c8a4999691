"""Quantised weights: the bits of the same weights widened to bfloat16, in every company."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kernels.cpu.dense import PackedWeight, linear
from kernels.cpu.library import Library
from kernels.cpu.quantised import QuantisedWeight
from kernels.gguf_blocks import FORMATS, take_apart

SHAPES = [(48, 256), (100, 768), (33, 96), (64, 1280)]
# Where the fp16 numbers of a block are.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
ROWS = (1, 2, 5, 8, 9, 16, 24, 25, 33, 300)


def blocks(kind: str, columns: int, depth: int) -> np.ndarray:
    """Any codes there can be, under scales of all sizes and signs; (columns, bytes of a row)."""
    length, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(columns * depth)
    raw = random.integers(0, 256, (columns, depth // length, size), dtype=np.uint8)
    for at in HALVES[kind]:
        shape = (columns, depth // length, 1)
        scales = random.standard_normal(shape) * 10.0 ** random.integers(-4, 1, shape)
        raw[:, :, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return raw.reshape(columns, -1)


def both(kind: str, columns: int, depth: int) -> tuple[QuantisedWeight, Tensor]:
    """A weight, and what it is in bfloat16."""
    raw = blocks(kind, columns, depth)
    wide = torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[kind])).bfloat16()
    return QuantisedWeight.pack(take_apart(kind, torch.from_numpy(raw))), wide


def fits(kind: str, depth: int) -> bool:
    return depth % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_bfloat16(library: Library, kind: str, shape: tuple[int, int]) -> None:
    """At every number of rows: widened in registers, in cache, and more than share a piece."""
    if not fits(kind, shape[1]):
        pytest.skip(f"{kind} comes in blocks of 256")
    own, wide = both(kind, *shape)
    packed = PackedWeight.pack(wide)
    for rows in ROWS:
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
        got = linear(library, x, own, 2)
        assert torch.equal(got, linear(library, x, packed, 2)), rows
        assert got.count_nonzero() > 0.9 * got.numel()


def test_weights_of_several_formats_side_by_side(library: Library) -> None:
    """Joined, and block by block in turn; with biases."""
    random = torch.Generator().manual_seed(3)
    parts = [both(kind, 32, 256) for kind in ("Q4_K", "Q6_K", "Q8_0", "Q4_1")]
    wide = [w for _, w in parts]
    bias = torch.randn(128, generator=random)
    joined = QuantisedWeight.join([q for q, _ in parts], bias)
    turns = QuantisedWeight.alternate([q for q, _ in parts], bias)
    in_turn = torch.stack([w.view(2, 16, 256) for w in wide], 1).reshape(128, 256)
    for rows in ROWS:
        x = torch.randn(rows, 256, generator=random)
        for own, right in ((joined, torch.cat(wide)), (turns, in_turn)):
            want = linear(library, x, PackedWeight.pack(right, bias), 2)
            assert torch.equal(linear(library, x, own, 2), want)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_a_row_does_not_know_its_company(library: Library, kind: str) -> None:
    own, _ = both(kind, 100, 256)
    x = torch.randn(70, 256)
    whole = linear(library, x, own, 2)
    for rows in range(1, 41):
        for first in (0, 1, 70 - rows):
            some = slice(first, first + rows)
            assert torch.equal(linear(library, x[some], own, 1 + rows % 3), whole[some])


@pytest.mark.parametrize("kind", FORMATS)
def test_taken_apart_nothing_is_lost(kind: str) -> None:
    """The parts make the numbers that `gguf` makes of the whole."""
    raw = blocks(kind, 5, 512)
    parts = take_apart(kind, torch.from_numpy(raw))
    scales = parts.scales.float().repeat_interleave(512 // parts.scales.shape[1], 1)
    shifts = torch.zeros_like(scales)
    if parts.shifts is not None:
        shifts = parts.shifts.float().repeat_interleave(512 // parts.scales.shape[1], 1)
    if parts.factors is not None:
        signed = parts.factors.view(torch.int8) if parts.shifts is None else parts.factors
        scales = scales * signed.float().repeat_interleave(parts.group, 1)
    if parts.shift_factors is not None:
        shifts = -shifts * parts.shift_factors.float().repeat_interleave(parts.group, 1)
    got = scales * (parts.codes.float() - parts.zero) + shifts
    want = gguf.quants.dequantize(raw, GGMLQuantizationType[kind])
    assert torch.equal(got, torch.from_numpy(want))


def test_memory_is_what_the_bits_take() -> None:
    for kind, bits in (("Q4_1", 5), ("Q4_K", 4.625), ("Q8_0", 8.5), ("Q6_K", 8.5625)):
        own, wide = both(kind, 64, 512)
        assert own.nbytes * 8 / wide.numel() == bits


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match="Q2_K"):
        take_apart("Q2_K", torch.zeros(1, 84, dtype=torch.uint8))
