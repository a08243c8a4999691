"""A head before its training: what its target knows, as far as it fits."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import torch
from torch import Tensor, nn

from engine.head import HeadModule
from engine.head_file import make_head
from engine.loader import LoadedModel
from engine.training.corpus import Corpus

SAMPLE = 4096  # rows that the scale of hidden states is measured on


def common_ids(corpus: Corpus, count: int) -> Tensor:
    """The `count` ids that the target wrote most often, ascending; of equals the lowest."""
    tokens, seen = corpus.tokens(), Counter[int]()
    for d in corpus.documents:
        seen.update(tokens[d.start + d.prompt : d.start + d.length].tolist())
    ranked = sorted(seen, key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(ranked[:count]))


def new_head(target: LoadedModel, corpus: Corpus, vocabulary: Tensor, seed: int) -> HeadModule:
    """In float32: a copy of the target's last layer and norm, which at first reads the target's
    hidden state and next to nothing of the token."""
    torch.manual_seed(seed)
    module = make_head(target, vocabulary).float()
    inner, own = target.model.model, module.lm.model
    own.layers[0].load_state_dict(inner.layers[-1].state_dict())
    own.norm.load_state_dict(inner.norm.state_dict())
    bits = torch.from_numpy(corpus.features()[:SAMPLE].copy())
    scale = bits.view(torch.bfloat16).float().square().mean().sqrt()
    hidden = module.fc.out_features
    with torch.no_grad():
        module.fc.weight[:, :hidden] = torch.eye(hidden) * scale
        module.fc.weight[:, hidden:].normal_(0.0, 0.02 * float(scale))
    return module


def frozen_parts(target: LoadedModel) -> tuple[Tensor, nn.Module]:
    """The table of embeddings as it is, and the last norm in float32."""
    norm = deepcopy(target.model.model.norm).float().requires_grad_(False)
    return target.model.get_input_embeddings().weight.detach(), norm
