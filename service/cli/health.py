"""Is the server serving? `python -m service.cli.health [--target HOST:PORT] [--wait S]` is the
probe of the container: exit 0 if it is."""

from __future__ import annotations

import asyncio
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.cli.channel import connect

SERVING = health_pb2.HealthCheckResponse.SERVING
ANSWER_S = 2.0
RETRY_S = 0.1


async def is_serving(channel: grpc.aio.Channel) -> bool:
    """Whether the server says SERVING; False also if it cannot be reached soon."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(reply.status == SERVING)


async def wait_serving(channel: grpc.aio.Channel, patience: float) -> bool:
    """Wait until the server says SERVING; False if it has not within `patience` seconds.

    A server that is not up yet, or goes away and comes back, is waited for too.
    """
    try:
        async with asyncio.timeout(patience):
            while True:
                if await _watch(channel):
                    return True
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        return False


async def _watch(channel: grpc.aio.Channel) -> bool:
    """Follow the live status; True at SERVING, False if the stream ends before."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        async for reply in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
            if reply.status == SERVING:
                return True
    except grpc.aio.AioRpcError:
        return False
    return False


async def _probe(target: str, wait: float) -> bool:
    async with connect(target) as channel:
        return await (wait_serving(channel, wait) if wait > 0 else is_serving(channel))


def main(
    target: Annotated[str, typer.Option(metavar="HOST:PORT")] = "127.0.0.1:50051",
    wait: Annotated[float, typer.Option(metavar="S", help="Wait this long for it.")] = 0.0,
) -> None:
    """Exit 0 if the server is SERVING, else 1."""
    raise typer.Exit(0 if asyncio.run(_probe(target, wait)) else 1)


if __name__ == "__main__":
    typer.run(main)
