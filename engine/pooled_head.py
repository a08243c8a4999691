"""A draft head in memory, beside its target and over a KV pool of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.features import FeaturePool
from engine.head import HeadModule
from engine.head_network import HeadNetwork
from engine.kv_cache import KVCache, KVShape
from engine.loader import LoadedModel
from engine.runner import OpenNetwork, PagedModel
from engine.sampler import Sampler
from engine.step_costs import CostTable, StepCosts
from kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class PooledHead:
    """`costs` learns from the passes of all engines over this head."""

    paged: PagedModel
    costs: StepCosts


@dataclass(frozen=True, slots=True)
class Beside:
    """The target that a head reads: its packed network, what is kept of it, and the operations."""

    loaded: LoadedModel
    network: OpenNetwork
    features: FeaturePool
    ops: Ops
    strict: bool
    own_shape: KVShape  # of the target's KV, in its own dtype


def bytes_of_features(target: LoadedModel) -> int:
    """Per token: the target's hidden state."""
    hidden: int = target.config.hidden_size * target.model.dtype.itemsize
    return hidden


def bytes_of_head(own_shape: KVShape) -> int:
    """Per token: the KV of a layer."""
    return replace(own_shape, layers=1).bytes_per_token


def pool_head(
    module: HeadModule,
    beside: Beside,
    config: EngineConfig,
    num_blocks: int,
    context: int,
    sampler: Sampler,
    measured: Callable[[PagedModel], CostTable],
) -> PooledHead:
    """`module` is packed in place. `measured` says what its passes cost."""
    shape = replace(beside.own_shape, layers=1)
    device = beside.loaded.model.device
    cache = KVCache.allocate(shape, num_blocks, config.block_size, device)
    network = HeadNetwork(
        module,
        beside.network,
        beside.features,
        cache,
        beside.ops,
        context=context,
        rows=max(config.max_step_rows, MEASURED),
        vocab_size=beside.loaded.vocab_size,
        strict=beside.strict,
    )
    vocab_size = beside.loaded.vocab_size
    paged = PagedModel(network, cache, config.block_size, vocab_size, sampler, says_sure=True)
    return PooledHead(paged, StepCosts(measured(paged)))


MEASURED = 128  # rows of the largest pass that is measured (`engine.row_cost`)
