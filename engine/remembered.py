"""Keeps what was found out about a model on this machine from one start to the next."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "found: "  # an empty file, or half of one, says nothing


def remembered(
    directory: str,
    name: str,
    find: Callable[[], str],
    check: Callable[[str], object] = lambda kept: None,
) -> str:
    """What `find` said when `name` was first asked for. `directory` empty, or one that cannot be
    written, keeps nothing. What is kept and `check` raises ValueError for is found out again."""
    if not directory:
        return find()
    path = Path(directory) / name
    try:
        kept = path.read_text()
    except (OSError, ValueError):
        kept = ""
    if kept.startswith(MARK) and _passes(check, kept.removeprefix(MARK)):
        return kept.removeprefix(MARK)
    found = find()
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(MARK + found)
        part.replace(path)
    except OSError:  # it will be found out again
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return found


def _passes(check: Callable[[str], object], kept: str) -> bool:
    try:
        check(kept)
    except ValueError:
        return False
    return True
