"""A load that swings: `python -m tests.swing`.

Between few and many streams every ten seconds. The draft choice that adapts is compared with fixed
numbers of drafts, in each phase with whichever of these is best there: one of them for all phases
would be worse. All take turns, over the same model in one process, with engines of their own, and
serve the same requests in the same order; what is measured of a phase are its tokens a second,
what begins with it (new prompts, or cancelling) included.

A table and, as the last line, one JSON object; `ratio` is adaptive over best fixed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.build import assemble
from engine.config import EngineConfig
from engine.drafting import draft_choice
from engine.pooled import Models, load_models
from engine.training.evaluate import costless
from service.models import resolve
from tests.streams import Streams, prompts, requests
from tests.switchback import parse

ADAPTIVE = "adaptive"
Rates = dict[str, dict[int, list[float]]]  # tokens a second by who and phase


def swing(
    streams: Streams, phases: Sequence[int], seconds: float, clock: Callable[[], float]
) -> list[float]:
    """Tokens a second of each phase."""
    rates = []
    for at_once in phases:
        streams.resize(at_once)
        tokens, begun = 0, clock()
        while clock() < begun + seconds:
            streams.prepare()
            tokens += streams.step()
        rates.append(tokens / (clock() - begun))
    return rates


def ratios(rates: Rates) -> dict[int, tuple[float, str]]:
    """By phase, adaptive over the best of the others, and which that is; medians over rounds."""
    found = {}
    for phase, own in rates[ADAPTIVE].items():
        others = {name: median(r[phase]) for name, r in rates.items() if name != ADAPTIVE}
        best = max(others, key=others.__getitem__)
        found[phase] = median(own) / others[best], best
    return found


def main() -> None:
    args = _arguments()
    directory = resolve(args.model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = {"draft": "ngram", "max_seqs": max(args.phases)} | parse(args.set)
    config = EngineConfig(model=str(directory), **settings)
    with TemporaryDirectory() as found:  # what is found out at the start of each of many engines
        run(args, replace(config, cache_dir=found), tokenizer)


def run(args: argparse.Namespace, config: EngineConfig, tokenizer: Tokenizer) -> None:
    models = load_models(config, time.monotonic)
    # Prompts are cut into the same chunks for all; to a fixed choice drafts look costless.
    sides: dict[str, tuple[EngineConfig, Models]] = {ADAPTIVE: (config, models)}
    for k in args.fixed:
        sides[f"k = {k}"] = replace(config, max_draft_tokens=k, step_ms=0), costless(models)
    rates: Rates = {name: {phase: [] for phase in args.phases} for name in sides}
    for number in range(args.rounds):
        names = list(sides)[:: -1 if number % 2 else 1]
        for name in names:
            choice = draft_choice(*sides[name], time.monotonic)
            own = replace(sides[name][0], step_ms=config.step_ms)
            engine = assemble(own, models, choice, time.monotonic).engine
            texts = prompts(args.prompts, tokenizer, number)
            source = requests(texts, (64, 192), number, time.monotonic)
            streams = Streams(engine, source, args.phases[0])
            taken = swing(streams, args.phases * args.swings, args.seconds, time.monotonic)
            for phase, rate in zip(args.phases * args.swings, taken, strict=True):
                rates[name][phase].append(rate)
    found = ratios(rates)
    table = Table("", *(f"{phase} streams, tok/s" for phase in args.phases))
    for name, by_phase in rates.items():
        table.add_row(name, *(f"{median(r):.1f}" for r in by_phase.values()))
    table.add_row("adaptive / best", *(f"{r:.3f} ({name})" for r, name in found.values()))
    Console().print(table)
    print(json.dumps({"ratio": {p: r for p, (r, _) in found.items()}, "rates": rates}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", default="humaneval", help="or random, or a file")
    parser.add_argument("--phases", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--fixed", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=10.0, help="of a phase")
    parser.add_argument("--swings", type=int, default=2, help="in one turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
