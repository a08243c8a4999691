"""Tensors in huge pages behave like any other."""

from __future__ import annotations

import gc
import mmap
import sys

import pytest
import torch

from kernels import hugepages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(3,), (7, 5, 3), (1 << 20, 3), (2, 3, 512, 512)])
def test_zeros(shape: tuple[int, ...], dtype: torch.dtype):
    tensor = hugepages.zeros(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor.fill_(3)
    assert (tensor == 3).all()
    if tensor.nbytes >= hugepages.PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        assert tensor.data_ptr() % hugepages.PAGE == 0


def test_nothing_is_zero_elements_of_anything():
    assert hugepages.zeros((0, 4), torch.float32).shape == (0, 4)


def test_views_keep_the_memory():
    view = hugepages.zeros((1 << 20,), torch.float32)[5:10]
    gc.collect()
    view.fill_(2)
    assert view.tolist() == [2.0] * 5


def test_tensors_do_not_overlap():
    a, b = (hugepages.zeros((1 << 20,), torch.float32) for _ in range(2))
    a.fill_(1)
    assert not b.any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_goes_back_with_the_tensor():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    size = (64 << 20) + (1 << 20)
    before = resident()
    tensor = hugepages.zeros((size,), torch.uint8).fill_(1)
    assert size - (1 << 19) < resident() - before < size + (1 << 19)
    del tensor
    gc.collect()
    assert resident() - before < 16 << 20


def test_without_huge_pages_it_is_plain_memory(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("no such advice")

    monkeypatch.setattr(hugepages.mmap, "mmap", Refusing)
    assert not hugepages.zeros((1 << 20,), torch.float32).any()
    monkeypatch.delattr(hugepages.mmap, "MADV_HUGEPAGE")
    assert not hugepages.zeros((1 << 20,), torch.float32).any()
