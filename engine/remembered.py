"""Keeps what was found out about a model on this machine from one start to the next."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

MARK = "found: "  # an empty file, or half of one, says nothing


def remembered(directory: str, name: str, find: Callable[[], str]) -> str:
    """What `find` said when `name` was first asked for. `directory` empty, or one that cannot be
    written, keeps nothing."""
    if not directory:
        return find()
    path = Path(directory) / name
    try:
        kept = path.read_text()
    except (OSError, ValueError):
        kept = ""
    if kept.startswith(MARK):
        return kept.removeprefix(MARK)
    found = find()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(MARK + found)
        part.replace(path)
    except OSError:
        pass  # it will be found out again
    return found
