"""How far drafts get: tokens a step of the target and what was accepted, by source and position.

    python -m tests.draft_rates --draft ngram --draft ngram,head:DIR --prompts humaneval

Every draft that a source makes is verified, as if rows cost nothing: how good the drafts are, not
what pays on a machine. Greedy unless `--temperature`. A table, and one JSON object as the last
line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.build import Built, assemble
from engine.config import EngineConfig
from engine.draft import DraftSource, DraftWrapper
from engine.drafting import draft_choice
from engine.pooled import load_models
from engine.request import SamplingParams
from engine.specs import resolve_models
from engine.types import Proposal, StepPlan, Verdict
from service.models import resolve
from tests.costless import costless
from tests.streams import Streams, prompts, requests

POSITIONS = 8


@dataclass(slots=True)
class Counts:
    """Of each source and position: how many drafts were verified, and how many accepted."""

    drafted: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    tokens: int = 0
    steps: int = 0

    @property
    def sources(self) -> list[str]:
        return sorted({source for source, _ in self.drafted})

    def rates(self, source: str) -> list[float]:
        """By position, of those that come so far."""
        return [
            round(self.accepted[source, p] / self.drafted[source, p], 3)
            for p in range(POSITIONS)
            if self.drafted[source, p]
        ]


class Counted(DraftWrapper):
    """A source whose verdicts are counted, of sequences that are past their prompt."""

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
            for position in range(len(proposal.tokens)):
                reached = position <= verdict.accepted
                counts.drafted[proposal.source, position] += reached
                counts.accepted[proposal.source, position] += position < verdict.accepted


def measure(draft: str, args: argparse.Namespace) -> Counts:
    """Serves the same requests for each `draft`."""
    config = resolve_models(
        EngineConfig(
            args.model, draft=draft, max_draft_tokens=args.max_draft_tokens, kv_cache_mib=512
        ),
        lambda name: str(resolve(name)),
    )
    models = costless(load_models(config, time.monotonic))
    choice = draft_choice(config, models, time.monotonic)
    counts = Counts()
    counted = Counted(choice, counts)
    built: Built = assemble(config, models, choice, time.monotonic, listener=counted)
    texts = islice(prompts(args.prompts, models.target.loaded.tokenizer, 0), args.count)
    sampling = SamplingParams(args.temperature)
    lengths = (args.tokens, args.tokens)
    source = requests(texts, lengths, 0, time.monotonic, sampling)
    streams = Streams(built.engine, source, 0)
    for at in range(0, args.count, args.streams):
        streams.hand(islice(source, min(args.streams, args.count - at)))
        while streams.busy:
            streams.step()
    return counts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--prompts", default="humaneval")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-draft-tokens", type=int, default=6)
    return parser.parse_args()


def main() -> None:
    args = parse()
    table = Table(title=f"{Path(args.prompts).name}, T = {args.temperature}")
    for column in ("drafts", "tokens a step", "source", "accepted, by position"):
        table.add_column(column)
    found = {}
    for draft in args.draft:
        counts = measure(draft, args)
        per_step = counts.tokens / counts.steps
        found[draft] = {"tokens_per_step": per_step}
        for source in counts.sources:
            rates = counts.rates(source)
            found[draft][source] = rates
            table.add_row(draft, f"{per_step:.2f}", source, " ".join(map(str, rates)))
    Console(width=120).print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
