"""Where models are kept, below one directory.

models/NAME/       ready for the engine; made under another name, so what is here is complete
downloads/NAME/    pieces of a download that is under way or was broken off
locks/NAME         held (flock) by whoever makes models/NAME
"""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from service.models.errors import DiskFull

FORMAT = 2  # of ready directories, written by `engine.convert`; others are made again


def home_directory(environ: Mapping[str, str]) -> Path:
    """$DRAFTWIRE_HOME, or `draftwire` in the user's cache directory."""
    if home := environ.get("DRAFTWIRE_HOME"):
        return Path(home).expanduser().absolute()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "draftwire"


@dataclass(frozen=True, slots=True)
class Store:
    """The directories and locks below `home`. `free_bytes` tells the free space at a path."""

    home: Path
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free

    def directory(self, name: str) -> Path:
        return self.home / "models" / name

    def downloads(self, name: str) -> Path:
        return self.home / "downloads" / name

    def ready(self, name: str) -> Path | None:
        """The directory of `name` if it is there and of the present format."""
        directory = self.directory(name)
        origin = directory / "draftwire.json"
        try:
            current = json.loads(origin.read_bytes())["format"] == FORMAT
        except (OSError, ValueError, KeyError):  # whoever makes it will say what is wrong
            return None
        return directory if current else None

    def remove_outdated(self, name: str) -> None:
        """Make way for `name` to be made again. The lock of `name` must be held."""
        directory = self.directory(name)
        if directory.exists():
            doomed = directory.with_name(f"{name}.outdated")
            shutil.rmtree(doomed, ignore_errors=True)
            directory.rename(doomed)  # a half-removed directory never bears the name
            shutil.rmtree(doomed)

    @contextmanager
    def lock(self, name: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold `name` alone among all processes. Calls `waiting` if that takes a wait.

        The system lets go of it when the process ends, however it ends. An OSError, of the block
        too, is raised as DiskFull or ModelError.
        """
        path = self.home / "locks" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                _flock(file.fileno(), waiting)
                yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"no space is left below {self.home}") from error
            raise ModelError(f"cannot work below {self.home}: {error}") from error

    def require_space(self, needed: int, what: str) -> None:
        """Raises DiskFull if fewer than `needed` bytes are free."""
        self.home.mkdir(parents=True, exist_ok=True)
        free = self.free_bytes(self.home)
        if free < needed:
            raise DiskFull(
                f"{what} needs {needed / 1e6:.0f} MB below {self.home}, "
                f"{free / 1e6:.0f} MB are free"
            )


def _flock(descriptor: int, waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
