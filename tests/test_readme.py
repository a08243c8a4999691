"""What README.md tells people to type exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from loadtest.__main__ import app as loadtest_app
from service.cli.app import build
from service.cli.health import main as health_main

ROOT = Path(__file__).parent.parent


def alone(command: Callable[..., None]) -> typer.Typer:
    app = typer.Typer()
    app.command()(command)
    return app


MODULES = {"loadtest": loadtest_app, "service.cli.health": alone(health_main)}


def shown() -> list[str]:
    """Lines of fenced blocks and pieces of inline code, continued lines joined."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    fence = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
    lines = [line for block in fence.findall(text) for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", fence.sub("", text))


def options_of(command: Any) -> set[str]:
    return {
        name for parameter in command.params for name in parameter.opts + parameter.secondary_opts
    }


def check(command: Any, words: list[str]) -> None:
    """Follow sub-commands, then look up every long option."""
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    used = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    assert used <= options_of(command) | {"--help"}
    if getattr(command, "commands", None):
        assert used, f"no such command: {words}"


def test_make_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {name for line in shown() for name in re.findall(r"\bmake ([a-z]+)\b", line)}
    assert {"run", "test"} <= used <= targets


def test_draftwire_commands() -> None:
    lines = [line for line in shown() if re.match(r"(\S*/)?draftwire \w", line)]
    assert lines
    for line in lines:
        check(typer.main.get_command(build()), shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("name", MODULES)
def test_options_of_modules(name: str) -> None:
    for line in shown():
        if found := re.search(rf"python\S* -m {re.escape(name)}( .*|$)", line):
            check(typer.main.get_command(MODULES[name]), shlex.split(found[1], comments=True))


def test_modules_exist() -> None:
    for line in shown():
        for name in re.findall(r"python\S* -m ([\w.]+)", line):
            assert find_spec(name), line
