"""Records: those of a server, read back, and made ones."""

from __future__ import annotations

from pathlib import Path

from service.pb import draftwire_pb2 as pb
from service.recorded import RecordedGeneration, RecordedSample, from_line


def recorded_in(root: Path) -> list[RecordedGeneration]:
    """All records, by tenant and age."""
    files = sorted(root.glob("*/*.jsonl"), key=lambda f: (f.parent, f.name.partition("-")[2]))
    return [from_line(line) for file in files for line in file.read_bytes().splitlines()]


def recorded(params: pb.GenerationParams, *samples: RecordedSample) -> RecordedGeneration:
    return RecordedGeneration(
        *("2026-01-02T03:04:05.678901+00:00", "g-1", "tenant\u2028", "m", "f00d", True, params),
        prompt_token_ids=(1, 2**32 - 1),
        samples=samples,
    )


def plain_sample(index: int = 0) -> RecordedSample:
    return RecordedSample(index, (1,), "a", "EOS", None, pb.Usage(), pb.SpeculationStats())
