"""llama.cpp: its own `llama-server`, spoken to over HTTP on loopback."""

from __future__ import annotations

import json
import shutil
import socket
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.peers.contender import Broken, Job, Missing, Outcome
from loadtest.peers.group import Group, log_file

POLL_S = 0.2
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy


@dataclass(frozen=True, slots=True)
class LlamaSetup:
    """`binary` and `gguf` are paths (or a name on PATH); `slots` sequences share the context of
    `slots * context` tokens. `arguments` are more of the server's; `hint` is how to get it."""

    binary: str
    gguf: Path | None
    hint: str
    threads: int
    slots: int
    context: int
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    patience: float = 600.0


class LlamaServer:
    """A contender. `logs` is a directory for the server's output."""

    def __init__(self, name: str, setup: LlamaSetup, logs: Path) -> None:
        self.name = name
        self._setup = setup
        self._log = log_file(logs, name)
        self._group: Group | None = None
        self._url = ""

    def start(self) -> dict[str, str]:
        setup = self._setup
        binary = shutil.which(setup.binary)
        if binary is None or setup.gguf is None or not setup.gguf.is_file():
            raise Missing(setup.hint)
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [
            *(binary, "--model", str(setup.gguf), "--host", "127.0.0.1", "--port", str(port)),
            *("--threads", str(setup.threads), "--threads-batch", str(setup.threads)),
            *("--parallel", str(setup.slots), "--ctx-size", str(setup.slots * setup.context)),
            *setup.arguments,
        ]
        libraries = {"LD_LIBRARY_PATH": str(Path(binary).resolve().parent)}
        self._group = Group(command, {**libraries, **setup.env}, self._log)
        self._until_ready(self._group)
        self._group.pause()
        said = self._log.read_text(errors="replace").splitlines()
        return {
            "weights": setup.gguf.name,
            "arguments": " ".join(setup.arguments),
            "system": next((line.strip() for line in said if "system_info" in line), ""),
        }

    def run(self, job: Job) -> Outcome:
        assert self._group is not None, "start comes first"
        counts: list[int] = []
        with self._group.awake(), ThreadPoolExecutor(job.at_once) as callers:
            started = time.perf_counter()
            try:
                for wave in job.waves:
                    counts += callers.map(lambda ids: self._complete(ids, job.max_tokens), wave)
            except (OSError, ValueError, KeyError) as error:
                words = self._group.last_words()
                raise Broken(f"{type(error).__name__}: {error}\n{words}") from error
            return Outcome(time.perf_counter() - started, tuple(counts))

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _complete(self, ids: tuple[int, ...], max_tokens: int) -> int:
        """One prompt to its end; the number of new tokens."""
        body = {
            "prompt": list(ids),
            "n_predict": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self._call("/completion", json.dumps(body).encode())
        return int(answer["tokens_predicted"])

    def _call(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data=body, headers=headers)
        with DIRECT.open(request, timeout=self._setup.patience) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def _until_ready(self, group: Group) -> None:
        end = time.monotonic() + self._setup.patience
        while time.monotonic() < end and not group.ended:
            try:
                self._call("/health")
            except (OSError, ValueError):
                time.sleep(POLL_S)
            else:
                return
        raise Broken(f"it did not become ready\n{group.last_words()}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
