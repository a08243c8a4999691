"""The engine as the service sees it: submit and cancel one way, one batched message per step back.

Two forms: `ThreadClient` runs the engine in a thread of this process (tests, embedding);
`ProcessClient` in `engine.process` runs it in a supervised child process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from engine.errors import InvalidRequest
from engine.observer import StepReport
from engine.outcome import Finish, FinishReason, TokenChunk
from engine.request import Request
from engine.types import ModelInfo


class EngineState(StrEnum):
    """STARTING → READY ⇄ RESTARTING → STOPPED; FAILED is final: it cannot work as configured."""

    STARTING = "STARTING"
    READY = "READY"
    RESTARTING = "RESTARTING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class EngineListener(Protocol):
    """Receives what the engine says. Called from a thread of the client; must not block."""

    def deliver(self, chunks: Seq[TokenChunk]) -> None:
        """Output of one step. Per request: gapless offsets, and `finish` on the last chunk."""
        ...

    def report(self, report: StepReport) -> None:
        """One step in numbers."""
        ...

    def changed(self, state: EngineState, info: ModelInfo | None, cause: str) -> None:
        """The engine's state changed. `info` is set with READY, `cause` with the bad ones."""
        ...


class EngineClient(Protocol):
    """Promise: every submitted request gets exactly one chunk with `finish`, even if the engine
    dies (then ERROR, retryable, within 2 s)."""

    @property
    def state(self) -> EngineState: ...

    def start(self) -> None:
        """Start the engine in the background; `changed` tells when it is READY."""
        ...

    def submit(self, request: Request) -> None:
        """Thread-safe, does not block. Raises EngineDead unless READY, InvalidRequest if a request
        of that id is live."""
        ...

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Thread-safe, does not block. Unknown or finished ids are ignored."""
        ...

    def stop(self) -> None:
        """Stop now; live requests end with DRAINED. Blocks until the engine is gone (bounded)."""
        ...


class Ledger:
    """Every live request and how many of its tokens were delivered. Thread-safe.

    It makes the promise above good: whatever is still live when an engine ends is ended here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def open(self, request: Request) -> None:
        """Raises InvalidRequest if a request of that id is live."""
        with self._lock:
            if request.id in self._entries:
                raise InvalidRequest(f"generation {request.id!r} is already live")
            self._entries[request.id] = _Entry(request)

    def pass_on(self, chunks: Seq[TokenChunk], now: float) -> list[TokenChunk]:
        """The chunks that belong to live requests; finished ones are struck off."""
        known = []
        with self._lock:
            for chunk in chunks:
                entry = self._entries.get(chunk.request_id)
                if entry is None:
                    continue
                known.append(chunk)
                entry.tokens += len(chunk.tokens)
                if entry.tokens and entry.first_token is None:
                    entry.first_token = now
                if chunk.finish is not None:
                    del self._entries[chunk.request_id]
        return known

    def close_all(self, finish: Finish, now: float) -> list[TokenChunk]:
        """A terminal chunk for every live request; none is live afterwards.

        What only the engine knew (when it was scheduled, drafts) is lost with the engine.
        """
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        return [
            TokenChunk(entry.request.id, entry.tokens, (), "", entry.closed(finish, now))
            for entry in entries
        ]

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(slots=True)
class _Entry:
    request: Request
    tokens: int = 0
    first_token: float | None = None

    def closed(self, finish: Finish, now: float) -> Finish:
        return replace(
            finish,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.tokens,
            arrived=self.request.arrived,
            # It was scheduled at some time before its first token; which, nobody can say any more.
            scheduled=self.first_token,
            prefilled=self.first_token,
            first_token=self.first_token,
            finished=now,
        )
