"""What drafts must be worth on this machine: measured when the engine starts."""

from __future__ import annotations

from collections.abc import Callable

from engine.types import Feed, Model, SamplingParams

REPETITIONS = 7


def draft_worth(
    model: Model, drafts: int, num_blocks: int, block_size: int, clock: Callable[[], float]
) -> float:
    """Tokens by which a step with `drafts` drafted rows must get further to cost no more per token:
    its time over that of a step of one row, less one. The least of several runs each, taken in
    turns. Overwrites the KV pool; a pool too small is taken for one where drafts are free.
    """
    rows = min(1 + drafts, num_blocks * block_size)
    blocks = range(-(-rows // block_size))
    sizes = (1, rows)
    least = dict.fromkeys(sizes, float("inf"))
    for _ in range(REPETITIONS):
        for size in sizes:
            feed = Feed((0,) * size, 0, blocks, size, SamplingParams(0.0))
            start = clock()
            model.run([feed])
            least[size] = min(least[size], clock() - start)
    return least[rows] / least[1] - 1
