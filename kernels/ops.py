"""One place to choose an implementation of the operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import library as cpu


class WriteKV(Protocol):
    """Contract: `reference.write_kv`."""

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None: ...


class PagedAttention(Protocol):
    """Contract: `reference.paged_attention`."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        block_tables: Tensor,
        cu_query: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int = 0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None: ...


class SampleRows(Protocol):
    """Contract: `reference.sample_rows`."""

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations, and what to call them in a fingerprint.

    `version` changes with the code. `library`: the C++ library, where the operations are its: a row
    has the same bits in any company then, and linear layers and whole passes can be had from it.
    """

    name: str
    isa: str
    version: str
    library: cpu.Library | None
    write_kv: WriteKV
    paged_attention: PagedAttention
    sample_rows: SampleRows


def load_ops(device: str, head_dim: int = 64) -> Ops:
    """The C++ library for `device` "cpu" where it was built and knows the head size, else torch.

    Raises ValueError if $DRAFTWIRE_ISA names an instruction set that is unknown or not there.
    """
    known = device == "cpu" and head_dim % 16 == 0 and head_dim <= 256
    library = cpu.load() if known else None
    if library is None:
        return REFERENCE
    return Ops(
        "cpu",
        library.isa,
        library.version,
        library,
        library.write_kv,
        library.paged_attention,
        library.sample_rows,
    )


REFERENCE = Ops(
    "reference",
    "torch",
    torch.__version__,
    None,
    reference.write_kv,
    reference.paged_attention,
    reference.sample_rows,
)
