"""`make bench`: Draftwire's own measurements, one after another, within ten minutes.

Each is a command of its own that prints a table and, as its last line, one JSON object; they are
gathered into one object, the last line of stdout. `--only NAME` (again and again) takes some.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any

COMMANDS = {
    "serving": "-m loadtest compare --own",
    "bandwidth": "-m tests.bandwidth",
    "memory": "-m loadtest memory",
    "batching": "-m tests.batching --rounds 2",
    "prefix-cache": "-m tests.switchback prefix-cache --streams 32 --seconds 60",
    "drafts": "-m tests.switchback drafts --streams 8 --seconds 40",
    "grammar": "-m tests.constrained",
    "numerics": "-m tests.switchback numerics --streams 8 --seconds 40",
}


def run(command: str) -> tuple[dict[str, Any] | None, int]:
    """Show what `command` prints, but for its last line: that is returned, with its status."""
    process = subprocess.Popen(
        [sys.executable, *shlex.split(command)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = ""
    with process.stdout:
        for line in process.stdout:
            print(last, end="", flush=True)
            last = line
    status = process.wait()
    try:
        found: dict[str, Any] = json.loads(last)
    except ValueError:
        print(last, end="", flush=True)
        return None, status or 1
    return found, status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=sorted(COMMANDS))
    args = parser.parse_args()
    results: dict[str, Any] = {}
    worst = 0
    for name in args.only or COMMANDS:
        print(f"\n{name}: python {COMMANDS[name]}", flush=True)
        results[name], status = run(COMMANDS[name])
        worst = max(worst, abs(status))
    print(json.dumps(results))
    return min(worst, 1)


if __name__ == "__main__":
    sys.exit(main())
