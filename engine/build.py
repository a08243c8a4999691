"""Puts an engine together from settings: the only module that knows all the others."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from engine.blocks import BlockPool
from engine.checkpoint import read_json
from engine.config import EngineConfig
from engine.core import Engine
from engine.draft import Composite, DraftSource
from engine.draft_gate import GatedDraft
from engine.draft_grammar import ForcedDraft, LegalDraft
from engine.draft_guard import GuardedDraft
from engine.draft_model import ModelDraft
from engine.draft_ngram import NgramDraft
from engine.draft_time import TimedDraft
from engine.errors import ConfigError, ModelError
from engine.fused import FAMILIES, fusable
from engine.grammar import Grammars
from engine.kv_cache import KVCache, KVShape, blocks_that_fit
from engine.loader import LoadedModel, check_same_vocabulary, load, resolve_device
from engine.logits import logit_rules
from engine.network import make_network
from engine.observer import EngineObserver
from engine.policy import ClassArrival
from engine.prefix import NoPrefixCache, PrefixCache
from engine.quantised import kind_of_draft, weights_as
from engine.rejection import REJECTION_VERSION, Independent, Rejection
from engine.remembered import remembered
from engine.request import Request
from engine.row_cost import RowCosts, row_costs
from engine.runner import ATTENTION, PagedModel, register_attention
from engine.sampler import Coupled, Sampler
from engine.scheduler import Scheduler
from engine.selfcheck import LONGEST, check_paged, probe_tokens, stock_logits
from engine.specs import parse_drafts
from engine.strictness import ENOUGH_BLOCKS, difference
from engine.text import Detokenizer, StopStrings
from engine.types import LogitRules, ModelInfo
from kernels.ops import Ops, load_ops
from kernels.reference import SAMPLER_VERSION

# Steps of rest where drafts do not pay: a try must cost little of what is saved meanwhile.
REST, DEAR_REST, DEAR = 8, 32, 0.2
TOO_LONG = 2.0


@dataclass(frozen=True, slots=True)
class Built:
    """A ready engine and what to tell about it."""

    engine: Engine
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Pooled:
    """A model in memory, and the same over a KV pool of its own. `strict_network`: linear layers
    are the kernels' own."""

    loaded: LoadedModel
    paged: PagedModel
    ops: Ops
    strict_network: bool


@dataclass(frozen=True, slots=True)
class Models:
    """Target and draft models, drafts by directory, over pools of `num_blocks` blocks each.

    Several engines may be put together over the same models, one after another.
    """

    target: Pooled
    drafts: dict[str, Pooled]
    num_blocks: int
    costs: RowCosts


def build(
    config: EngineConfig,
    clock: Callable[[], float],
    observer: EngineObserver | None = None,
) -> Built:
    """Load models, size and allocate the KV pools, check them, wire everything.

    `config.model` and the models in `config.draft` are directories. Raises ConfigError.
    """
    models = load_models(config, clock)
    return assemble(config, models, draft_sources(config, models, clock), clock, observer)


def load_models(config: EngineConfig, clock: Callable[[], float]) -> Models:
    """The part of `build` that takes seconds and memory."""
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    register_attention()
    target = _load(config, config.model)
    drafts = {s.model: _load(config, s.model) for s in parse_drafts(config.draft) if s.model}
    for directory in drafts:
        check_same_vocabulary(config.model, directory)
    num_blocks = _num_blocks(config, [target, *drafts.values()])
    pooled = _pooled(target, config, num_blocks, target.vocab_size, Rejection())
    return Models(
        pooled,
        {
            d: _pooled(
                m,
                replace(config, weights=kind_of_draft(config.weights, Path(d))),
                num_blocks,
                min(m.vocab_size, target.vocab_size),
                Independent(),
            )
            for d, m in drafts.items()
        },
        num_blocks,
        row_costs(pooled.paged, num_blocks, config.block_size, clock),
    )


def _load(config: EngineConfig, directory: str) -> LoadedModel:
    """In bfloat16 also where the CPU does not compute in it, if the kernels have the whole pass:
    they widen it in registers, and read half of what float32 takes."""
    dtype = config.dtype
    if dtype == "auto" and config.numerics != "fast":
        families = read_json(Path(directory), "config.json").get("architectures") or [""]
        on_cpu = resolve_device(config.device).type == "cpu"
        if on_cpu and families[0] in FAMILIES and _load_ops("cpu", 64).library is not None:
            dtype = "bfloat16"
    return load(directory, dtype, config.device, attn_implementation=ATTENTION)


def draft_sources(
    config: EngineConfig, models: Models, clock: Callable[[], float]
) -> list[DraftSource]:
    """What `config.draft` names, each of them rested where it does not pay, and guarded; before
    them, if there are any, what grammars force."""
    target = models.target.loaded
    cheap = models.costs.cheap_rows(config.draft_rows)
    worth = models.costs.worth(min(config.max_draft_tokens, max(1, cheap - 1)))
    # What the target itself would take to catch up and then to draft token by token, and some.
    catch_up = models.costs.at_most(config.max_step_rows)
    passes = config.max_draft_tokens * models.costs.at_most(config.draft_rows)
    most_s = TOO_LONG * (catch_up + passes)
    sources: list[DraftSource] = []
    for spec in parse_drafts(config.draft):
        source: DraftSource = NgramDraft()
        if spec.kind == "model":
            draft = models.drafts[spec.model]
            source = ModelDraft(draft.paged, config.max_step_rows, draft.loaded.context_limit)
        gated = GatedDraft(source, worth, REST if worth < DEAR else DEAR_REST)
        timed = TimedDraft(gated, clock, most_s)
        sources.append(GuardedDraft(timed, target.vocab_size))
    return [GuardedDraft(ForcedDraft(), target.vocab_size), *sources] if sources else []


def assemble(
    config: EngineConfig,
    models: Models,
    sources: Seq[DraftSource],
    clock: Callable[[], float],
    observer: EngineObserver | None = None,
) -> Built:
    """An engine over `models`, with as many of their blocks as `config` allows for.

    Drafts are spent while rows are cheap, and no further than `config` says.
    """
    target = models.target.loaded
    loaded = [target, *(m.loaded for m in models.drafts.values())]
    num_blocks = min(models.num_blocks, _num_blocks(config, loaded))
    info = _info(config, models.target, tuple(s.name for s in sources), num_blocks)
    pool = BlockPool(num_blocks, config.block_size)

    def texts(request: Request) -> Detokenizer:
        stopping, output = request.stopping, request.output
        forced = 0 if request.forced is None else request.forced.characters
        stops = StopStrings(stopping.strings, output.include_stop, forced)
        least, keep = stopping.min_tokens, output.keep_special_tokens
        return Detokenizer(target.tokenizer, request.prompt, stops, least, keep)

    def copy_blocks(pairs: Seq[tuple[int, int]]) -> None:
        for model in (models.target, *models.drafts.values()):
            model.paged.cache.copy_blocks(pairs)

    prefixes = (
        PrefixCache(pool, secrets.token_bytes(32)) if config.prefix_cache else NoPrefixCache()
    )
    drafting = replace(config, draft_rows=models.costs.cheap_rows(config.draft_rows))

    grammars = Grammars(target.tokenizer, info.vocab_size, info.eos_ids) if info.eos_ids else None

    def rules(request: Request) -> LogitRules | None:
        return logit_rules(request, info.vocab_size, grammars)

    scheduler = Scheduler(
        drafting, pool, prefixes, ClassArrival(), texts, info.context_limit, rules
    )
    target_model, draft = models.target.paged, LegalDraft(Composite(sources))
    engine = Engine(scheduler, target_model, draft, copy_blocks, clock, observer)
    if grammars is not None:
        engine.prepare = grammars.prepare
    return Built(engine, info)


def _shape(loaded: LoadedModel, kv_dtype: str) -> KVShape:
    c, own = loaded.config, loaded.model.dtype
    if kv_dtype not in ("auto", "int8", str(own).removeprefix("torch.")):
        raise ConfigError(f"kv_dtype {kv_dtype} is neither int8 nor that of the model, {own}")
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv_heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    dtype = torch.int8 if kv_dtype == "int8" else own
    return KVShape(c.num_hidden_layers, kv_heads, head_dim, dtype)


def _load_ops(device: str, head_dim: int) -> Ops:
    try:
        return load_ops(device, head_dim)
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


def _pooled(
    loaded: LoadedModel,
    config: EngineConfig,
    num_blocks: int,
    vocab_size: int,
    uncoupled: Sampler,
) -> Pooled:
    """The model over a pool of its own, packed, and checked against its stock self."""
    device, dtype, shape = loaded.model.device, loaded.model.dtype, _shape(loaded, config.kv_dtype)
    ops = _load_ops(device.type, shape.head_dim)
    strict = config.numerics != "fast" and ops.library is not None
    try:
        cache = KVCache.allocate(shape, num_blocks, config.block_size, device)
    except (OSError, MemoryError, RuntimeError) as error:  # mmap's, torch's
        raise ConfigError(f"kv_cache_mib={config.kv_cache_mib} cannot be had: {error}") from error
    tokens = probe_tokens(vocab_size, loaded.sliding_window or 0, num_blocks * config.block_size)
    quantised = weights_as(config.weights, loaded.model, loaded.directory)
    expected = stock_logits(loaded.model, tokens.to(device), strict and fusable(loaded.model))
    # What starts with the engine looks at texts of its own, however short a context was asked for.
    positions = max(_context(config, loaded), LONGEST)
    network = make_network(loaded.model, cache, ops, positions, strict, quantised)
    sampler = Coupled(ops.sample_rows) if config.verification == "coupled" else uncoupled
    paged = PagedModel(network, cache, config.block_size, vocab_size, sampler)
    check_paged(paged, loaded.architecture, tokens.to(device), expected, config.block_size, dtype)
    return Pooled(loaded, paged, ops, strict)


def _context(config: EngineConfig, loaded: LoadedModel) -> int:
    return min(loaded.context_limit, config.max_context or loaded.context_limit)


def _not_strict_because(config: EngineConfig, target: Pooled, blocks: int, digest: str) -> str:
    """Empty if the same request has the same bytes in any company."""
    if config.verification == "rejection":
        return "verification is rejection, as asked for: what is drawn depends on the drafts"
    if config.numerics == "fast":
        return "numerics are fast, as asked for"
    if not target.strict_network:
        return "there are no strict kernels for this device, or they were not built"
    found = remembered(
        config.cache_dir,
        f"strict-{digest}-{min(blocks, ENOUGH_BLOCKS)}",
        lambda: difference(target.paged, target.loaded.vocab_size, blocks, config.block_size),
    )
    return found and f"{target.loaded.architecture}: a row changes with {found}"


def _info(
    config: EngineConfig, pooled: Pooled, sources: tuple[str, ...], num_blocks: int
) -> ModelInfo:
    target, ops = pooled.loaded, pooled.ops
    facts = {
        "weights": target.weights_hash,
        "config": hashlib.sha256((target.directory / "config.json").read_bytes()).hexdigest(),
        "dtype": str(target.model.dtype),
        # Native weights have the values of the model that was made of them.
        "weights_as": {"native": "auto"}.get(config.weights, config.weights),
        "kv_dtype": str(_shape(target, config.kv_dtype).dtype),
        "device": str(target.model.device),
        "kernels": f"{ops.name}/{ops.isa}/{ops.version}",
        "strict": pooled.strict_network,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sampler": SAMPLER_VERSION
        if config.verification == "coupled"
        else f"rejection {REJECTION_VERSION}",
        "grammars": version("llguidance"),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    because = _not_strict_because(config, pooled, num_blocks, digest[:32])
    if because and config.numerics == "strict":
        raise ModelError(f"strict numerics cannot be had: {because}; numerics fast would serve it")
    return ModelInfo(
        model=config.model_name or config.model,
        architecture=target.architecture,
        directory=config.model,
        context_limit=_context(config, target),
        vocab_size=target.vocab_size,
        eos_ids=target.eos_ids,
        dtype=str(target.model.dtype).removeprefix("torch."),
        device=str(target.model.device),
        draft_sources=sources,
        max_draft_tokens=config.max_draft_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        fingerprint=digest[:32],
        strict=not because,
        not_strict_because=because,
        kv_dtype=str(_shape(target, config.kv_dtype).dtype).removeprefix("torch."),
        weights=config.weights,
    )
