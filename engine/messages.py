"""What crosses the line between the service's process and the engine's: one batch a step."""

from __future__ import annotations

from dataclasses import dataclass

from engine.observer import StepReport
from engine.outcome import FinishReason, TokenChunk
from engine.request import Request
from engine.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str
    reason: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish nothing more; every live request ends with DRAINED."""


Command = Submit | Cancel | Stop


@dataclass(frozen=True, slots=True)
class Ready:
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Stepped:
    chunks: tuple[TokenChunk, ...]
    report: StepReport | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine stops. `final`: starting it again cannot help (a wrong setting or model)."""

    cause: str
    final: bool


Reply = Ready | Stepped | Failed
