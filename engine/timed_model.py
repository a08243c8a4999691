"""A model whose passes teach its table of costs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.step_costs import StepCosts
from engine.types import Drawn, Feed, Model


class TimedModel:
    """`Model` that tells `costs` how long passes take in which every row is drawn from, as the
    table was measured: rows of a prompt skip the language-model head."""

    def __init__(self, model: Model, costs: StepCosts, clock: Callable[[], float]) -> None:
        self._model = model
        self._costs = costs
        self._clock = clock

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        """See `engine.types.Model`."""
        begun = self._clock()
        drawn = self._model.run(feeds)
        took = self._clock() - begun
        rows = sum(len(f.tokens) for f in feeds)
        if rows and rows == sum(f.sample for f in feeds):
            self._costs.observe(rows, sum(f.start for f in feeds), took)
        return drawn
