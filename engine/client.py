"""The engine as the service sees it: submit and cancel one way, one batched message per step back.

Two forms: `ThreadClient` runs the engine in a thread of this process (tests, embedding);
`ProcessClient` in `engine.process` runs it in a supervised child process.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import StrEnum
from typing import Protocol

from engine.observer import StepReport
from engine.types import FinishReason, ModelInfo, Request, TokenChunk


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
        """Thread-safe, does not block. Raises EngineDead unless READY."""
        ...

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Thread-safe, does not block. Unknown or finished ids are ignored."""
        ...

    def stop(self) -> None:
        """Stop now; live requests end with DRAINED. Blocks until the engine is gone (bounded)."""
        ...
