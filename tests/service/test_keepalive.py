"""A client that pings often keeps its connection through a long silence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from service.pb import draftwire_pb2 as pb
from tests.service.fakes import TIMEOUT_S
from tests.service.harness import running

# gRPC pings once a second at most; the third bad ping cuts the connection.
PINGING = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SILENCE_S = 5.0


async def kept(model_dir: Path, allowed_s: float) -> bool:
    """Whether a queued generation outlives the silence on a server that allows such pings."""
    async with running(model_dir, options=PINGING, min_ping_interval_s=allowed_s) as served:
        session = await served.session()
        await session.start("queued", max_tokens=1)
        await session.event("accepted")
        reading = asyncio.ensure_future(session.call.read())
        await asyncio.wait([reading], timeout=SILENCE_S)
        if reading.done():
            error = reading.exception()
            assert isinstance(error, grpc.aio.AioRpcError)
            assert "many pings" in str(error.details())
            return False
        served.engine.step()
        async with asyncio.timeout(TIMEOUT_S):
            frame = await reading
        assert frame.events[-1].finished.reason == pb.FINISH_REASON_LENGTH
        return True


async def test_frequent_pings_on_a_silent_stream(model_dir: Path) -> None:
    """With gRPC's default of 300 s the same client is cut off: the test can tell."""
    assert await asyncio.gather(kept(model_dir, 0.5), kept(model_dir, 300.0)) == [True, False]
