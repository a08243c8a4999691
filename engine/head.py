"""A draft head: a layer of the target's kind that goes on from the target's own last hidden state.

The row of position p takes the embedding of the token at p and the hidden state at p - 1, which is
the target's where the target has been, else the head's own guess; what it gives is its guess of the
hidden state at p, and through the target's own rows for the most common ids, of the token at p + 1
(EAGLE, Li et al. 2024, section 3; trimmed vocabulary: FR-Spec, Zhao et al. 2025).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

OWN = ("fc.", "feature_norm", "embedding_norm", "lm.model.layers.", "lm.model.norm.")


class HeadModule(nn.Module):
    """The parameters, and what of a pass is not a decoder's. `lm` is a causal LM of one layer,
    whose inputs are what `fc` gives and whose `lm_head` has the target's rows for `vocabulary`.
    """

    lm: Any
    vocabulary: Tensor

    def __init__(self, model_class: type[nn.Module], config: Any, vocabulary: Tensor) -> None:
        """`config` is the target's; `vocabulary` (V',) its ids that can be drawn."""
        super().__init__()
        own = deepcopy(config)
        own.num_hidden_layers, own.vocab_size, own.pad_token_id = 1, len(vocabulary), None
        own.tie_word_embeddings = False
        if getattr(own, "layer_types", None):
            own.layer_types = own.layer_types[-1:]
        lm: Any = model_class(own)
        hidden = config.hidden_size
        self.lm = lm
        self.eps: float = lm.model.norm.variance_epsilon
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.feature_norm = nn.Parameter(torch.ones(hidden))
        self.embedding_norm = nn.Parameter(torch.ones(hidden))
        self.register_buffer("vocabulary", vocabulary.long(), persistent=False)

    def normed(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """(..., hidden) float32 each -> (..., 2 * hidden), which `fc` takes."""
        shape = features.shape[-1:]
        return torch.cat(
            (
                rms_norm(features, shape, self.feature_norm.float(), self.eps),
                rms_norm(embeddings, shape, self.embedding_norm.float(), self.eps),
            ),
            -1,
        )

    def own_state(self) -> dict[str, Tensor]:
        """What is trained, by name; the rest is the target's."""
        return {n: t for n, t in self.state_dict().items() if n.startswith(OWN)}
