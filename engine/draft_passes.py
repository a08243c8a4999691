"""Drafts that cost passes of a model: what it would take to have them in a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.draft import DraftSource
from engine.draft_pick import Chain, Pick, pick
from engine.draft_step import DraftStep
from engine.step_costs import StepCosts
from engine.types import Work

# A draft model that lags behind a sequence by more rows than this catches up for the steps to come
# rather than for the next one: for so many, if the sequence lasts as long.
LEVEL, HORIZON = 16, 32


@dataclass(frozen=True, slots=True)
class Priced:
    """A source of which every draft costs a pass of its model."""

    source: DraftSource
    costs: StepCosts


@dataclass(frozen=True, slots=True)
class Option:
    """What could be done in a step: `passes` of a source (None: none), for the sequences in
    `drafting`; `tried`: to see how it does, not for what it brings."""

    priced: Priced | None
    passes: int
    drafting: frozenset[int]
    pick: Pick
    tried: bool = False


def with_passes(
    step: DraftStep,
    chains: Seq[Chain],
    hopes: Seq[Seq[float]],
    priced: Priced,
    passes: int,
    rate: float,
) -> Option | None:
    """Drafts of `priced`, which survive as `hopes` says, where they get further than the free ones
    by what they cost at `rate` tokens a second; None if that is nowhere."""
    costs = priced.costs
    row = (costs.seconds(9) - costs.seconds(1)) / 8  # of more than one
    mixed, drafting, first, later = list(chains), set(), 0, 0.0
    for i, work in enumerate(step.work):
        survival = hopes[i][:passes]
        if not survival:
            continue
        lag = lag_of(work)
        joining = row * lag / min(HORIZON, max(1, work.seq.left)) if lag > LEVEL else 0.0
        cost = joining + row * (min(lag, LEVEL) + passes - 1)
        if sum(survival) - sum(chains[i].survival) > rate * cost:
            mixed[i] = Chain(survival, step.each(work))
            drafting.add(i)
            first += min(lag, LEVEL)
            later += joining
    if not drafting:
        return None
    context = sum(step.work[i].start for i in drafting)
    drafts = costs.seconds(first, context)
    drafts += (passes - 1) * costs.seconds(len(drafting), context) + later
    found = pick(mixed, step.drawing, lambda n: step.seconds(n) + drafts, step.most_s)
    used = frozenset(i for i in drafting if found.lengths[i])
    return Option(priced, passes, used, found) if used else None


def lag_of(work: Work) -> int:
    """Rows until a draft model is level with the sequence."""
    return work.start + work.count - work.seq.drafted
