"""The engine's process: `python -m engine.child FD`, FD being one end of a socket pair.

First message in: the EngineConfig. Then commands in, replies out (`engine.messages`). It ends
when told to, when the other side is gone, or when the engine cannot go on. SIGUSR1 dumps stacks.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.host import Host, Inbox, LastReport
from engine.messages import Command, Failed, Ready, Stop


def main(fd: int) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # An interrupt from the terminal reaches the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection = Connection(fd)
    try:
        return _serve(connection, connection.recv())
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return 0
    except ConfigError as error:
        connection.send(Failed(str(error), final=True))
        return 2
    except Exception as error:
        connection.send(Failed(f"{type(error).__name__}: {error}", final=False))
        raise


def _serve(connection: Connection, config: EngineConfig) -> int:
    inbox, ready, reports = Inbox(), threading.Event(), LastReport()
    reader = threading.Thread(target=_read, args=(connection, inbox, ready), daemon=True)
    reader.start()
    # Brings in torch, for seconds: after all that must answer meanwhile, signals and a Stop.
    from engine.build import build

    built = build(config, time.monotonic, reports)
    # Libraries and models stay; to look through them for garbage would stop a step for long.
    gc.collect()
    gc.freeze()
    ready.set()
    connection.send(Ready(built.info))
    Host(built.engine, reports, inbox, connection.send).run()
    return 0


def _read(connection: Connection, inbox: Inbox, ready: threading.Event) -> None:
    """Bring commands to the inbox; the end of the connection is a Stop. While the model is still
    being loaded there is nothing to finish, so a Stop ends the process at once."""
    command: Command | None = None
    while not isinstance(command, Stop):
        try:
            command = connection.recv()
        except (EOFError, OSError):
            command = Stop()
        if isinstance(command, Stop) and not ready.is_set():
            os._exit(0)
        inbox.put(command)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
