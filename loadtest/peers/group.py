"""A program in a process group of its own, which can be stopped from computing.

A pool of threads that spins after its last parallel region, or a server that polls, would take
cores from whoever is measured. So the groups of those who wait are stopped by the system.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TERMINATED = 128 + signal.SIGTERM
STOP_S = 30.0
END_S = 5.0


def unwind_on_sigterm() -> None:
    """Let a SIGTERM end this process through its `finally` clauses, which end the groups."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))


def log_file(logs: Path, name: str) -> Path:
    """Where the output of the contender `name` goes."""
    return logs / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.log"


class Group:
    """`command`, running. stdout is a pipe if `talks`, else goes to `log` as stderr does.

    Not a session of its own: when this process dies, the system then ends a stopped group too.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, talks: bool = False
    ) -> None:
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else out,
                stderr=out,
                env={**os.environ, **env},
                process_group=0,
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def status(self) -> int | None:
        """The exit status, soon after its output has ended; None if it goes on all the same."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(END_S)
        return None

    def last_words(self, lines: int = 12) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """It runs inside the block, and is paused after it."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def close(self) -> None:
        """End the whole group: asked first, then without asking."""
        self._signal(signal.SIGCONT)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was never read by a dead reader
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
