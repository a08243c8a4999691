"""The C++ library, bound with ctypes: tensors are checked here, pointers cross, the GIL is free.

The library links against libgomp by its soname alone. torch, imported above, has brought its own
copy of it, so both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PATH = Path(__file__).parents[1] / "_cpu.so"
BLOCK = 16
_ABI = 4  # api.cpp's
_DTYPES = (torch.bfloat16, torch.float32)


def load(isa: str | None = None, path: Path = PATH) -> Library | None:
    """The library for the best instruction set of this CPU, or None where it was not built.

    `isa`, or else $DRAFTWIRE_ISA, forces one of amx, avx512bf16, avx512, avx2 and generic, or
    amx_emulated, which is for tests. Raises ValueError if it is unknown or not on this CPU,
    RuntimeError if the file is of another version.
    """
    if not path.exists():
        return None
    isa = isa or os.environ.get("DRAFTWIRE_ISA") or None
    native = ctypes.CDLL(str(path))
    if native.draftwire_abi() != _ABI:
        raise RuntimeError(f"{path} is of another version: run `python -m kernels.build`")
    for name, result, arguments in _SIGNATURES:
        function = getattr(native, name)
        function.restype, function.argtypes = result, arguments
    table = native.draftwire_kernels(isa.encode() if isa else None)
    if not table:
        raise ValueError(
            f"DRAFTWIRE_ISA={isa}: not one of amx, avx512bf16, avx512, avx2 and generic, or this "
            "CPU does not have it"
        )
    return Library(
        native,
        table,
        native.draftwire_isa(table).decode(),
        native.draftwire_version().decode(),
    )


class Pool(Structure):
    """`Pool` of kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
        *((name, c_int) for name in ("kv_heads", "head_dim")),
    ]


class _Attention(Structure):
    """`Attention` of kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k_cache", "v_cache", "k_scale", "v_scale", "out")),
        *((name, c_void_p) for name in ("block_tables", "cu_query", "context_lens")),
        *((name, c_int64) for name in ("q_row", "q_head", "out_row", "out_head", "table_row")),
        *((name, c_int) for name in ("heads", "kv_heads", "head_dim", "window")),
        ("scale", c_float),
    ]


_SIGNATURES: list[tuple[str, Any, list[Any]]] = [
    ("draftwire_wide", c_bool, [c_void_p]),
    ("draftwire_scratch", c_int64, [c_void_p, c_int, c_int, c_int]),
    ("draftwire_linear", None, [c_void_p, c_void_p, c_int, c_int]),
    ("draftwire_pass", None, [c_void_p] * 4 + [c_int]),
    ("draftwire_kernels", c_void_p, [c_char_p]),
    ("draftwire_isa", c_char_p, [c_void_p]),
    ("draftwire_version", c_char_p, []),
    (
        "draftwire_write_kv",
        None,
        [c_void_p, c_void_p, POINTER(Pool), c_void_p, c_int64, c_int64, c_int64, c_int],
    ),
    (
        "draftwire_attention",
        c_bool,
        [c_void_p, POINTER(_Attention), c_int, c_int, c_int],
    ),
    (
        "draftwire_sample",
        None,
        [c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64] + [c_void_p] * 7 + [c_int],
    ),
]


@dataclass(frozen=True, slots=True)
class Library:
    """The operations for one instruction set; contracts as in `reference`.

    They use torch's number of threads. Tensors of another shape, dtype or layout than the contract
    asks for raise ValueError; values inside index tensors are trusted.
    """

    native: ctypes.CDLL
    table: int
    isa: str
    version: str

    @property
    def pairs(self) -> bool:
        """Whether linear layers multiply pairs of bfloat16, so that inputs are rounded to it."""
        return not self.native.draftwire_wide(self.table)

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """`reference.write_kv`."""
        rows, heads, dim = k.shape
        scales = _check_caches(k_cache, v_cache, k_scale, v_scale, heads, dim, k.dtype)
        _check(v.shape == k.shape and v.dtype == k.dtype, "v is not like k")
        _check(_rows_packed(k) and _rows_packed(v), "rows of k or v are not contiguous")
        _check(slots.shape == (rows,), "not one slot per row")
        slots = slots.to(torch.int64).contiguous()
        self.native.draftwire_write_kv(
            k.data_ptr(),
            v.data_ptr(),
            byref(Pool(k_cache.data_ptr(), v_cache.data_ptr(), *scales, heads, dim)),
            slots.data_ptr(),
            rows,
            k.stride(0),
            v.stride(0),
            k.element_size(),
        )

    def paged_attention(
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
    ) -> None:
        """`reference.paged_attention`, for head sizes that are a multiple of 16 up to 256."""
        _, heads, dim = q.shape
        kv_heads = v_cache.shape[1]
        _check(dim % 16 == 0 and 0 < dim <= 256, f"head size {dim} is not 16, 32, ... 256")
        _check(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} kv heads")
        scales = _check_caches(k_cache, v_cache, k_scale, v_scale, kv_heads, dim, q.dtype)
        _check(out.shape == q.shape and out.dtype == q.dtype, "out is not like q")
        _check(q.stride(2) == 1 and out.stride(2) == 1, "heads of q or out are not contiguous")
        sequences = len(context_lens)
        _check(block_tables.ndim == 2 and len(block_tables) == sequences, "not a table each")
        _check(len(cu_query) == sequences + 1, "cu_query is not one longer than context_lens")
        for index in (block_tables, cu_query, context_lens):
            _check(index.dtype == torch.int32 and index.stride(-1) == 1, "not int32, contiguous")
        call = _Attention(
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            *scales,
            out.data_ptr(),
            block_tables.data_ptr(),
            cu_query.data_ptr(),
            context_lens.data_ptr(),
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            block_tables.stride(0),
            heads,
            kv_heads,
            dim,
            window,
            scale,
        )
        if not self.native.draftwire_attention(
            self.table, byref(call), sequences, q.element_size(), torch.get_num_threads()
        ):
            raise MemoryError("no memory for the scratch of attention")

    def sample_rows(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """`reference.sample_rows`."""
        rows, vocabulary = logits.shape
        _check(logits.dtype in _DTYPES, f"logits are {logits.dtype}")
        _check(vocabulary > 0 and logits.stride(1) == 1, "rows of logits are not contiguous")
        columns = [
            column.to(dtype).contiguous()
            for column, dtype in (
                (temperature, torch.float64),
                (top_k, torch.int64),
                (top_p, torch.float64),
                (min_p, torch.float64),
                (seeds, torch.int64),
                (positions, torch.int64),
            )
        ]
        _check(all(c.shape == (rows,) for c in columns), "not one value per row")
        ids = torch.empty(rows, dtype=torch.int64)
        self.native.draftwire_sample(
            self.table,
            logits.data_ptr(),
            logits.element_size(),
            rows,
            vocabulary,
            logits.stride(0),
            *(c.data_ptr() for c in columns),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return ids


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_caches(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    heads: int,
    dim: int,
    dtype: torch.dtype,
) -> tuple[int | None, int | None]:
    """The addresses of the scales."""
    blocks = len(v_cache)
    _check(dtype in _DTYPES, f"{dtype} is neither bfloat16 nor float32")
    _check(k_cache.shape == (blocks, heads, dim // 2, BLOCK, 2), "k_cache has another shape")
    _check(v_cache.shape == (blocks, heads, BLOCK // 2, dim, 2), "v_cache has another shape")
    _check(k_cache.is_contiguous() and v_cache.is_contiguous(), "caches are not contiguous")
    if k_scale is None or v_scale is None:
        _check(k_scale is v_scale, "one scale alone")
        _check(k_cache.dtype == v_cache.dtype == dtype, "caches have another dtype")
        return None, None
    _check(k_cache.dtype == v_cache.dtype == torch.int8, "caches with scales are not int8")
    for scale in (k_scale, v_scale):
        _check(scale.shape == (blocks, heads, BLOCK), "a scale has another shape")
        _check(scale.dtype == torch.float32 and scale.is_contiguous(), "not float32, contiguous")
    return k_scale.data_ptr(), v_scale.data_ptr()


def _rows_packed(rows: Tensor) -> bool:
    """Heads of a row follow each other; rows may lie apart."""
    return rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
