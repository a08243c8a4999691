"""Strict numerics: promised only where whole passes give the same bits in any company."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import build as building
from engine.build import build
from engine.errors import ModelError
from engine.fused import fusable, fuse
from engine.model_input import ModelInput
from engine.network import make_network
from engine.remembered import remembered
from engine.request import SamplingParams
from engine.runner import PagedModel, StockNetwork
from engine.sampler import Coupled
from engine.strictness import CROWDS, ENOUGH_BLOCKS, LENGTH, difference
from engine.types import Feed
from kernels.ops import load_ops
from tests.engine.children import config_of, write_model
from tests.engine.tiny import BLOCK, FAMILIES, VOCAB, paged, tiny

BLOCKS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_families_are_strict(family: str, dtype: torch.dtype) -> None:
    stock = tiny(family).to(dtype)
    assert fusable(stock)
    assert difference(paged(stock, BLOCKS), VOCAB, BLOCKS, BLOCK) == ""


class Tampered:
    """A network whose rows depend on something."""

    def __init__(self, inner: PagedModel, harm: Callable[[ModelInput, Tensor], Tensor]) -> None:
        self._inner = inner
        self._harm = harm

    def logits(self, batch: ModelInput) -> Tensor:
        return self._harm(batch, self._inner.logits(batch).clone())


def nudged(rows: Callable[[ModelInput], bool]) -> Callable[[ModelInput, Tensor], Tensor]:
    """One bit of one logit of the last row, in batches that `rows` picks."""

    def harm(batch: ModelInput, logits: Tensor) -> Tensor:
        if rows(batch):
            logits[-1, 3] = torch.nextafter(logits[-1, 3], torch.tensor(float("inf")))
        return logits

    return harm


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (lambda b: len(b.token_ids) == 16, "being computed in two pieces"),
        (lambda b: len(b.token_ids) == 13, "being computed in pieces"),
        (lambda b: len(b.token_ids) == 1, "being computed alone"),
        (lambda b: len(b.context_lens) == 2 and b.cu_query[1] == 1, "a neighbour"),
        (lambda b: len(b.context_lens) == 4, "neighbours that verify"),
        (lambda b: len(b.token_ids) > 64, "a crowd"),
    ],
)
def test_a_single_bit_is_found(rows: Callable[[ModelInput], bool], found: str) -> None:
    inner = paged(tiny("llama"), BLOCKS)
    network = Tampered(inner, nudged(rows))
    sampler = Coupled(load_ops("cpu").sample_rows)
    model = PagedModel(network, inner.cache, BLOCK, VOCAB, sampler)
    assert difference(model, VOCAB, BLOCKS, BLOCK) == found


def test_a_tiny_pool_is_checked_with_what_fits() -> None:
    assert difference(paged(tiny("llama"), 1), VOCAB, 1, BLOCK) == ""


def test_an_unknown_family_runs_stock_modules_over_strict_linears() -> None:
    stock = tiny("llama").to(torch.bfloat16)
    stock.config.hidden_act = "gelu"
    assert not fusable(stock)
    inner = paged(tiny("llama"), BLOCKS)
    network = make_network(stock, inner.cache, load_ops("cpu"), 512, True)
    assert isinstance(network, StockNetwork)


def test_info_says_strict_and_fast(model: Path) -> None:
    config = config_of(model, draft="none")
    strict = build(config, time.monotonic).info
    fast = build(replace(config, numerics="fast"), time.monotonic).info
    assert strict.strict
    assert strict.not_strict_because == ""
    assert not fast.strict
    assert fast.not_strict_because == "numerics are fast, as asked for"
    assert strict.fingerprint != fast.fingerprint


def test_what_is_not_strict_is_refused_if_demanded_and_named_if_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "difference", lambda *_: "the phase of the moon")
    config = config_of(model, draft="none")
    info = build(config, time.monotonic).info
    assert not info.strict
    assert info.not_strict_because.endswith("a row changes with the phase of the moon")
    with pytest.raises(ModelError, match="phase of the moon; numerics fast"):
        build(replace(config, numerics="strict"), time.monotonic)


def test_the_check_is_remembered_by_fingerprint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model, draft="none", cache_dir=str(tmp_path / "checks"))
    first = build(config, time.monotonic).info
    monkeypatch.setattr(building, "difference", lambda *_: "being asked again")
    assert build(config, time.monotonic).info == first
    other = build(replace(config, dtype="bfloat16"), time.monotonic).info
    assert other.not_strict_because.endswith("being asked again")


def test_what_cannot_be_kept_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in ("", str(tmp_path / "file" / "below")):
        assert remembered(directory, "name", lambda: "found") == "found"


@pytest.mark.parametrize("harm", [b"", b"found", b"\xff\xfe"])
def test_half_a_memory_is_none(tmp_path: Path, harm: bytes) -> None:
    (tmp_path / "name").write_bytes(harm)
    assert remembered(str(tmp_path), "name", lambda: "looked again") == "looked again"
    assert remembered(str(tmp_path), "name", lambda: "not looked") == "looked again"


def test_what_does_not_pass_is_found_out_again_and_kept(tmp_path: Path) -> None:
    def check(kept: str) -> None:
        if kept == "spoilt":
            raise ValueError

    remembered(str(tmp_path), "name", lambda: "spoilt")
    assert remembered(str(tmp_path), "name", lambda: "good", check) == "good"
    assert remembered(str(tmp_path), "name", lambda: "not looked", check) == "good"


def test_nothing_is_left_behind_where_it_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    assert remembered(str(tmp_path), "name", lambda: "found") == "found"
    assert [p.name for p in tmp_path.iterdir()] == ["name"]


def test_a_pool_for_all_neighbours_is_told_from_a_tiny_one() -> None:
    """What was found in a pool without room for them must not stand for one with it."""
    lengths = (LENGTH, *CROWDS["a crowd"])
    assert sum(-(-length // BLOCK) for length in lengths) <= ENOUGH_BLOCKS


def test_a_window_in_the_config_of_a_llama_means_nothing() -> None:
    model = tiny("llama")
    model.config.sliding_window = 8
    assert {layer.window for layer in fuse(model, 64).layers} == {0}
    assert {layer.window for layer in fuse(tiny("mistral-window"), 64).layers} == {24}


def test_a_short_context_is_no_obstacle(model: Path) -> None:
    info = build(config_of(model, draft="none", max_context=8), time.monotonic).info
    assert info.context_limit == 8
    assert info.strict


def test_an_edited_config_is_another_fingerprint(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    before = build(config_of(directory, draft="none"), time.monotonic).info.fingerprint
    file = directory / "config.json"
    file.write_text(file.read_text().replace("1e-06", "1e-05"))
    after = build(config_of(directory, draft="none"), time.monotonic).info.fingerprint
    assert before != after


def test_room_only_grows() -> None:
    inner = paged(tiny("llama"), BLOCKS)

    def run(rows: int, sampled: int) -> int:
        feed = Feed((5,) * rows, 0, range(BLOCKS), sampled, SamplingParams(0.0))
        inner.run([feed])
        return id(inner._network._decoder._room)  # type: ignore[attr-defined]

    run(100, 1)
    room = run(40, 40)
    assert {run(100, 1), run(40, 40), run(100, 40)} == {room}
