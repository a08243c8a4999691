"""A set of drafts is its target's, and whole; else one line says what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.head_file import About, load_head, make_head, read_about, save_head
from engine.loader import LoadedModel, load
from tests.engine.training.models import IDS, write_target
from tests.engine.vocabularies import byte_level

KNOWN = torch.tensor([3, 5, 8, 13, 21, 34])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_target(tmp_path_factory.mktemp("target")), "float32", "cpu")


@pytest.fixture
def made(target: LoadedModel, tmp_path: Path) -> Path:
    directory = tmp_path / "set"
    directory.mkdir()
    save_head(make_head(target, KNOWN), directory)
    About.of(target, len(KNOWN), {"steps": 7}).write(directory)
    return directory


def test_round_trip(target: LoadedModel, tmp_path: Path) -> None:
    module = make_head(target, KNOWN)
    save_head(module, tmp_path)
    About.of(target, len(KNOWN), {"steps": 7}).write(tmp_path)
    again = load_head(tmp_path, target)
    assert torch.equal(again.vocabulary, KNOWN)
    for name, parameter in again.own_state().items():
        assert torch.equal(parameter, module.own_state()[name].bfloat16().float())
    rows = target.model.get_output_embeddings().weight[KNOWN]
    assert torch.equal(again.lm.lm_head.weight, rows)
    assert not any(p.requires_grad for p in again.parameters())
    assert read_about(tmp_path, target).recipe == {"steps": 7}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft.json", "head.safetensors"]


def test_what_it_is_for_is_known_without_loading_it(target: LoadedModel) -> None:
    assert About.of_directory(target.directory) == About.of(target, 0, {})


def test_of_other_weights(made: Path, tmp_path: Path) -> None:
    other = load(write_target(tmp_path / "other", seed=1), "float32", "cpu")
    with pytest.raises(
        ConfigError, match=r"not for .*other: their weights_hash is '\w+', not '\w+'"
    ):
        load_head(made, other)


def test_of_another_tokenizer(made: Path, target: LoadedModel, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other")
    byte_level(IDS, ("other text " * 50,)).save(str(other / "tokenizer.json"))
    with pytest.raises(ConfigError, match="their tokenizer_hash is"):
        load_head(made, load(other, "float32", "cpu"))


def test_of_another_size(made: Path, target: LoadedModel) -> None:
    replace(About.of(target, len(KNOWN), {}), hidden_size=96).write(made)
    with pytest.raises(ConfigError, match="their hidden_size is 96, not 64"):
        load_head(made, target)


@pytest.mark.parametrize("size", [0, 5, 100, 20_000])
def test_cut_short(made: Path, target: LoadedModel, size: int) -> None:
    with (made / "head.safetensors").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ConfigError, match=r"head\.safetensors is not a head"):
        load_head(made, target)


def test_files_that_are_not_there(made: Path, target: LoadedModel) -> None:
    for name in ("absent", "a" * 300, "a/" * 5000):
        with pytest.raises(ConfigError, match="holds no set of drafts"):
            load_head(made / name, target)
    (made / "head.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"head\.safetensors is not a head"):
        load_head(made, target)
    (made / "draft.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no set of drafts: .* has no draft\.json"):
        load_head(made, target)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1}', '{"name": "draft"}', "[" * 100_000]
)
def test_someone_elses_json(made: Path, target: LoadedModel, text: str) -> None:
    (made / "draft.json").write_text(text)
    with pytest.raises(ConfigError, match="holds no set of drafts"):
        load_head(made, target)


def test_of_a_later_format(made: Path, target: LoadedModel) -> None:
    about = json.loads((made / "draft.json").read_text())
    (made / "draft.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(ConfigError, match="not one of format 1"):
        load_head(made, target)


def without_vocabulary(state: dict[str, Any]) -> None:
    del state["vocabulary"]


def foreign_ids(state: dict[str, Any]) -> None:
    state["vocabulary"][-1] = IDS


def negative_ids(state: dict[str, Any]) -> None:
    state["vocabulary"][0] = -1


def fewer_ids(state: dict[str, Any]) -> None:
    state["vocabulary"] = state["vocabulary"][:-1].clone()


def ids_in_a_table(state: dict[str, Any]) -> None:
    state["vocabulary"] = state["vocabulary"][:, None].clone()


def a_parameter_less(state: dict[str, Any]) -> None:
    del state["fc.weight"]


def a_parameter_more(state: dict[str, Any]) -> None:
    state["fc.bias"] = torch.zeros(64)


def of_another_shape(state: dict[str, Any]) -> None:
    state["fc.weight"] = state["fc.weight"][:, :-1].clone()


def ids_out_of_order(state: dict[str, Any]) -> None:
    state["vocabulary"] = state["vocabulary"].flip(0).contiguous()


def an_id_twice(state: dict[str, Any]) -> None:
    state["vocabulary"][1] = state["vocabulary"][0]


def ids_that_are_no_whole_numbers(state: dict[str, Any]) -> None:
    state["vocabulary"] = state["vocabulary"].float()


def of_another_type(state: dict[str, Any]) -> None:
    state["fc.weight"] = state["fc.weight"].view(torch.int16)


def no_numbers(state: dict[str, Any]) -> None:
    state["fc.weight"][3, 3] = float("nan")


@pytest.mark.parametrize(
    "spoil",
    [
        without_vocabulary,
        foreign_ids,
        negative_ids,
        fewer_ids,
        ids_in_a_table,
        a_parameter_less,
        a_parameter_more,
        of_another_shape,
        ids_out_of_order,
        an_id_twice,
        ids_that_are_no_whole_numbers,
        of_another_type,
        no_numbers,
    ],
)
def test_tensors_that_are_no_head(
    made: Path, target: LoadedModel, spoil: Callable[[dict[str, Any]], None]
) -> None:
    state = load_file(made / "head.safetensors")
    spoil(state)
    save_file(state, made / "head.safetensors")
    with pytest.raises(ConfigError, match=r"head\.safetensors is not a head"):
        load_head(made, target)


def test_a_family_that_there_is_no_head_for(target: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"there are draft heads for Llama.*, not for GPT2"):
        make_head(replace(target, architecture="GPT2LMHeadModel"), KNOWN)
