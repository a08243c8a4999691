"""`draftwire serve`: one option for every setting, made from the settings model itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from engine.errors import ConfigError
from service.settings import PREFIX, ServeSettings

DOC = f"""Serve a model over gRPC.

Every option is also an environment variable ({PREFIX}LISTEN and so on) and a key of the settings
file; the command line wins over the environment, and that over the file. Exit status: 0 stopped,
1 failed, 2 wrong settings.
"""
CONFIG = Parameter(
    "config",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option(metavar="FILE", help="Settings file in TOML.")],
)


def serve_command() -> Callable[..., None]:
    """The command, with a signature that typer can read the options from."""

    def serve(config: Path | None, **options: Any) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        try:
            settings = ServeSettings.load(config, **given)
        except ConfigError as error:
            print(f"draftwire: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        from service.app import run  # only now: it loads the whole server

        raise typer.Exit(run(settings))

    options = (_option(name, field) for name, field in ServeSettings.model_fields.items())
    serve.__signature__ = Signature([CONFIG, *options])  # type: ignore[attr-defined]
    serve.__doc__ = DOC
    return serve


def _option(name: str, field: FieldInfo) -> Parameter:
    """An option that is None unless given: the default is the model's business, and only shown."""
    default = field.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    shown = "" if default in (None, "") else f" Default: {default}."
    option = typer.Option(help=f"{field.description}{shown}", show_default=False)
    kind: Any = field.annotation
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
