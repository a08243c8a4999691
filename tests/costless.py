"""Models whose rows and passes are taken to cost nothing, so that every draft is verified."""

from __future__ import annotations

from dataclasses import replace

from engine.pooled import Models
from engine.step_costs import FREE, CostTable, StepCosts

NOTHING = CostTable(((65536, 1e-9),))


def costless(models: Models) -> Models:
    """The same, but for what is known of their costs."""
    return replace(
        models,
        target=replace(models.target, costs=StepCosts(FREE)),
        drafts={d: replace(m, costs=StepCosts(NOTHING)) for d, m in models.drafts.items()},
        heads={d: replace(m, costs=StepCosts(NOTHING)) for d, m in models.heads.items()},
    )
