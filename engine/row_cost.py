"""What rows cost on this machine, measured when the engine starts: how far drafts can pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.request import SamplingParams
from engine.types import Feed, Model

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
REPETITIONS = 5
# A step of drafts gets one or two tokens further: where its rows cost more than that is worth, load
# decides against it, and a draft that is refused has cost time that others waited for.
CHEAP = 1.6


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Seconds of a step by rows, ascending; at least of one row."""

    seconds: dict[int, float]

    def cheap_rows(self, most: int) -> int:
        """As many rows as a step may have and still cost about one of a single row."""
        cheap = 1
        for rows, seconds in self.seconds.items():
            if seconds > CHEAP * self.seconds[1]:
                break
            cheap = rows
        return min(cheap, most)

    def at_most(self, rows: int) -> float:
        """Seconds that a step of so many rows hardly exceeds: beyond what was measured, as many
        times what the most rows took as they are contained."""
        most = max(self.seconds)
        return max(self.seconds.values()) * max(1.0, rows / most)

    def worth(self, drafts: int) -> float:
        """Tokens by which a step with so many drafted rows must get further to cost no more per
        token. Between two sizes the larger counts."""
        rows = next((r for r in self.seconds if r > drafts), max(self.seconds))
        return max(0.0, self.seconds[rows] / self.seconds[1] - 1)


def row_costs(
    model: Model, num_blocks: int, block_size: int, clock: Callable[[], float]
) -> RowCosts:
    """Of one sequence that begins, as far as the pool reaches: the least of several runs of each
    size, taken in turns. Overwrites the KV pool."""
    sizes = [size for size in SIZES if size <= num_blocks * block_size]
    least = dict.fromkeys(sizes, float("inf"))
    for _ in range(REPETITIONS):
        for size in sizes:
            blocks = range(-(-size // block_size))
            feed = Feed((0,) * size, 0, blocks, size, SamplingParams(0.0))
            start = clock()
            model.run([feed])
            least[size] = min(least[size], clock() - start)
    return RowCosts(least)
