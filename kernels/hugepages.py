"""Tensors in huge pages: a core streams about twice as fast from 2 MiB pages as from 4 KiB ones."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor of zeros, 2 MiB aligned, for which the kernel is asked to use huge pages.

    Pages are taken when first written, as with `torch.zeros`; that is also what this returns where
    the system has no huge pages or the tensor is smaller than one. The memory lives as long as the
    tensor and its views.
    """
    size = math.prod(shape) * dtype.itemsize
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
    if advice is None or size < PAGE:
        return torch.zeros(*shape, dtype=dtype)
    whole = size // PAGE * PAGE  # the rest stays in small pages: no more memory than asked for
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = torch.frombuffer(memory, dtype=torch.uint8)  # the tensor's storage owns the mapping
    start = -raw.data_ptr() % PAGE
    try:
        memory.madvise(advice, start, whole)
    except OSError:  # a kernel built without huge pages
        return torch.zeros(*shape, dtype=dtype)
    return raw[start : start + size].view(dtype).view(*shape)
