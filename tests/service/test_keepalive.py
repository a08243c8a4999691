"""A client that pings often keeps its connection, with a silent call and without any."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from service.pb import draftwire_pb2 as pb
from tests.service.harness import running

# Scaled: a ping every 50 ms where a real client pings every 10 s.
PING_MS = 50
PINGING = (
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@pytest.mark.parametrize(("allowed_s", "cut"), [(0.02, False), (300.0, True)])
async def test_frequent_pings_on_a_silent_stream(
    model_dir: Path, allowed_s: float, cut: bool
) -> None:
    """With gRPC's default of 300 s the same client loses the connection: the test can tell."""
    async with running(model_dir, options=PINGING, min_ping_interval_s=allowed_s) as served:
        session = await served.session()
        await session.start("queued", max_tokens=1)
        await session.event("accepted")
        reading = asyncio.ensure_future(session.call.read())
        await asyncio.wait([reading], timeout=20 * PING_MS / 1000 if not cut else 10)
        if cut:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reading
            assert "many pings" in str(caught.value.details())
            return
        assert not reading.done()
        served.engine.step()
        frame = await reading
        assert frame.events[-1].finished.reason == pb.FINISH_REASON_LENGTH
