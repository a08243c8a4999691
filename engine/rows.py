"""How the rows of a step are shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.policy import Rank
from engine.types import Sequence


def share_rows(
    needs: Mapping[Sequence, int], budget: int, rank: Callable[[Sequence], Rank]
) -> dict[Sequence, int]:
    """Rows by sequence, as many as it needs at most, and `budget` at most in all.

    One for each that decodes. Of the rest half goes to the prompt that is first in line, so that it
    gets on, and what is left by class to the shortest prompts first, so that none of them waits
    for all of a long one.
    """
    if sum(needs.values()) <= budget:
        return dict(needs)
    shares = dict.fromkeys(needs, 0)
    turns = [(s, 1) for s, need in needs.items() if need <= 1]
    prompts = [s for s, need in needs.items() if need > 1]
    if prompts:
        first = min(prompts, key=rank)
        turns.append((first, -(-(budget - len(turns)) // 2)))
        prompts.sort(key=lambda s: (s.request.priority, needs[s]))
        turns += [(s, budget) for s in prompts]
    for seq, most in turns:
        rows = min(needs[seq] - shares[seq], most, budget)
        shares[seq] += rows
        budget -= rows
    return shares
