"""Puts an engine together from settings: the only module that knows all the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.core import Engine
from engine.draft import DraftSource
from engine.draft_choice import DraftChoice
from engine.drafting import draft_choice
from engine.errors import ModelError
from engine.grammar import Grammars
from engine.logits import logit_rules
from engine.observer import EngineObserver
from engine.policy import ClassArrival
from engine.pooled import Models, Pooled, blocks_of, context_of, kv_shape, load_models
from engine.prefix import NoPrefixCache, PrefixCache
from engine.remembered import remembered
from engine.request import Request
from engine.scheduler import Scheduler
from engine.strictness import ENOUGH_BLOCKS, difference
from engine.text import Detokenizer, StopStrings
from engine.timed_model import TimedModel
from engine.types import LogitRules, ModelInfo


@dataclass(frozen=True, slots=True)
class Built:
    """A ready engine and what to tell about it."""

    engine: Engine
    info: ModelInfo


def build(
    config: EngineConfig,
    clock: Callable[[], float],
    observer: EngineObserver | None = None,
) -> Built:
    """Load models, size and allocate the KV pools, check them, wire everything.

    `config.model` and the models in `config.draft` are directories. Raises ConfigError.
    """
    models = load_models(config, clock)
    return assemble(config, models, draft_choice(config, models, clock), clock, observer)


def assemble(
    config: EngineConfig,
    models: Models,
    draft: DraftChoice,
    clock: Callable[[], float],
    observer: EngineObserver | None = None,
    listener: DraftSource | None = None,
) -> Built:
    """An engine over `models`, with as many of their blocks as `config` allows for. `listener`
    stands for `draft` where it is given: it hears what becomes of its drafts."""
    target = models.target.loaded
    num_blocks = min(models.num_blocks, blocks_of(config, models.bytes_per_token))
    info = _info(config, models.target, tuple(s.name for s in draft.sources), num_blocks)
    pool = BlockPool(num_blocks, config.block_size)

    def texts(request: Request) -> Detokenizer:
        stopping, output = request.stopping, request.output
        forced = 0 if request.forced is None else request.forced.characters
        stops = StopStrings(stopping.strings, output.include_stop, forced)
        least, keep = stopping.min_tokens, output.keep_special_tokens
        return Detokenizer(target.tokenizer, request.prompt, stops, least, keep)

    prefixes = (
        PrefixCache(pool, secrets.token_bytes(32)) if config.prefix_cache else NoPrefixCache()
    )
    grammars = Grammars(target.tokenizer, info.vocab_size, info.eos_ids) if info.eos_ids else None

    def rules(request: Request) -> LogitRules | None:
        return logit_rules(request, info.vocab_size, grammars)

    costs = models.target.costs
    scheduler = Scheduler(
        config, pool, prefixes, ClassArrival(), texts, info.context_limit, rules, costs.rows_within
    )
    model = TimedModel(models.target.paged, costs, clock)
    engine = Engine(scheduler, model, listener or draft, models.copy_blocks, clock, observer)
    if grammars is not None:
        engine.prepare = grammars.prepare
    return Built(engine, info)


def _not_strict_because(config: EngineConfig, target: Pooled, blocks: int) -> str:
    """Empty if the same request has the same bytes in any company."""
    if config.verification == "rejection":
        return "verification is rejection, as asked for: what is drawn depends on the drafts"
    if config.numerics == "fast":
        return "numerics are fast, as asked for"
    if not target.strict_network:
        return "there are no strict kernels for this device, or they were not built"
    found = remembered(
        config.cache_dir,
        f"strict-{target.fingerprint}-{min(blocks, ENOUGH_BLOCKS)}",
        lambda: difference(target.paged, target.loaded.vocab_size, blocks, config.block_size),
    )
    return found and f"{target.loaded.architecture}: a row changes with {found}"


def _info(
    config: EngineConfig, pooled: Pooled, sources: tuple[str, ...], num_blocks: int
) -> ModelInfo:
    target = pooled.loaded
    because = _not_strict_because(config, pooled, num_blocks)
    if because and config.numerics == "strict":
        raise ModelError(f"strict numerics cannot be had: {because}; numerics fast would serve it")
    return ModelInfo(
        model=config.model_name or config.model,
        architecture=target.architecture,
        directory=config.model,
        context_limit=context_of(config, target),
        vocab_size=target.vocab_size,
        eos_ids=target.eos_ids,
        dtype=str(target.model.dtype).removeprefix("torch."),
        device=str(target.model.device),
        draft_sources=sources,
        max_draft_tokens=config.max_draft_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        fingerprint=pooled.fingerprint,
        strict=not because,
        not_strict_because=because,
        kv_dtype=str(kv_shape(target, config.kv_dtype).dtype).removeprefix("torch."),
        weights=config.weights,
    )
