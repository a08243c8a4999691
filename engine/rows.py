"""How the rows of a step are shared."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.policy import Rank
from engine.types import Sequence


def share_rows(
    seqs: Seq[Sequence], budget: int, rank: Callable[[Sequence], Rank]
) -> dict[Sequence, int]:
    """Rows by sequence, `budget` at most in all.

    One for each that decodes. Of the rest half goes to the prompt that is first in line, so that it
    gets on, and what is left by class to the shortest prompts first, so that none of them waits
    for all of a long one.
    """
    shares = dict.fromkeys(seqs, 0)
    turns = [(s, 1) for s in seqs if s.goal - s.computed <= 1]
    prompts = [s for s in seqs if s.goal - s.computed > 1]
    if prompts:
        first = min(prompts, key=rank)
        turns.append((first, -(-(budget - len(turns)) // 2)))
        prompts.sort(key=lambda s: (s.request.priority, s.goal - s.computed))
        turns += [(s, budget) for s in prompts]
    for seq, most in turns:
        rows = min(seq.goal - seq.computed - shares[seq], most, budget)
        shares[seq] += rows
        budget -= rows
    return shares
