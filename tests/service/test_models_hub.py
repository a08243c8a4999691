"""Models from a hub, against a small hub of our own on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": os.urandom(1 << 20),
    "README.md": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
}
CODE = """
import sys
from service.models.errors import DownloadFailed
from service.models.hub import snapshot
seen = []
try:
    path = snapshot(sys.argv[1], lambda stage, done=0, total=0: seen.append((stage, done, total)))
    print(*sorted(str(p.relative_to(path)) for p in path.rglob("*")), seen[-1:])
except DownloadFailed as error:
    print("DownloadFailed:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """The few answers that a download needs. `failing` names a file that is not delivered."""

    failing = ""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/")
        if path == "api/models/org/tiny/revision/main":
            self._json({"id": "org/tiny", "sha": COMMIT, "siblings": []})
        elif path.startswith(f"api/models/org/tiny/tree/{COMMIT}"):
            self._json(
                [
                    {"type": "file", "path": n, "size": len(c), "oid": _etag(c)}
                    for n, c in FILES.items()
                ]
            )
        elif (name := path.removeprefix(f"org/tiny/resolve/{COMMIT}/")) in FILES:
            self._file(name)
        else:
            self.send_error(404)

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        if name == self.failing:
            self.send_error(403)
            return
        self._send(FILES[name], {"ETag": f'"{_etag(FILES[name])}"', "X-Repo-Commit": COMMIT})

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(failing: str = "") -> Iterator[str]:
    """The URL of a hub, for as long as the block runs."""
    handler = type("Handler", (Hub,), {"failing": failing})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def ask(endpoint: str, cache: Path, repository: str = "org/tiny", **environment: str) -> str:
    """What `snapshot` does in a process of its own: the library reads its settings at import."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, repository],
        cwd=ROOT,
        env={**kept, **settings, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.rstrip()


GOT = "config.json model.safetensors tokenizer.json"


def test_fetched_once_then_offline(cache: Path) -> None:
    size = sum(len(FILES[name]) for name in GOT.split())
    with serving() as endpoint:
        assert ask(endpoint, cache) == f"{GOT} [('downloading org/tiny', {size}, {size})]"
    assert ask(endpoint, cache) == f"{GOT} []"  # the hub is gone


def test_incomplete_copy_is_not_taken_for_the_model(cache: Path) -> None:
    with serving(failing="model.safetensors") as endpoint:
        assert ask(endpoint, cache).startswith("DownloadFailed: the hub did not deliver org/tiny")
    with serving() as endpoint:
        assert ask(endpoint, cache).startswith(f"{GOT} [(")


def test_unreachable_hub_and_unknown_model_are_named(cache: Path) -> None:
    with serving() as endpoint:
        unknown = ask(endpoint, cache, "org/absent")
        offline = ask(endpoint, cache, HF_HUB_OFFLINE="1")
    away = ask(endpoint, cache)
    for said, repository in ((unknown, "org/absent"), (offline, "org/tiny"), (away, "org/tiny")):
        assert said.startswith(f"DownloadFailed: the hub did not deliver {repository}: ")
        assert "\n" not in said
