"""A tiny target whose next token is mostly a matter of the last one."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.engine.tiny import tiny
from tests.engine.vocabularies import byte_level

ROWS, IDS = 448, 420
SCALE = 0.1


def write_target(directory: Path, seed: int = 0, family: str = "llama") -> Path:
    """Its layers add little to the embedding of the token, out of which a fixed permutation of the
    ids is read: greedy outputs go around in cycles that are long for an n-gram of the request. The
    embeddings are small, so that training need not take weights far."""
    model = tiny(family, vocab=ROWS, seed=seed)
    torch.manual_seed(seed)
    rows = torch.randn(ROWS, 64)
    following = torch.randperm(ROWS)
    model.model.embed_tokens.weight.copy_(SCALE * rows)
    model.lm_head.weight[following] = 0.3 * rows
    for name, parameter in model.named_parameters():
        if "layers" in name and parameter.ndim > 1:
            parameter.mul_(0.15 * (SCALE if "o_proj" in name or "down_proj" in name else 1.0))
    model.config.max_position_embeddings = 512
    model.generation_config.eos_token_id = 2
    model.bfloat16().save_pretrained(directory)
    byte_level(IDS).save(str(directory / "tokenizer.json"))
    return directory
