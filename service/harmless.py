"""Keeps telemetry from ever reaching a generation."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import structlog

EVERY_S = 60.0


class Harmless:
    """`with harmless:` swallows exceptions and logs one a minute, with the count of the others."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger, clock: Callable[[], float]):
        self._log = log
        self._clock = clock
        self._next_line = float("-inf")
        self.failures = 0

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failures += 1
        if self._clock() >= self._next_line:
            self._next_line = self._clock() + EVERY_S
            self._log.warning(
                "telemetry failed", error=f"{type(error).__name__}: {error}", total=self.failures
            )
        return True
