"""What a grammar costs: `python -m tests.constrained`.

Tokens a second by a JSON schema over tokens a second without: two engines of the same settings take
turns (`tests.switchback`) over the same prompts and as many tokens, one holding its outputs to a
schema of objects, strings, numbers, dates and arrays. So where no drafts are made, step i of one
has the rows of step i of the other. For one stream and for eight, with drafts off and on. The ratio
of all tokens over all time with its 95 % interval, and the median over pairs of blocks, which some
blocks that the machine disturbed do not move. A table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.build import build
from engine.config import EngineConfig
from engine.request import GrammarParams, Request, SamplingParams, StopParams
from loadtest.statistics import Interval, Spread, ratio_of_rates, spread
from service.models import resolve
from tests.streams import Streams
from tests.switchback import Block, Clocks, Steps, parse, sitting

GENRES = ("crime", "love", "war", "space", "music", "travel", "ghost", "history", "sport", "sea")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["lead", "support", "extra"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
FILM = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "released": {"type": "string", "format": "date"},
        "rating": {"type": "number"},
        "in_colour": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z-]{2,20}$"}},
        "cast": {"type": "array", "items": PERSON, "maxItems": 3},
    },
    "required": ["title", "released", "rating", "in_colour", "tags", "cast"],
    "additionalProperties": False,
}
# Longer than any output here, so that both sides end by their number of tokens.
SCHEMA = {"type": "array", "items": FILM, "minItems": 100}
GRAMMAR = GrammarParams("json_schema", json.dumps(SCHEMA), longest=True)


def films(
    tokenizer: Tokenizer, tokens: int, grammar: GrammarParams | None, clock: Callable[[], float]
) -> Iterator[Request]:
    """Requests without end, greedy, each with another prompt."""
    for number in count():
        genre = GENRES[number % len(GENRES)]
        question = f"List {number // len(GENRES) + 10} {genre} films as JSON."
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        stopping, sampling = StopParams(tokens), SamplingParams(0.0)
        yield Request(str(number), prompt, stopping, sampling, grammar=grammar, arrived=clock())


@dataclass(frozen=True, slots=True)
class Constraint:
    """`Toggle`: a with the grammar, b without."""

    config: EngineConfig
    tokenizer: Tokenizer
    streams: int
    tokens: int
    name: str = "grammar"

    def sides(self) -> tuple[Callable[[], Steps], Callable[[], Steps]]:
        return (lambda: self._make(GRAMMAR)), (lambda: self._make(None))

    def _make(self, grammar: GrammarParams | None) -> Steps:
        engine = build(self.config, time.monotonic).engine
        source = films(self.tokenizer, self.tokens, grammar, time.monotonic)
        return Streams(engine, source, self.streams)


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens a second with the grammar and without, medians of blocks, and the ratio."""

    drafts: str
    streams: int
    constrained: float
    free: float
    ratio: Interval
    of_pairs: Spread


def measure(toggle: Constraint, sittings: int, seconds: float, steps: int) -> Result:
    a: list[Block] = []
    b: list[Block] = []
    for number in range(sittings):
        one, other = sitting(toggle, bool(number % 2), seconds / sittings, steps, Clocks())
        a += one.blocks
        b += other.blocks
        gc.collect()  # the engines of this sitting, before the next two are loaded
    rates = [[(float(block.tokens), block.wall) for block in blocks] for blocks in (a, b)]
    with_it, without = ([tokens / wall for tokens, wall in side] for side in rates)
    pairs = [x / y for x, y in zip(with_it, without, strict=True)]
    return Result(
        toggle.config.draft,
        toggle.streams,
        spread(with_it).median,
        spread(without).median,
        ratio_of_rates(*rates),
        spread(pairs),
    )


def main() -> None:
    args = _arguments()
    directory = resolve(args.model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    base = EngineConfig(**{"model": str(directory), "kv_cache_mib": 128} | parse(args.set))
    results = [
        measure(
            Constraint(replace(base, draft=drafts), tokenizer, streams, args.max_tokens),
            args.sittings,
            args.seconds,
            args.steps,
        )
        for drafts in ("none", "ngram")
        for streams in args.streams
    ]
    shown = Table("drafts", "streams", "with, tok/s", "without", "ratio", "95 %", "of pairs")
    for r in results:
        interval, numbers = f"{r.ratio.low:.3f} - {r.ratio.high:.3f}", (r.constrained, r.free)
        rates = (f"{n:.0f}" for n in numbers)
        ratios = f"{r.ratio.ratio:.3f}", interval, f"{r.of_pairs.median:.3f}"
        shown.add_row(r.drafts, str(r.streams), *rates, *ratios)
    Console().print(shown)
    print(json.dumps({"results": [asdict(r) for r in results]}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=25, help="of a block")
    parser.add_argument("--seconds", type=float, default=24.0, help="for each line")
    parser.add_argument("--sittings", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
