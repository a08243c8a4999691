"""How far it is: a line that is written over on a terminal, now and then one elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

EVERY_S = (0.5, 30.0)  # on a terminal, elsewhere


class Progress:
    """Says what is done of a phase, how fast it goes and how long it will take."""

    def __init__(
        self, file: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file
        self._clock = clock
        self._terminal = file.isatty()

    def say(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    @contextmanager
    def phase(
        self, name: str, total: int | None, done: int, unit: str
    ) -> Iterator[Callable[..., None]]:
        """Gives what is to be called with the number that is done by now, a remark, and the total
        if it is another one by now."""
        begun = self._clock()
        shown, text = begun, ""

        def bar(now: int, remark: str = "", changed: int | None = None) -> None:
            nonlocal shown, text, total
            total = changed or total
            seconds = self._clock() - begun
            rate = (now - done) / max(seconds, 1e-9)
            text = f"{name}: {now}{f' of {total}' if total else ''} {unit}, {rate:.1f}/s"
            if total and rate > 0:
                text += f", {max(0.0, total - now) / rate / 60:.1f} min left"
            text += f", {remark}" if remark else ""
            if self._clock() - shown >= EVERY_S[not self._terminal]:
                shown = self._clock()
                self._show(text, last=False)

        try:
            yield bar
        finally:
            if text:
                self._show(text, last=True)

    def _show(self, text: str, last: bool) -> None:
        over, end = ("\r\033[K", "\n" * last) if self._terminal else ("", "\n")
        print(over + text, end=end, file=self._file, flush=True)
