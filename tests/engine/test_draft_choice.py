"""What is verified of what several sources guess: what pays, and a little to find out."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.draft_choice import SAVED, TRY, DraftChoice
from engine.draft_passes import Priced
from engine.request import SpeculationParams
from engine.step_costs import CostTable, StepCosts
from engine.types import NO_PROPOSAL, Proposal, StepPlan, Verdict, Work
from tests.engine.fakes import Rig, reference
from tests.engine.test_draft_ngram import plan, sequence

NEVER = frozenset[int]()


def table(*seconds: float) -> StepCosts:
    """Of 1, 2, 3 ... rows; the rest as the last step goes on."""
    return StepCosts(CostTable(tuple(enumerate(seconds, start=1))))


FLAT = table(1.0, 1.0)
STEEP = table(1.0, 2.0)


class Guess:
    """Guesses as many as it may, of a grade, for whom it likes; counts what it was asked for."""

    errors = 0

    def __init__(self, name: str, token: int = 1, grade: int = 0) -> None:
        self.name = name
        self._token = token
        self._grade = grade
        self.silent = False
        self.asked: list[list[int]] = []

    def propose(self, plan: StepPlan) -> list[Proposal]:
        self.asked.append([w.draft_cap for w in plan.work])
        return [self._one(w) for w in plan.work]

    def _one(self, work: Work) -> Proposal:
        if not work.draft_cap or self.silent:
            return NO_PROPOSAL
        count = work.draft_cap
        return Proposal((self._token,) * count, self.name, None, (self._grade,) * count)

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        return None

    def forget(self, request_id: str) -> None:
        return None


def level(plan: StepPlan) -> StepPlan:
    """As if draft models had seen all but the token that is fed."""
    for work in plan.work:
        work.seq.drafted = work.start
    return plan


def run(
    choice: DraftChoice, accept: float, steps: int, step: StepPlan, seed: int = 0
) -> list[list[Proposal]]:
    """What is proposed in so many steps, each draft being accepted with that probability."""
    rng, out = random.Random(seed), []
    for _ in range(steps):
        proposals = choice.propose(level(step))
        verdicts = []
        for proposal in proposals:
            accepted = 0
            while accepted < len(proposal.tokens) and rng.random() < accept:
                accepted += 1
            verdicts.append(Verdict(accepted, 9))
        choice.observe(step, proposals, verdicts)
        out.append(proposals)
    return out


def drafts(steps: Seq[Seq[Proposal]]) -> list[int]:
    return [sum(len(p.tokens) for p in step) for step in steps]


def test_free_rows_are_all_used() -> None:
    choice = DraftChoice([Guess("ngram")], costs=FLAT)
    step = plan((sequence([1], "a"), 4), (sequence([1], "b"), 2))
    assert drafts(run(choice, 0.1, 50, step)) == [6] * 50


def test_dear_rows_are_used_as_far_as_drafts_are_good() -> None:
    """A row costs as much as a step of its own: no draft is worth more than a certain one."""
    choice = DraftChoice([Guess("ngram", grade=3)], costs=STEEP)
    assert sum(drafts(run(choice, 1.0, 50, plan((sequence([1], "a"), 4))))) == 0
    half = table(1.0, 1.5)
    good = DraftChoice([Guess("ngram", grade=3)], costs=half)
    assert drafts(run(good, 1.0, 100, plan((sequence([1], "a"), 4))))[-1] == 4
    bad = DraftChoice([Guess("ngram", grade=3)], costs=half)
    assert sum(drafts(run(bad, 0.3, 300, plan((sequence([1], "a"), 4))))[50:]) < 30


@pytest.mark.parametrize("accept", [0.0, 0.2])
def test_what_does_not_pay_is_tried_for_a_hundredth_of_the_time(accept: float) -> None:
    choice = DraftChoice([Guess("ngram")], costs=table(1.0, 1.5, 2.0, 2.5))
    tried = drafts(run(choice, accept, 3000, plan((sequence([1], "a"), 3))))[100:]
    assert sum(tried) > 10
    assert sum(tried) * 0.5 <= 1.5 * TRY * len(tried)


def test_what_has_become_good_is_found_out() -> None:
    choice = DraftChoice([Guess("ngram")], costs=table(1.0, 1.3, 1.6, 1.9))
    step = plan((sequence([1], "a"), 3))
    run(choice, 0.0, 500, step)
    assert drafts(run(choice, 1.0, 3000, step))[-1] == 3


def test_every_sequence_has_its_turn_of_tries() -> None:
    choice = DraftChoice([Guess("ngram")], costs=table(1.0, 1.5, 2.0))
    step = plan(*((sequence([1], name), 3) for name in "abcd"))
    tried = [
        sum(len(p.tokens) for p in ps) for ps in zip(*run(choice, 0.0, 3000, step), strict=True)
    ]
    assert min(tried) > 0.7 * max(tried) > 3


def test_a_model_drafts_where_its_passes_pay() -> None:
    """Of one sequence: 1.75 tokens in 1.3 steps; as a target of its own it would not pay."""
    for cost, pays in ((0.3, True), (1.0, False)):
        model = Guess("model")
        choice = DraftChoice([], [Priced(model, table(cost, cost))], costs=table(1.0, 1.0, 1.0))
        counts = drafts(run(choice, 0.75, 200, plan((sequence([1], "a"), 4))))
        if pays:
            assert min(counts[20:]) >= 1
        else:
            assert sum(counts[20:]) < 10


def test_as_many_passes_as_pay() -> None:
    """By the formula of Leviathan et al. (2023), 3.1: the most tokens per second."""
    for accept, cost in ((0.5, 0.1), (0.7, 0.1), (0.9, 0.1), (0.7, 0.3), (0.9, 0.3)):
        model = Guess("model")
        choice = DraftChoice([], [Priced(model, table(cost, cost))], costs=table(1.0, 1.0))
        counts = drafts(run(choice, accept, 2000, plan((sequence([1], "a"), 8)), seed=3))
        rates = [(1 - accept ** (k + 1)) / (1 - accept) / (1 + k * cost) for k in range(9)]
        usual = sorted(counts[500:])[750]
        assert rates[usual] >= 0.97 * max(rates), (accept, cost, usual)


def test_a_free_guess_that_gets_as_far_is_taken_instead() -> None:
    ngram, model = Guess("ngram", 1, grade=3), Guess("model", 2)
    choice = DraftChoice([ngram], [Priced(model, table(0.2, 0.2))], costs=table(1.0, 1.0))
    step = plan((sequence([1], "a"), 4), (sequence([1], "b"), 4))
    run(choice, 0.8, 100, step)
    (first, second) = choice.propose(level(step))
    assert {first.source, second.source} == {"ngram"}
    ngram.silent = True
    (first, second) = choice.propose(level(step))
    assert {first.source, second.source} == {"model"}


def test_a_model_that_has_not_caught_up_leaves_the_free_guess() -> None:
    """As far as it is as likely as what was hoped for."""
    ngram, model = Guess("ngram", 1, grade=1), Guess("model", 2)
    choice = DraftChoice([ngram], [Priced(model, table(0.01, 0.01))], costs=table(1.0, 1.0))
    step = level(plan((sequence([1], "a"), 4)))
    assert choice.propose(step)[0].source == "model"
    model.silent = True
    assert choice.propose(step) == [Proposal((1,) * 3, "ngram", None, (1,) * 4)]


def test_a_long_prompt_is_read_by_the_draft_only_for_outputs_that_pay_for_it() -> None:
    for wanted, pays in ((1, False), (90, True)):
        model = Guess("model")
        costs = StepCosts(CostTable(((1, 0.1), (2, 0.11), (9, 0.2))))
        choice = DraftChoice([], [Priced(model, costs)], costs=table(1.0, 1.0))
        seq = sequence([1] * 100, "a")
        seq.tokens += [1] * (100 - wanted)
        step = plan((seq, 4))
        assert bool(drafts([choice.propose(step)])[0]) is pays


def test_the_choice_stays_where_another_is_hardly_better() -> None:
    """Passes whose worth goes up and down by a hundredth do not change the number of passes."""
    model = Guess("model")
    costs = table(0.1, 0.1)
    choice = DraftChoice([], [Priced(model, costs)], costs=table(1.0, 1.0))
    step = plan((sequence([1], "a"), 8))
    counts = drafts(run(choice, 0.8, 3000, step))[1000:]
    changes = sum(a != b for a, b in pairwise(counts))
    assert changes < len(counts) / 20


@pytest.mark.parametrize(("most_s", "most"), [(1.25, 2), (1.0, 0), (0.9, 3)])
def test_no_draft_makes_a_step_too_long(most_s: float, most: int) -> None:
    """One that takes too long by itself may take up to three times as long."""
    costs = table(1.0, 1.1, 1.2, 1.3) if most_s >= 1 else table(1.0, 1.4, 2.0, 2.6, 3.2)
    choice = DraftChoice([Guess("ngram", grade=3)], costs=costs, most_s=most_s)
    assert max(drafts(run(choice, 1.0, 80, plan((sequence([1], "a"), 4))))) == most


def test_rows_of_prompts_neither_pay_for_drafts_nor_forbid_them() -> None:
    """The rate is that of the rows drawn from; what a draft costs is that of one row more."""
    costs = StepCosts(CostTable(((1, 1.0), (2, 1.1), (100, 10.9), (200, 110.9))))
    few, many = sequence([1], "a"), sequence([1] * 150, "b")
    choice = DraftChoice([Guess("ngram", grade=3)], costs=costs)
    alone = plan((few, 2))
    assert drafts([choice.propose(alone)]) == [2]
    beside = StepPlan(1, (*alone.work, Work(many, 0, 20, 0, False)))
    assert drafts([choice.propose(beside)]) == [2]
    beside = StepPlan(1, (*alone.work, Work(many, 0, 140, 0, False)))
    assert drafts([choice.propose(beside)]) == [0]  # there a row costs as much as a step


def test_what_a_request_does_not_want_is_not_tried_either() -> None:
    rig = Rig(draft="ngram,model")
    wish = SpeculationParams(sources=frozenset({"ngram"}))
    for number in range(6):
        rig.submit(str(number), [1, 2, 3, 1 + number], 60, speculation=wish, ignore_eos=True)
    rig.drain()
    for number in range(6):
        assert {name for name, _ in rig.finish(str(number)).by_source} <= {"ngram"}
        assert rig.tokens(str(number)) == reference([1, 2, 3, 1 + number], 60, stop_ids=NEVER)


def test_what_can_be_saved_up_is_bounded() -> None:
    choice = DraftChoice([Guess("ngram")], costs=table(1.0, 1.7, 2.4))
    run(choice, 0.0, 20, plan((sequence([1], "a"), 0), (sequence([1], "b"), 3)))
    for _ in range(10_000):
        choice.propose(plan((sequence([1], "a"), 3)))
    assert max(choice._saved.values()) <= SAVED * 1.01


def test_a_token_is_worth_what_it_costs_once_all_prompts_are_read() -> None:
    """One sequence decodes, the prompts of many take their turns; soon a step will be of all of
    them, and a token of it costs less than a draft does."""
    costs = StepCosts(CostTable(((1, 2.0), (2, 2.9), (3, 3.8), (100, 91.1))))
    alone = plan((sequence([1], "a"), 2))
    for running, drafted in ((1, 2), (50, 0)):
        choice = DraftChoice([Guess("ngram", grade=3)], costs=costs)
        assert drafts([choice.propose(replace(alone, running=running))]) == [drafted]


def test_prompts_that_fill_a_step_leave_no_time_for_drafts() -> None:
    costs = StepCosts(CostTable(((1, 1.0), (101, 11.0))))
    few, many = sequence([1], "a"), sequence([1] * 150, "b")
    for rows, drafted in ((29, 0), (28, 1), (20, 4)):
        choice = DraftChoice([Guess("ngram", grade=3)], costs=costs, most_s=3.95)
        step = StepPlan(1, (*plan((few, 4)).work, Work(many, 0, rows, 0, False)))
        assert drafts([choice.propose(step)]) == [drafted]


def test_nobody_is_asked_where_even_the_best_drafts_would_not_pay() -> None:
    """But for the number of drafts at which they would, if there is one."""
    step = plan(*((sequence([1], name), 4) for name in "abcd"))
    for more, asked in ((1.0, 0), (0.97, 0), (0.5, 1)):
        guess = Guess("ngram")
        costs = StepCosts(CostTable(((1, 1.0), (4, 4.0), (100, 4.0 + 96 * more))))
        DraftChoice([guess], costs=costs).propose(step)
        assert len(guess.asked) == asked
    guess = Guess("ngram")
    costs = StepCosts(CostTable(((1, 1.0), (4, 4.0), (5, 6.0), (12, 6.0), (100, 500.0))))
    assert drafts([DraftChoice([guess], costs=costs).propose(step)]) == [8]


class Drawn(Guess):
    """A draft model that says how sure it was of each draw; with `probs` by rejection's rules."""

    def __init__(self, grades: tuple[int, ...], probs: bool = False) -> None:
        super().__init__("head")
        self._grades = grades
        self._probs = probs

    def _one(self, work: Work) -> Proposal:
        count = min(work.draft_cap, len(self._grades))
        if not count:
            return NO_PROPOSAL
        probs = [None] * count if self._probs else None
        return Proposal((2,) * count, self.name, probs, self._grades)


def drawn_by(source: Drawn) -> tuple[int, ...]:
    """Drafts of two sequences, where drawing costs next to nothing and a row 3 % of a step."""
    rows = table(1.0, *(1.0 + 0.03 * n for n in range(1, 12)))
    choice = DraftChoice([], [Priced(source, table(0.001, 0.001))], costs=rows)
    step = level(plan((sequence([1], "a"), 4), (sequence([1], "b"), 4)))
    return tuple(len(p.tokens) for p in choice.propose(step))


def test_draws_that_turned_out_poor_are_not_verified() -> None:
    assert drawn_by(Drawn((9, 9, 9, 9))) == (4, 4)
    assert drawn_by(Drawn((9, 9, 0, 9))) == (2, 2)


def test_one_draw_is_verified_all_the_same() -> None:
    """Or nobody would ever know better."""
    assert drawn_by(Drawn((0, 9, 9, 9))) == (1, 1)


def test_what_was_drawn_for_rejection_is_not_left_out_for_what_it_is() -> None:
    """That would be a bias (`engine.rejection`)."""
    assert drawn_by(Drawn((9, 9, 0, 0), probs=True)) == (4, 4)
