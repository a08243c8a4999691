"""int8 KV: what a row becomes, which is a matter of that row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.ops import WriteKV

BLOCK = 16
TINY = torch.finfo(torch.float32).tiny


def written(write_kv: WriteKV, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """k (T, heads, D), v and their scales (T, heads) as the pool holds them."""
    heads, dim = k.shape[1:]
    pools = (
        torch.full((4, heads, dim // 2, BLOCK, 2), -128, dtype=torch.int8),
        torch.full((4, heads, BLOCK // 2, dim, 2), -128, dtype=torch.int8),
        torch.full((4, heads, BLOCK), -1.0),
        torch.full((4, heads, BLOCK), -1.0),
    )
    write_kv(k, v, *pools[:2], slots, *pools[2:])
    block, offset = slots // BLOCK, slots % BLOCK
    there = (
        pools[0][block, :, :, offset].flatten(2),
        pools[1][block, :, offset // 2, :, offset % 2],
        pools[2][block, :, offset],
        pools[3][block, :, offset],
    )
    assert int((pools[2] != -1).sum()) == int((pools[3] != -1).sum()) == len(slots) * heads
    assert int((pools[0] != -128).sum()) == int((pools[1] != -128).sum()) == k.numel()
    return there


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    slots=st.lists(st.integers(0, 4 * BLOCK - 1), min_size=1, max_size=9, unique=True),
    heads=st.integers(1, 3),
    dim=st.sampled_from([2, 16, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    exponent=st.integers(-120, 120),
    seed=st.integers(0, 2**31),
)
def test_a_row_is_its_scale_times_whole_numbers(write_kv, slots, heads, dim, dtype, exponent, seed):
    random = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, len(slots), heads, dim, generator=random) * 2.0**exponent).to(dtype)
    k_is, v_is, k_scale, v_scale = written(write_kv, k, v, torch.tensor(slots))
    for row, whole, scale in ((k, k_is, k_scale), (v, v_is, v_scale)):
        largest = row.float().abs().amax(-1)
        assert torch.equal(scale, torch.where(largest / 127 < TINY, 0.0, largest / 127))
        assert int(whole.abs().max()) <= 127
        if (scale > 0).all():
            assert (whole.abs().amax(-1) == 127).all()
            error = (whole * scale[..., None] - row.float()).abs()
            assert (error <= scale[..., None] * 0.50001).all()


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(count=st.integers(1, 40), at=st.integers(0, 39), seed=st.integers(0, 2**31))
def test_a_row_is_the_same_in_any_company(write_kv, count, at, seed):
    random = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 40, 2, 32, generator=random)
    slots = torch.randperm(4 * BLOCK, generator=random)[:count]
    at %= count
    together = written(write_kv, k[:count], v[:count], slots)
    alone = written(write_kv, k[at : at + 1], v[at : at + 1], slots[at : at + 1])
    assert all(torch.equal(a[at], b[0]) for a, b in zip(together, alone, strict=True))


def test_ties_go_to_the_even_number(write_kv: WriteKV):
    k = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])[None, None]
    there = written(write_kv, k, k, torch.tensor([3]))
    for whole in there[:2]:
        assert whole.flatten().tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
    assert [float(s) for s in there[2:]] == [1.0, 1.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_makes_the_scale_nan(write_kv: WriteKV, bad: float, dtype: torch.dtype):
    k = torch.ones(1, 2, 16, dtype=dtype)
    k[0, 0, 5] = bad
    _, _, k_scale, v_scale = written(write_kv, k, torch.ones_like(k), torch.tensor([0]))
    assert k_scale[0].isnan().tolist() == [True, False]
    assert not v_scale.isnan().any()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 126 * TINY])
def test_what_is_too_small_is_zero(write_kv: WriteKV, size: float):
    k = torch.full((1, 1, 16), size)
    whole, _, scale, _ = written(write_kv, k, k, torch.tensor([0]))
    assert not whole.any()
    assert not scale.any()
