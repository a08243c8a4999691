"""Linear layers: right by torch's, and a row the same in any company, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.dense import DEPTH, WIDTH, PackedWeight, linear
from kernels.cpu.library import Library

# Columns that are and are not whole blocks, an odd number of blocks, a depth that must be padded.
SHAPES = [(96, 64), (100, 96), (16, 32), (48, 34), (33, 160)]
DTYPES = [torch.bfloat16, torch.float32]
ROWS = 70


def layer(columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, weight and bias; inputs are whole in bfloat16, so that all variants read the same."""
    generator = torch.Generator().manual_seed(columns * depth)
    x = torch.randn(ROWS, depth, generator=generator).bfloat16().float()
    weight = torch.randn(columns, depth, generator=generator) / depth**0.5
    return x, weight.to(dtype), torch.randn(columns, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
def test_is_what_torch_computes(
    library: Library, shape: tuple[int, int], dtype: torch.dtype, biased: bool
) -> None:
    x, weight, bias = layer(*shape, dtype)
    packed = PackedWeight.pack(weight, bias if biased else None)
    got = linear(library, x, packed, 2)
    want = functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_know_its_company(
    library: Library, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Any number of rows, any place among them, any number of threads."""
    x, weight, bias = layer(*shape, dtype)
    packed = PackedWeight.pack(weight, bias)
    whole = linear(library, x, packed, 2)
    for rows in range(1, 41):
        for first in (0, 1, ROWS - rows):
            some = slice(first, first + rows)
            assert torch.equal(linear(library, x[some], packed, 1 + rows % 3), whole[some])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_neighbours_do_no_harm(library: Library, dtype: torch.dtype) -> None:
    x, weight, bias = layer(100, 96, dtype)
    packed = PackedWeight.pack(weight, bias)
    want = linear(library, x, packed, 2)
    x[::3] = float("nan")
    x[1::3] = float("inf")
    assert torch.equal(linear(library, x, packed, 2)[2::3], want[2::3])


def test_leading_dimensions_and_dtype_are_kept(library: Library) -> None:
    x, weight, _ = layer(96, 64, torch.bfloat16)
    got = linear(library, x.bfloat16().reshape(2, 35, 64), PackedWeight.pack(weight), 2)
    assert got.shape == (2, 35, 96)
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_pads_with_zeros(dtype: torch.dtype) -> None:
    _, weight, bias = layer(33, 34, dtype)
    packed = PackedWeight.pack(weight, bias)
    assert packed.padded_columns == 3 * WIDTH
    assert packed.padded_depth == 2 * DEPTH
    assert packed.packed.count_nonzero() == weight.count_nonzero()
    assert packed.packed.double().sum().item() == pytest.approx(weight.double().sum().item())
    assert packed.bias is not None
    assert packed.bias[33:].count_nonzero() == 0


@pytest.mark.parametrize(("shape", "dtype"), [((4, 33), torch.float32), ((4, 32), torch.int8)])
def test_what_cannot_be_packed_is_refused(shape: tuple[int, int], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="cannot pack"):
        PackedWeight.pack(torch.zeros(shape, dtype=dtype))
