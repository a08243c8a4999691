"""`draftwire`: the commands put together."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from service.cli.generate import generate
from service.cli.replay import replay
from service.cli.serve import serve_command
from service.cli.train import train_draft
from service.models.cli import app as models


def build() -> typer.Typer:
    """The whole command line as one typer application."""
    app = typer.Typer(
        name="draftwire",
        help="Text generation with speculative decoding over gRPC.",
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,  # a prompt is never printed by accident
    )
    app.callback()(root)
    app.command("serve")(serve_command())
    app.command()(generate)
    app.command()(replay)
    app.command("train-draft")(train_draft)
    app.add_typer(models, name="models", help="The models that Draftwire knows by name.")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftwire {version('draftwire')}")
        raise typer.Exit


def root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options that stand before the command."""
