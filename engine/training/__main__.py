"""`python -m engine.training`: `draftwire train-draft`, the part that needs torch.

Exit status: 0 done, 1 failed, 2 a model, data or settings that cannot be used, 130 stopped by
SIGINT or SIGTERM (a second one does not wait). With --tied it stops when its standard input ends,
so that it never outlives whoever started it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from engine.errors import ConfigError, EngineError

FAILED, MISTAKEN, STOPPED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """`--model` is a directory here."""
    given = vars(_parser().parse_args(arguments))
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    if given.pop("tied"):
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    # Brings in torch, for seconds: after all that must answer meanwhile.
    from engine.training.order import Interrupted, Order
    from engine.training.progress import Progress
    from engine.training.run import train_draft

    try:
        order = Order(**{**given, "data": tuple(given["data"])})
        train_draft(order, time.monotonic, Progress(), stop.is_set)
    except Interrupted:
        return _say("stopped; the same command goes on from here", STOPPED)
    except (ConfigError, ValueError) as error:
        return _say(str(error), MISTAKEN)
    except (EngineError, OSError) as error:
        return _say(str(error), FAILED)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.training", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--tied", action="store_true")
    return parser


def _say(text: str, status: int) -> int:
    print(f"draftwire: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return status


def _stop_with_stdin() -> None:
    while os.read(0, 4096):  # not by the file, whose lock would be held as the process ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
