"""Structured output of a real model by 200 schemas: `python -m tests.schemas`.

Half of them from JSON-Schema-Test-Suite, half from files that people write by schema. Each is asked
for at temperature 0 and 0.8, many at once, without drafts and with those of n-grams and of the
grammar. What ends by itself must be valid by the `jsonschema` library, and what is cut off the
beginning of something valid; drafts must not change a byte. Prints what was counted and, as the
last line, one JSON object; exit status 1 if anything is wrong. Schemas that are refused are counted
by cause.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.grammar import Grammars
from engine.pooled import load_models
from service.models import resolve
from tests.schemas.corpus import Schema, fetch_wheel, suite, vendored
from tests.schemas.judge import Closer
from tests.schemas.run import choose, judge, requests, serve

DRAFTED, DRAFT_ROWS = 8, 256  # of a step, as if they cost nothing
SHOWN = 20


def in_turns(schemas: list[Schema], seed: int) -> Iterator[Schema]:
    """One of each source, then another of each, so that no source is most of what is taken."""
    by_source: dict[str, list[Schema]] = {}
    for schema in random.Random(seed).sample(schemas, len(schemas)):
        by_source.setdefault(schema.source, []).append(schema)
    for turn in zip_longest(*by_source.values()):
        yield from (schema for schema in turn if schema is not None)


def main(words: Sequence[str] | None = None) -> int:
    args = _arguments(words)
    directory = resolve(args.model)
    config = EngineConfig(
        str(directory),
        draft="none",
        max_draft_tokens=0,
        max_seqs=args.at_once,
        kv_cache_mib=512,
        numerics="strict",
    )
    models = load_models(config, time.monotonic)
    loaded = models.target.loaded
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    grammars = Grammars(tokenizer, loaded.vocab_size, loaded.eos_ids)
    parts = [group.schema for group in suite()], list(vendored(fetch_wheel()))
    schemas: list[Schema] = []
    refused: Counter[str] = Counter()
    for part in parts:
        found, causes = choose(grammars, list(in_turns(part, args.seed)), args.schemas // 2)
        schemas += found
        refused.update(causes)
    print(f"{len(schemas)} schemas; {sum(refused.values())} before them refused:")
    for cause, count in refused.most_common():
        print(f"  {count:3} {cause[:100]}")

    asked = requests(tokenizer, schemas, args.max_tokens, loaded.eos_ids)
    began = time.monotonic()
    plain, _ = serve(config, models, asked)
    plain_s = time.monotonic() - began
    drafting = replace(config, draft="ngram", max_draft_tokens=DRAFTED, draft_rows=DRAFT_ROWS)
    began = time.monotonic()
    drafted, drafts = serve(drafting, models, asked)
    drafted_s = time.monotonic() - began

    closer = Closer(tokenizer, loaded.eos_ids, loaded.vocab_size)
    tally = judge(grammars, closer, schemas, plain)
    differing = [i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b]
    tokens = sum(len(output.ids) for output in plain)
    for failure in tally.failures[:SHOWN]:
        print(f"  wrong: {failure}")
    for i in differing[:SHOWN]:
        print(f"  differs with drafts: {schemas[i // 2].name}: {plain[i]} {drafted[i]}")
    line = {
        "schemas": len(schemas),
        "refused": sum(refused.values()),
        "outputs": len(plain),
        "tokens": tokens,
        "ends": dict(tally.ends),
        "cut_off_and_completed": tally.completed,
        "failures": len(tally.failures),
        "differences_with_drafts": len(differing),
        "drafts": {name: [s.accepted, s.drafted] for name, s in drafts.items()},
        "seconds": [round(plain_s, 1), round(drafted_s, 1)],
    }
    print(json.dumps(line))
    short = len(schemas) < args.schemas // 2 * 2
    return int(bool(tally.failures or differing or short))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="which schemas are taken")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
