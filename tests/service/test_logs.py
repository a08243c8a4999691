"""A log that cannot be written costs lines, never the work."""

from __future__ import annotations

import io
import json
import logging

import pytest

from service.logs import library_handler, make_log


class Full(io.StringIO):
    """A stream on a full disk, or whose reader left."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("closed")]
)
def test_a_line_that_cannot_be_written_is_lost_in_silence(error: Exception) -> None:
    log = make_log("info", "json", Full(error))
    log.info("finished", tokens=3)
    log.warning("telemetry failed")
    handler = library_handler("info", "json", lambda: 0.0, Full(error))
    handler.emit(logging.LogRecord("lib", logging.WARNING, "", 0, "hm", None, None))


def test_lines_are_json() -> None:
    stream = io.StringIO()
    make_log("info", "json", stream).info("ready", address="127.0.0.1:1")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["address"], line["level"]) == ("ready", "127.0.0.1:1", "info")
