"""`draftwire models`: what is supplied and what is here; fetching ahead of the first use."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from engine.errors import ModelError
from service.models.catalogue import CatalogueModel
from service.models.errors import UnknownModel
from service.models.progress import shown
from service.models.pull import parts_fetched
from service.models.store import Store
from service.models.supply import Supply

FAILED = 1
MISTAKEN = 2

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the models that are supplied by name, and whether they are here."""
    supply = Supply.of_user(os.environ)
    rows = [_row(model, supply.store) for model in supply.catalogue]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(box=None)
    for heading in ("name", "download", "on disk", "licence", "state", "purpose"):
        table.add_column(heading, no_wrap=heading != "purpose")
    for row in rows:
        sizes = (f"{int(str(row[key])) / 1e6:,.0f} MB" for key in ("download_bytes", "ready_bytes"))
        cells = (*sizes, row["licence"], row["state"], row["purpose"])
        table.add_row(str(row["name"]), *map(str, cells))
    Console().print(table)


@app.command("pull")
def pull_models(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Supplied names, GGUF files, hub ids."),
    ],
) -> None:
    """Fetch models and make them ready. Exit status: 0 ready, 1 failed, 2 no such model."""
    console = Console(stderr=True)
    try:
        for name in names:
            with shown(console) as report:
                directory = Supply.of_user(os.environ, report).resolve(name)
            typer.echo(f"{name} is ready in {directory}")
    except ModelError as error:
        typer.echo(f"draftwire: {error}", err=True)
        raise typer.Exit(MISTAKEN if isinstance(error, UnknownModel) else FAILED) from error


def _row(model: CatalogueModel, store: Store) -> dict[str, object]:
    directory = store.ready(model.name)
    fetched = parts_fetched(model, store)
    state = "outdated" if store.directory(model.name).exists() else "not pulled"
    if fetched:
        state = f"{fetched} of {len(model.carriers)} parts"
    return {
        "name": model.name,
        "purpose": model.purpose,
        "licence": model.licence,
        "download_bytes": model.size,
        "ready_bytes": model.ready_size,
        "state": "ready" if directory else state,
        "directory": str(directory) if directory else None,
    }
