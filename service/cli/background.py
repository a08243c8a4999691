"""A server in the background, found again by its pid file.

The server inherits a lock on the file and holds it for as long as it lives, so a pid that was left
behind by a crash, and may belong to another process by now, is never taken for a server.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

POLL_S = 0.1


class AlreadyRunning(Exception):
    """There is a server with this pid file."""


@dataclass(frozen=True, slots=True)
class Background:
    """At most one server, with its pid file and its log in `folder`."""

    folder: Path
    command: Sequence[str] = (sys.executable, "-m", "service", "serve")

    @property
    def pid_file(self) -> Path:
        return self.folder / "server.pid"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def start(self, options: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start the command with `options` in a session of its own. Raises AlreadyRunning."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.pid_file.open("a+") as pid_file, self.log.open("wb") as log:
            if not _lock(pid_file):
                raise AlreadyRunning(f"a server with pid file {self.pid_file} is being started")
            server = subprocess.Popen(
                [*self.command, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is not for the server
                pass_fds=[pid_file.fileno()],
            )
            pid_file.truncate(0)
            pid_file.write(f"{server.pid}\n")
        return server

    def pid(self) -> int | None:
        """The pid of the server; None if there is none (or it is being started right now)."""
        if not self.pid_file.exists():
            return None
        with self.pid_file.open() as pid_file:
            return None if _lock(pid_file) else int(pid_file.read() or 0) or None

    def stop(self, grace: float) -> bool:
        """Ask the server to stop, and after `grace` seconds make it. False if there is none."""
        pid = self.pid()
        if pid is None:
            return False
        with suppress(ProcessLookupError):  # it went by itself
            os.kill(pid, signal.SIGTERM)
            if not self._gone_within(grace):
                os.killpg(pid, signal.SIGKILL)
                self._gone_within(grace)
        self.pid_file.unlink(missing_ok=True)
        return True

    def tail(self, lines: int = 20) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _gone_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.pid() is not None:
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True


def _lock(file: IO[str]) -> bool:
    """Take the lock; it is given back when the last copy of the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
