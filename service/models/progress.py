"""How far a model has come, shown as a bar on a terminal and as lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Report(Protocol):
    """Told whenever something has moved. `total` 0: how much there is to do is not known."""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None: ...


def silent(stage: str, done: int = 0, total: int = 0) -> None:
    """A `Report` that nobody sees."""


class _Lines:
    """One line per stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        if stage != self._stage:
            self._stage = stage
            size = f" ({total / 1e6:.0f} MB)" if total else ""
            self._console.print(f"{stage}{size}", highlight=False)


@contextmanager
def shown(console: Console) -> Iterator[Report]:
    """A `Report` for as long as the block runs."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[size]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def finish() -> None:
            for task in tasks.values():
                bars.update(task, total=1, completed=1)
                bars.stop_task(task)

        def report(stage: str, done: int = 0, total: int = 0) -> None:
            size = f"{done / 1e6:,.0f}/{total / 1e6:,.0f} MB" if total else ""
            if stage not in tasks:
                finish()
                tasks[stage] = bars.add_task(stage, total=total or None, size=size)
            bars.update(tasks[stage], completed=done, total=total or None, size=size)

        yield report
        finish()
