"""A worker as `loadtest/peers/worker.py`, without an engine: it does what its options say.

It appends a line per job to `journal`: its name, the first prompt and the number of prompts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def run(options: dict[str, Any], job: dict[str, Any], number: int) -> dict[str, Any]:
    with Path(options["journal"]).open("a") as journal:
        journal.write(f"{options['name']} {job['prompts'][0]} {len(job['prompts'])}\n")
    if number == options.get("dies_at"):
        print("Segmentation fault", file=sys.stderr, flush=True)
        sys.exit(9)
    if number == options.get("fails_at"):
        return {"error": "RuntimeError: out of memory"}
    if number == options.get("hangs_at"):
        time.sleep(60)
    counts = [job["max_tokens"]] * len(job["prompts"])
    if number == options.get("miscounts_at"):
        counts[-1] -= 1
    return {"seconds": options.get("seconds", 1.0) * len(counts), "counts": counts}


def main() -> None:
    options: dict[str, Any] = {}
    jobs = 0
    for line in sys.stdin:
        question = json.loads(line)
        if question["op"] == "load":
            options = question["options"]
            if options.get("missing"):
                answer: dict[str, Any] = {"missing": "no module named peer"}
            else:
                answer = {"facts": {"version": "1"}}
        else:
            answer = run(options, question["job"], jobs)
            jobs += 1
        print(json.dumps(answer), flush=True)


main()
