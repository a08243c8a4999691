"""Memory over many calls and over one long call. Client and server share the process here, so a
leak in either would show."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from pathlib import Path

import psutil
import pytest

from service.pb import draftwire_pb2 as pb
from tests.service.harness import Harness, params_of, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1 << 20


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


async def cancelled_streams(served: Harness, count: int) -> None:
    limit = asyncio.Semaphore(50)

    async def one(n: int) -> None:
        async with limit:
            call = served.generations.Generate(pb.GenerateRequest(params=params_of()))
            for _ in range(n % 4):
                await call.read()
            call.cancel()

    for start in range(0, count, 500):
        await asyncio.gather(*(one(n) for n in range(start, start + 500)))
        served.spans.clear()
        served.engine.cancels.clear()
        served.engine.requests.clear()
        served.engine.finishes.clear()
        served.log.truncate(0)
        served.log.seek(0)


async def test_twenty_thousand_cancelled_streams_do_not_grow_the_process(model_dir: Path) -> None:
    async with running(model_dir) as served:
        served.engine.play(pause_s=0.002)
        await cancelled_streams(served, 5_000)
        before = rss()
        await cancelled_streams(served, 20_000)
        grown = rss() - before
        served.engine.pause()
    assert grown < 10 * MIB, f"{grown / MIB:.1f} MiB"


async def test_a_session_of_twenty_thousand_generations_does_not_grow(model_dir: Path) -> None:
    async with running(model_dir) as served:
        client = await served.session()

        async def generations(count: int) -> None:
            for n in range(count):
                await client.start(str(n), max_tokens=1)
                await client.event("accepted")
                served.engine.step()
                await client.event("delta")
                await client.event("finished")
            client.frames.clear()
            served.spans.clear()
            served.engine.requests.clear()
            served.engine.finishes.clear()
            served.log.truncate(0)
            served.log.seek(0)

        await generations(1_000)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        grown = []
        for _ in range(5):
            await generations(4_000)
            gc.collect()
            grown.append(tracemalloc.get_traced_memory()[0] - before)
        tracemalloc.stop()
        assert grown[-1] - grown[0] < MIB, grown
