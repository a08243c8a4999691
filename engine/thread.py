"""The engine in a thread of this process: for tests and for embedding."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from engine.client import EngineListener, EngineState, Ledger
from engine.core import Engine
from engine.errors import EngineDead
from engine.host import Host, Inbox, LastReport
from engine.messages import Cancel, Stepped, Stop, Submit
from engine.outcome import Finish, FinishReason
from engine.request import Request
from engine.types import ModelInfo

Factory = Callable[[LastReport], tuple[Engine, ModelInfo]]


class ThreadClient:
    """`EngineClient` around an engine made by `factory` inside the thread.

    If the engine raises, its requests end with ERROR and the state is FAILED: a thread shares its
    fate with the process, so there is no restart here.
    """

    def __init__(
        self,
        factory: Factory,
        listener: EngineListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._factory = factory
        self._listener = listener
        self._clock = clock
        self._inbox = Inbox()
        self._ledger = Ledger()
        self._lock = threading.Lock()
        self._state = EngineState.STARTING
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def state(self) -> EngineState:
        return self._state

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        # Under the lock, so that a request is in the ledger before the engine's end is declared,
        # and ended with the others, or refused.
        with self._lock:
            if self._state is not EngineState.READY:
                raise EngineDead(f"the engine is {self._state}")
            self._ledger.open(request)
            self._inbox.put(Submit(request))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._inbox.put(Cancel(request_id, reason))

    def stop(self) -> None:
        self._inbox.put(Stop())
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _run(self) -> None:
        reports = LastReport()
        try:
            engine, info = self._factory(reports)
            self._change(EngineState.READY, info)
            Host(engine, reports, self._inbox, self._deliver).run()
        except BaseException as error:  # whatever ends the thread must end its requests
            cause = f"{type(error).__name__}: {error}"
            self._close(Finish(FinishReason.ERROR, error=cause), EngineState.FAILED, cause)
        else:
            self._close(Finish(FinishReason.DRAINED), EngineState.STOPPED, "")

    def _close(self, finish: Finish, state: EngineState, cause: str) -> None:
        self._change(state, None, cause)
        self._listener.deliver(self._ledger.close_all(finish, self._clock()))

    def _deliver(self, step: Stepped) -> None:
        chunks = self._ledger.pass_on(step.chunks, self._clock())
        if chunks:
            self._listener.deliver(chunks)
        if step.report is not None:
            self._listener.report(step.report)

    def _change(self, state: EngineState, info: ModelInfo | None, cause: str = "") -> None:
        with self._lock:
            self._state = state
        self._listener.changed(state, info, cause)
