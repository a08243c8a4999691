"""How many steps of training there is time for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from engine.training.trainer import Schedule, Trainer, Windows

FEWEST = 10  # steps
WEIGHT = 0.1  # of a step in what is held of the machine's speed


class Pace:
    """What a step takes by the depth of its chains, and how much slower the machine is by now."""

    def __init__(self, seconds: tuple[float, ...]) -> None:
        self._seconds = seconds
        self._slower = 1.0

    @property
    def deepest(self) -> float:
        """Seconds of a step of the deepest chains."""
        return self._slower * self._seconds[-1]

    def note(self, depth: int, seconds: float) -> None:
        """A step has taken so long."""
        self._slower += WEIGHT * (seconds / self._seconds[depth - 1] - self._slower)

    def steps(self, schedule: Schedule, done: int, seconds: float) -> int:
        """How many it should be in all, `done` included, for the others to take `seconds`; a few
        also where there is no time."""

        def left(steps: int) -> float:
            starts = [max(done, round(s * steps)) for s in schedule.deeper[: schedule.depth]]
            counts = (b - a for a, b in zip(starts, [*starts[1:], steps], strict=True))
            return self._slower * sum(
                c * s for c, s in zip(counts, self._seconds[: schedule.depth], strict=True)
            )

        most = done + int(max(0.0, seconds) / (self._slower * min(self._seconds)))
        fits = bisect_right(range(done, most + 1), max(0.0, seconds), key=left)
        return max(done + fits - 1, FEWEST)


def measured(trainer: Trainer, windows: Windows, clock: Callable[[], float]) -> Pace:
    """On a few steps of every depth, which the trainer must forget."""
    schedule = trainer.schedule
    every_depth = replace(schedule, steps=FEWEST, deeper=(0.0,) * schedule.depth)
    seconds = []
    for depth in range(1, schedule.depth + 1):
        trainer.schedule = replace(every_depth, depth=depth)
        times = []
        for _ in range(3):
            begun = clock()
            trainer.step(0, windows.batch(0, schedule.windows, schedule.length))
            times.append(clock() - begun)
        seconds.append(max(1e-9, sorted(times)[1]))
    trainer.schedule = schedule
    return Pace(tuple(seconds))
