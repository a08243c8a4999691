"""A closed loop: each of `concurrency` clients sends its next request when its last one ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from loadtest.client import Record, Stream
from service.pb import draftwire_pb2 as pb

Params = Callable[[int], pb.GenerationParams]
OnEnd = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Load:
    """How much load: `requests` are measured, after `warmup` others; `timeout` seconds for each."""

    target: str
    concurrency: int
    requests: int
    warmup: int
    streams: int
    timeout: float


async def measure(load: Load, params: Params, on_end: OnEnd) -> list[Record]:
    """Warm up, then send `params(0)` to `params(requests - 1)`; the records of those that ended
    in time. The warm-up takes the indices after them, so that it caches none of their prompts."""
    streams = [Stream(load.target, time.perf_counter) for _ in range(load.streams)]
    everything = range(load.requests + load.warmup)
    try:
        await _loop(streams, params, everything[load.requests :], load, on_end)
        return await _loop(streams, params, everything[: load.requests], load, on_end)
    finally:
        for stream in streams:
            await stream.close()


async def _loop(
    streams: Sequence[Stream], params: Params, indices: Iterable[int], load: Load, on_end: OnEnd
) -> list[Record]:
    queue = iter(indices)  # shared: whoever is free takes the next
    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(record)
        on_end(record)

    with suppress(TimeoutError):
        async with asyncio.timeout(load.timeout), asyncio.TaskGroup() as clients:
            for number in range(load.concurrency):
                stream = streams[number % len(streams)]
                clients.create_task(_client(stream, params, queue, keep))
    return records


async def _client(stream: Stream, params: Params, queue: Iterator[int], keep: OnEnd) -> None:
    for index in queue:
        keep(await stream.generate(f"load-{index}", params(index)))
