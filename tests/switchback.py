"""Small effects of a setting: `python -m tests.switchback NAME`, or `--a KEY=VALUE --b KEY=VALUE`.

A shared machine drifts by more than a per cent within a minute, so two runs one after the other
cannot tell a per cent. Here one process holds two engines that differ in the setting under test
and serve the same requests, and lets them take turns: 50 steps of one, 50 of the other, the order
changing each time, for minutes. Where the setting does not change what a step does, block i of one
is the same work as block i of the other. Which engine was loaded first, and where its pages lie in
memory, can matter as much as the setting: in the next sitting both are loaded anew, in the other
order.

Reported per measure: the ratio a over b of tokens per second, of steps per second, and of steps
per second of processor time, with the 95 % interval of a paired bootstrap over blocks. Above 1, a
is better. A table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.build import build
from engine.config import EngineConfig
from engine.request import SamplingParams
from loadtest.statistics import Interval, ratio_of_rates
from service.models import resolve
from tests.streams import Streams, prompts, requests

WARM_BLOCKS = 2
BOOLS = {"true": True, "false": False}
MEASURES = ("tokens per second", "steps per second", "steps per CPU second")


class Steps(Protocol):
    """One side: something that takes steps."""

    def prepare(self) -> None:
        """What has to be done before the next step and is not to be timed."""
        ...

    def step(self) -> int:
        """One step; how many tokens came of it."""
        ...


class Toggle(Protocol):
    """A setting with two values to compare."""

    @property
    def name(self) -> str: ...

    def sides(self) -> tuple[Callable[[], Steps], Callable[[], Steps]]:
        """How to make a and b. Whoever measures decides which is made first."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """A toggle: `EngineConfig` fields of either side, over `base`."""

    name: str
    a: dict[str, Any]
    b: dict[str, Any]
    base: EngineConfig
    make: Callable[[EngineConfig], Steps]

    def sides(self) -> tuple[Callable[[], Steps], Callable[[], Steps]]:
        a, b = replace(self.base, **self.a), replace(self.base, **self.b)
        return (lambda: self.make(a)), (lambda: self.make(b))


NAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "drafts": ({"draft": "ngram"}, {"draft": "none"}),
    "prefix-cache": ({"prefix_cache": True}, {"prefix_cache": False}),
    "numerics": ({"numerics": "strict"}, {"numerics": "fast"}),
    "kv-dtype": ({"kv_dtype": "int8"}, {"kv_dtype": "auto"}),
}


@dataclass(frozen=True, slots=True)
class Block:
    """So many steps in a row: what came of them and what they took, in seconds."""

    steps: int
    tokens: int
    wall: float
    cpu: float


@dataclass(slots=True)
class Blocks:
    """Of one side, in order."""

    blocks: list[Block] = field(default_factory=list)

    def rates(self, measure: str) -> list[tuple[float, float]]:
        """(amount, cost) of every block for one of MEASURES."""
        return [
            (
                float(b.tokens if "tokens" in measure else b.steps),
                b.cpu if "CPU" in measure else b.wall,
            )
            for b in self.blocks
        ]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds: of the wall, and of all threads of this process on processors."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time


def take_block(side: Steps, steps: int, clocks: Clocks) -> Block:
    """`steps` steps of one side; what prepares them is not timed."""
    tokens, wall, cpu = 0, 0.0, 0.0
    for _ in range(steps):
        side.prepare()
        began, spent = clocks.wall(), clocks.cpu()
        tokens += side.step()
        wall += clocks.wall() - began
        cpu += clocks.cpu() - spent
    return Block(steps, tokens, wall, cpu)


def sitting(
    toggle: Toggle, b_first: bool, seconds: float, steps: int, clocks: Clocks
) -> tuple[Blocks, Blocks]:
    """Make both sides and let them take turns for `seconds`; at least two pairs of blocks."""
    makers = toggle.sides()
    order = (1, 0) if b_first else (0, 1)
    made = {i: makers[i]() for i in order}
    for _ in range(WARM_BLOCKS):
        for i in order:
            take_block(made[i], steps, clocks)
    kept = (Blocks(), Blocks())
    end = clocks.wall() + seconds
    while clocks.wall() < end or len(kept[0].blocks) < 2:
        for i in order:
            kept[i].blocks.append(take_block(made[i], steps, clocks))
        order = order[::-1]
    return kept


def compare(
    toggle: Toggle, sittings: int, seconds: float, steps: int, clocks: Clocks
) -> tuple[dict[str, Interval], int]:
    """The ratio a over b by measure, and the number of pairs of blocks behind it."""
    a, b = Blocks(), Blocks()
    for number in range(sittings):
        more_a, more_b = sitting(toggle, bool(number % 2), seconds / sittings, steps, clocks)
        a.blocks += more_a.blocks
        b.blocks += more_b.blocks
        gc.collect()  # the engines of this sitting, before the next two are loaded
    found = {m: ratio_of_rates(a.rates(m), b.rates(m)) for m in MEASURES}
    return found, len(a.blocks)


def parse(assignments: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` for fields of EngineConfig, in the type of the field. Raises ValueError."""
    usual = EngineConfig()
    types = {f.name: type(getattr(usual, f.name)) for f in fields(EngineConfig)}
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        key = key.replace("-", "_")
        if key not in types:
            raise ValueError(f"unknown setting {key!r}; known: {', '.join(types)}")
        if types[key] is bool and text not in BOOLS:
            raise ValueError(f"{assignment}: true or false")
        values[key] = BOOLS[text] if types[key] is bool else types[key](text)
    return values


def main() -> None:
    args = _arguments()
    directory = resolve(args.model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def make(config: EngineConfig) -> Steps:
        engine = build(config, time.monotonic).engine
        lengths = (args.max_tokens // 2, args.max_tokens * 3 // 2)
        texts = prompts(args.prompts, tokenizer, 0)
        sampling = SamplingParams(args.temperature)
        source = requests(texts, lengths, 0, time.monotonic, sampling)
        return Streams(engine, source, args.streams)

    a, b = NAMED[args.name] if args.name else (parse(args.a), parse(args.b))
    base = replace(
        EngineConfig(model=str(directory), draft="none", max_seqs=max(64, args.streams)),
        **parse(args.both),
    )
    name = args.name or f"{' '.join(args.a)} / {' '.join(args.b)}"
    toggle = Settings(name, a, b, base, make)
    found, pairs = compare(toggle, args.sittings, args.seconds, args.steps, Clocks())
    shown = Table("a over b", "ratio", "95 % interval", title=f"{name}, {args.streams} streams")
    for measure, interval in found.items():
        shown.add_row(measure, f"{interval.ratio:.4f}", f"{interval.low:.4f} - {interval.high:.4f}")
    Console().print(shown)
    ratios = {measure: asdict(interval) for measure, interval in found.items()}
    measured = {"a": a, "b": b, "streams": args.streams, "prompts": args.prompts}
    print(json.dumps({**measured, "pairs": pairs, "ratios": ratios}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=sorted(NAMED))
    parser.add_argument("--a", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--b", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--both", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", default="humaneval", help="or random, or a file of JSON lines")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128, help="on average")
    parser.add_argument("--steps", type=int, default=50, help="of a block")
    parser.add_argument("--seconds", type=float, default=180.0, help="in all")
    parser.add_argument("--sittings", type=int, default=2)
    args = parser.parse_args()
    if bool(args.name) == bool(args.a or args.b):
        parser.error("either a name, or --a and --b")
    return args


if __name__ == "__main__":
    main()
