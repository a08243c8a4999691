"""`draftwire train-draft`: drafts made for a model, by a process that may have torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from engine.errors import ModelError
from service.models import resolve
from service.models.errors import UnknownModel
from service.models.programs import engine_environment
from service.models.progress import shown

FAILED, MISTAKEN = 1, 2
TRAINER = (sys.executable, "-P", "-m", "engine.training", "--tied")


def train_draft(
    model: Annotated[
        str,
        typer.Option(help="Catalogue name, GGUF file, directory, or hub id; fetched if need be."),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE|DIR...",
            help="What prompts are made of: .py, .md, .rst, .txt, and .jsonl, records included.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the drafts go.")],
    more_data: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
    minutes: Annotated[float, typer.Option(help="How long all of it may take.")] = 60.0,
    tokens: Annotated[
        int, typer.Option(help="Tokens for the model to write; 0: for 40 % of the time.")
    ] = 0,
    steps: Annotated[
        int, typer.Option(help="Steps of training; 0: as many as there is time for.")
    ] = 0,
    vocabulary: Annotated[int, typer.Option(help="Most common tokens that the head knows.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of prompts, samples and training.")] = 0,
    threads: Annotated[int, typer.Option(help="0: one per core.")] = 0,
) -> None:
    """Make drafts for a model out of what it writes itself.

    Prompts are made of your files, the model goes on from them, and a table of n-grams and a small
    head learn from that. Serve with --draft ngram,table:DIR,head:DIR. It may be stopped at any
    time: the same command goes on. Exit status: 0 done, 1 failed, 2 wrong arguments, 130 stopped.
    """
    files = [*data, *(more_data or [])]
    if problem := _problem(files, out):
        raise _ended(problem, MISTAKEN)
    try:
        with shown(Console(stderr=True)) as report:
            directory = resolve(model, report)
    except ModelError as error:
        raise _ended(str(error), MISTAKEN if isinstance(error, UnknownModel) else FAILED) from error
    options = {
        "--model": directory,
        "--out": out,
        "--minutes": minutes,
        "--tokens": tokens,
        "--steps": steps,
        "--vocabulary": vocabulary,
        "--seed": seed,
        "--threads": threads,
    }
    words = [f"{name}={value}" for name, value in options.items()]
    raise typer.Exit(run_child([*TRAINER, *words, "--data", *map(_plain, files)]))


def run_child(command: Sequence[str]) -> int:
    """Its exit status, 128 and more if a signal ended it. SIGINT and SIGTERM are passed on, once
    each time: it is in a session of its own, so that a terminal does not send it another one."""
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, env=engine_environment(), start_new_session=True
        ) as child,
        _passed_on(child),
    ):
        status = child.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    def send(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {n: signal.signal(n, send) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _problem(data: Sequence[Path], out: Path) -> str:
    """What can be said before anything is fetched."""
    for path in data:
        if not path.exists():
            return f"there is no {path}"
    if out.exists() and not out.is_dir():
        return f"{out} is no folder"
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return f"{out} cannot be written"
    return ""


def _plain(path: Path) -> str:
    """Not to be taken for an option."""
    return str(path.absolute())


def _ended(text: str, status: int) -> typer.Exit:
    typer.echo(f"draftwire: {text}", err=True)
    return typer.Exit(status)
