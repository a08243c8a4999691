"""`python -m loadtest.bench`: what drafts are worth, by concurrency.

Decoding is bound by memory: a step reads every weight once, for one row or for thirty. So tokens
per second grow with the rows that share a step, be they other people's sequences or one's own
drafts, until the step is bound by arithmetic; from there drafts only pay if they are good. The
bench starts one server per draft setting, one after the other, and loads each with 1, 8 and 32
clients: HumanEval, greedy, every output at full length. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Process = subprocess.Popen[bytes]

STOP_S = 60.0
POLL_S = 0.1


def main(
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Settings of --draft. Default: none, auto."),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Clients at once. Default: 1, 8, 32.")
    ] = None,
    model: Annotated[str, typer.Option(help="--model of the servers.")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Requests per client, at least 20.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    patience: Annotated[float, typer.Option(metavar="S", help="For a server to serve.")] = 600.0,
) -> None:
    """Measure servers of our own, by draft setting and concurrency."""
    runs: list[dict[str, Any]] = []
    for setting in draft or ["none", "auto"]:
        with server(["--model", model, "--draft", setting], patience) as target:
            for clients in concurrency or [1, 8, 32]:
                options = {
                    "--concurrency": clients,
                    "--requests": max(20, rounds * clients),
                    "--warmup": clients,
                    "--max-tokens": max_tokens,
                }
                runs.append({"draft": setting} | load(target, options))
    Console().print(table(runs))
    print(json.dumps({"model": model, "runs": runs}))
    raise typer.Exit(1 if any(run["errors"] for run in runs) else 0)


@contextmanager
def server(options: list[str], patience: float) -> Iterator[str]:
    """A server on a free port of 127.0.0.1, SERVING; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        listen = ["--listen", "127.0.0.1:0", "--port-file", str(port_file)]
        log = (Path(folder) / "log").open("wb")
        command = [sys.executable, "-m", "service", "serve", *listen, *options]
        with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                target = _until_serving(process, port_file, patience)
                if target is None:
                    raise SystemExit((Path(folder) / "log").read_text(errors="replace"))
                yield target
            finally:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def load(target: str, options: dict[str, int]) -> dict[str, Any]:
    """One run of the load test in a process of its own; its JSON object."""
    arguments = [str(part) for option in options.items() for part in option]
    command = [sys.executable, "-m", "loadtest", "--target", target, *arguments]
    done = subprocess.run(
        [*command, "--ignore-eos", "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def table(runs: list[dict[str, Any]]) -> Table:
    """Runs as rows."""
    shown = Table("draft", "clients", "tok/s", "ttft p50 ms", "itl p50 ms", "tok/step", "errors")
    for run in runs:
        shown.add_row(
            run["draft"],
            str(run["concurrency"]),
            f"{run['output_tok_s']:.1f}",
            f"{(run['ttft_s']['p50'] or 0) * 1e3:.0f}",
            f"{(run['itl_s']['p50'] or 0) * 1e3:.1f}",
            f"{run['tokens_per_target_step'] or 0:.2f}",
            str(run["errors"]),
        )
    return shown


def _until_serving(process: Process, port_file: Path, patience: float) -> str | None:
    """The address of the server once it is SERVING; None if it ends or `patience` does."""
    end = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < end:
        if port_file.exists():
            target = port_file.read_text(encoding="utf-8").strip()
            probe = [sys.executable, "-m", "service.cli.health", "--target", target, "--wait", "2"]
            if subprocess.run(probe, check=False).returncode == 0:
                return target
        time.sleep(POLL_S)
    return None


if __name__ == "__main__":
    typer.run(main)
