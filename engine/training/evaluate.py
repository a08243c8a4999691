"""How far a set of drafts gets: tokens a step of the target, and what was accepted of each source.

Every draft that a source makes is verified, as if rows cost nothing: how good drafts are, not what
pays on a machine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from engine.build import assemble
from engine.config import EngineConfig
from engine.draft import DraftSource, DraftWrapper
from engine.drafting import draft_choice
from engine.pooled import Models, load_models
from engine.request import Request
from engine.step_costs import FREE, CostTable, StepCosts
from engine.types import Proposal, StepPlan, Verdict

NOTHING = CostTable(((65536, 1e-9),))


def costless(models: Models) -> Models:
    """The same, but for what is known of their costs."""
    return replace(
        models,
        target=replace(models.target, costs=StepCosts(FREE)),
        drafts={d: replace(m, costs=StepCosts(NOTHING)) for d, m in models.drafts.items()},
        heads={d: replace(m, costs=StepCosts(NOTHING)) for d, m in models.heads.items()},
    )


@dataclass(slots=True)
class Counts:
    """By source and position, counted from 0: how many drafts were verified with all before them
    right, and how many of these were right; over steps of one row and its drafts."""

    drafted: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    tokens: int = 0
    steps: int = 0

    def scores(self) -> dict[str, Any]:
        """Tokens a step, and by source the share accepted at each position."""
        by_source: dict[str, list[float]] = {}
        for source, position in sorted(self.drafted):
            share = self.accepted[source, position] / self.drafted[source, position]
            by_source.setdefault(source, []).append(round(share, 3))
        return {
            "tokens_per_step": round(self.tokens / max(1, self.steps), 3),
            "accepted": by_source,
        }


class Counted(DraftWrapper):
    """A source whose verdicts are counted."""

    def __init__(self, source: DraftSource, counts: Counts) -> None:
        super().__init__(source)
        self._counts = counts

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        super().observe(plan, proposals, verdicts)
        counts = self._counts
        for work, proposal, verdict in zip(plan.work, proposals, verdicts, strict=True):
            if not work.samples or work.count > 1:
                continue
            counts.steps += 1
            counts.tokens += verdict.accepted + 1
            for position in range(min(len(proposal.tokens), verdict.accepted + 1)):
                counts.drafted[proposal.source, position] += 1
                counts.accepted[proposal.source, position] += position < verdict.accepted


def rates(
    config: EngineConfig,
    requests: Iterable[Request],
    at_once: int = 8,
    models: Models | None = None,
) -> Counts:
    """Serves all `requests` with the drafts of `config`. `models` may be those of a `config` with
    more drafts. Raises RuntimeError if one fails."""
    models = costless(models or load_models(config, time.monotonic))
    choice, counts = draft_choice(config, models, time.monotonic), Counts()
    built = assemble(config, models, choice, time.monotonic, listener=Counted(choice, counts))
    engine, live, left = built.engine, 0, iter(requests)
    while True:
        for request in left:
            engine.submit(request)
            live += 1
            if live >= at_once:
                break
        if not live:
            return counts
        for chunk in engine.step():
            if chunk.finish is not None:
                live -= 1
                if chunk.finish.error:
                    raise RuntimeError(chunk.finish.error)
