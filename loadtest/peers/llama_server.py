"""llama.cpp: its own `llama-server`, spoken to over HTTP on loopback."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from loadtest.peers.contender import Broken, Job, Missing, Outcome
from loadtest.peers.group import Group, log_file

POLL_S = 0.2
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy


@dataclass(frozen=True, slots=True)
class LlamaSetup:
    """`binary` is a path or a name on PATH; `models` are the GGUF file and, if one drafts, the
    draft model's; a None among them was not given. `slots` sequences share the context of
    `slots * context` tokens. `arguments` are more of the server's; `hint` is how to get it all."""

    binary: str
    models: tuple[Path | None, ...]
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
        models = [path for path in setup.models if path is not None and path.is_file()]
        if binary is None or len(models) < len(setup.models):
            raise Missing(setup.hint)
        weights = zip(("--model", "--spec-draft-model"), map(str, models), strict=False)
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [
            *(binary, *chain.from_iterable(weights), "--host", "127.0.0.1", "--port", str(port)),
            *("--threads", str(setup.threads), "--threads-batch", str(setup.threads)),
            *("--parallel", str(setup.slots), "--ctx-size", str(setup.slots * setup.context)),
            *("--cache-ram", "0"),  # no prompt comes twice; it would copy the KV of each that ends
            *setup.arguments,
        ]
        libraries = {"LD_LIBRARY_PATH": str(Path(binary).resolve().parent)}
        self._group = Group(command, {**libraries, **setup.env}, self._log)
        self._until_ready(self._group)
        self._group.pause()
        told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
        return {
            "weights": ", ".join(path.name for path in models),
            "arguments": " ".join(setup.arguments),
            "version": (told.stdout + told.stderr).strip(),  # which of the two has changed
        }

    def run(self, job: Job) -> Outcome:
        assert self._group is not None, "start comes first"
        answers: list[dict[str, Any]] = []
        with self._group.awake(), ThreadPoolExecutor(job.at_once) as callers:
            started = time.perf_counter()
            try:
                for wave in job.waves:
                    answers += callers.map(lambda ids: self._complete(ids, job.max_tokens), wave)
                seconds = time.perf_counter() - started
                counts = tuple(int(answer["tokens_predicted"]) for answer in answers)
                return Outcome(seconds, counts, drafting([a["timings"] for a in answers]))
            except (OSError, ValueError, KeyError) as error:
                words = self._group.last_words()
                raise Broken(f"{type(error).__name__}: {error}\n{words}") from error

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _complete(self, ids: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
        """One prompt to its end; what the server says of it."""
        body = {
            "prompt": list(ids),
            "n_predict": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        return self._call("/completion", json.dumps(body).encode())

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


def drafting(timings: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How much was drafted, from the server's own words, one mapping per prompt; they have no
    word of drafts where there were none. A step gives a token of its own and the accepted ones."""
    tokens = sum(t["predicted_n"] for t in timings)
    drafted, accepted = (sum(t.get(k, 0) for t in timings) for k in ("draft_n", "draft_n_accepted"))
    per_step = tokens / (tokens - accepted)
    return {"drafted": drafted, "accepted": accepted, "tokens_per_step": per_step}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
