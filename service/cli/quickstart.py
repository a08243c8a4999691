"""`make run`: bring up a server in the background and stream a first completion from it.

`make stop` is this with `--stop`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated

import typer

from engine.errors import ConfigError
from service.cli.background import AlreadyRunning, Background
from service.cli.channel import connect
from service.cli.health import is_serving, wait_serving
from service.settings import ServeSettings

PROMPT = '''def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number."""'''
STOPS = ("\ndef ", "\n\n\n", "\n```")
STOP_GRACE_S = 35.0
POLL_S = 0.2


class Failed(Exception):
    """Something that ends the command, in words."""


def main(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT")] = "127.0.0.1:50051",
    folder: Annotated[Path, typer.Option(help="For the log and the pid file.")] = Path(".run"),
    oneshot: Annotated[bool, typer.Option("--oneshot", help="Stop the server at the end.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the server and do no more.")] = False,
    patience: Annotated[float, typer.Option(metavar="S", help="For the server to serve.")] = 600.0,
) -> None:
    """Start a server unless one is there, stream a completion, and say how to go on."""
    background = Background(folder)
    if stop:
        stopped = background.stop(STOP_GRACE_S)
        say("stopped" if stopped else "no server was started from here")
        return
    try:
        with ExitStack() as stack:
            ours = bring_up(background, listen, patience, stack)
            complete(listen)
            if not oneshot:
                stack.pop_all()  # leave the server running
                explain(listen, background if ours else None)
    except (Failed, ConfigError, AlreadyRunning) as failure:
        say(str(failure))
        raise typer.Exit(1) from failure


def bring_up(background: Background, listen: str, patience: float, stack: ExitStack) -> bool:
    """Have a server SERVING at `listen`, stopped by `stack`; False if it was there already."""
    if asyncio.run(_is_serving(listen)):
        say(f"a server is already serving at {listen}; using it")
        return False
    if (pid := background.pid()) is not None:
        raise Failed(
            f"process {pid} was started from here but is not serving at {listen}: see "
            f"{background.log}, or stop it with `make stop`"
        )
    pull(ServeSettings.load().model)
    say(f"starting the server at {listen} (log: {background.log})")
    server = background.start(["--listen", listen])
    stack.callback(background.stop, STOP_GRACE_S)
    if not asyncio.run(_until_serving(listen, server, patience)):
        code = server.poll()
        what = "is not serving yet" if code is None else f"stopped with exit status {code}"
        raise Failed(f"{background.tail()}\n\nthe server {what}; its log ends as above")
    return True


def pull(model: str) -> None:
    """Fetch the model here, with a progress bar; the server would do it too, but silently."""
    _draftwire("the model could not be fetched", sys.stderr, "models", "pull", model)


def complete(target: str) -> None:
    """Stream a completion of the built-in prompt to the terminal, through the real client."""
    say(f"completing through `draftwire generate --target {target}`:\n")
    print(PROMPT, end="", flush=True)
    options = ["--target", target, "--max-tokens", "96", "--temperature", "0"]
    for stop in STOPS:
        options += ["--stop", stop]
    _draftwire("the completion failed", sys.stdout, "generate", PROMPT, *options)
    print(flush=True)


def explain(target: str, background: Background | None) -> None:
    """How to call the server, and how to stop it if it is ours."""
    command = Path(sys.executable).with_name("draftwire")
    say(f"\nThe server is at {target}. To call it:")
    say(f"  {command} generate 'import numpy as' --target {target} --max-tokens 40")
    say(f"  {command} generate 'What is a mutex?' --chat --target {target}")
    say(f"  {sys.executable} -m loadtest --target {target} --concurrency 8 --requests 40")
    if background is not None:
        say(f"Its log is {background.log}; `make stop` stops it.")


def say(line: str) -> None:
    """To stderr: stdout is for the completion."""
    print(line, file=sys.stderr, flush=True)


def _draftwire(failure: str, stdout: IO[str], *arguments: str) -> None:
    command = [sys.executable, "-m", "service", *arguments]
    if subprocess.run(command, stdout=stdout, check=False).returncode != 0:
        raise Failed(failure)


async def _is_serving(target: str) -> bool:
    async with connect(target) as channel:
        return await is_serving(channel)


async def _until_serving(target: str, server: subprocess.Popen[bytes], patience: float) -> bool:
    async with connect(target) as channel:
        serving = asyncio.create_task(wait_serving(channel, patience))
        while not serving.done() and server.poll() is None:
            await asyncio.wait([serving], timeout=POLL_S)
        if serving.done():
            return serving.result()
        serving.cancel()
        return False


if __name__ == "__main__":
    typer.run(main)
