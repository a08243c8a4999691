"""Tiny random models of the common families, and engines over them."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.kv_cache import KVCache, KVShape
from engine.network import make_network
from engine.runner import ATTENTION, PagedModel, register_attention
from engine.sampler import Coupled, Sampler
from kernels.ops import Ops, load_ops

VOCAB = 96
BLOCK = 16

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-untied-bias": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
}


def tiny(family: str, *, seed: int = 0, layers: int = 2, vocab: int = VOCAB) -> PreTrainedModel:
    """A random float32 model with grouped-query attention; weights large enough to be decisive."""
    config_class, model_class, extra = FAMILIES[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **extra,
    )
    torch.manual_seed(seed)
    model = model_class(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.5 if "embed" in name else 0.15)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1)
    return model


def paged(
    model: PreTrainedModel,
    num_blocks: int,
    *,
    ops: Ops | None = None,
    vocab: int = VOCAB,
    strict: bool = True,
    sampler: Sampler | None = None,
) -> PagedModel:
    """`model`, which is packed in place, over a pool of its own. Not `strict`: stock modules."""
    register_attention()
    model.set_attn_implementation(ATTENTION)
    c = model.config
    head_dim = c.hidden_size // c.num_attention_heads
    shape = KVShape(c.num_hidden_layers, c.num_key_value_heads, head_dim, model.dtype)
    cache = KVCache.allocate(shape, num_blocks, BLOCK, torch.device("cpu"))
    ops = ops or load_ops("cpu")
    network = make_network(model, cache, ops, 512, strict)
    return PagedModel(network, cache, BLOCK, vocab, sampler or Coupled(ops.sample_rows))


def prompts(count: int, rng: random.Random, longest: int = 60) -> list[list[int]]:
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def stock_greedy(model: PreTrainedModel, prompt: Seq[int], tokens: int) -> list[int]:
    """transformers' own greedy output, EOS ignored."""
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
        )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids
