"""What a step costs with so many drafts, and how long it may take."""

from __future__ import annotations

from engine.step_costs import StepCosts
from engine.types import StepPlan, Work

# A draft that is less likely to survive is not thought about, unless rows cost nothing.
HOPELESS = 0.05
# If even drafts that are all accepted gave no more than so many times the tokens a second, nobody
# is asked for any: that takes a per cent of a step of many sequences.
WORTH_ASKING = 1.1
# A step that takes longer than it should without any drafts may take so many times that with them.
LONGER = 3.0


class DraftStep:
    """What is known of a step before it is decided."""

    def __init__(self, plan: StepPlan, costs: StepCosts, most_s: float) -> None:
        self.work = plan.work
        drawing = sum(w.samples for w in plan.work)
        # What a token is worth is what it costs once all prompts are read.
        self.drawing = max(plan.running, drawing)
        self._costs = costs
        self._rows = plan.rows
        self.context = sum(w.start for w in plan.work)
        self._drawn = costs.seconds(max(1, self.drawing), self.context)
        self._all = costs.seconds(self._rows, self.context)
        alone = costs.seconds(max(1, drawing), self.context)
        limit = most_s if alone <= most_s else LONGER * alone
        self.most_s = self._drawn + max(0.0, limit - self._all)
        # How likely a draft must be to survive to be thought about.
        self.least = HOPELESS if self.more(0) else 0.0

    def seconds(self, drafts: int) -> float:
        """Of a row of each sequence, and so many drafts beside what the step has anyway. Rows of
        prompts are worth their time; they count in what more rows cost."""
        return self._drawn + self._costs.seconds(self._rows + drafts, self.context) - self._all

    @property
    def worth_asking(self) -> bool:
        """Whether drafts could pay, were they as good as can be."""
        most, now = sum(w.draft_cap for w in self.work), self.drawing / self.seconds(0)
        counts = (n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= most)
        return any((self.drawing + n) / self.seconds(n) > WORTH_ASKING * now for n in counts)

    def more(self, drafts: int) -> float:
        """Of one draft more than so many."""
        return max(0.0, self.seconds(drafts + 1) - self.seconds(drafts))

    def each(self, work: Work) -> float:
        """Of a draft of this sequence, beside what any row takes."""
        return self._costs.per_draft(work.start + work.count)
