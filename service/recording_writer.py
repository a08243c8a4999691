"""What is recorded goes to the disk here, in a thread of its own: nobody ever waits for it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from service.harmless import Harmless
from service.metrics import RecordingMetrics
from service.record import Log

# What may wait for the disk; beyond that records are dropped.
MOST_WAITING = 1024
MOST_WAITING_BYTES = 64 << 20
LOG_EVERY_S = 60.0


class Drop(StrEnum):
    """Why a record was not written."""

    QUEUE_FULL = "queue_full"
    DISK = "disk"
    TOO_LARGE = "too_large"
    INTERNAL = "internal"
    STOPPED = "stopped"


class Store(Protocol):
    """Keeps lines by tenant; `service.segments` on disk. Used by one thread, after `open`."""

    def open(self) -> None:
        """Raises OSError if nothing can be kept."""
        ...

    def append(self, tenant: str, line: bytes) -> bool:
        """False if the line is larger than what may be kept. Raises OSError."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """A line to write. `line` makes it, in the writer's thread; `size` is about the bytes of memory
    that are held until then."""

    tenant: str
    size: int
    line: Callable[[], bytes]


class Losses:
    """Counts what is dropped, by reason, and logs it once a minute. Any thread; never raises."""

    def __init__(
        self,
        metrics: RecordingMetrics,
        harmless: Harmless,
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._harmless = harmless
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._untold: Counter[str] = Counter()
        self._next_line = float("-inf")

    def add(self, reason: Drop, error: str = "") -> None:
        with self._harmless:
            self._metrics.dropped(reason)
        with self._lock:
            self._untold[reason.value] += 1
            if self._clock() < self._next_line:
                return
            self._next_line = self._clock() + LOG_EVERY_S
            untold, self._untold = dict(self._untold), Counter()
        with self._harmless:
            self._log.warning("records dropped", **untold, **({"error": error} if error else {}))


class Writer:
    """`put` from one thread, `close` from any; both after `start`."""

    def __init__(
        self,
        store: Store,
        losses: Losses,
        metrics: RecordingMetrics,
        harmless: Harmless,
        most_waiting: int = MOST_WAITING,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
    ) -> None:
        self._store = store
        self._losses = losses
        self._metrics = metrics
        self._harmless = harmless
        self._most_waiting = most_waiting
        self._most_waiting_bytes = most_waiting_bytes
        self._jobs: deque[Job] = deque()
        self._bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        # A daemon, so that a disk that hangs cannot keep the process.
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)

    def start(self) -> None:
        """Raises OSError if the store cannot be opened."""
        self._store.open()
        self._thread.start()

    def put(self, job: Job) -> None:
        """Have a line written, or dropped if too much waits. Does not block."""
        with self._changed:
            full = (
                len(self._jobs) >= self._most_waiting
                or self._bytes + job.size > self._most_waiting_bytes
            )
            closing = self._closing
            if not full and not closing:
                self._jobs.append(job)
                self._bytes += job.size
                self._changed.notify()
                return
        self._losses.add(Drop.STOPPED if closing else Drop.QUEUE_FULL)

    def close(self, timeout_s: float) -> None:
        """Write what waits; drop what is left of it after `timeout_s`. Blocks so long at most."""
        if self._thread.ident is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            left = len(self._jobs)
            self._jobs.clear()
        for _ in range(left):
            self._losses.add(Drop.STOPPED)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._write(job)
            with self._changed:
                self._bytes -= job.size
        with suppress(OSError):
            self._store.close()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._jobs and not self._closing:
                self._changed.wait()
            return self._jobs.popleft() if self._jobs else None

    def _write(self, job: Job) -> None:
        try:
            kept = self._store.append(job.tenant, job.line())
        except OSError as error:
            self._losses.add(Drop.DISK, f"{type(error).__name__}: {error}")
        except Exception as error:  # one bad record must not end the others
            self._losses.add(Drop.INTERNAL, type(error).__name__)
        else:
            if not kept:
                self._losses.add(Drop.TOO_LARGE)
                return
            with self._harmless:
                self._metrics.written()
