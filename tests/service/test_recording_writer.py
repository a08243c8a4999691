"""A disk that hangs or fails: nobody waits, nobody notices, and what is lost is counted."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.metrics import NoOpMeter

from service.harmless import Harmless
from service.logs import make_log
from service.metrics import RecordingMetrics
from service.pb import draftwire_pb2 as pb
from service.recording_writer import Drop, Job, Losses, Writer
from tests.service.fakes import TIMEOUT_S, eventually, text_of
from tests.service.harness import Harness, running
from tests.service.test_telemetry import total


class StuckStore:
    """A disk that hangs until it is let go; knows what reached it."""

    def __init__(self, *_: Any) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()
        self.lines: list[bytes] = []

    def open(self) -> None:
        return None

    def append(self, tenant: str, line: bytes) -> bool:
        self.reached.set()
        assert self.go.wait(TIMEOUT_S)
        self.lines.append(line)
        return True

    def close(self) -> None:
        return None


class TinyStore(StuckStore):
    def append(self, tenant: str, line: bytes) -> bool:
        return False


class BrokenStore(StuckStore):
    def append(self, tenant: str, line: bytes) -> bool:
        raise OSError(28, "No space left on device")


async def _ten_generations(served: Harness) -> None:
    session = await served.session()
    for i in range(10):
        await session.start(f"g{i}", max_tokens=2)
        await session.event("accepted")
        served.engine.step(2)
        events = (await session.until_finished(f"g{i}"))[f"g{i}"]
        assert "".join(e.delta.text for e in events) == text_of(2)
        assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH


async def test_a_disk_that_hangs_costs_records_and_nothing_else(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StuckStore()
    monkeypatch.setattr("service.server.Segments", lambda *_: store)
    monkeypatch.setattr("service.server.MOST_FLUSH_S", 0.1)
    monkeypatch.setattr("service.server.LAST_WORDS_S", 0.1)
    monkeypatch.setattr("service.server.Writer", partial(Writer, most_waiting=3))
    async with running(model_dir, record=tmp_path) as served:
        await _ten_generations(served)
        assert store.reached.wait(TIMEOUT_S)
        # One is being written, three wait; the first may not have been taken up at once.
        full = total(served.reader, "draftwire.records.dropped")
        assert full in (6, 7)
        lines = [line for line in served.logged() if line["event"] == "records dropped"]
        assert len(lines) == 1
        assert lines[0]["queue_full"] == 1
        async with asyncio.timeout(TIMEOUT_S):
            await served.stop()
        store.go.set()


async def test_a_disk_that_fails_costs_records_and_nothing_else(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.server.Segments", BrokenStore)
    async with running(model_dir, record=tmp_path) as served:
        await _ten_generations(served)
        await eventually(
            lambda: (
                total(served.reader, "draftwire.records.dropped", draftwire__drop__reason="disk")
                == 10
            )
        )
        assert total(served.reader, "draftwire.records.written") == 0
        (line,) = [line for line in served.logged() if line["event"] == "records dropped"]
        assert "No space left" in line["error"]


async def test_what_is_written_is_counted(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir, record=tmp_path) as served:
        await _ten_generations(served)
        await eventually(lambda: total(served.reader, "draftwire.records.written") == 10)
        assert total(served.reader, "draftwire.records.dropped") == 0


class Harm:
    """Losses that are kept, over a clock that stands until it is moved."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        self.now = 0.0
        log = make_log("info", "json", self.out)
        self.metrics = RecordingMetrics(NoOpMeter("test"))
        self.harmless = Harmless(log, self.clock)
        self.losses = Losses(self.metrics, self.harmless, log, self.clock)

    def clock(self) -> float:
        return self.now

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.getvalue().splitlines()]

    def writer(self, store: Any, *limits: int) -> Writer:
        writer = Writer(store, self.losses, self.metrics, self.harmless, *limits)
        writer.start()
        return writer


def test_one_line_a_minute_says_how_many() -> None:
    harm = Harm()
    for now in (0.0, 1.0, 59.0, 60.0, 61.0):
        harm.now = now
        harm.losses.add(Drop.DISK if now != 59 else Drop.QUEUE_FULL, "broken")
    first, second = harm.lines()
    assert (first["disk"], first["error"]) == (1, "broken")
    assert (second["disk"], second["queue_full"]) == (2, 1)


def test_what_waits_is_bounded_in_bytes() -> None:
    harm, store = Harm(), StuckStore()
    writer = harm.writer(store, 100, 1000)
    for _ in range(3):
        writer.put(Job("t", 400, lambda: b"x"))
    assert [line["queue_full"] for line in harm.lines()] == [1]
    store.go.set()
    writer.close(TIMEOUT_S)
    assert store.lines == [b"x"] * 2
    writer.put(Job("t", 1, lambda: b"x"))  # after the end
    assert store.lines == [b"x"] * 2


def test_room_comes_back_when_it_is_written() -> None:
    harm, store = Harm(), StuckStore()
    store.go.set()
    writer = harm.writer(store, 1, 1000)
    for i in range(20):
        writer.put(Job("t", 1000, lambda: b"x"))
        while writer._bytes:
            threading.Event().wait(0.001)
        assert len(store.lines) == i + 1
    writer.close(TIMEOUT_S)
    assert harm.lines() == []


def test_closing_writes_what_waits_within_bounds() -> None:
    harm, store = Harm(), StuckStore()
    writer = harm.writer(store)
    for _ in range(5):
        writer.put(Job("t", 1, lambda: b"x"))
    assert store.reached.wait(TIMEOUT_S)
    writer.close(0.05)
    assert [line["stopped"] for line in harm.lines()] == [1]
    assert sum(harm.losses._untold.values()) == 3
    store.go.set()
    writer._thread.join(TIMEOUT_S)
    assert store.lines == [b"x"]


async def test_a_stop_waits_for_what_is_not_written(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StuckStore()
    monkeypatch.setattr("service.server.Segments", lambda *_: store)
    async with running(model_dir, record=tmp_path) as served:
        await _ten_generations(served)
        stopping = asyncio.ensure_future(served.stop())
        recordings: Any = served.server._recordings
        await eventually(lambda: recordings._writer._closing)
        assert store.lines == []
        store.go.set()
        await stopping
        assert len(store.lines) == 10


def test_what_is_too_large_to_keep_is_counted() -> None:
    harm, store = Harm(), TinyStore()
    writer = harm.writer(store)
    writer.put(Job("t", 1, lambda: b"x"))
    writer.close(TIMEOUT_S)
    assert [line["too_large"] for line in harm.lines()] == [1]


def test_a_record_that_cannot_be_made_does_not_end_the_others() -> None:
    harm, store = Harm(), StuckStore()
    store.go.set()
    writer = harm.writer(store)

    def fails() -> bytes:
        raise ZeroDivisionError

    writer.put(Job("t", 1, fails))
    writer.put(Job("t", 1, lambda: b"x"))
    writer.close(TIMEOUT_S)
    assert store.lines == [b"x"]
    assert [line["internal"] for line in harm.lines()] == [1]
