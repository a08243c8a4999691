"""Speaks as much of llama-server's HTTP as a comparison uses; one token less for a prompt of 13.
Started with a draft model it says of every prompt that 3 tokens were drafted and 2 accepted.

What it was asked, and with which arguments it was started, goes to the file $FAKE_JOURNAL.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def note(what: Any) -> None:
    with Path(os.environ["FAKE_JOURNAL"]).open("a") as journal:
        journal.write(json.dumps(what) + "\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note(body)
        tokens = body["n_predict"] - (13 in body["prompt"])
        drafts = {"draft_n": 3, "draft_n_accepted": 2} if "--spec-draft-model" in sys.argv else {}
        timings = {"predicted_n": tokens, **drafts}
        self._answer({"tokens_predicted": tokens, "timings": timings})

    def _answer(self, what: dict[str, Any]) -> None:
        data = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if sys.argv[1:] == ["--version"]:
    raise SystemExit("version: 1")
note(sys.argv[1:])
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
