"""Which network computes a loaded model: fused or stock, strict or fast."""

from __future__ import annotations

from typing import Any

import torch

from engine.errors import ModelError
from engine.fused import FusedNetwork, fusable, fuse
from engine.kv_cache import KVCache
from engine.linear import LibraryLinear, StrictLinear, replace_linears
from engine.quantised import Weights
from engine.runner import OpenNetwork, StockNetwork
from kernels.ops import Ops


def make_network(
    model: Any,
    cache: KVCache,
    ops: Ops,
    context: int,
    strict: bool,
    quantised: Weights | None = None,
) -> OpenNetwork:
    """The network of `model`, a causal LM of transformers, for positions up to `context`.

    `strict`: linear layers are the kernels' own, fused where the family is known; needs
    `ops.library`. Otherwise they are the library's that torch brings, which may give a row other
    bits in other company. `model` is packed in place and must not be used afterwards. `quantised`
    weights, which only a strict, fused network takes: ModelError if this would be another.
    """
    if strict and ops.library is not None and fusable(model):
        return FusedNetwork(ops.library, fuse(model, context, quantised), cache)
    if quantised is not None:
        raise ModelError(
            f"quantised weights are not for {type(model).__name__} as it is computed here"
        )
    if strict and ops.library is not None:
        library = ops.library
        replace_linears(model, lambda layer: StrictLinear(layer, library))
    elif (
        model.device.type == "cpu"
        and model.dtype == torch.bfloat16
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        replace_linears(model, LibraryLinear)
    return StockNetwork(model, cache, ops)
