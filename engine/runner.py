"""A stock transformers model over paged KV: `Model` for target and draft alike.

Attention is registered through transformers' `AttentionInterface`; what it needs of the step
travels as the keyword `step`, so nothing is global.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine.errors import ModelError
from engine.kv_cache import KVCache
from engine.logprobs import Rows, rows_to_tell, tell
from engine.model_input import ModelInput
from engine.sampler import Sampler
from engine.types import Drawn, Feed
from engine.verify import RULED_OUT, UNUSABLE
from kernels.ops import Ops

ATTENTION = "draftwire_paged"


@dataclass(frozen=True, slots=True)
class StepContext:
    """What attention needs of a step."""

    ops: Ops
    cache: KVCache
    batch: ModelInput


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    step: StepContext,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, T, D), key and value (1, kv_heads, T, D) -> (1, T, heads, D)."""
    for name in ("softcap", "s_aux", "position_bias"):
        if unused.get(name) is not None:
            raise ModelError(f"attention with {name} is not supported")
    layer = module.layer_idx
    batch = step.batch
    k_cache, v_cache = step.cache.k[layer], step.cache.v[layer]  # type: ignore[index]
    scales = step.cache.scales(layer)  # type: ignore[arg-type]
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    step.ops.write_kv(k, v, k_cache, v_cache, batch.slots, *scales)
    out = torch.empty_like(q)
    step.ops.paged_attention(
        q,
        k_cache,
        v_cache,
        out,
        batch.block_tables,
        batch.cu_query,
        batch.context_lens,
        scaling,
        sliding_window or 0,
        *scales,
    )
    return out[None], None


def register_attention() -> None:
    """Make `attn_implementation="draftwire_paged"` known. Safe to call again."""
    AttentionInterface.register(ATTENTION, paged_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class Network(Protocol):
    """What a model computes of a batch, K/V of all rows being written on the way."""

    def logits(self, batch: ModelInput) -> Tensor:
        """(R, at least the vocabulary) for `batch.logit_rows`, valid until the next call."""
        ...


class OpenNetwork(Network, Protocol):
    """One that can be looked into."""

    @property
    def embedding(self) -> Tensor | None:
        """(V, hidden), the table that embeddings are read from, if it is one of its own."""
        ...

    def hidden(self, rows: int) -> Tensor:
        """(rows, hidden) for the first rows of the last batch: what the last layer gave, before
        the last norm; valid until the next call."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """(T, hidden) embeddings, valid until the next call."""
        ...


class StockNetwork:
    """`Network` by the modules of transformers."""

    def __init__(self, model: nn.Module, cache: KVCache, ops: Ops) -> None:
        self._model = model
        self._cache = cache
        self._ops = ops
        self._hidden = torch.empty(0)
        norm = getattr(model.get_decoder(), "norm", None)  # type: ignore[operator]
        if norm is not None:
            norm.register_forward_pre_hook(self._keep)

    def logits(self, batch: ModelInput) -> Tensor:
        """See `Network`."""
        # With no row to sample the head still needs one; its result is dropped.
        rows = batch.logit_rows if len(batch.logit_rows) else batch.logit_rows.new_zeros(1)
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=rows,
            step=StepContext(self._ops, self._cache, batch),
        )
        logits: Tensor = output.logits[0, : len(batch.logit_rows)]
        return logits

    @property
    def embedding(self) -> Tensor:
        """See `OpenNetwork`."""
        table: Tensor = self._model.get_input_embeddings().weight.data  # type: ignore[operator]
        return table

    def hidden(self, rows: int) -> Tensor:
        """See `OpenNetwork`. Empty if the model's last norm is not where it is expected."""
        return self._hidden[:rows]

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `OpenNetwork`."""
        embedded: Tensor = self._model.get_input_embeddings()(token_ids)  # type: ignore[operator]
        return embedded

    def _keep(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._hidden = arguments[0][0]


class PagedModel:
    """`Model` over a network and its KV pool.

    `vocab_size` is the number of ids that may be drawn; embedding rows past it are padding.
    `says_sure`: logits are logarithms of probabilities, and it tells those of what it draws.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        block_size: int,
        vocab_size: int,
        sampler: Sampler,
        says_sure: bool = False,
    ) -> None:
        self._says_sure = says_sure
        self._network = network
        self.cache = cache
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._sampler = sampler
        self._device = cache.k[0].device

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        """See `engine.types.Model`. Feeds without tokens are answered without a pass."""
        full = [f for f in feeds if f.tokens]
        if not full:
            return [Drawn() for _ in feeds]
        with torch.inference_mode():
            batch = ModelInput.build(full, self._block_size, self._device)
            logits = self.logits(batch)
            told = _process(feeds, logits)
            drawn = self._draw(feeds, batch, logits)
            for i, rows in told.items():
                drawn[i] = tell(feeds[i], rows, drawn[i].tokens)
        return drawn

    def logits(self, batch: ModelInput) -> Tensor:
        """(R, vocab_size) for `batch.logit_rows`, valid until the next call."""
        return self._network.logits(batch)[:, : self._vocab_size]

    def _draw(self, feeds: Seq[Feed], batch: ModelInput, logits: Tensor) -> list[Drawn]:
        if batch.sampled is not None:
            logits = logits[batch.sampled]
        if not len(logits):
            return [Drawn() for _ in feeds]
        ids, probs = self._sampler.draw(feeds, logits, batch.draws)
        if min(ids) < 0:
            ids = [i if i >= 0 else _why(row) for i, row in zip(ids, logits, strict=True)]
        left, sure = iter(ids), iter(_sure(logits, ids) if self._says_sure else ())
        drawn = [
            Drawn(tuple(islice(left, f.sample)), sure=tuple(islice(sure, f.sample))) for f in feeds
        ]
        if probs is None:
            return drawn
        own = torch.split(probs, [f.sample for f in feeds])
        return [replace(d, probs=p) for d, p in zip(drawn, own, strict=True)]


def _sure(logits: Tensor, ids: list[int]) -> list[float]:
    """How likely each of `ids` is by its row of `logits` (R, V)."""
    at = torch.tensor(ids, device=logits.device).clamp(min=0)[:, None]
    sure: list[float] = logits.gather(1, at)[:, 0].exp().tolist()
    return sure


def _why(row: Tensor) -> int:
    """Why nothing can be drawn from it."""
    return RULED_OUT if bool((row == -torch.inf).all()) else UNUSABLE


def _process(feeds: Seq[Feed], logits: Tensor) -> dict[int, Rows]:
    """Change the rows of the feeds that have rules. Returns, by feed, rows to tell logprobs of."""
    told: dict[int, Rows] = {}
    end = 0
    for i, feed in enumerate(feeds):
        first, start = end, end + len(feed.known)
        end = start + feed.sample
        if feed.output.logprobs is not None or feed.known:
            told[i] = rows_to_tell(feed, logits[first:start], logits[start:end])
        if feed.rules is not None and feed.sample:
            feed.rules.apply(logits[start:end], feed.drafts)
    return told
