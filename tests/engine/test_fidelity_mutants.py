"""Ways in which a row could come to depend on its company, made on purpose: each is seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine import pooled as building
from engine.blocks import BlockPool
from engine.build import build
from engine.errors import ModelError
from engine.kv_cache import KVCache
from engine.linear import StrictLinear, replace_linears
from engine.model_input import Draws
from engine.prefix import PrefixCache
from engine.runner import Network, PagedModel, StockNetwork
from engine.sampler import Sampler
from engine.types import Drawn, Feed, Sequence
from kernels.cpu.library import Library
from kernels.ops import Ops
from tests.engine.children import config_of
from tests.engine.tiny_fidelity import TinySuite, named, write_models
from tests.fidelity.bits import WatchedSampler

Patch = pytest.MonkeyPatch

SHARE = 8
run, keep, take = PagedModel.run, PrefixCache.keep, BlockPool._take
watch = WatchedSampler.__init__


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


def reads_an_old_block_table(patch: Patch) -> None:
    """Each seat's table is kept as long as it is long enough, whoever sits there now."""
    kept: dict[tuple[int, int], Seq[int]] = {}

    def wrong(self: PagedModel, feeds: Seq[Feed]) -> list[Drawn]:
        stale = []
        for seat, feed in enumerate(feeds):
            table = kept.get((id(self), seat), ())
            if len(table) < len(feed.blocks):
                table = kept[id(self), seat] = list(feed.blocks)
            stale.append(replace(feed, blocks=table))
        return run(self, stale)

    patch.setattr(PagedModel, "run", wrong)


def finds_a_block_that_was_given_to_another(patch: Patch) -> None:
    """The name of what an evicted block held still leads to it."""

    def wrong(self: BlockPool) -> int:
        names = dict(self._by_name)
        block = take(self)
        self._by_name.update({n: b for n, b in names.items() if n not in self._by_name})
        return block

    def find(self: BlockPool, name: bytes) -> int | None:
        block = self._by_name.get(name)
        return block if block is not None and (self._refs[block] or block in self._idle) else None

    patch.setattr(BlockPool, "_take", wrong)
    patch.setattr(BlockPool, "find", find)
    patch.setattr(BlockPool, "store", _store_over)


def _store_over(self: BlockPool, block: int, name: bytes) -> None:
    if self._names[block] is None:
        self._names[block] = name
        self._by_name[name] = block


def remembers_what_is_not_computed(patch: Patch) -> None:
    """A block is remembered before its last rows are computed."""

    def wrong(self: PrefixCache, seq: Sequence, start: int) -> None:
        computed, size = seq.computed, self._pool.block_size
        ahead = min(-(-computed // size) * size, len(seq.tokens), seq.table.capacity)
        seq.computed = max(computed, ahead)
        keep(self, seq, start)
        seq.computed = computed

    patch.setattr(PrefixCache, "keep", wrong)


def does_not_copy(patch: Patch) -> None:
    def wrong(self: BlockPool) -> tuple[tuple[int, int], ...]:
        self._copies.clear()
        return ()

    patch.setattr(BlockPool, "take_copies", wrong)


def draws_by_the_row(patch: Patch) -> None:
    """The noise depends on where in the batch a row is."""

    class Wrong:
        def __init__(self, inner: Sampler) -> None:
            self._inner = inner

        def draw(
            self, feeds: Seq[Feed], logits: Tensor, draws: Draws
        ) -> tuple[list[int], Tensor | None]:
            positions = draws.positions + torch.arange(len(draws.positions))
            return self._inner.draw(feeds, logits, replace(draws, positions=positions))

    def wrong(self: WatchedSampler, sampler: Sampler) -> None:
        watch(self, Wrong(sampler))

    patch.setattr(WatchedSampler, "__init__", wrong)


class SkipsATile(StrictLinear):
    """The last 16 columns are computed for the first 32 rows only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.view(-1, y.shape[-1])[32:, -16:] = 0
        return y


class OneRowItsOwnWay(StrictLinear):
    """A single row is multiplied by somebody else."""

    def __init__(self, layer: nn.Linear, library: Library) -> None:
        self.plain = layer.weight.detach().float()
        super().__init__(layer, library)

    def forward(self, x: Tensor) -> Tensor:
        one = x.shape[:-1].numel() == 1
        return (x.float() @ self.plain.T).to(x.dtype) if one else super().forward(x)


class SplitsK(OneRowItsOwnWay):
    """Where rows are many, the sum of two halves (as of two threads)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() <= 4:
            return StrictLinear.forward(self, x)
        half = x.shape[-1] // 2
        parts = ((x[..., :half], self.plain[:, :half]), (x[..., half:], self.plain[:, half:]))
        first, second = (a.float() @ b.T for a, b in parts)
        return (first + second).to(x.dtype)


def runs_over(patch: Patch, kind: type[StrictLinear]) -> None:
    """The stock modules, over linear layers of a kind."""

    def make_network(model: nn.Module, cache: KVCache, ops: Ops, *_: object) -> Network:
        library = ops.library
        assert library is not None
        replace_linears(model, lambda layer: kind(layer, library))
        return StockNetwork(model, cache, ops)

    patch.setattr(building, "make_network", make_network)


def differs(directory: Path, dtype: str, settings: Seq[str]) -> bool:
    suite = TinySuite(directory, SHARE, dtype=dtype)
    return any(suite.run(named(name)).differences for name in settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [SkipsATile, OneRowItsOwnWay, SplitsK])
def test_linear(directory: Path, monkeypatch: Patch, dtype: str, kind: type[StrictLinear]) -> None:
    """Without a slip nothing is seen: `test_fidelity_axes` with stock modules."""
    runs_over(monkeypatch, kind)
    assert differs(directory, dtype, ["alone", "company"])


@pytest.mark.parametrize("kind", [SkipsATile, OneRowItsOwnWay, SplitsK])
def test_the_check_at_start_sees_it_too(
    directory: Path, monkeypatch: Patch, kind: type[StrictLinear]
) -> None:
    """In float32: of a model as small as this, bf16 hides the last bits of so few rows."""
    runs_over(monkeypatch, kind)
    config = config_of(directory / "target", numerics="strict", dtype="float32")
    with pytest.raises(ModelError, match="a row changes with"):
        build(config, time.monotonic)


@pytest.mark.parametrize(
    ("mutant", "setting"),
    [
        (reads_an_old_block_table, "company"),
        (finds_a_block_that_was_given_to_another, "preempted-cached"),
        (remembers_what_is_not_computed, "prefix-cold"),
        (does_not_copy, "prefix-warm"),
        (draws_by_the_row, "company"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocks_and_draws(
    directory: Path, monkeypatch: Patch, mutant: Callable[[Patch], None], setting: str
) -> None:
    assert not differs(directory, "bfloat16", [setting])
    mutant(monkeypatch)
    assert differs(directory, "bfloat16", [setting])
