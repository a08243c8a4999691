"""What continuous batching gives over static: `python -m tests.batching`.

The same engine, with output lengths drawn evenly from 8 to 512 and 32 streams. Static: 32 requests
at once, and the next 32 when all have ended, so that a wave lasts as long as its longest output.
Continuous: always 32 in flight. With steps of equal cost, the second would have the throughput of
the first times

    E[max of 32 lengths] / E[length]

which is the bound. Steps are not of equal cost: those at the end of a wave have few rows and are a
little cheaper, so the ratio stays below it. Two engines of the same settings take turns, a wave of
the one and as many tokens of the other, which has been brought to its steady state before; the
ratio is taken round by round.

A table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.build import build
from engine.config import EngineConfig
from engine.request import Request
from loadtest.statistics import spread
from service.models import resolve
from tests.streams import Streams, prompts, requests
from tests.switchback import parse


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second of a wave and of the streams beside it; `bound` for this very wave."""

    static: float
    continuous: float
    bound: float

    @property
    def ratio(self) -> float:
        return self.continuous / self.static


def expected_bound(lengths: tuple[int, int], streams: int) -> float:
    """E[max]/E[mean] for `streams` draws, even over the integers of `lengths`, both included."""
    low, high = lengths
    values = high - low + 1
    below = sum((i / values) ** streams for i in range(1, values))  # P(max <= low + i - 1)
    return (high - below) / ((low + high) / 2)


def take_wave(streams: Streams, clock: Callable[[], float]) -> tuple[int, float]:
    """Serve all there is; tokens, and seconds on the engine alone."""
    tokens, seconds = 0, 0.0
    while streams.busy:
        began = clock()
        tokens += streams.step()
        seconds += clock() - began
    return tokens, seconds


def take_tokens(streams: Streams, most: int, clock: Callable[[], float]) -> tuple[int, float]:
    """Keep the streams full until `most` tokens have come; likewise."""
    tokens, seconds = 0, 0.0
    while tokens < most:
        streams.prepare()
        began = clock()
        tokens += streams.step()
        seconds += clock() - began
    return tokens, seconds


def take_round(
    wave: Sequence[Request],
    static: Streams,
    continuous: Streams,
    clock: Callable[[], float],
) -> Round:
    """One wave of `static` and as many tokens of `continuous`."""
    lengths = [request.stopping.max_tokens for request in wave]
    static.hand(wave)
    tokens, seconds = take_wave(static, clock)
    if tokens != sum(lengths):
        raise RuntimeError(f"{tokens} tokens instead of {sum(lengths)}")
    more, longer = take_tokens(continuous, tokens, clock)
    bound = max(lengths) * len(lengths) / sum(lengths)
    return Round(tokens / seconds, more / longer, bound)


def main() -> None:
    args = _arguments()
    lengths = (args.shortest, args.longest)
    directory = resolve(args.model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = EngineConfig(
        **{"model": str(directory), "draft": "none", "max_seqs": args.streams} | parse(args.set)
    )
    clock = time.monotonic
    static = Streams(build(config, clock).engine, iter(()), args.streams)
    source = requests(prompts("humaneval", tokenizer, 1), lengths, 1, clock)
    continuous = Streams(build(config, clock).engine, source, args.streams)
    take_tokens(continuous, args.streams * sum(lengths) // 2, time.perf_counter)
    waves = requests(prompts("humaneval", tokenizer, 2), lengths, 2, clock)
    rounds = [
        take_round(list(islice(waves, args.streams)), static, continuous, time.perf_counter)
        for _ in range(args.rounds)
    ]
    report(rounds, expected_bound(lengths, args.streams))


def report(rounds: Sequence[Round], bound: float) -> None:
    """Print the table and the line."""
    shown = Table("", "median", "least", "most")
    measured = {
        "static, tok/s": spread([r.static for r in rounds]),
        "continuous, tok/s": spread([r.continuous for r in rounds]),
        "ratio": spread([r.ratio for r in rounds]),
        "bound of these waves": spread([r.bound for r in rounds]),
        "ratio over its wave's bound": spread([r.ratio / r.bound for r in rounds]),
    }
    for name, values in measured.items():
        shown.add_row(name, *(f"{v:.3f}" for v in (values.median, values.least, values.most)))
    shown.add_row("bound E[max]/E[mean]", f"{bound:.3f}")
    Console().print(shown)
    share = sum(r.ratio for r in rounds) / sum(r.bound for r in rounds)
    line = {"rounds": [asdict(r) for r in rounds], "bound": bound, "share_of_bound": share}
    print(json.dumps(line | {name: asdict(values) for name, values in measured.items()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
