"""`draftwire train-draft`: what is asked of the process that trains, and how both end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from service.cli import train
from service.cli.app import build
from tests.engine.training.models import write_target

NOTES = "import json, sys; json.dump(sys.argv[2:], open(sys.argv[1], 'w')); sys.exit(int(7))"
# Says when it is ready, and with which signal or end of its input it was stopped.
WAITS = """
import signal, sys, threading
def told(number, frame):
    print("told", number, file=sys.stderr, flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, told)
signal.signal(signal.SIGTERM, told)
print("ready", file=sys.stderr, flush=True)
sys.stdin.buffer.read()
print("alone", file=sys.stderr, flush=True)
"""
PARENT = "import sys; from service.cli.train import run_child; sys.exit(run_child(sys.argv[1:]))"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One that is only looked at from outside."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).write_text("{}")
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6]}\n')
    return path


def invoke(*words: object) -> Result:
    return CliRunner().invoke(build(), ["train-draft", *map(str, words)])


def test_what_the_process_is_asked(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setattr(train, "TRAINER", (sys.executable, "-c", NOTES, str(notes)))
    (tmp_path / "-more.txt").touch()
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    result = invoke("--model", model, "--data", data, "--out", out, "--minutes", 3, "--steps", 5)
    assert result.exit_code == 7  # its status is the command's
    asked = json.loads(notes.read_text())
    assert asked[asked.index("--data") + 1 :] == [str(data)]
    assert {f"--model={model}", f"--out={out}", "--minutes=3.0", "--steps=5"} <= set(asked)
    assert {"--tokens=0", "--vocabulary=4096", "--seed=0", "--threads=0"} <= set(asked)
    invoke("--model", model, "--out", out, "--data", data, data, "--", "-more.txt")
    asked = json.loads(notes.read_text())
    assert asked[asked.index("--data") + 1 :] == [str(data), str(data), str(tmp_path / "-more.txt")]


def test_what_is_wrong_is_one_line(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWIRE_HOME", str(tmp_path / "home"))
    out = tmp_path / "out"
    cases: list[tuple[str, tuple[object, ...], int]] = [
        ("no model 'nobody'", ("--model", "nobody", "--data", data, "--out", out), 2),
        ("there is no", ("--model", model, "--data", tmp_path / "absent", "--out", out), 2),
        ("is no folder", ("--model", model, "--data", data, "--out", data), 2),
        ("cannot be written", ("--model", model, "--data", data, "--out", data / "below"), 2),
        ("has no config.json", ("--model", tmp_path, "--data", data, "--out", out), 1),
    ]
    for text, words, status in cases:
        result = invoke(*words)
        assert result.exit_code == status, result.output
        assert result.output.startswith("draftwire: ")
        assert text in result.output
        assert result.output.count("\n") == 1
    assert not out.exists()


def test_what_the_process_finds_wrong_is_one_line(data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command = [*train.TRAINER, "--model", tmp_path / "empty", "--data", data]
    ended = subprocess.run(
        [*map(str, command), f"--out={tmp_path / 'out'}"],
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        env=train.engine_environment(),
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "empty has no config.json" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def started(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, *command], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_waited_for(number: signal.Signals) -> None:
    with started(sys.executable, "-c", WAITS) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(20) == 130
        assert process.stderr.read() == f"told {int(number)}\n"


def test_it_does_not_outlive_the_command() -> None:
    with started(sys.executable, "-c", WAITS) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.kill()
        assert process.stderr.read() == "alone\n"


def test_the_status_of_one_that_was_killed() -> None:
    kills = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert train.run_child([sys.executable, "-c", kills]) == 137
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stopped_it_says_how_to_go_on(data: Path, tmp_path: Path) -> None:
    """The real process, in the middle of its training."""
    target, out = write_target(tmp_path / "target"), tmp_path / "out"
    lines = ([5 + i, 6 + i % 7, 9] for i in range(64))
    data.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in lines))
    words: list[Any] = ["--model", target, "--data", data, "--out", out, "--tokens", 1500]
    words += ["--threads", 1, "--steps"]
    command = [*train.TRAINER, *map(str, words), "400"]
    state = out / "work" / "state.pt"
    with started(*command) as process:
        assert process.stderr is not None
        end = time.monotonic() + 90
        while not state.exists():
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        last = process.stderr.read().splitlines()[-1]
    assert last == "draftwire: stopped; the same command goes on from here"
    assert not (out / "draft.json").exists()
    assert os.listdir(out) == ["work"]
