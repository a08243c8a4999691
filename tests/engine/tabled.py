"""Models that are a table: what a token leaves to choose from is known exactly.

A population of sequences goes through the real parts, from the draft model to the verdict, and the
law of what comes out is compared with the table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import engine.core
from engine.draft import DraftSource
from engine.draft_model import ModelDraft
from engine.kv_cache import KVCache, KVShape
from engine.model_input import ModelInput
from engine.request import Request, SamplingParams, StopParams
from engine.runner import PagedModel
from engine.sampler import Sampler
from engine.types import BlockTable, LogitRules, Model, Sequence, StepPlan, Work
from kernels.reference import survivors
from tests.engine.fakes import PlainText

BLOCK = 16
FIRST = 3  # tokens of the output that are looked at
PROMPT = (0,)
BATCH = 20_000


class Table:
    """`Network` of logits (V, V) by the last token."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def logits(self, batch: ModelInput) -> Tensor:
        return self._logits[batch.token_ids[batch.logit_rows]]


def tabled(logits: Tensor, sampler: Sampler) -> PagedModel:
    shape = KVShape(1, 1, 16, torch.float32)
    cache = KVCache.allocate(shape, 1, BLOCK, torch.device("cpu"))
    return PagedModel(Table(logits), cache, BLOCK, logits.shape[1], sampler)


@dataclass(frozen=True)
class Population:
    """Whoever has been served: the first tokens of each, and what became of the drafts."""

    outputs: Tensor  # (N, FIRST)
    drafted: int
    accepted: int

    def counts(self, vocabulary: int) -> Tensor:
        """Of each possible output, as one number in base `vocabulary`."""
        base = vocabulary ** torch.arange(FIRST - 1, -1, -1)
        return (self.outputs * base).sum(1).bincount(minlength=vocabulary**FIRST)


def serve(
    model: Model,
    draft: DraftSource,
    count: int,
    sampling: SamplingParams,
    *,
    most_drafts: int,
    tokens: int = FIRST,
    rules: LogitRules | None = None,
) -> Population:
    """`count` requests that differ in their seed, until each has its first tokens. In batches, so
    that no tensor is too large."""
    outputs: list[list[int]] = []
    totals: Counter[str] = Counter()
    for first in range(0, count, BATCH):
        seeds = range(first, min(first + BATCH, count))
        sequences = [_sequence(seed, sampling, rules) for seed in seeds]
        live = sequences
        while live:
            _step(model, draft, live, most_drafts, totals)
            live = [seq for seq in live if seq.generated < tokens]
        outputs += [seq.tokens[len(PROMPT) :][:tokens] for seq in sequences]
    return Population(torch.tensor(outputs), totals["drafted"], totals["accepted"])


def _sequence(seed: int, sampling: SamplingParams, rules: LogitRules | None) -> Sequence:
    request = Request(str(seed), PROMPT, StopParams(100), replace(sampling, seed=seed))
    return Sequence(request, list(PROMPT), BlockTable(BLOCK, [0]), PlainText(), rules)


def _step(
    model: Model, draft: DraftSource, live: Seq[Sequence], most_drafts: int, totals: Counter[str]
) -> None:
    work = tuple(
        Work(seq, seq.computed, len(seq.tokens) - seq.computed, most_drafts) for seq in live
    )
    plan = StepPlan(0, work)
    proposals = draft.propose(plan)
    feeds = [engine.core.make_feed(w, p) for w, p in zip(work, proposals, strict=True)]
    # By its name in the engine, so that what is done to it there is done here.
    verdicts = engine.core.verify(proposals, model.run(feeds))
    draft.observe(plan, proposals, verdicts)
    for seq, proposal, verdict in zip(live, proposals, verdicts, strict=True):
        assert verdict.next_token is not None
        seq.computed = len(seq.tokens) + verdict.accepted
        seq.tokens += [*proposal.tokens[: verdict.accepted], verdict.next_token]
        totals["drafted"] += len(proposal.tokens)
        totals["accepted"] += verdict.accepted


def model_draft(logits: Tensor, sampler: Sampler) -> ModelDraft:
    return ModelDraft(tabled(logits, sampler), 10**9, 10**9)


def joint(steps: Tensor) -> Tensor:
    """The law of the first three tokens by that of one after another (V, V); (V ** 3,)."""
    first = steps[PROMPT[-1]]
    return (first[:, None, None] * steps[:, :, None] * steps[None]).flatten()


def total_variation(one: Tensor, other: Tensor) -> Tensor:
    """Between laws (..., V)."""
    return (one - other).abs().sum(-1) / 2


def law_of(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """What each row (R, V) leaves to draw from."""
    kept = survivors(
        logits,
        torch.full((len(logits),), sampling.temperature, dtype=torch.float64),
        torch.full((len(logits),), sampling.top_k),
        torch.full((len(logits),), sampling.top_p, dtype=torch.float64),
        torch.full((len(logits),), sampling.min_p, dtype=torch.float64),
    )
    return kept.softmax(1)


def misfit(counts: Tensor, law: Tensor) -> float:
    """By how much `counts` go beyond what chance does in one of a million samples: their
    chi-square over its quantile. What cannot be must not be; cells that are expected fewer than
    five times are taken together."""
    if bool(counts[law == 0].any()):
        return math.inf
    expected = law * counts.sum()
    few = expected < 5
    cells = torch.cat([expected[~few], expected[few].sum()[None]])
    seen = torch.cat([counts[~few], counts[few].sum()[None]])
    cells, seen = cells[cells > 0], seen[cells > 0]
    if len(cells) == 1:
        return 0.0  # There was no choice.
    return float(((seen - cells) ** 2 / cells).sum()) / _quantile(len(cells) - 1)


def _quantile(freedom: int) -> float:
    """Of chi-square at 1 - 1e-6, a few in a hundred too low (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3
