"""How a command reaches a server."""

from __future__ import annotations

import grpc

OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # --target names the server itself
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # the default grows to two minutes
)


def connect(target: str) -> grpc.aio.Channel:
    """A plaintext channel to HOST:PORT. Connects when first used; close it."""
    return grpc.aio.insecure_channel(target, options=OPTIONS)
