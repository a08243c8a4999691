"""What a pass of one model costs: a measured table, refined by the passes that are made.

Pure. Measured by `engine.row_cost`, told of passes by `engine.timed_model`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, log

# How fast a table follows what is seen: what one size teaches is true of the machine (another one
# is busy, the bus is slower) more often than of the size, so all others follow nearly as far. No
# single pass counts for more than so much, for it may have waited for a processor.
PACE, SHARED, MOST = 0.05, 0.9, 0.5
LEAST_S, MOST_S = 1e-12, 1e6  # what a pass may take, and so far what is learnt may lead
# Rows that a capped step may always have: their cost per row is at most so much over the least.
EFFICIENT, GROWTH = 1.15, 2**0.25


@dataclass(frozen=True, slots=True)
class CostTable:
    """`seconds` of a pass with next to no context, by rows, ascending, never less for more rows;
    fewer rows than the first take as long as that. `per_position`: more for each position of
    context of a sequence that has one row, `per_score`: for each position that one more row of it
    attends to. Raises ValueError for what cannot be."""

    seconds: tuple[tuple[int, float], ...]
    per_position: float = 0.0
    per_score: float = 0.0

    def __post_init__(self) -> None:
        rows = [r for r, _ in self.seconds]
        if not rows or rows[0] < 1 or any(a >= b for a, b in pairwise(rows)):
            raise ValueError("sizes of passes do not ascend")
        taken = [s for _, s in self.seconds]
        if not all(LEAST_S <= s <= MOST_S for s in taken) or taken != sorted(taken):
            raise ValueError("seconds of passes are no seconds, or fall")
        if not all(0.0 <= each <= MOST_S for each in (self.per_position, self.per_score)):
            raise ValueError("seconds of a position are no seconds")


FREE = CostTable(((65536, 1.0),))  # any number of rows costs the same


class StepCosts:
    """`CostTable` that learns."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._rows = [rows for rows, _ in table.seconds]
        self._base = [seconds for _, seconds in table.seconds]
        self._drift = [0.0] * len(self._rows)  # logarithm of seen over measured, by size
        self._now = list(self._base)

    def seconds(self, rows: int, context: int = 0) -> float:
        """Of a pass of so many rows, their sequences having `context` positions in all. Linear
        between two sizes and beyond the last."""
        return self._by_rows(rows) + self._table.per_position * context

    def _by_rows(self, rows: int) -> float:
        at = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        if rows <= self._rows[0]:
            return self._now[0]
        if at == 0:  # the only size
            return self._now[0] * rows / self._rows[0]
        low, high = self._rows[at - 1], self._rows[at]
        a, b = self._now[at - 1], self._now[at]
        return a + (b - a) * (rows - low) / (high - low)

    def per_draft(self, context: int) -> float:
        """Seconds of attention for one more row of a sequence of `context` positions."""
        return self._table.per_score * context

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """A pass took so long."""
        expected = self.seconds(rows, context)
        if not 0 < seconds < float("inf"):
            return
        error = max(-MOST, min(MOST, log(seconds / expected)))
        at = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        nearest = at if at == 0 or self._rows[at] - rows <= rows - self._rows[at - 1] else at - 1
        for i in range(len(self._drift)):
            self._drift[i] += PACE * error * (1.0 if i == nearest else SHARED)
        # Sizes drift apart. Still more rows take no less, or what goes on from the last two would
        # come to nothing.
        now = (b * exp(d) for b, d in zip(self._base, self._drift, strict=True))
        self._now = list(accumulate((max(LEAST_S, min(MOST_S, s)) for s in now), max))

    def rows_within(self, seconds: float, context: int, decoding: int, most: int) -> int:
        """As many rows as a pass may have to end within `seconds`, `most` at most. At least those
        of `decoding` and as many more as it takes for a row to be about as cheap as it can be:
        prompts have to get on."""
        sizes = sorted({min(most, round(GROWTH**n)) for n in range(most.bit_length() * 4 + 1)})
        each = [self.seconds(rows) / rows for rows in sizes]
        cheap = EFFICIENT * min(each)
        least = next(r for r, own in zip(sizes, each, strict=True) if own <= cheap)
        every = range(1, most + 1)
        in_time = bisect_right(every, seconds, key=lambda rows: self.seconds(rows, context))
        return min(most, max(decoding + least, in_time))
