"""Rejection sampling has the target's law, whatever drafts, and no slip in it goes unseen.

How many samples show which error: at one false alarm in a million and a power of 0.99, 160,000 over
16 even cells show a total variation of 0.01, and 1,050,000 over 64 cells one of 0.005.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import engine.core
import engine.draft_grammar
import engine.rejection
from engine.draft import DraftSource
from engine.draft_grammar import LegalDraft
from engine.draft_model import ModelDraft
from engine.model_input import Draws
from engine.rejection import (
    NO_DRAFT,
    Independent,
    Rejection,
    accept_or_replace,
    draw_from,
    law,
)
from engine.request import SamplingParams
from engine.sampler import Coupled
from engine.types import Drawn, Feed, OutputGrammar, Proposal, StepPlan, Verdict
from engine.verify import verify
from kernels.ops import load_ops
from kernels.reference import uniform
from tests.engine.tabled import (
    Population,
    joint,
    law_of,
    misfit,
    model_draft,
    serve,
    tabled,
    total_variation,
)

Patch = pytest.MonkeyPatch

VOCAB = 4
PLAIN = SamplingParams(1.0)


def logits(seed: int, vocabulary: int = VOCAB) -> Tensor:
    return torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.2


TARGET, DRAFT = logits(1), logits(2)


class Favourite:
    """A source that is sure: the draft table's likeliest tokens. No matter of chance."""

    name = "favourite"
    errors = 0

    def propose(self, plan: StepPlan) -> list[Proposal]:
        proposals = []
        for work in plan.work:
            tokens = [work.seq.tokens[-1]]
            for _ in range(work.draft_cap):
                tokens.append(int(DRAFT[tokens[-1]].argmax()))
            proposals.append(Proposal(tuple(tokens[1:]), self.name))
        return proposals

    def observe(self, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]) -> None:
        return None

    def forget(self, request_id: str) -> None:
        return None


class NeverThree:
    """`LogitRules` and `OutputGrammar` of an output without token 3."""

    fault = ""

    @property
    def grammar(self) -> OutputGrammar:
        return self

    def legal(self, drafts: Seq[int]) -> int:
        return [*drafts, 3].index(3)

    def forced(self, most: int) -> tuple[int, ...]:
        return ()

    def apply(self, logits: Tensor, drafts: Seq[int]) -> None:
        logits[:, 3] = -torch.inf

    def advance(self, tokens: Seq[int]) -> None:
        return None


def without_three(logits: Tensor) -> Tensor:
    return logits.masked_fill(torch.arange(VOCAB) == 3, -torch.inf)


def rejected(
    count: int,
    sampling: SamplingParams = PLAIN,
    *,
    draft: DraftSource | None = None,
    most_drafts: int = 2,
    grammar: bool = False,
) -> Population:
    """Through draft model, rules, target and verdict."""
    return serve(
        tabled(TARGET, Rejection()),
        LegalDraft(draft or model_draft(DRAFT, Independent())),
        count,
        sampling,
        most_drafts=most_drafts,
        rules=NeverThree() if grammar else None,
    )


def law_is_the_targets(served: Population, sampling: SamplingParams, grammar: bool) -> float:
    """Whether the joint law of the first three tokens is; the misfit, over 1 if it is not."""
    right = joint(law_of(without_three(TARGET) if grammar else TARGET, sampling))
    counts = served.counts(VOCAB)
    distance = float(total_variation(counts / counts.sum(), right))
    # What chance alone makes of it is sqrt(cells / (2 pi N)) at most, on average.
    chance = (int((right > 0).sum()) / (2 * torch.pi * float(counts.sum()))) ** 0.5
    return max(misfit(counts, right), distance / (2 * chance))


CASES: dict[str, tuple[SamplingParams, dict[str, object]]] = {
    "one draft": (PLAIN, {"most_drafts": 1}),
    "three drafts": (PLAIN, {"most_drafts": 3}),
    "cut off": (SamplingParams(0.7, top_k=3, top_p=0.9), {}),
    "sure of itself": (PLAIN, {"draft": Favourite()}),
    "under a grammar": (PLAIN, {"grammar": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_three_tokens_have_the_targets_law(name: str) -> None:
    sampling, settings = CASES[name]
    served = rejected(10_000, sampling, **settings)  # type: ignore[arg-type]
    assert 0 < served.accepted < served.drafted
    assert law_is_the_targets(served, sampling, bool(settings.get("grammar"))) < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_and_so_they_have_in_a_million(name: str) -> None:
    sampling, settings = CASES[name]
    served = rejected(1_050_000, sampling, **settings)  # type: ignore[arg-type]
    assert law_is_the_targets(served, sampling, bool(settings.get("grammar"))) < 1


def chain(seeds: Tensor, sampling: SamplingParams, vocabulary: int, most_drafts: int) -> Tensor:
    """The first three tokens of a sequence for each of `seeds`, (S, 3), by the same arithmetic with
    the sequences side by side in tensors."""
    p, q = (law_of(logits(seed, vocabulary), sampling) for seed in (1, 2))
    count = len(seeds)
    done = torch.zeros(count, dtype=torch.int64)
    tokens = torch.zeros(count, 1 + 3 + most_drafts, dtype=torch.int64)
    at = torch.arange(count)

    def u(stream: int, ahead: int) -> Tensor:
        return uniform(seeds, 1 + done + ahead, torch.tensor(stream))

    while bool((done < 3).any()):
        drafts, last = [], tokens[at, done.clamp(max=3)]
        for i in range(most_drafts):
            last = draw_from(q[last], u(engine.rejection.PROPOSAL, i))
            drafts.append(last)
        last, going = tokens[at, done.clamp(max=3)], done < 3
        moved = done.clone()
        for i in range(most_drafts + 1):
            draft = drafts[i] if i < most_drafts else torch.full_like(last, NO_DRAFT)
            own = accept_or_replace(
                p[last],
                q[last] * (i < most_drafts),
                draft,
                u(engine.rejection.ACCEPTANCE, i),
                u(engine.rejection.REPLACEMENT, i),
            )
            tokens[at[going], (moved + 1)[going].clamp(max=3)] = own[going]
            moved += going
            going = going & (own == draft) & (moved < 3)
            last = own
        done = moved
    return tokens[:, 1:4]


@pytest.mark.parametrize(
    ("vocabulary", "sampling", "count"),
    [
        (4, PLAIN, 1_050_000),
        (4, SamplingParams(0.6, top_p=0.8), 1_050_000),
        (16, SamplingParams(1.0, top_k=9), 300_000),
    ],
)
def test_up_to_a_million_sequences_side_by_side(
    vocabulary: int, sampling: SamplingParams, count: int
) -> None:
    shares = torch.arange(count).chunk(3)
    outputs = torch.cat(
        [chain(seeds, sampling, vocabulary, k) for seeds, k in zip(shares, (1, 2, 4), strict=True)]
    )
    right = joint(law_of(logits(1, vocabulary), sampling))
    assert misfit(Population(outputs, 0, 0).counts(vocabulary), right) < 1


def laws(name: str) -> tuple[Tensor, Tensor]:
    """Target's and draft's, of one row of 64."""
    random = torch.Generator().manual_seed(7)
    p, q = torch.randn(2, 64, generator=random, dtype=torch.float64).mul(1.5).softmax(1)
    half = torch.arange(64) < 32
    match name:
        case "equal":
            q = p
        case "nothing in common":
            p, q = p * half, q * ~half
        case "draft sees half":
            q = q * half
        case "target sees half":
            p = p * half
        case "draft is sure":
            q = torch.zeros_like(q).index_fill_(0, torch.tensor([5]), 1.0)
        case "target is sure":
            p = torch.zeros_like(p).index_fill_(0, torch.tensor([5]), 1.0)
    return p / p.sum(), q / q.sum()


@pytest.mark.parametrize(
    "name",
    [
        "apart",
        "equal",
        "nothing in common",
        "draft sees half",
        "target sees half",
        "draft is sure",
        "target is sure",
    ],
)
def test_a_million_draws_of_one_row(name: str) -> None:
    p, q = laws(name)
    counts, accepted, total = torch.zeros(64), 0, 0
    for first in range(0, 1_050_000, 50_000):
        at = torch.arange(first, first + 50_000)
        u, v, w = (uniform(torch.tensor(9), at, torch.tensor(s)) for s in (-2, -3, -4))
        drafts = draw_from(q.expand(len(at), -1), u)
        tokens = accept_or_replace(p.expand(len(at), -1), q.expand(len(at), -1), drafts, v, w)
        counts += tokens.bincount(minlength=64)
        accepted += int((tokens == drafts).sum())
        total += len(at)
    assert misfit(counts, p) < 1
    assert float(total_variation(counts / total, p)) < 0.005
    assert accepted / total == pytest.approx(1 - float(total_variation(p, q)), abs=0.003)


def test_randomness_at_its_ends_never_draws_what_cannot_be() -> None:
    """The smallest and the largest u there are, over laws with nothing at either end."""
    ends = torch.tensor([0.5 / 2**52, 1 - 0.5 / 2**52], dtype=torch.float64)
    for weights in ([0.0, 0.3, 0.7, 0.0], [0.0, 1e-300, 1.0, 0.0], [0.0, 0.1, 0.0, 0.0]):
        rows = torch.tensor([weights, weights], dtype=torch.float64)
        ids = draw_from(rows, ends)
        assert bool((rows.gather(1, ids[:, None]) > 0).all())


def test_rows_that_nothing_can_be_drawn_from() -> None:
    bad = torch.tensor([[torch.nan, 0.0], [-torch.inf, -torch.inf], [0.0, torch.inf], [0.0, 0.0]])
    columns = (torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    draws = Draws(columns[0], columns[1], columns[0], columns[0] * 0, columns[1], columns[1])
    feeds = [Feed((1,), 0, [0], 1, PLAIN) for _ in bad]
    ids, _ = Rejection().draw(feeds, bad, draws)
    assert ids[:3] == [-1, -1, -1]
    assert ids[3] in (0, 1)


@pytest.mark.parametrize("context", range(VOCAB))
def test_how_often_drafts_are_accepted(context: int, monkeypatch: Patch) -> None:
    """Rejection: 1 - TV, the most there is. Coupled: at least (1 - TV) / (1 + TV)."""
    monkeypatch.setattr("tests.engine.tabled.PROMPT", (context,))
    apart = float(total_variation(law_of(TARGET, PLAIN)[context], law_of(DRAFT, PLAIN)[context]))
    coupled = Coupled(load_ops("cpu").sample_rows)
    rates = []
    for target, draft in ((Rejection(), Independent()), (coupled, coupled)):
        served = serve(
            tabled(TARGET, target),
            model_draft(DRAFT, draft),
            6_000,
            PLAIN,
            most_drafts=1,
            tokens=1,
        )
        assert served.drafted == 6_000
        rates.append(served.accepted / served.drafted)
    rejection, shared = rates
    assert rejection == pytest.approx(1 - apart, abs=0.03)
    assert (1 - apart) / (1 + apart) - 0.03 < shared < 1 - apart + 0.03


# ---- slips, made on purpose ------------------------------------------------------------------


def proposal_and_acceptance_share_a_stream(patch: Patch) -> None:
    patch.setattr(engine.rejection, "ACCEPTANCE", engine.rejection.PROPOSAL)


def proposal_and_replacement_share_a_stream(patch: Patch) -> None:
    patch.setattr(engine.rejection, "REPLACEMENT", engine.rejection.PROPOSAL)


def acceptance_and_replacement_share_a_stream(patch: Patch) -> None:
    patch.setattr(engine.rejection, "REPLACEMENT", engine.rejection.ACCEPTANCE)


def drafts_are_the_likeliest_and_q_says_softmax(patch: Patch) -> None:
    def wrong(
        self: Independent, feeds: Seq[Feed], logits: Tensor, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        q = law(logits, draws)
        return q.argmax(1).tolist(), q

    patch.setattr(Independent, "draw", wrong)


def replaces_by_the_targets_law(patch: Patch) -> None:
    def wrong(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, replace: Tensor) -> Tensor:
        own = accept_or_replace(p, q, drafts, accept, replace)
        return torch.where(own == drafts, own, draw_from(p, replace))

    patch.setattr(engine.rejection, "accept_or_replace", wrong)


def drops_a_draft_for_its_own_low_probability(patch: Patch) -> None:
    propose = ModelDraft.propose

    def wrong(self: ModelDraft, plan: StepPlan) -> list[Proposal]:
        kept = []
        for p in propose(self, plan):
            low = [float(row[t]) < 0.3 for row, t in zip(p.probs or (), p.tokens, strict=True)]
            count = [*low, True].index(True)
            kept.append(replace(p, tokens=p.tokens[:count], probs=(p.probs or [])[:count] or None))
        return kept

    patch.setattr(ModelDraft, "propose", wrong)


def drops_a_draft_that_the_grammar_forbids(patch: Patch) -> None:
    cut = engine.draft_grammar._cut

    def wrong(work: object, proposal: Proposal) -> Proposal:
        kept = cut(work, replace(proposal, probs=None))  # type: ignore[arg-type]
        return replace(kept, probs=(proposal.probs or [])[: len(kept.tokens)] or None)

    patch.setattr(engine.draft_grammar, "_cut", wrong)


def accepts_one_too_many(patch: Patch) -> None:
    def wrong(proposals: Seq[Proposal], drawn: Seq[Drawn | str]) -> list[Verdict]:
        return [
            replace(v, accepted=min(v.accepted + 1, len(p.tokens)))
            for p, v in zip(proposals, verify(proposals, drawn), strict=True)
        ]

    patch.setattr(engine.core, "verify", wrong)


def takes_the_row_behind(patch: Patch) -> None:
    """The row after a rejected draft knows of the draft."""

    def wrong(proposals: Seq[Proposal], drawn: Seq[Drawn | str]) -> list[Verdict]:
        wrongs = []
        for v, d in zip(verify(proposals, drawn), drawn, strict=True):
            assert isinstance(d, Drawn)
            row = min(v.accepted + 1, len(d.tokens) - 1)
            wrongs.append(replace(v, next_token=d.tokens[row]))
        return wrongs

    patch.setattr(engine.core, "verify", wrong)


def q_is_of_another_temperature(patch: Patch) -> None:
    draw = Independent.draw

    def wrong(
        self: Independent, feeds: Seq[Feed], logits: Tensor, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        tokens, _ = draw(self, feeds, logits, draws)
        return tokens, logits.double().softmax(1)

    patch.setattr(Independent, "draw", wrong)


def p_is_not_cut_off(patch: Patch) -> None:
    draw = Rejection.draw

    def wrong(
        self: Rejection, feeds: Seq[Feed], logits: Tensor, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        return draw(self, feeds, logits, replace(draws, top_p=torch.ones_like(draws.top_p)))

    patch.setattr(Rejection, "draw", wrong)


WARM = SamplingParams(0.6, top_p=0.9)
MUTANTS: dict[Callable[[Patch], None], SamplingParams] = {
    proposal_and_acceptance_share_a_stream: PLAIN,
    proposal_and_replacement_share_a_stream: PLAIN,
    acceptance_and_replacement_share_a_stream: PLAIN,
    drafts_are_the_likeliest_and_q_says_softmax: PLAIN,
    replaces_by_the_targets_law: PLAIN,
    drops_a_draft_for_its_own_low_probability: PLAIN,
    drops_a_draft_that_the_grammar_forbids: PLAIN,
    accepts_one_too_many: PLAIN,
    takes_the_row_behind: PLAIN,
    q_is_of_another_temperature: WARM,
    p_is_not_cut_off: WARM,
}


@pytest.mark.parametrize("slip", MUTANTS, ids=lambda slip: slip.__name__)
def test_every_slip_is_seen(slip: Callable[[Patch], None], monkeypatch: Patch) -> None:
    slip(monkeypatch)
    grammar = slip is drops_a_draft_that_the_grammar_forbids  # the faintest
    sampling = MUTANTS[slip]
    served = rejected(12_000 if grammar else 5_000, sampling, grammar=grammar)
    assert law_is_the_targets(served, sampling, grammar) > 1.5


@pytest.mark.parametrize("sampling", [PLAIN, WARM])
@pytest.mark.parametrize("grammar", [False, True])
def test_and_none_is_seen_where_there_is_none(sampling: SamplingParams, grammar: bool) -> None:
    assert law_is_the_targets(rejected(5_000, sampling, grammar=grammar), sampling, grammar) < 1
