"""Models in memory, each over a KV pool of its own, checked, and with what its passes cost."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from engine.checkpoint import read_json
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.features import FeaturePool, Tapped
from engine.fused import FAMILIES, fusable
from engine.head import HeadModule
from engine.head_file import WEIGHTS, load_head
from engine.kv_cache import KVCache, KVShape
from engine.loader import LoadedModel, check_same_vocabulary, load, resolve_device
from engine.network import make_network
from engine.pooled_head import Beside, PooledHead, bytes_of_features, bytes_of_head, pool_head
from engine.quantised import kind_of_draft, weights_as
from engine.rejection import REJECTION_VERSION, Independent, Rejection
from engine.remembered import remembered
from engine.row_cost import check_costs, from_text, measure_costs, to_text
from engine.runner import ATTENTION, OpenNetwork, PagedModel, register_attention
from engine.sampler import Coupled, Sampler
from engine.selfcheck import LONGEST, check_paged, probe_tokens, stock_logits
from engine.specs import parse_drafts
from engine.step_costs import CostTable, StepCosts
from engine.strictness import ENOUGH_BLOCKS
from kernels.ops import Ops, load_ops
from kernels.reference import SAMPLER_VERSION


@dataclass(frozen=True, slots=True)
class Pooled:
    """A model in memory, and the same over a KV pool of its own. `strict_network`: linear layers
    are the kernels' own. `features` are kept if someone reads them. `costs` learns from the passes
    of all engines over this model."""

    loaded: LoadedModel
    paged: PagedModel
    network: OpenNetwork
    features: FeaturePool | None
    ops: Ops
    strict_network: bool
    fingerprint: str
    costs: StepCosts


@dataclass(frozen=True, slots=True)
class Models:
    """Target, draft models and heads, by directory, over pools of `num_blocks` blocks each, all of
    which together take `bytes_per_token`.

    Several engines may be put together over the same models, one after another.
    """

    target: Pooled
    drafts: dict[str, Pooled]
    heads: dict[str, PooledHead]
    num_blocks: int
    bytes_per_token: int

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """In all pools; see `KVCache.copy_blocks`."""
        models = (self.target, *self.drafts.values())
        for paged in (*(m.paged for m in models), *(h.paged for h in self.heads.values())):
            paged.cache.copy_blocks(pairs)
        if self.target.features is not None:
            self.target.features.copy_blocks(pairs)


def load_models(config: EngineConfig, clock: Callable[[], float], read: bool = False) -> Models:
    """Loads, sizes and checks all models that `config` names; takes seconds and memory.

    `config.model` and the models in `config.draft` are directories. `read`: the target's hidden
    states are kept even if no head reads them. Raises ConfigError.
    """
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    register_attention()
    target = _load(config, config.model)
    specs = parse_drafts(config.draft)
    drafts = {s.model: _load(config, s.model) for s in specs if s.model}
    for directory in drafts:
        check_same_vocabulary(config.model, directory)
    heads = {s.directory: load_head(Path(s.directory), target) for s in specs if s.kind == "head"}
    per_token = sum(
        kv_shape(m, config.kv_dtype).bytes_per_token for m in (target, *drafts.values())
    )
    read = read or bool(heads)
    per_token += read * bytes_of_features(target)
    per_token += len(heads) * bytes_of_head(kv_shape(target, "auto"))
    num_blocks = blocks_of(config, per_token)
    pooled = _pooled(target, config, num_blocks, target.vocab_size, Rejection(), clock, read)
    return Models(
        pooled,
        {
            d: _pooled(
                m,
                replace(config, weights=kind_of_draft(config.weights, Path(d))),
                num_blocks,
                min(m.vocab_size, target.vocab_size),
                Independent(),
                clock,
            )
            for d, m in drafts.items()
        },
        {d: _pooled_head(m, d, pooled, config, num_blocks, clock) for d, m in heads.items()},
        num_blocks,
        per_token,
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


def fingerprint(config: EngineConfig, loaded: LoadedModel, ops: Ops, strict: bool) -> str:
    """Of all that decides what a model computes here, and how fast. `strict`: by the kernels' own
    linear layers."""
    facts = {
        "weights": loaded.weights_hash,
        "config": hashlib.sha256((loaded.directory / "config.json").read_bytes()).hexdigest(),
        "dtype": str(loaded.model.dtype),
        # Native weights have the values of the model that was made of them.
        "weights_as": {"native": "auto"}.get(config.weights, config.weights),
        "kv_dtype": str(kv_shape(loaded, config.kv_dtype).dtype),
        "device": str(loaded.model.device),
        "kernels": f"{ops.name}/{ops.isa}/{ops.version}",
        "strict": strict,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sampler": SAMPLER_VERSION
        if config.verification == "coupled"
        else f"rejection {REJECTION_VERSION}",
        "grammars": version("llguidance"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def kv_shape(loaded: LoadedModel, kv_dtype: str) -> KVShape:
    """Of the KV of one token. Raises ConfigError for a dtype that the model does not have."""
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


def blocks_of(config: EngineConfig, bytes_per_token: int) -> int:
    """Blocks that all pools may have, if they take so much together. Raises ConfigError if none."""
    need = bytes_per_token * config.block_size
    blocks = (config.kv_cache_mib << 20) // need
    if blocks < 1:
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
    clock: Callable[[], float],
    read: bool = False,
) -> Pooled:
    """The model over a pool of its own, packed, and checked against its stock self."""
    device, dtype, shape = (
        loaded.model.device,
        loaded.model.dtype,
        kv_shape(loaded, config.kv_dtype),
    )
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
    positions = max(context_of(config, loaded), LONGEST)
    network = make_network(loaded.model, cache, ops, positions, strict, quantised)
    sampler = Coupled(ops.sample_rows) if config.verification == "coupled" else uncoupled
    features = None
    if read:
        hidden = loaded.config.hidden_size
        features = FeaturePool(num_blocks, config.block_size, hidden, dtype, device)
    seen = network if features is None else Tapped(network, features)
    paged = PagedModel(seen, cache, config.block_size, vocab_size, sampler)
    check_paged(paged, loaded.architecture, tokens.to(device), expected, config.block_size, dtype)
    digest = fingerprint(config, loaded, ops, strict)
    costs = _costs(config, paged, num_blocks, digest, clock)
    return Pooled(loaded, paged, network, features, ops, strict, digest, StepCosts(costs))


def _pooled_head(
    module: HeadModule,
    directory: str,
    target: Pooled,
    config: EngineConfig,
    num_blocks: int,
    clock: Callable[[], float],
) -> PooledHead:
    assert target.features is not None
    loaded, sample_rows = target.loaded, target.ops.sample_rows
    digest = hashlib.sha256((Path(directory) / WEIGHTS).read_bytes()).hexdigest()[:16]
    return pool_head(
        module,
        Beside(
            loaded,
            target.network,
            target.features,
            target.ops,
            target.strict_network,
            kv_shape(loaded, "auto"),
        ),
        config,
        num_blocks,
        max(context_of(config, loaded), LONGEST),
        Coupled(sample_rows) if config.verification == "coupled" else Independent(),
        lambda paged: _costs(config, paged, num_blocks, f"{target.fingerprint}-{digest}", clock),
    )


def context_of(config: EngineConfig, loaded: LoadedModel) -> int:
    """Positions that a sequence may have."""
    return min(loaded.context_limit, config.max_context or loaded.context_limit)


def _costs(
    config: EngineConfig,
    model: PagedModel,
    num_blocks: int,
    digest: str,
    clock: Callable[[], float],
) -> CostTable:
    """Measured once for a model on this machine, if there is a place to keep it; and again if the
    machine turns out to be much faster, for then it was busy."""

    def measured() -> str:
        return to_text(measure_costs(model, num_blocks, config.block_size, clock))

    name = f"costs-smooth-{digest}-{config.weights}-{min(num_blocks, ENOUGH_BLOCKS)}"

    def check(kept: str) -> None:
        check_costs(from_text(kept), model, config.block_size, clock)

    return from_text(remembered(config.cache_dir, name, measured, check))
