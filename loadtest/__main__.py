"""`python -m loadtest`: put load on a server and report; with `--json` the last line of stdout is
one JSON object. Exit 0 only if every request completed. `python -m loadtest compare` and
`memory`: see `loadtest.compare` and `loadtest.memory`."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.client import OPTIONS, Record
from loadtest.compare import compare
from loadtest.memory import memory
from loadtest.report import summarise, table
from loadtest.runner import Load, Params, measure
from loadtest.workload import RandomTokens, Workload, humaneval, spec_bench
from service.pb import draftwire_pb2 as pb
from service.pb import draftwire_pb2_grpc as pb_grpc

INFO_S = 10.0

app = typer.Typer()


class WorkloadName(StrEnum):
    HUMANEVAL = "humaneval"
    SPEC_BENCH = "spec-bench"
    RANDOM = "random"


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    target: Annotated[str, typer.Option(metavar="HOST:PORT")] = "127.0.0.1:50051",
    workload: Annotated[WorkloadName, typer.Option(help="Where the prompts come from.")] = (
        WorkloadName.HUMANEVAL
    ),
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="spec-bench: the question file.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="random: tokens per prompt.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Requests to measure.")] = 164,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the clock starts.")] = 0,
    streams: Annotated[int, typer.Option(min=1, help="Connections, one stream each.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Request i samples with seed + i; also draws the prompts.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always max-tokens long.")] = (
        False
    ),
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="No drafts.")] = False,
    timeout: Annotated[float, typer.Option(metavar="S", help="Give up after S seconds.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Measure a running server with real clients in a closed loop."""
    if context.invoked_subcommand:
        return
    load = Load(target, concurrency, requests, warmup, min(streams, concurrency), timeout)
    base = pb.GenerationParams(
        sampling=pb.Sampling(temperature=temperature),
        stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=ignore_eos),
        speculation=pb.Speculation(off=no_speculation),
    )
    try:
        source = open_workload(workload, target, prompts, prompt_tokens, seed or 0)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    records = _measure(load, lambda index: request(source, base, seed, index))
    report = summarise(records, workload=workload, concurrency=concurrency, requests=requests)
    Console().print(table(report))
    if as_json:
        print(json.dumps(report.as_dict()))
    raise typer.Exit(1 if report.errors else 0)


def open_workload(
    name: WorkloadName, target: str, prompts: Path | None, prompt_tokens: int, seed: int
) -> Workload:
    """The workload by name. ValueError if it lacks something."""
    match name:
        case WorkloadName.HUMANEVAL:
            return humaneval()
        case WorkloadName.SPEC_BENCH:
            if prompts is None:
                raise ValueError("spec-bench needs --prompts FILE")
            return spec_bench(prompts)
        case WorkloadName.RANDOM:
            return RandomTokens(_vocab_size(target), prompt_tokens, seed)


def request(
    source: Workload, base: pb.GenerationParams, seed: int | None, index: int
) -> pb.GenerationParams:
    """Request number `index` of a run: its prompt, the common parameters and its own seed."""
    params = source.prompt(index)
    params.MergeFrom(base)
    if seed is not None:
        params.sampling.seed = (seed + index) % 2**64
    return params


def _vocab_size(target: str) -> int:
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        try:
            info = pb_grpc.ModelServiceStub(channel).GetModelInfo(
                pb.GetModelInfoRequest(), timeout=INFO_S
            )
        except grpc.RpcError as error:
            raise ValueError(f"no model info from {target}: {error}") from error
    return int(info.vocab_size)


def _measure(load: Load, params: Params) -> list[Record]:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=load.warmup + load.requests)
        return asyncio.run(measure(load, params, lambda _: progress.advance(bar)))


app.command()(compare)
app.command()(memory)

if __name__ == "__main__":
    app()
