"""What `--draft` may say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint import hash_weights, weight_files
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.shipped import shipped_set
from engine.specs import AUTO, DraftSpec, parse_drafts, resolve_models


@pytest.mark.parametrize(
    ("setting", "specs"),
    [
        ("none", ()),
        (" none ", ()),
        ("auto", (DraftSpec("ngram"), DraftSpec("suffix"))),
        ("ngram", (DraftSpec("ngram"),)),
        ("suffix", (DraftSpec("suffix"),)),
        ("table:/a/b", (DraftSpec("table", directory="/a/b"),)),
        (
            "suffix,table:t,model:m",
            (DraftSpec("suffix"), DraftSpec("table", directory="t"), DraftSpec("model", "m")),
        ),
        ("model:a/b", (DraftSpec("model", "a/b"),)),
        ("ngram,model:a", (DraftSpec("ngram"), DraftSpec("model", "a"))),
        ("model:hub:org/x , ngram", (DraftSpec("model", "hub:org/x"), DraftSpec("ngram"))),
    ],
)
def test_known(setting: str, specs: tuple[DraftSpec, ...]) -> None:
    assert parse_drafts(setting) == specs


@pytest.mark.parametrize(
    "setting",
    [
        "", "tree", "model", "model:", "ngram:5", "ngram,", "ngram,none", "none,ngram",
        "auto,ngram", "suffix:5", "table", "table:", "suffix,table",
    ],
)  # fmt: skip
def test_unknown(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown draft source.* head:DIR or model:ID"):
        parse_drafts(setting)


def test_twice_the_same_kind() -> None:
    for setting in ("model:a,model:b", "table:a,ngram,table:b", "suffix,suffix"):
        with pytest.raises(ConfigError, match="twice"):
            parse_drafts(setting)


def test_names_become_directories_and_the_name_is_kept() -> None:
    """A table is no model, and is where the setting says."""
    config = EngineConfig(model="small", draft="ngram,suffix,table:t/u,model:tiny")
    resolved = resolve_models(config, lambda name: f"/models/{name}")
    assert (resolved.model, resolved.model_name) == ("/models/small", "small")
    assert resolved.draft == "ngram,suffix,table:t/u,model:/models/tiny"
    assert resolve_models(EngineConfig(draft="none"), str).draft == "none"


def test_automatic_drafts_are_those_made_for_the_model_too() -> None:
    def shipped(model: Path) -> Path | None:
        return Path("/sets/own") if model == Path("known") else None

    def drafts(model: str, draft: str) -> str:
        return resolve_models(EngineConfig(model=model, draft=draft), str, shipped).draft

    assert drafts("known", "auto") == f"{AUTO},table:/sets/own,head:/sets/own"
    assert drafts("unknown", "auto") == AUTO
    assert drafts("known", "ngram") == "ngram"
    assert drafts("known", "none") == "none"


def test_there_is_one_draft_kv() -> None:
    with pytest.raises(ConfigError, match="head and model"):
        parse_drafts("head:a,model:b")


def test_a_set_is_found_by_the_weights_it_was_made_for(tmp_path: Path) -> None:
    model, sets = tmp_path / "model", tmp_path / "sets"
    model.mkdir()
    assert shipped_set(model, sets) is None
    save_file({"a": torch.ones(3)}, model / "model.safetensors")
    own = hash_weights(model, weight_files(model))
    for name, weights in (("other", "0" * 64), ("own", own)):
        (sets / name).mkdir(parents=True)
        (sets / name / "draft.json").write_text(json.dumps({"weights_hash": weights}))
    assert shipped_set(model, sets) == sets / "own"
    save_file({"a": torch.zeros(3)}, model / "model.safetensors")
    assert shipped_set(model, sets) is None
    assert shipped_set(tmp_path / "nowhere", sets) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_draft_tokens": -1},
        {"max_draft_tokens": 65},
        {"max_seqs": 0},
        {"max_step_rows": 0},
        {"max_seqs": 65, "max_step_rows": 64},
        {"draft_rows": -1},
        {"step_ms": -1},
        {"kv_cache_mib": 0},
        {"block_size": 8},
        {"dtype": "float16"},
        {"threads": -1},
        {"max_context": -1},
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**wrong)  # type: ignore[arg-type]
