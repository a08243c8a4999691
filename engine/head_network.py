"""A draft head over paged KV: what a pass of it computes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.features import FeaturePool
from engine.head import HeadModule
from engine.kv_cache import KVCache
from engine.linear import StrictLinear
from engine.model_input import ModelInput
from engine.network import make_network
from engine.runner import OpenNetwork
from kernels.ops import Ops


class HeadNetwork:
    """`Network` of a head beside its target. The rows that are drawn from leave the head's guess of
    their hidden state in `features`, for the next row of a chain to go on from; the target
    overwrites it when it gets there.

    To the decoder its inputs are a table of embeddings, made anew for every pass, and its tokens
    are the numbers of the rows.
    """

    def __init__(
        self,
        module: HeadModule,
        target: OpenNetwork,
        features: FeaturePool,
        cache: KVCache,
        ops: Ops,
        *,
        context: int,
        rows: int,
        vocab_size: int,
        strict: bool,
    ) -> None:
        """For positions up to `context` and passes of up to `rows` rows. `module` is packed in
        place, and must have the type of its weights already."""
        self._module = module
        self._target = target
        self._features = features
        dtype, hidden = module.fc.weight.dtype, module.fc.out_features
        module.lm.model.embed_tokens = nn.Embedding(rows, hidden, dtype=dtype)
        self._fc: nn.Module = module.fc
        if strict and ops.library is not None:
            self._fc = StrictLinear(module.fc, ops.library)
        self._decoder = make_network(module.lm, cache, ops, context, strict)
        assert self._decoder.embedding is not None
        self._inputs = self._decoder.embedding
        self._numbers = torch.arange(rows, device=self._inputs.device)
        self._vocabulary = module.vocabulary.to(self._inputs.device)
        self._logits = torch.full((0, vocab_size), -torch.inf)

    def logits(self, batch: ModelInput) -> Tensor:
        """(R, vocab_size), logarithms of probabilities, minus infinity for ids that the head does
        not know; see `Network`."""
        count, rows = len(batch.token_ids), batch.logit_rows
        if count > len(self._inputs):
            raise ValueError(f"a pass of {count} rows; the head takes {len(self._inputs)}")
        embeddings = self._target.embed(batch.token_ids).float()
        both = self._module.normed(self._features.before(batch).float(), embeddings)
        self._inputs[:count] = self._fc(both.to(self._inputs.dtype))
        known = self._decoder.logits(replace(batch, token_ids=self._numbers[:count]))
        self._features.write(batch.slots[rows], self._decoder.hidden(count)[rows])
        if len(rows) > len(self._logits):
            shape = (len(rows), self._logits.shape[1])
            self._logits = torch.full(shape, -torch.inf, device=known.device)
        logits = self._logits[: len(rows)]
        known = known[:, : len(self._vocabulary)].float()
        logits[:, self._vocabulary] = known.log_softmax(1)
        return logits
