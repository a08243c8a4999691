"""Measures what a pass costs on this machine, when an engine first starts over a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import pairwise
from math import inf

from engine.request import SamplingParams
from engine.step_costs import LEAST_S, CostTable
from engine.types import Feed, Model

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
REPETITIONS = 5
# A size whose first pass takes longer is measured once, and is the largest; one that takes half as
# long twice, a quarter three times, and so on. Larger ones are reckoned from the last two.
LONG_S = 0.5
# Few rows may cost by steps, as many as a register or a tile holds. Beyond so many they are small
# beside the rest, and what looks like one is the noise of a measurement.
STEPS = 8
# Sizes by which a table that was kept is checked, and what is too much less than it says.
CHECKED, FASTER = (1, 8), 0.75
# Sequences, positions of context and rows of each for what context costs.
TOGETHER, CONTEXT, MANY = 8, 512, 5


def measure_costs(
    model: Model, num_blocks: int, block_size: int, clock: Callable[[], float]
) -> CostTable:
    """As far as the pool reaches, the least of several passes of each size, taken in turns.
    Overwrites the KV pool."""

    def run(sequences: int, context: int, rows: int) -> float:
        feeds = _feeds(sequences, context, rows, block_size)
        start = clock()
        model.run(feeds)
        return max(LEAST_S, clock() - start)

    positions = num_blocks * block_size
    seconds = _smooth(_by_rows(run, [s for s in SIZES if s <= positions]))
    sequences = min(TOGETHER, positions // (CONTEXT + MANY + block_size))
    if sequences < 1 or seconds[1] > LONG_S / 4:
        return CostTable(tuple(seconds.items()))
    one, many = (_by_context(run, sequences, rows) for rows in (1, MANY))
    return CostTable(tuple(seconds.items()), one, max(0.0, many - one) / (MANY - 1))


def check_costs(
    table: CostTable, model: Model, block_size: int, clock: Callable[[], float]
) -> None:
    """Raises ValueError for a table that was measured when the machine had other things to do: a
    pass takes much less than it says. That one takes more says nothing about the table."""
    for size, expected in table.seconds:
        if size not in CHECKED:
            continue
        least = inf
        for _ in range(REPETITIONS):
            start = clock()
            model.run(_feeds(1, 0, size, block_size))
            least = min(least, clock() - start)
        if least < FASTER * expected:
            raise ValueError(f"{size} rows take {least:.2g} s, not {expected:.2g}")


# Seconds of a pass of so many sequences, positions of context, and rows of each.
_Run = Callable[[int, int, int], float]


def _by_rows(run: _Run, sizes: list[int]) -> dict[int, float]:
    least: dict[int, float] = {}
    for size in sizes:
        least[size] = run(1, 0, size)
        if least[size] > LONG_S and len(least) > 1:
            break
    for turn in range(1, REPETITIONS):
        for size in [s for s, seconds in least.items() if seconds < LONG_S / 2**turn]:
            least[size] = min(least[size], run(1, 0, size))
    return least


def _smooth(seconds: dict[int, float]) -> dict[int, float]:
    """The same without what cannot be: more rows never take less, and beyond `STEPS` none of them
    takes less than one before it. A size that came out slow would make those after it look cheap.
    """
    few = [rows for rows in seconds if rows <= STEPS]
    smooth = dict(zip(few, _rising([(seconds[rows], 1) for rows in few]), strict=True))
    sizes = list(seconds)[len(few) - 1 :]
    slopes = [((seconds[b] - seconds[a]) / (b - a), b - a) for a, b in pairwise(sizes)]
    for (a, b), slope in zip(pairwise(sizes), _rising(slopes), strict=True):
        smooth[b] = smooth[a] + max(0.0, slope) * (b - a)
    return smooth


def _rising(values: Seq[tuple[float, int]]) -> list[float]:
    """Values with weights, the nearest that never fall: isotonic regression by pooling adjacent
    violators (Ayer et al. 1955)."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, how many
    for value, weight in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, more, others = pools.pop()
            mean = (mean * weight + before * more) / (weight + more)
            weight, count = weight + more, count + others
        pools.append((mean, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _by_context(run: _Run, sequences: int, rows: int) -> float:
    """Seconds for a position of context of a sequence."""
    pairs = [(run(sequences, CONTEXT, rows), run(sequences, 0, rows)) for _ in range(REPETITIONS)]
    far, near = min(far for far, _ in pairs), min(near for _, near in pairs)
    return max(0.0, far - near) / (sequences * CONTEXT)


def _feeds(sequences: int, context: int, rows: int, block_size: int) -> list[Feed]:
    each = -(-(context + rows) // block_size)
    return [
        Feed(
            (0,) * rows,
            context,
            range(i * each, (i + 1) * each),
            rows,
            SamplingParams(0.0),
        )
        for i in range(sequences)
    ]


def to_text(table: CostTable) -> str:
    """For `engine.remembered`."""
    return json.dumps([table.seconds, table.per_position, table.per_score])


def from_text(text: str) -> CostTable:
    """What `to_text` wrote. Raises ValueError for anything else."""
    try:
        seconds, per_position, per_score = json.loads(text)
        pairs = tuple((int(rows), float(taken)) for rows, taken in seconds)
        table = CostTable(pairs, float(per_position), float(per_score))
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a table of costs: {error}") from error
    if table.seconds[0][0] != 1:
        raise ValueError("not a table of costs: one row is missing")
    return table
