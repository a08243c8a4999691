"""`make fidelity`: the same request gives the same tokens, whatever else the engine does.

Every comparison is one request's complete token ids under one setting (`tests.fidelity.settings`)
against the same request alone: same models, one request at a time, no drafts, no prefix cache. The
bits of the logits behind every token are compared too, where the engine runs in this process.
Exit status 1 on a difference, or if a setting did not do what it is there for.

`--against transformers` compares float32 output with transformers' own instead.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer

from engine.config import WEIGHTS, EngineConfig
from engine.convert import truncate_layers
from engine.head_file import TABLE
from engine.ngram_table import open_table
from engine.pooled import load_models
from service.models import resolve
from tests.fidelity import against_transformers
from tests.fidelity.judge import Row
from tests.fidelity.prompts import SPEC_BENCH, load_requests
from tests.fidelity.restart import run_restart
from tests.fidelity.settings import OF_SET, SETTINGS, Setting
from tests.fidelity.suite import Suite, share_of

SHOWN = 5


def run(args: argparse.Namespace, scratch: Path, console: Console) -> list[Row]:
    directory = resolve(args.model)
    if args.set:
        drafts, table = f"head:{args.set}", open_table(Path(args.set) / TABLE)
    else:
        small, table = scratch / "draft", None
        truncate_layers(directory, small, args.draft_layers)
        drafts = f"model:{small}"
    config = EngineConfig(
        model=str(directory),
        draft=drafts,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        weights=args.weights,
        kv_cache_mib=args.kv_cache_mib,
        numerics="strict",
        cache_dir=str(scratch / "checks"),
    )
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    requests = load_requests(tokenizer, args.prompts)
    if not SPEC_BENCH.exists():
        console.print("spec_bench_half.jsonl is not there: HumanEval only")
    known = OF_SET if args.set else SETTINGS
    settings = [s for s in known if not args.only or s.name in args.only]
    suite = Suite(config, load_models(config, time.monotonic), requests, args.seed, table)
    shares = {s.name: share_of(s, requests, args.seed, args.limit) for s in settings}
    wanted = list({r.id: r for share in shares.values() for r in share}.values())
    started = time.monotonic()
    with Progress(console=console) as progress:
        task = progress.add_task("references", total=len(wanted))
        suite.references(wanted, lambda name: progress.advance(task))
    console.print(f"{len(wanted)} references in {time.monotonic() - started:.0f} s")
    rows = []
    for setting in settings:
        row = _one(suite, setting, config, args)
        report(row, args, console)
        rows.append(row)
    return rows


def _one(suite: Suite, setting: Setting, config: EngineConfig, args: argparse.Namespace) -> Row:
    if not setting.restart:
        return suite.run(setting, args.limit)
    share = share_of(setting, suite.requests, args.seed, args.limit)
    return run_restart(setting, config, share, {r.id: suite.reference(r.id) for r in share})


def report(row: Row, args: argparse.Namespace, console: Console) -> None:
    """One line, then what differs, and how to see it again."""
    did = row.tally
    console.print(
        f"{row.setting:17} comparisons {row.comparisons:4}  differences {len(row.differences)}"
        f"  {row.seconds:5.1f} s  tokens {row.tokens}  drafts accepted {did.accepted} of"
        f" {did.drafted}  preempted {did.preempted}  cached {row.cached}"
        f"  cut off {row.cancelled}  at once <= {did.most_at_once}"
    )
    for what in row.idle:
        console.print(f"    not tested: {what}")
    for found in row.differences[:SHOWN]:
        console.print(f"    {found.line()}")
    if len(row.differences) > SHOWN:
        console.print(f"    and {len(row.differences) - SHOWN} more")
    if row.differences or row.idle:
        console.print(f"    again: {_command(row.setting, args)}")


def _command(setting: str, args: argparse.Namespace) -> str:
    words = ["python", "-m", "tests.fidelity", "--only", setting, "--seed", str(args.seed)]
    for name in (
        "model",
        "dtype",
        "kv_dtype",
        "weights",
        "prompts",
        "limit",
        "draft_layers",
        "kv_cache_mib",
        "set",
    ):
        if (value := getattr(args, name)) is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    return shlex.join(words)


def table(rows: Seq[Row]) -> Table:
    made = Table("setting", "comparisons", "differences", "seconds", "tokens")
    for row in rows:
        values = (row.comparisons, len(row.differences), round(row.seconds, 1), row.tokens)
        made.add_row(row.setting, *map(str, values))
    made.add_section()
    by_axis: Counter[str] = Counter()
    for row in rows:
        by_axis.update(dict.fromkeys(row.axes, row.comparisons))
        by_axis.update(row.ruled)
    by_axis["T = 0"] = sum(r.greedy for r in rows)
    by_axis["T = 0.8"] = sum(r.comparisons - r.greedy for r in rows)
    for axis, count in sorted(by_axis.items()):
        made.add_row(axis, str(count))
    return made


def summary(rows: Seq[Row], args: argparse.Namespace, seconds: float) -> dict[str, object]:
    return {
        "model": args.model,
        "dtype": args.dtype,
        "kv_dtype": args.kv_dtype,
        "weights": args.weights,
        "set": args.set or "",
        "seed": args.seed,
        "comparisons": sum(r.comparisons for r in rows),
        "differences": sum(len(r.differences) for r in rows),
        "not_tested": sum(len(r.idle) for r in rows),
        "tokens": sum(r.tokens for r in rows),
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
    }


def parse(words: Seq[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fidelity", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "int8"])
    parser.add_argument("--weights", default="auto", choices=WEIGHTS)
    parser.add_argument("--prompts", type=int, default=250, help="how many to take them from")
    parser.add_argument("--limit", type=int, help="most comparisons per setting")
    names = [s.name for s in (*SETTINGS, *OF_SET)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="SETTING")
    parser.add_argument("--set", help="of drafts made for the model, instead of other sources")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft-layers", type=int, default=4)
    parser.add_argument("--kv-cache-mib", type=int, default=768)
    return parser.parse_args(words)


def main(words: Seq[str] | None = None) -> int:
    chooser = argparse.ArgumentParser(add_help=False)
    chooser.add_argument("--against", choices=["engine", "transformers"], default="engine")
    chosen, rest = chooser.parse_known_args(words)
    if chosen.against == "transformers":
        return against_transformers.main(rest)
    args = parse(rest)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        rows = run(args, Path(scratch), console)
    console.print(table(rows))
    print(json.dumps(summary(rows, args, time.monotonic() - started)))
    return 1 if any(row.differences or row.idle for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
