"""Writing KV: what attention reads is what was written, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cpu.library import Library
from kernels.ops import WriteKV
from tests.kernels.conftest import libraries

BLOCK = 16


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    slots=st.lists(st.integers(0, 5 * BLOCK - 1), max_size=30, unique=True),
    padding=st.sets(st.integers(0, 29)),
    heads=st.integers(1, 3),
    dim=st.sampled_from([2, 32, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    wide=st.booleans(),
)
def test_rows_land_in_their_slots(write_kv, slots, padding, heads, dim, dtype, wide):
    random = torch.Generator().manual_seed(len(slots))
    slots = [-1 if i in padding else slot for i, slot in enumerate(slots)]
    fused = torch.randn(len(slots), 2, heads, dim, generator=random).to(dtype)
    k, v = fused.unbind(1)  # rows of a fused projection: packed heads, rows apart
    if not wide:
        k, v = k.contiguous(), v.contiguous()
    k_cache = torch.full((5, heads, dim // 2, BLOCK, 2), 7, dtype=dtype)
    v_cache = torch.full((5, heads, BLOCK // 2, dim, 2), 7, dtype=dtype)
    write_kv(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))
    used = set()
    for row, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, BLOCK)
            used.add(slot)
            assert torch.equal(k_cache[block, :, :, offset].flatten(1), k[row])
            assert torch.equal(v_cache[block, :, offset // 2, :, offset % 2], v[row])
    rest = [divmod(slot, BLOCK) for slot in set(range(5 * BLOCK)) - used]
    assert all(
        (k_cache[b, :, :, o] == 7).all() and (v_cache[b, :, o // 2, :, o % 2] == 7).all()
        for b, o in rest
    )


def test_slots_may_be_int32(write_kv: WriteKV):
    k = torch.randn(2, 1, 4)
    k_cache, v_cache = torch.zeros(1, 1, 2, BLOCK, 2), torch.zeros(1, 1, BLOCK // 2, 4, 2)
    write_kv(k, k, k_cache, v_cache, torch.tensor([3, -1], dtype=torch.int32))
    assert torch.equal(v_cache[0, 0, 1, :, 1], k[0, 0])
    assert torch.count_nonzero(v_cache) == 4


def test_nan_is_copied_bit_by_bit(library: Library):
    k = torch.tensor([0x7FC1, -0x3E], dtype=torch.int16).view(torch.bfloat16).reshape(1, 1, 2)
    k_cache = torch.zeros(1, 1, 1, BLOCK, 2, dtype=torch.bfloat16)
    v_cache = torch.zeros(1, 1, BLOCK // 2, 2, 2, dtype=torch.bfloat16)
    library.write_kv(k, k, k_cache, v_cache, torch.tensor([5]))
    assert torch.equal(k_cache[0, 0, 0, 5].view(torch.int16), k[0, 0].view(torch.int16))


def test_wrong_inputs_are_refused():
    library = next(iter(libraries().values()))
    k = torch.zeros(2, 1, 4)
    k_cache, v_cache = torch.zeros(1, 1, 2, BLOCK, 2), torch.zeros(1, 1, BLOCK // 2, 4, 2)
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="v is not like k"):
        library.write_kv(k, k[:1], k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="one slot per row"):
        library.write_kv(k, k, k_cache, v_cache, slots[:1])
    with pytest.raises(ValueError, match="another dtype"):
        library.write_kv(k, k, k_cache.bfloat16(), v_cache, slots)
    apart = torch.zeros(2, 1, 8)[:, :, ::2]
    with pytest.raises(ValueError, match="rows of k or v"):
        library.write_kv(apart, apart, k_cache, v_cache, slots)
