"""What a server has recorded, read back."""

from __future__ import annotations

from pathlib import Path

from service.recorded import RecordedGeneration, from_line


def recorded_in(root: Path) -> list[RecordedGeneration]:
    """All records, by tenant and age."""
    files = sorted(root.glob("*/*.jsonl"), key=lambda f: (f.parent, f.name.partition("-")[2]))
    return [from_line(line) for file in files for line in file.read_bytes().splitlines()]
