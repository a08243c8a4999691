"""Lines in files, a folder of them for each tenant; of too many bytes the oldest are deleted.

    ROOT/<tenant, encoded>/<UTC time>-<number>.jsonl

Folders are 0700, files 0600. One server at a time, one thread of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

LOCK = ".lock"
FOLDER = re.compile(r"[a-z0-9_%~-]+")
NAME = re.compile(r"\d{8}T\d{6}Z-(\d{8,})\.jsonl")
# A segment is what is deleted at once.
MOST_SEGMENT_BYTES = 16 << 20
SEGMENTS = 8
# Folders whose content is remembered; that of others is looked up again.
KNOWN = 1024
# File names have up to 255 bytes; so many characters of a long one are kept for people to read.
LONGEST_NAME = 200
READABLE = 100
KEPT = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")


def folder_name(tenant: str) -> str:
    """Another name for every tenant, of characters that no file system takes for others.

    A byte of UTF-8 that is not a small letter, a digit, - or _ is % and two digits; of a long name
    the beginning is followed by ~ and a digest.
    """
    raw = tenant.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if byte in KEPT else f"%{byte:02x}" for byte in raw)
    if len(name) > LONGEST_NAME:
        return f"{name[:READABLE]}~{hashlib.sha256(raw).hexdigest()}"
    return name or "~"


@dataclass(slots=True)
class Segment:
    path: Path
    size: int


class Folder:
    """The segments of one tenant, oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(mode=0o700, exist_ok=True)
        if path.is_symlink():
            raise NotADirectoryError(f"{path} is a link")
        found = sorted(_segments_in(path))
        self._segments = deque(Segment(path / name, size) for _, name, size in found)
        self._number = found[-1][0] if found else 0
        self._total = sum(segment.size for segment in self._segments)
        # What a killed server left half written is not continued.
        self._open = bool(found) and _is_whole(self._segments[-1])

    def append(self, line: bytes, most: int, most_segment: int, now: float) -> None:
        """Add a line; afterwards there are at most `most` bytes, which `line` has to fit."""
        self._open = self._open and self._segments[-1].size + len(line) <= most_segment
        self.shrink(most - len(line))
        if self._open:
            segment = self._segments[-1]
            _write(segment.path, line, os.O_APPEND)
        else:
            self._number += 1
            time = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
            segment = Segment(self._path / f"{time}-{self._number:08}.jsonl", 0)
            _write(segment.path, line, os.O_APPEND | os.O_CREAT | os.O_EXCL)
            self._segments.append(segment)
            self._open = True
        segment.size += len(line)
        self._total += len(line)

    def shrink(self, most: int) -> None:
        """Delete the oldest until there are at most `most` bytes."""
        while self._total > most:
            oldest = self._segments[0]
            oldest.path.unlink(missing_ok=True)
            self._segments.popleft()
            self._total -= oldest.size


class Segments:
    """At most `most` bytes for each tenant, those that were there before included."""

    def __init__(self, root: Path, most: int, wall: Callable[[], float]) -> None:
        self._root = root
        self._most = most
        self._most_segment = min(most // SEGMENTS, MOST_SEGMENT_BYTES)
        self._wall = wall
        self._folders: dict[str, Folder] = {}
        self._lock: int | None = None

    def open(self) -> None:
        """Raises OSError if ROOT cannot be written, or another server writes there."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.access(self._root, os.W_OK | os.X_OK):
                raise PermissionError("no permission to write there")
            for path in self._root.iterdir():
                if FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    Folder(path).shrink(self._most)
        except BlockingIOError as error:
            os.close(lock)
            raise BlockingIOError("another server records there") from error
        except OSError:
            os.close(lock)
            raise
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append(self, tenant: str, line: bytes) -> bool:
        """Write a line. False if it is larger than all of the tenant's may be. Raises OSError."""
        if len(line) > self._most:
            return False
        name = folder_name(tenant)
        try:
            self._append(name, line)
        except OSError as error:
            self._folders.pop(name, None)  # what there is may not be what was thought
            if not isinstance(error, FileNotFoundError):
                raise
            self._append(name, line)  # somebody tidied up
        return True

    def _append(self, name: str, line: bytes) -> None:
        folder = self._folders.get(name)
        if folder is None:
            folder = self._folders[name] = Folder(self._root / name)
            if len(self._folders) > KNOWN:
                del self._folders[next(iter(self._folders))]
        folder.append(line, self._most, self._most_segment, self._wall())


def _segments_in(path: Path) -> Iterator[tuple[int, str, int]]:
    """Number, name and size of each."""
    with os.scandir(path) as entries:
        for entry in entries:
            match = NAME.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                yield int(match[1]), entry.name, entry.stat().st_size


def _is_whole(segment: Segment) -> bool:
    if not segment.size:
        return True
    with segment.path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _write(path: Path, line: bytes, flags: int) -> None:
    """All of it or nothing, as far as the disk lets us."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        before = os.fstat(file).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, before)
            raise
    finally:
        os.close(file)
