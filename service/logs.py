"""Logs: structlog, one JSON object a line on stderr. Prompts and outputs are never logged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
REPEAT_S = 60.0


class Sink:
    """A text stream that fails silently: a full disk or a reader that left costs lines of the log,
    never the work that they were about. `lost` counts failures."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = 0

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.lost += 1
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.lost += 1


class OncePerMinute(logging.Filter):
    """Lets a repeated line of a library through once a minute (an exporter that fails, say)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._next: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg))
        now = self._clock()
        if now < self._next.get(key, float("-inf")):
            return False
        self._next[key] = now + REPEAT_S
        return True


def make_log(
    level: str, form: Literal["json", "console"], stream: TextIO | None = None
) -> FilteringBoundLogger:
    """A logger that writes to `stream` (stderr)."""
    return structlog.wrap_logger(  # type: ignore[no-any-return]
        structlog.WriteLogger(cast(TextIO, Sink(stream or sys.stderr))),
        processors=[*_shared(), *_rendering(form)],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        context_class=dict,
        cache_logger_on_first_use=True,
    )


def library_handler(
    level: str,
    form: Literal["json", "console"],
    clock: Callable[[], float],
    stream: TextIO | None = None,
) -> logging.Handler:
    """A handler for the root logger that gives the lines of libraries the same form."""
    handler = logging.StreamHandler(Sink(stream or sys.stderr))
    handler.setLevel(max(LEVELS[level], logging.WARNING) if level != "debug" else logging.DEBUG)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *_shared()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(form),
            ],
        )
    )
    handler.addFilter(OncePerMinute(clock))
    return handler


def _shared() -> list[Processor]:
    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _rendering(form: Literal["json", "console"]) -> list[Processor]:
    if form == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return [structlog.dev.ConsoleRenderer(colors=False)]
