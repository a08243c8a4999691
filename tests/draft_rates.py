"""How far drafts get on texts for evaluation: see `engine.training.evaluate`.

    python -m tests.draft_rates --draft ngram --draft ngram,head:DIR --prompts humaneval

Greedy unless `--temperature`. A table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.specs import resolve_models
from engine.training.evaluate import rates
from service.models import resolve
from tests.streams import prompts, requests


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--prompts", default="humaneval", help="humaneval, random, or a file")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--count", type=int, default=32, help="of prompts")
    parser.add_argument("--tokens", type=int, default=96, help="of each output")
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
        wanted = EngineConfig(
            args.model, draft=draft, max_draft_tokens=args.max_draft_tokens, kv_cache_mib=512
        )
        config = resolve_models(wanted, lambda name: str(resolve(name)))
        tokenizer = Tokenizer.from_file(f"{config.model}/tokenizer.json")
        texts = prompts(args.prompts, tokenizer, 0)
        lengths, sampling = (args.tokens, args.tokens), SamplingParams(args.temperature)
        all_of_them = requests(texts, lengths, 0, time.monotonic, sampling)
        found[draft] = rates(config, islice(all_of_them, args.count), args.streams).scores()
        for source, shares in found[draft]["accepted"].items():
            per_step = f"{found[draft]['tokens_per_step']:.2f}"
            table.add_row(draft, per_step, source, " ".join(map(str, shares)))
    Console(width=120).print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
