"""Engines that are Python libraries: a worker with an interpreter of its own, spoken to by JSON."""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.peers.contender import Broken, Job, Missing, Outcome
from loadtest.peers.group import Group, log_file

WORKER = Path(__file__).with_name("worker.py")
CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Setup:
    """How to run a worker. `python` is the interpreter that has the library; `options` go to its
    `load`; `hint` says how to get the library. `patience`: seconds for one answer."""

    library: str
    python: str
    hint: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    patience: float = 600.0
    script: Path = WORKER


class Piped:
    """A contender behind `loadtest/peers/worker.py`. `logs` is a directory for its stderr."""

    def __init__(self, name: str, setup: Setup, logs: Path) -> None:
        self.name = name
        self._setup = setup
        self._log = log_file(logs, name)
        self._group: Group | None = None
        self._buffer = b""

    def start(self) -> dict[str, str]:
        command = [self._setup.python, "-P", str(self._setup.script), self._setup.library]
        try:
            self._group = Group(command, self._setup.env, self._log, talks=True)
        except OSError as error:
            raise Missing(self._setup.hint) from error
        answer = self._ask({"op": "load", "options": dict(self._setup.options)})
        if answer.get("missing"):
            raise Missing(self._setup.hint)
        return {str(k): str(v) for k, v in answer["facts"].items()}

    def run(self, job: Job) -> Outcome:
        answer = self._ask({"op": "run", "job": asdict(job)})
        return Outcome(answer["seconds"], tuple(answer["counts"]), answer.get("details", {}))

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        group = self._group
        assert group is not None, "start comes first"
        with group.awake():
            try:
                assert group.process.stdin is not None
                group.process.stdin.write(json.dumps(question).encode() + b"\n")
                group.process.stdin.flush()
                answer: dict[str, Any] = json.loads(self._line(group))
            except (OSError, ValueError, EOFError) as error:
                raise Broken(f"{error or type(error).__name__}\n{group.last_words()}") from error
        if "error" in answer:
            raise Broken(f"{answer['error']}\n{group.last_words()}")
        return answer

    def _line(self, group: Group) -> bytes:
        """The next line it says. EOFError if it ends first, TimeoutError if it takes too long."""
        pipe = group.process.stdout
        assert pipe is not None
        end = time.monotonic() + self._setup.patience
        with selectors.DefaultSelector() as waiting:
            waiting.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not waiting.select(end - time.monotonic()):
                    raise TimeoutError(f"no answer for {self._setup.patience:.0f} s")
                piece = os.read(pipe.fileno(), CHUNK)
                if not piece:
                    raise EOFError(f"it ended with status {group.status()}")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
