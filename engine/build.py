"""Puts an engine together from settings: the only module that knows all the others."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import transformers

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.core import Engine
from engine.draft import Composite, DraftSource
from engine.draft_gate import GatedDraft
from engine.draft_guard import GuardedDraft
from engine.draft_model import ModelDraft
from engine.draft_ngram import NgramDraft
from engine.errors import ConfigError
from engine.kv_cache import KVCache, KVShape, blocks_that_fit
from engine.linear import pack_linears
from engine.loader import LoadedModel, check_same_vocabulary, load
from engine.observer import EngineObserver
from engine.policy import ClassArrival
from engine.prefix import NoPrefixCache, PrefixCache
from engine.runner import ATTENTION, PagedModel, register_attention
from engine.scheduler import Scheduler
from engine.selfcheck import check_paged, probe_tokens, stock_logits
from engine.specs import parse_drafts
from engine.text import Detokenizer
from engine.types import ModelInfo, Request
from kernels.ops import Ops, load_ops
from kernels.reference import SAMPLER_VERSION

# Accepted drafts per step from which drafting pays, and steps of rest where it does not, so that
# trying costs under 2 %. From the row costs in BENCHMARKS.md: a step of seven rows costs 1.06 of
# one row in bf16, and 1.6 in float32.
GATES = {torch.bfloat16: (0.06, 8), torch.float32: (0.6, 32)}


@dataclass(frozen=True, slots=True)
class Built:
    """A ready engine and what to tell about it."""

    engine: Engine
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Pooled:
    """A model in memory, and the same over a KV pool of its own."""

    loaded: LoadedModel
    paged: PagedModel
    ops: Ops


@dataclass(frozen=True, slots=True)
class Models:
    """Target and draft models, drafts by directory, over pools of `num_blocks` blocks each.

    Several engines may be put together over the same models, one after another.
    """

    target: Pooled
    drafts: dict[str, Pooled]
    num_blocks: int


def build(
    config: EngineConfig,
    clock: Callable[[], float],
    observer: EngineObserver | None = None,
) -> Built:
    """Load models, size and allocate the KV pools, check them, wire everything.

    `config.model` and the models in `config.draft` are directories. Raises ConfigError.
    """
    models = load_models(config)
    return assemble(config, models, draft_sources(config, models), clock, observer)


def load_models(config: EngineConfig) -> Models:
    """The part of `build` that takes seconds and memory."""
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    register_attention()
    target = load(config.model, config.dtype, config.device, attn_implementation=ATTENTION)
    drafts = {
        spec.model: load(spec.model, config.dtype, config.device, attn_implementation=ATTENTION)
        for spec in parse_drafts(config.draft)
        if spec.kind == "model"
    }
    for directory in drafts:
        check_same_vocabulary(config.model, directory)
    num_blocks = _num_blocks(config, [target, *drafts.values()])

    def pooled(loaded: LoadedModel, vocab_size: int) -> Pooled:
        ops = _ops(loaded)
        return Pooled(loaded, _paged(loaded, config, num_blocks, ops, vocab_size), ops)

    return Models(
        pooled(target, target.vocab_size),
        {d: pooled(m, min(m.vocab_size, target.vocab_size)) for d, m in drafts.items()},
        num_blocks,
    )


def draft_sources(config: EngineConfig, models: Models) -> list[DraftSource]:
    """What `config.draft` names, each of them rested where it does not pay, and guarded."""
    target = models.target.loaded
    sources: list[DraftSource] = []
    for spec in parse_drafts(config.draft):
        source: DraftSource = NgramDraft()
        if spec.kind == "model":
            draft = models.drafts[spec.model]
            source = ModelDraft(draft.paged, config.max_step_rows, draft.loaded.context_limit)
        gated = GatedDraft(source, *GATES[target.model.dtype])
        sources.append(GuardedDraft(gated, target.vocab_size))
    return sources


def assemble(
    config: EngineConfig,
    models: Models,
    sources: Seq[DraftSource],
    clock: Callable[[], float],
    observer: EngineObserver | None = None,
) -> Built:
    """An engine over `models`, with as many of their blocks as `config` allows for."""
    target = models.target.loaded
    loaded = [target, *(m.loaded for m in models.drafts.values())]
    num_blocks = min(models.num_blocks, _num_blocks(config, loaded))
    info = _info(config, target, models.target.ops, tuple(s.name for s in sources), num_blocks)
    pool = BlockPool(num_blocks, config.block_size)

    def texts(request: Request) -> Detokenizer:
        return Detokenizer(target.tokenizer, request.prompt, request.stopping.strings)

    def copy_blocks(pairs: Seq[tuple[int, int]]) -> None:
        for model in (models.target, *models.drafts.values()):
            model.paged.cache.copy_blocks(pairs)

    prefixes = (
        PrefixCache(pool, secrets.token_bytes(32)) if config.prefix_cache else NoPrefixCache()
    )
    scheduler = Scheduler(config, pool, prefixes, ClassArrival(), texts, info.context_limit)
    target_model, draft = models.target.paged, Composite(sources)
    return Built(Engine(scheduler, target_model, draft, copy_blocks, clock, observer), info)


def _shape(loaded: LoadedModel, kv_dtype: str) -> KVShape:
    c, own = loaded.config, loaded.model.dtype
    if kv_dtype not in ("auto", "int8", str(own).removeprefix("torch.")):
        raise ConfigError(f"kv_dtype {kv_dtype} is neither int8 nor that of the model, {own}")
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv_heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    dtype = torch.int8 if kv_dtype == "int8" else own
    return KVShape(c.num_hidden_layers, kv_heads, head_dim, dtype)


def _ops(loaded: LoadedModel) -> Ops:
    try:
        return load_ops(loaded.model.device.type, _shape(loaded, "auto").head_dim)
    except ValueError as error:  # $DRAFTWIRE_ISA
        raise ConfigError(str(error)) from error


def _num_blocks(config: EngineConfig, models: list[LoadedModel]) -> int:
    shapes = [_shape(m, config.kv_dtype) for m in models]
    blocks = blocks_that_fit(shapes, config.kv_cache_mib, config.block_size)
    if blocks < 1:
        need = sum(s.bytes_per_token for s in shapes) * config.block_size
        raise ConfigError(
            f"kv_cache_mib={config.kv_cache_mib} holds no block: target and draft need "
            f"{need} bytes for {config.block_size} tokens, {config.kv_cache_mib << 20} are allowed"
        )
    return blocks


def _paged(
    loaded: LoadedModel, config: EngineConfig, num_blocks: int, ops: Ops, vocab_size: int
) -> PagedModel:
    """The model over a pool of its own, checked against its stock self, linears packed."""
    device = loaded.model.device
    shape = _shape(loaded, config.kv_dtype)
    cache = KVCache.allocate(shape, num_blocks, config.block_size, device)
    tokens = probe_tokens(vocab_size, loaded.sliding_window or 0, num_blocks * config.block_size)
    expected = stock_logits(loaded.model, tokens.to(device))
    if device.type == "cpu":
        pack_linears(loaded.model)
    paged = PagedModel(loaded.model, cache, config.block_size, vocab_size, ops)
    check_paged(paged, loaded.architecture, tokens.to(device), expected, config.block_size)
    return paged


def _info(
    config: EngineConfig, target: LoadedModel, ops: Ops, sources: tuple[str, ...], num_blocks: int
) -> ModelInfo:
    context = min(target.context_limit, config.max_context or target.context_limit)
    facts = {
        "weights": target.weights_hash,
        "dtype": str(target.model.dtype),
        "kv_dtype": str(_shape(target, config.kv_dtype).dtype),
        "device": str(target.model.device),
        "kernels": f"{ops.name}/{ops.isa}/{ops.version}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sampler": SAMPLER_VERSION,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return ModelInfo(
        model=config.model_name or config.model,
        architecture=target.architecture,
        directory=config.model,
        context_limit=context,
        vocab_size=target.vocab_size,
        eos_ids=target.eos_ids,
        dtype=str(target.model.dtype).removeprefix("torch."),
        device=str(target.model.device),
        draft_sources=sources,
        max_draft_tokens=config.max_draft_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        fingerprint=digest[:32],
    )
