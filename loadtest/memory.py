"""`python -m loadtest memory`: what the two processes hold beside weights and KV pools.

A server of our own gets so many long requests at once that its KV pool overflows, so that every
page of the pool has been written and is resident. Then the memory of its process tree is read, and
the weights (the model's safetensors files) and the pool (its setting) are taken off. Pss counts a
page that several processes share once, Rss once per process. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from loadtest.compare import model_directory
from loadtest.peers.contender import Broken, Job
from loadtest.peers.group import unwind_on_sigterm
from loadtest.peers.own_server import OwnServer, waves
from loadtest.workload import RandomTokens

MIB = 1 << 20
PROMPT, OUTPUT = 448, 64
OVERFLOW = 1.5


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of one process, in bytes."""

    command: str
    pss: int
    rss: int


def memory(
    model: Annotated[str, typer.Option(help="A name of `draftwire models`, or a directory.")] = (
        "smollm2-135m"
    ),
    kv_cache_mib: Annotated[int, typer.Option(min=1, help="Of the server.")] = 128,
    flags: Annotated[
        str, typer.Option(help="More flags of serve, separated by blanks.")
    ] = "--draft ngram",
) -> None:
    """Measure what a server of our own holds beside weights and KV pools."""
    unwind_on_sigterm()
    weights = sum(f.stat().st_size for f in model_directory(model).glob("*.safetensors"))
    pool = kv_cache_mib * MIB
    arguments = ["--model", model, "--kv-cache-mib", str(kv_cache_mib), *flags.split()]
    with tempfile.TemporaryDirectory() as logs:
        server = OwnServer("draftwire", arguments, Path(logs))
        try:
            idle, loaded = idle_and_loaded(server)
        except Broken as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
        finally:
            server.close()
    report = {
        "model": model,
        "flags": arguments,
        "weights": weights,
        "kv_pool": pool,
        "idle": [asdict(process) for process in idle],
        "loaded": [asdict(process) for process in loaded],
        "beyond_pss": sum(p.pss for p in loaded) - weights - pool,
        "beyond_rss": sum(p.rss for p in loaded) - weights - pool,
    }
    Console().print(table(report, loaded))
    print(json.dumps(report))


def idle_and_loaded(server: OwnServer) -> tuple[list[Held], list[Held]]:
    """What its processes hold before any request, and with the pool full. Raises Broken."""
    serving = server.serve()
    idle = held_by(serving.group.process.pid)
    job = filling(serving.info.kv_capacity_tokens, serving.info.vocab_size)
    records, _ = asyncio.run(waves(serving.target, job))
    if bad := [record.error for record in records if record.error]:
        said = serving.group.last_words()
        raise Broken(f"{len(bad)} requests failed: {bad[0]}\n{said}")
    return idle, held_by(serving.group.process.pid)


def filling(capacity: int, vocabulary: int) -> Job:
    """More requests at once than the pool of `capacity` tokens holds."""
    count = int(capacity * OVERFLOW) // (PROMPT + OUTPUT) + 1
    source = RandomTokens(vocabulary, PROMPT, seed=0)
    prompts = tuple(tuple(source.prompt(i).token_ids.ids) for i in range(count))
    return Job(prompts, count, OUTPUT)


def held_by(pid: int) -> list[Held]:
    """What `pid` and its descendants hold now; the parent first."""
    parent = psutil.Process(pid)
    held = []
    for process in (parent, *parent.children(recursive=True)):
        info = process.memory_full_info()
        held.append(Held(" ".join(process.cmdline()[1:4]), info.pss, info.rss))
    return held


def table(report: dict[str, object], loaded: Sequence[Held]) -> Table:
    """Pss and Rss in MiB, by process and in all."""
    shown = Table("MiB", "Pss", "Rss")
    for process in loaded:
        shown.add_row(process.command, *(f"{v / MIB:.0f}" for v in (process.pss, process.rss)))
    for name in ("weights", "kv_pool"):
        shown.add_row(name, *[f"-{int(str(report[name])) / MIB:.0f}"] * 2)
    beyond = (report["beyond_pss"], report["beyond_rss"])
    shown.add_row("beyond", *(f"{int(str(v)) / MIB:.0f}" for v in beyond))
    return shown
