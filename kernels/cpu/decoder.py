"""A whole pass of a decoder in C++: weights and pools are given once, a batch per call."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.dense import ROWS, Projection, Weight
from kernels.cpu.library import Library, Pool
from kernels.hugepages import zeros


class _Layer(Structure):
    """`Layer` of dense.h."""

    _fields_ = [
        *((name, Projection) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        ("pool", Pool),
        ("window", c_int),
    ]


class _Decoder(Structure):
    """`Decoder` of dense.h."""

    _fields_ = [
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in ("embedding", "norm", "cos", "sin")),
        ("head", Projection),
        *((n, c_int) for n in ("count", "hidden", "heads", "kv_heads", "head_dim")),
        ("element_bytes", c_int),
        ("eps", c_float),
        ("scale", c_float),
    ]


class _Batch(Structure):
    """`Batch` of dense.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "logit_rows")),
        *((name, c_void_p) for name in ("block_tables", "cu_query", "context_lens")),
        ("table_row", c_int64),
        *((name, c_int) for name in ("rows", "sequences", "sampled")),
    ]


class _Workspace(Structure):
    """`Workspace` of dense.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("residual", "input", "qkv", "query", "attended")),
        *((name, c_void_p) for name in ("middle", "gate", "logits", "scratch")),
        ("scratch_bytes", c_int64),
        ("most_rows", c_int),
    ]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Norms are float32; `window` 0 sees all. `qkv` has the columns of q, k
    and v in turn; `gate_up` alternates between 16 columns of each.
    """

    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Llama and its kin. `embedding` (vocabulary, hidden) in the weights' dtype, None if it is the
    head's; `cos` and `sin` (context, head_dim / 2) float32; `scale` is attention's.
    """

    layers: tuple[DecoderLayer, ...]
    embedding: Tensor | None
    norm: Tensor
    head: Weight
    cos: Tensor
    sin: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class LayerPool:
    """KV of one layer, as `kernels` says; scales (num_blocks, kv_heads, BLOCK) with int8."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Decoder:
    """Weights over pools. Not for two threads at once: calls share room to work in."""

    def __init__(
        self, library: Library, weights: DecoderWeights, pools: Seq[LayerPool], threads: int
    ) -> None:
        self._library = library
        self._weights = weights
        self._pools = tuple(pools)  # kept alive: the structures below point into them
        self._threads = threads
        pairs = zip(weights.layers, pools, strict=True)
        self._layers = (_Layer * len(weights.layers))(*(_layer(weights, *p) for p in pairs))
        self._decoder = _Decoder(
            self._layers,
            *(_pointer(t) for t in (weights.embedding, weights.norm, weights.cos, weights.sin)),
            weights.head.as_argument(),
            len(weights.layers),
            weights.head.depth,
            weights.heads,
            weights.kv_heads,
            weights.head_dim,
            weights.head.dtype.itemsize,
            weights.eps,
            weights.scale,
        )
        self._embedding = _Decoder.from_buffer_copy(self._decoder)
        self._embedding.count = 0  # no layers
        self._room = _Room.make(library, weights, 0, 0, threads)

    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        cu_query: Tensor,
        context_lens: Tensor,
        logit_rows: Tensor,
    ) -> Tensor:
        """(R, columns of the head) float32 for `logit_rows`, valid until the next call; K and V of
        all rows are written. Arguments as in `engine.model_input.ModelInput`, trusted.
        """
        self._pass(
            self._decoder,
            token_ids,
            positions,
            slots,
            block_tables,
            cu_query,
            context_lens,
            logit_rows,
        )
        return self._room.logits[: len(logit_rows), : self._weights.head.columns]

    def _pass(
        self,
        decoder: _Decoder,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        cu_query: Tensor,
        context_lens: Tensor,
        logit_rows: Tensor,
    ) -> None:
        rows, sampled = len(token_ids), len(logit_rows)
        if rows > self._room.rows or sampled > len(self._room.logits):
            most = max(rows, self._room.rows), max(sampled, len(self._room.logits))
            self._room = _Room.make(self._library, self._weights, *most, self._threads)
        batch = _Batch(
            *(t.data_ptr() for t in (token_ids, positions, slots, logit_rows)),
            *(t.data_ptr() for t in (block_tables, cu_query, context_lens)),
            block_tables.stride(0),
            rows,
            len(context_lens),
            sampled,
        )
        self._library.native.draftwire_pass(
            self._library.table,
            byref(decoder),
            byref(batch),
            byref(self._room.argument),
            self._threads,
        )

    def hidden(self, rows: int) -> Tensor:
        """(rows, hidden) float32: what the last layer gave for the first rows of the last call,
        before the last norm; valid until the next one."""
        return self._room.buffers[0][:rows]

    def embed(self, token_ids: Tensor) -> Tensor:
        """(T, hidden) float32: embeddings, however they are packed; valid until the next call."""
        none = token_ids.new_empty(0)
        self._pass(self._embedding, token_ids, none, none, none[None], none, none, none)
        return self.hidden(len(token_ids))


@dataclass(frozen=True, slots=True)
class _Room:
    """Buffers for `rows` rows; `argument` points into them."""

    rows: int
    logits: Tensor
    buffers: tuple[Tensor, ...]
    argument: _Workspace

    @staticmethod
    def make(
        library: Library, weights: DecoderWeights, rows: int, sampled: int, threads: int
    ) -> _Room:
        layer = weights.layers[0]
        hidden, kind = weights.head.depth, weights.head.dtype
        rows, sampled = (-(-max(n, 1) // ROWS) * ROWS for n in (rows, sampled))
        reads = kind if library.pairs else torch.float32
        depth = max(w.padded_depth for w in (layer.qkv, layer.out, layer.gate_up, weights.head))
        queries = weights.heads * weights.head_dim
        scratch = library.native.draftwire_scratch(
            library.table, weights.heads, weights.kv_heads, weights.head_dim
        )
        logits = zeros((sampled, weights.head.padded_columns), torch.float32)
        buffers = (
            zeros((rows, hidden), torch.float32),
            zeros((max(rows, sampled), depth), reads),
            zeros((rows, layer.qkv.padded_columns), torch.float32),
            zeros((rows, queries), kind),
            zeros((rows, layer.out.padded_depth), kind),
            zeros((rows, layer.down.padded_depth), reads),
            zeros((threads, rows, 16), torch.float32),
            logits,
            zeros((threads, scratch), torch.uint8),
        )
        pointers = (b.data_ptr() for b in buffers)
        return _Room(rows, logits, buffers, _Workspace(*pointers, scratch, rows))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer(weights: DecoderWeights, layer: DecoderLayer, pool: LayerPool) -> _Layer:
    return _Layer(
        *(w.as_argument() for w in (layer.qkv, layer.out, layer.gate_up, layer.down)),
        *(_pointer(t) for t in (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)),
        Pool(
            *(_pointer(t) for t in (pool.k, pool.v, pool.k_scale, pool.v_scale)),
            weights.kv_heads,
            weights.head_dim,
        ),
        layer.window,
    )
