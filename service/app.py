"""Runs the server until it is told to stop, and says how that went by an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console

from engine.errors import ConfigError
from engine.specs import resolve_models
from service.logs import library_handler, make_log
from service.record import Log
from service.server import BindError, ClientFactory, Server
from service.settings import ServeSettings
from service.telemetry import make_telemetry

OK = 0
ERROR = 1
MISCONFIGURED = 2


class StopSignals:
    """SIGTERM or SIGINT asks to stop; a second one asks to stop at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def notice(self) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    def install(self) -> Callable[[], None]:
        """Listen to the process's signals; returns what undoes it."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.notice)

        def undo() -> None:
            for number in signals:
                loop.remove_signal_handler(number)

        return undo


async def serve(
    settings: ServeSettings, make_client: ClientFactory, log: Log, stop: StopSignals
) -> int:
    """Serve until `stop` or until the engine fails for good; returns the exit code."""
    telemetry = make_telemetry(
        settings.telemetry,
        _version(),
        settings.otlp_endpoint,
        settings.metrics_interval_s,
    )
    log.info("starting", settings=settings.redacted())
    server = Server(settings, make_client, telemetry, log)
    try:
        await server.start()
    except BindError as error:
        await server.abandon()
        print(f"draftwire: {error}", file=sys.stderr)
        return ERROR
    except ConfigError:
        await server.abandon()
        raise
    log.info("listening", address=server.address)
    with announced(server.address, settings.port_file):
        failed = await _until_over(server, stop)
    if failed:
        print(f"draftwire: {server.lifecycle.cause}", file=sys.stderr)
        log.error("engine failed", cause=server.lifecycle.cause)
    else:
        log.info("draining", grace_s=settings.grace_s)
    await server.stop(0.0 if failed else settings.grace_s, stop.at_once)
    log.info("stopped")
    return MISCONFIGURED if failed else OK


@contextmanager
def announced(address: str, port_file: Path | None) -> Iterator[None]:
    """Say in a file where to connect, as long as that is worth trying."""
    if port_file is None:
        yield
        return
    write_atomically(port_file, address)
    try:
        yield
    finally:
        with suppress(OSError):
            if port_file.read_text(encoding="utf-8").strip() == address:  # not a successor's
                port_file.unlink()


async def _until_over(server: Server, stop: StopSignals) -> bool:
    """Until the server is to stop; whether that is because the engine failed."""
    waits = [
        asyncio.create_task(stop.asked.wait()),
        asyncio.create_task(server.lifecycle.failed.wait()),
    ]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return server.lifecycle.failed.is_set()


def _version() -> str:
    try:
        return version("draftwire")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the whole new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(f"{text}\n", encoding="utf-8")
    draft.replace(path)


def run(settings: ServeSettings) -> int:
    """`draftwire serve`: exit code 0 after a stop that was asked for, 1 for an error, 2 if the
    settings or the model cannot work. The cause is one line on stderr."""
    log = make_log(settings.log_level, settings.log_format)
    root = logging.getLogger()
    handler = library_handler(settings.log_level, settings.log_format, time.monotonic)
    root.addHandler(handler)
    try:
        # Before the event loop, so that an interrupt ends a long download as it ends any program.
        make_client = engine_factory(settings)
        return asyncio.run(_main(settings, make_client, log))
    except ConfigError as error:
        print(f"draftwire: {error}", file=sys.stderr)
        return MISCONFIGURED
    finally:
        root.removeHandler(handler)


async def _main(settings: ServeSettings, make_client: ClientFactory, log: Log) -> int:
    stop = StopSignals()
    uninstall = stop.install()
    try:
        return await serve(settings, make_client, log, stop)
    finally:
        uninstall()


def engine_factory(settings: ServeSettings) -> ClientFactory:
    """Find the models, fetching what is missing (which shows on stderr), and say how to make
    their engine. Raises ConfigError for a model that cannot be had."""
    from engine.process import ProcessClient, Supervision  # only the real server needs these
    from service.models.progress import shown
    from service.models.store import home_directory
    from service.models.supply import resolve

    with shown(Console(stderr=True)) as report:
        config = resolve_models(
            settings.to_engine_config(), lambda name: str(resolve(name, report))
        )
    config = replace(config, cache_dir=str(home_directory(os.environ) / "checks"))
    supervision = Supervision(watchdog_s=settings.watchdog_s)
    return lambda listener: ProcessClient(config, listener, supervision)
