"""Several draft sources, and which of their drafts a step verifies.

Sources that cost nothing worth counting guess for everybody; one that costs passes guesses only
where that pays. What pays is decided for all sequences together, by how likely drafts are to be
accepted (`engine.acceptance`) and what rows and passes cost (`engine.step_costs`), as
`engine.draft_pick` says. What does not pay is tried again for a hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf

from engine.acceptance import Acceptance
from engine.draft import DraftSource, allowed
from engine.draft_passes import Option, Priced, lag_of, with_passes
from engine.draft_pick import Chain, pick
from engine.draft_step import DraftStep
from engine.step_costs import StepCosts
from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict

# Another choice of source and number of passes than in the step before must be better by so much.
STAY = 1.03
# The share of the time that goes to sources that do not pay, and how much of it can be saved up, in
# steps: a try of a model costs many.
TRY, SAVED = 0.01, 40.0


class DraftChoice:
    """`DraftSource` of the best drafts of several: of the `free` ones, and of at most one of the
    `priced` ones in a step. `costs` are the target's. A step is made no longer than `most_s`
    seconds by drafts, and if it is longer without, no longer than a few times that.
    """

    name = "choice"

    def __init__(
        self,
        free: Seq[DraftSource],
        priced: Seq[Priced] = (),
        *,
        costs: StepCosts,
        most_s: float = inf,
    ) -> None:
        self._free = tuple(free)
        self._priced = tuple(priced)
        self._costs = costs
        self._most_s = most_s
        self._acceptance = Acceptance()
        self._stay: tuple[str, int] = ("", 0)  # the priced source and its passes, last time
        self._saved: dict[str, float] = {}
        self._turn = 0

    @property
    def sources(self) -> tuple[DraftSource, ...]:
        return (*self._free, *(p.source for p in self._priced))

    @property
    def errors(self) -> int:
        return sum(source.errors for source in self.sources)

    def propose(self, plan: StepPlan) -> list[Proposal]:
        none = [NO_PROPOSAL] * len(plan.work)
        if not self.sources:
            return none
        step = DraftStep(plan, self._costs, self._most_s)
        if not step.worth_asking:
            return none
        free, chains = self._guesses(plan, step)
        option = self._choose(step, chains)
        if option.priced is None:
            option = self._try_priced(step, option)
        drawn = self._draw(plan, option)
        lengths = self._lengths(step, chains, option, drawn)
        self._try_free(step, chains, lengths)
        return [_cut(d if d.tokens else f, n) for d, f, n in zip(drawn, free, lengths, strict=True)]

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        for work, proposal, verdict in zip(plan.work, proposals, verdicts, strict=True):
            if not verdict.error:
                self._acceptance.learn(work.seq.request.id, proposal, verdict)
        for source in self.sources:
            source.observe(plan, proposals, verdicts)

    def forget(self, request_id: str) -> None:
        self._acceptance.forget(request_id)
        for source in self.sources:
            source.forget(request_id)

    # ---- what could be verified ----------------------------------------------------------------

    def _guesses(self, plan: StepPlan, step: DraftStep) -> tuple[list[Proposal], list[Chain]]:
        """By sequence, the free guess that gets furthest, and its chain."""
        best = [NO_PROPOSAL] * len(plan.work)
        survivals: list[list[float]] = [[] for _ in plan.work]
        for source in self._free:
            guesses = source.propose(_permitted(plan, source.name))
            for i, guess in enumerate(guesses):
                if guess.tokens:
                    survival = self._acceptance.of_proposal(
                        plan.work[i].seq.request.id, guess, step.least
                    )
                    if sum(survival) > sum(survivals[i]):
                        best[i], survivals[i] = guess, survival
        return best, [Chain(s, step.each(w)) for s, w in zip(survivals, plan.work, strict=True)]

    # ---- what is -------------------------------------------------------------------------------

    def _choose(self, step: DraftStep, chains: Seq[Chain]) -> Option:
        best = Option(None, 0, frozenset(), pick(chains, step.drawing, step.seconds, step.most_s))
        stay = best if self._stay[1] == 0 else None
        for priced in self._priced:
            name = priced.source.name
            hopes = [
                self._acceptance.of_draws(w.seq.request.id, name, w.draft_cap, step.least)
                if allowed(w, name)
                else ()
                for w in step.work
            ]
            for passes in range(1, max(map(len, hopes)) + 1):
                option = with_passes(step, chains, hopes, priced, passes, best.pick.rate)
                if option is None:
                    continue
                if self._stay == (name, passes):
                    stay = option
                if option.pick.rate > best.pick.rate:
                    best = option
        if stay is not None and best.pick.rate < STAY * stay.pick.rate:
            best = stay
        name = best.priced.source.name if best.priced else ""
        self._stay = name, best.passes
        return best

    def _lengths(
        self, step: DraftStep, chains: Seq[Chain], option: Option, drawn: Seq[Proposal]
    ) -> list[int]:
        """How many drafts of each sequence are verified, now that they are there."""
        lengths, known = list(option.pick.lengths), list(chains)
        for i in option.drafting:
            draft = drawn[i]
            lengths[i] = len(draft.tokens)
            if not draft.tokens:  # it has not caught up yet
                lengths[i] = sum(s >= option.pick.least for s in chains[i].survival)
            elif draft.grades and draft.probs is None:
                request_id = step.work[i].seq.request.id
                survival = self._acceptance.of_proposal(request_id, draft)
                known[i] = Chain(survival, chains[i].each)
        if option.tried or all(a is b for a, b in zip(known, chains, strict=True)):
            return lengths
        # The passes are made: what is left to pay is the rows.
        lengths = list(pick(known, step.drawing, step.seconds, step.most_s).lengths)
        for i in option.drafting:
            if known[i] is not chains[i]:
                lengths[i] = max(1, lengths[i])
                self._acceptance.left_out(drawn[i], lengths[i])
        return lengths

    def _draw(self, plan: StepPlan, option: Option) -> list[Proposal]:
        if option.priced is None:
            return [NO_PROPOSAL] * len(plan.work)
        work = tuple(
            w.capped(option.pick.lengths[i] if i in option.drafting else 0)
            for i, w in enumerate(plan.work)
        )
        return option.priced.source.propose(replace(plan, work=work))

    # ---- and what is tried all the same ------------------------------------------------------

    def _save(self, step: DraftStep, name: str) -> float:
        """Seconds that may now be spent on trying a source."""
        one = step.seconds(0)
        saved = self._saved[name] = min(SAVED * one, self._saved.get(name, 0.0) + TRY * one)
        return saved

    def _try_priced(self, step: DraftStep, option: Option) -> Option:
        """One draft of a priced source for the sequence for which that costs least."""
        for priced in self._priced:
            name = priced.source.name
            saved = self._save(step, name)
            could = [i for i, w in enumerate(step.work) if w.draft_cap and allowed(w, name)]
            if not could:
                continue
            i = min(could, key=lambda i: lag_of(step.work[i]))
            cost = priced.costs.seconds(lag_of(step.work[i]), step.work[i].start) + step.more(0)
            if cost <= saved:
                self._saved[name] -= cost
                lengths = list(option.pick.lengths)
                lengths[i] = 1
                tried = replace(option.pick, lengths=tuple(lengths))
                return Option(priced, 1, frozenset({i}), tried, tried=True)
        return option

    def _try_free(self, step: DraftStep, chains: Seq[Chain], lengths: list[int]) -> None:
        """One draft of the next sequence that would get none."""
        saved, count = self._save(step, ""), len(chains)
        for i in (n % count for n in range(self._turn, self._turn + count)):
            if not lengths[i] and chains[i].survival:
                drafts = sum(lengths)
                cost = step.more(drafts) + chains[i].each
                if cost <= saved and step.seconds(drafts + 1) <= step.most_s:
                    self._saved[""] -= cost
                    self._turn, lengths[i] = i + 1, 1
                return


def _permitted(plan: StepPlan, source: str) -> StepPlan:
    work = tuple(w if allowed(w, source) else w.capped(0) for w in plan.work)
    return replace(plan, work=work)


def _cut(proposal: Proposal, count: int) -> Proposal:
    if count >= len(proposal.tokens):
        return proposal
    if not count:
        return NO_PROPOSAL
    probs = None if proposal.probs is None else proposal.probs[:count]
    return replace(proposal, tokens=proposal.tokens[:count], probs=probs)
