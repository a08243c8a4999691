"""Records generations: what was asked for and what came of it, once the last sample has ended.

`service.record` is telemetry and knows no text; this is opt-in, and keeps it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from engine.errors import ConfigError
from engine.outcome import Finish, TokenChunk
from engine.request import Request
from engine.types import ModelInfo
from service.events import finished
from service.pb import draftwire_pb2 as pb
from service.recorded import RecordedGeneration, RecordedSample, to_line
from service.recording_writer import Job, Writer

# Memory of a token id in a list, of a piece of text and its characters, and of all else.
TOKEN_BYTES = 40
PIECE_BYTES = 64
CHARACTER_BYTES = 4
OTHER_BYTES = 2048


class Recording(Protocol):
    """What is kept of one generation. Event loop only; must not raise or block."""

    def chunk(self, index: int, chunk: TokenChunk) -> None:
        """More of sample `index`."""
        ...


class Recordings(Protocol):
    """Begins recordings, between `start` and `close`."""

    def start(self) -> None:
        """Raises ConfigError if nothing can be recorded."""
        ...

    def begin(
        self, params: pb.GenerationParams, requests: Sequence[Request], info: ModelInfo
    ) -> Recording:
        """Of the generation that asks for `params`; a request for each of its samples."""
        ...

    def close(self, timeout_s: float) -> None:
        """Finish within so many seconds. Blocks."""
        ...


class NoRecordings:
    """Keeps nothing: both protocols when recording is off."""

    def start(self) -> None:
        return None

    def begin(
        self, params: pb.GenerationParams, requests: Sequence[Request], info: ModelInfo
    ) -> Recording:
        return self

    def chunk(self, index: int, chunk: TokenChunk) -> None:
        return None

    def close(self, timeout_s: float) -> None:
        return None


class FileRecordings:
    """Hands recordings to a writer. `where` is for messages; `wall` gives seconds since 1970."""

    def __init__(self, writer: Writer, where: str, wall: Callable[[], float]) -> None:
        self._writer = writer
        self._where = where
        self._wall = wall

    def start(self) -> None:
        try:
            self._writer.start()
        except OSError as error:
            raise ConfigError(f"record: cannot record in {self._where}: {error}") from error

    def begin(
        self, params: pb.GenerationParams, requests: Sequence[Request], info: ModelInfo
    ) -> Recording:
        return _LiveRecording(params, requests, info, self._wall(), self._writer.put)

    def close(self, timeout_s: float) -> None:
        self._writer.close(timeout_s)


@dataclass(slots=True)
class _LiveSample:
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: Finish | None = None


class _LiveRecording:
    def __init__(
        self,
        params: pb.GenerationParams,
        requests: Sequence[Request],
        info: ModelInfo,
        now: float,
        done: Callable[[Job], None],
    ) -> None:
        self._params = params
        self._first = requests[0]
        self._info = info
        self._now = now
        self._done = done
        self._samples = [_LiveSample() for _ in requests]
        self._live = len(requests)

    def chunk(self, index: int, chunk: TokenChunk) -> None:
        sample = self._samples[index]
        sample.tokens += chunk.tokens
        if chunk.text:
            sample.text.append(chunk.text)
        if chunk.finish is not None:
            sample.finish = chunk.finish
            self._live -= 1
            if not self._live:
                self._done(Job(self._first.tenant, self._size(), partial(_line, self)))

    def _size(self) -> int:
        tokens = len(self._first.prompt) + sum(len(sample.tokens) for sample in self._samples)
        pieces = [piece for sample in self._samples for piece in sample.text]
        text = PIECE_BYTES * len(pieces) + CHARACTER_BYTES * sum(map(len, pieces))
        return TOKEN_BYTES * tokens + text + self._params.ByteSize() + OTHER_BYTES

    def recorded(self) -> RecordedGeneration:
        """All of it, after the last end."""
        params = pb.GenerationParams()
        params.CopyFrom(self._params)
        params.sampling.seed = self._first.sampling.seed
        return RecordedGeneration(
            time=datetime.fromtimestamp(self._now, UTC).isoformat(timespec="microseconds"),
            generation=self._first.id,
            tenant=self._first.tenant,
            model=self._info.model,
            fingerprint=self._info.fingerprint,
            strict=self._info.strict,
            params=params,
            prompt_token_ids=self._first.prompt,
            samples=tuple(_recorded(i, sample) for i, sample in enumerate(self._samples)),
        )


def _line(recording: _LiveRecording) -> bytes:
    return to_line(recording.recorded())


def _recorded(index: int, sample: _LiveSample) -> RecordedSample:
    finish = sample.finish
    assert finish is not None
    wire = finished(finish, index)
    return RecordedSample(
        index=index,
        token_ids=tuple(sample.tokens),
        text="".join(sample.text),
        finish_reason=finish.reason.value,
        matched=finish.matched,
        usage=wire.usage,
        speculation=wire.speculation,
    )
