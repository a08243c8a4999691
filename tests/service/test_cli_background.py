"""The server in the background, and `make run` around it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli.background import AlreadyRunning, Background
from tests.loadtest.fakes import FakeServer, serve

WAITS = "import signal, sys; print('up', sys.argv[1:], flush=True); signal.pause()"
DEAF = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);"
    "signal.pause(); signal.pause()"
)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def background(folder: Path, script: str) -> Background:
    return Background(folder / "run", (sys.executable, "-c", script))


def until_up(server: Background, process: subprocess.Popen[bytes]) -> None:
    while "up" not in server.tail():
        assert process.poll() is None


def test_from_start_to_stop(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    server = background(tmp_path, WAITS)
    assert server.pid() is None
    process = server.start(["--listen", "here"])
    processes.append(process)
    until_up(server, process)
    assert server.pid() == process.pid
    assert server.tail() == "up ['--listen', 'here']"
    assert os.getpgid(process.pid) != os.getpgid(0)  # Ctrl-C does not reach it
    with pytest.raises(AlreadyRunning):
        server.start([])
    assert server.stop(grace=20)
    assert process.wait() == -15
    assert server.pid() is None
    assert not server.stop(grace=20)


def test_one_that_does_not_stop_is_killed(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    server = background(tmp_path, DEAF)
    process = server.start([])
    processes.append(process)
    until_up(server, process)
    assert server.stop(grace=0.3)
    assert process.wait() == -9


def test_a_pid_left_behind_is_nobody(tmp_path: Path) -> None:
    """After a crash the number may belong to any process, here to this one."""
    server = background(tmp_path, WAITS)
    server.folder.mkdir()
    server.pid_file.write_text(f"{os.getpid()}\n")
    assert server.pid() is None
    assert not server.stop(grace=1)


async def quickstart(*arguments: str, **env: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service.cli.quickstart", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | env,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("oneshot", [[], ["--oneshot"]])
async def test_a_server_that_is_there_is_used_and_left_alone(
    tmp_path: Path, oneshot: list[str]
) -> None:
    folder = tmp_path / "run"
    async with serve(FakeServer()) as fake:
        code, out, err = await quickstart(
            "--listen", fake.target, "--folder", str(folder), *oneshot
        )
    assert code == 0, err
    assert "already serving" in err
    assert out.endswith("Hello, wörld\n")
    assert fake.requests[0].text in out
    assert ("loadtest" in err) is (not oneshot)
    assert not folder.exists()


async def test_settings_that_cannot_work_are_named(tmp_path: Path) -> None:
    code, out, err = await quickstart(
        *("--listen", "127.0.0.1:1", "--folder", str(tmp_path)), DRAFTWIRE_MAX_SEQS="0"
    )
    assert (code, out) == (1, "")
    assert "max_seqs" in err


async def test_stop_without_a_server_says_so(tmp_path: Path) -> None:
    code, _, err = await quickstart("--stop", "--folder", str(tmp_path))
    assert code == 0
    assert "no server" in err
