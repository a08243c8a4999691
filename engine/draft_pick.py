"""Which drafts a step verifies: those that bring more tokens per second than they cost.

Drafts of all sequences are taken in order of their survival probability, so that a later draft of a
chain never comes before an earlier one, and as many of them as give the most tokens per second by
the table of costs (SmartSpec; DSpark, Algorithm 1, without its early stop, since the costs of rows
go up in steps). Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chain:
    """Drafts that one sequence could have verified: their survival probabilities, none above the
    one before; and the seconds that each of them costs beside its share of the rows."""

    survival: Seq[float]
    each: float = 0.0


@dataclass(frozen=True, slots=True)
class Pick:
    """How many drafts of each chain are verified, the tokens per second that are expected, and how
    likely the least likely of these drafts is to be accepted; more than 1 if there is none."""

    lengths: tuple[int, ...]
    rate: float
    least: float


def pick(chains: Seq[Chain], drawing: int, seconds: Callable[[int], float], most_s: float) -> Pick:
    """`drawing` tokens come anyway; a step with n drafts takes `seconds(n)`, and shall take no more
    than `most_s`."""
    drafts = [
        (-survival, i, chain.each)
        for i, chain in enumerate(chains)
        for survival in chain.survival
        if survival > 0
    ]
    drafts.sort()  # stable: a chain's own order is kept where two are alike
    best, taken = drawing / seconds(0), 0
    tokens, more = float(drawing), 0.0
    for count, (negative, _, each) in enumerate(drafts, start=1):
        tokens -= negative
        more += each
        took = seconds(count) + more
        if took > most_s:
            break
        rate = tokens / took
        if rate > best:
            best, taken = rate, count
    lengths = [0] * len(chains)
    for _, i, _ in drafts[:taken]:
        lengths[i] += 1
    return Pick(tuple(lengths), best, -drafts[taken - 1][0] if taken else 2.0)
