"""Keeps what was found out about a model on this machine from one start to the next."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def remembered(directory: str, name: str, find: Callable[[], str]) -> str:
    """What `find` said when `name` was first asked for. `directory` empty, or one that cannot be
    written, keeps nothing."""
    if not directory:
        return find()
    path = Path(directory) / name
    try:
        return path.read_text()
    except OSError:
        found = find()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(found)
        part.replace(path)
    except OSError:
        pass  # it will be found out again
    return found
