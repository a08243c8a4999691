"""Runs settings over one set of models and compares every request with its quiet self."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.build import assemble
from engine.config import EngineConfig
from engine.core import Engine
from engine.draft import DraftSource
from engine.draft_choice import DraftChoice
from engine.draft_head import HeadDraft
from engine.draft_model import ModelDraft
from engine.draft_ngram import NgramDraft
from engine.draft_suffix import SuffixDraft
from engine.draft_table import TableDraft
from engine.ngram_table import NgramTable
from engine.outcome import FinishReason
from engine.pooled import Models
from engine.request import Request, SpeculationParams
from engine.training.evaluate import costless
from tests.fidelity.bits import watch
from tests.fidelity.company import Company, Ticks
from tests.fidelity.judge import Reference, Row, digests_of, idle, judge, judge_cancelled
from tests.fidelity.prompts import rules_of
from tests.fidelity.settings import LONGEST_DRAFT, OF_SET, SETTINGS, WARM, Setting
from tests.fidelity.sources import FLAW, KnownDraft, VaryingDraft

MOST_SEQS = 40
# Requests that a tight pool holds at once, and the longest among them, in tokens.
TIGHT_SEQS, TIGHT_TOKENS = 3, 600
# One in so many has a doomed twin beside it.
DOOMED = 2
TWIN_SEED = 1 << 40
SAMPLE_BITS = 8
MADE = {
    "suffix": ("suffix",),
    "table": ("table",),
    "head": ("head",),
    "made": ("suffix", "table", "head"),
}


def share_of(
    setting: Setting, requests: Seq[Request], seed: int, limit: int | None
) -> list[Request]:
    """The requests of a setting: the next ones of an endless round, whichever settings run."""
    order = random.Random(seed).sample(range(len(requests)), len(requests))
    known = (*SETTINGS, *OF_SET)
    start = sum(s.share for s in known[: [s.name for s in known].index(setting.name)])
    turn = [requests[order[(start + i) % len(order)]] for i in range(len(order))]
    fitting = [r for r in turn if not setting.tight or _longest(r) <= TIGHT_TOKENS]
    if setting.continued:  # rules tell the output from the prompt
        fitting = [r for r in fitting if not rules_of(r)]
    count = setting.share if limit is None else min(limit, setting.share)
    if setting.samples == 1:
        return fitting[:count]
    groups = (_samples(r, setting.samples) for r in fitting[: count // setting.samples])
    return [sample for group in groups for sample in group]


def _samples(request: Request, count: int) -> list[Request]:
    """As a client's n makes them, with seeds that no other request has."""
    seed = request.sampling.seed << SAMPLE_BITS
    return [
        replace(
            request,
            id=f"{request.id} sample {i}",
            sampling=replace(request.sampling, seed=seed + i),
            group=request.id,
        )
        for i in range(count)
    ]


def _in_turn(requests: Seq[Request], rng: random.Random) -> list[Request]:
    """Shuffled, but for the samples of one prompt, which come together."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group or request.id, []).append(request)
    return [r for group in rng.sample(list(groups.values()), len(groups)) for r in group]


def _longest(request: Request) -> int:
    return len(request.prompt) + request.stopping.max_tokens


class Suite:
    """`models` are loaded with one draft model, or with the head of a set whose table `table` is.
    `seed` decides all that is drawn."""

    def __init__(
        self,
        config: EngineConfig,
        models: Models,
        requests: Seq[Request],
        seed: int,
        table: NgramTable | None = None,
    ) -> None:
        self._config = replace(config, draft="none", max_draft_tokens=LONGEST_DRAFT)
        # Drafts as if rows were free: many, and the same in each run.
        self._models = costless(models)
        self.requests = requests
        self._seed = seed
        self._table = table
        self._sampler = watch(models.target.paged)
        self._references: dict[str, Reference] = {}

    def references(
        self, requests: Seq[Request], progress: Callable[[str], None] = lambda name: None
    ) -> None:
        """Compute what is missing: one request at a time, no drafts, no prefix cache."""
        config = replace(
            self._config, max_seqs=1, max_step_rows=512, max_draft_tokens=0, prefix_cache=False
        )
        engine = assemble(config, self._models, self._choice([]), Ticks()).engine
        for request in requests:
            if request.id not in self._references:
                self._references[request.id] = self._alone(engine, request)
                progress(request.id)

    def _alone(self, engine: Engine, request: Request) -> Reference:
        self._sampler.take()
        company = Company(engine, (1, 1), random.Random(0), frozenset())
        output = company.serve([request])[request.id]
        assert output.finish is not None
        assert output.finish.reason is not FinishReason.ERROR, output.finish.error
        digests = digests_of(request, len(output.tokens), self._sampler.take())
        assert None not in digests, "the sampler did not see all logits"
        return Reference(tuple(output.tokens), digests)

    def reference(self, request_id: str) -> Reference:
        return self._references[request_id]

    def run(self, setting: Setting, limit: int | None = None) -> Row:
        """Serve the setting's share in company and compare. Its references must be there."""
        rng = random.Random(f"{self._seed}/{setting.name}")
        row = Row(setting.name, setting.axes)
        share = share_of(setting, self.requests, self._seed, limit)
        wants = {r.id: self._references[r.id] for r in share}
        if setting.continued:
            share, wants = self._continued(share, rng)
        twins = _twins(share) if setting.cancels else []
        served = [*share, *twins]
        engine = self._engine(setting, served, wants, row)
        company = Company(engine, setting.batch, rng, frozenset(t.id for t in twins))
        started = time.monotonic()
        order = _in_turn(served, rng)
        if setting.cache == WARM:
            company.serve(order[::-1])  # what was asked last is asked first: it may still be there
        self._sampler.take()
        outputs = company.serve(order)
        row.seconds = time.monotonic() - started
        digests = self._sampler.take()
        for request in share:
            judge(row, request, outputs[request.id], wants[request.id], digests)
        for twin in twins:
            judge_cancelled(row, twin, outputs[twin.id], wants[_original(twin.id)])
        row.idle = idle(setting, row)
        return row

    def _continued(
        self, share: Seq[Request], rng: random.Random
    ) -> tuple[list[Request], dict[str, Reference]]:
        """Prompts that end in the middle of what the reference said, and the rest of it."""
        requests, wants = [], {}
        for request in share:
            known = self._references[request.id]
            cut = rng.randint(1, len(known.tokens) - 1)
            stopping = replace(request.stopping, max_tokens=request.stopping.max_tokens - cut)
            prompt = request.prompt + known.tokens[:cut]
            requests.append(replace(request, prompt=prompt, stopping=stopping))
            wants[request.id] = Reference(known.tokens[cut:], known.digests[cut:])
        return requests, wants

    def _engine(
        self, setting: Setting, served: Seq[Request], wants: dict[str, Reference], row: Row
    ) -> Engine:
        config = replace(
            self._config,
            max_seqs=min(MOST_SEQS, setting.rows),
            max_step_rows=setting.rows,
            draft_rows=setting.rows,
            prefix_cache=bool(setting.cache),
        )
        models = self._models
        if setting.tight:
            models = replace(models, num_blocks=self._tight(served))
        draft = self._choice(self._sources(setting, config, served, wants))
        return assemble(config, models, draft, Ticks(), row.tally).engine

    def _choice(self, sources: Seq[DraftSource]) -> DraftChoice:
        return DraftChoice(sources, costs=self._models.target.costs)

    def _tight(self, served: Seq[Request]) -> int:
        """Blocks for the longest request, or for a few ordinary ones."""
        size = self._config.block_size
        lengths = sorted(-(-(_longest(r) + LONGEST_DRAFT) // size) for r in served)
        return max(lengths[-1], TIGHT_SEQS * lengths[len(lengths) // 2])

    def _sources(
        self,
        setting: Setting,
        config: EngineConfig,
        served: Seq[Request],
        wants: dict[str, Reference],
    ) -> list[DraftSource]:
        if setting.drafts == "none":
            return []
        seed = f"{self._seed}/{setting.name}/drafts"
        if setting.drafts in MADE:
            return [
                VaryingDraft(self._made(kind, config), LONGEST_DRAFT, f"{seed}/{kind}")
                for kind in MADE[setting.drafts]
            ]
        source: DraftSource = NgramDraft()
        if setting.drafts == "model":
            (draft,) = self._models.drafts.values()
            source = ModelDraft(draft.paged, config.max_step_rows, draft.loaded.context_limit)
        elif setting.drafts != "ngram":
            flaw = {"perfect": 0.0, "wrong": 1.0, "flawed": FLAW}[setting.drafts]
            texts = {r.id: [*r.prompt, *wants[_original(r.id)].tokens] for r in served}
            vocab_size = self._models.target.loaded.vocab_size
            source = KnownDraft(setting.drafts, texts, vocab_size, flaw, seed)
        return [VaryingDraft(source, LONGEST_DRAFT, seed)]

    def _made(self, kind: str, config: EngineConfig) -> DraftSource:
        if kind == "suffix":
            return SuffixDraft()
        if kind == "table":
            assert self._table is not None
            return TableDraft(self._table)
        (head,) = self._models.heads.values()
        rows = min(config.max_step_rows, self._config.max_step_rows)  # what it was made for
        return HeadDraft(head.paged, rows, self._models.target.loaded.context_limit)


def _twins(share: Seq[Request]) -> list[Request]:
    """Greedy requests again, under names and seeds of their own (which greedy ones ignore)."""
    greedy = [r for r in share if r.sampling.temperature == 0]
    return [
        replace(
            r,
            id=f"{r.id} twin",
            sampling=replace(r.sampling, seed=r.sampling.seed + TWIN_SEED),
            speculation=SpeculationParams(i % LONGEST_DRAFT),
        )
        for i, r in enumerate(greedy)
    ]


def _original(request_id: str) -> str:
    return request_id.removesuffix(" twin")
