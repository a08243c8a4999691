"""Before serving: does the paged path give what the stock model gives?

A model whose attention has something that the paged kernels do not know would be served wrong
without a word; here it is refused by name instead.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import ModelError
from engine.model_input import ModelInput
from engine.request import SamplingParams
from engine.runner import ATTENTION, PagedModel
from engine.types import Feed
from engine.widened import widened

LENGTH = 40
SPLIT = 17
LONGEST = 1024
# Relative error of the logits' norm. bf16 keeps 8 bits, and errors add up over the layers.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2}
TOLERANCE_INT8_KV = 8e-2  # adds about 1e-2 of its own (docs/models.md)


def stock_logits(model: PreTrainedModel, tokens: Tensor, wide: bool) -> Tensor:
    """(1, T) ids -> (T, V) logits by the model's own attention; to be called before packing.

    `wide`: computed in float32 of the same weights. Where bf16 also is what is handed from layer to
    layer, the logits of a large model can be a tenth off: no measure for a network that is better.
    """
    model.set_attn_implementation("eager")  # every model has it, with all its own features
    with torch.inference_mode(), widened(model) if wide else nullcontext():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0]
    model.set_attn_implementation(ATTENTION)
    return logits


def probe_tokens(vocab_size: int, window: int, capacity: int) -> Tensor:
    """(1, T) ids spread over the vocabulary; longer than the sliding window if there is one."""
    length = min(window + SPLIT if window else LENGTH, LONGEST, capacity)
    return (torch.arange(length) * 7919 % vocab_size)[None]


def check_paged(
    paged: PagedModel,
    name: str,
    tokens: Tensor,
    expected: Tensor,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Feed the probe in two chunks through blocks in reverse order. Raises ModelError.

    `dtype` is that of the model.
    """
    ids = tuple(tokens[0].tolist())
    blocks = list(range(-(-len(ids) // block_size)))[::-1]
    got = []
    for start, end in ((0, min(SPLIT, len(ids))), (SPLIT, len(ids))):
        if end > start:
            feed = Feed(ids[start:end], start, blocks, end - start, SamplingParams(0.0))
            with torch.inference_mode():
                batch = ModelInput.build([feed], block_size, tokens.device)
                got.append(paged.logits(batch).clone())
    actual = torch.cat(got).float()
    expected = expected[:, : actual.shape[1]].float()
    error = ((actual - expected).norm() / expected.norm()).item()
    tolerance = TOLERANCE[dtype]
    if paged.cache.k_scale:
        tolerance = max(tolerance, TOLERANCE_INT8_KV)
    if not error <= tolerance:
        raise ModelError(
            f"{name}: logits over paged KV differ from the stock model's "
            f"(relative error {error:.2g}, allowed {tolerance:.0e}); not serving it"
        )
