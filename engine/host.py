"""The loop around an engine: commands in, one batch per step out. Used by thread and process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from engine.core import Engine
from engine.messages import Cancel, Command, Stepped, Stop, Submit
from engine.observer import StepReport
from engine.outcome import FinishReason
from engine.request import Request


class Inbox:
    """Commands for the engine's thread, in order. `put` never blocks."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._arrived = threading.Event()

    def put(self, command: Command) -> None:
        self._commands.append(command)
        self._arrived.set()

    def wait(self) -> None:
        """Until there is a command."""
        self._arrived.wait()

    def drain(self) -> list[Command]:
        self._arrived.clear()
        commands = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands


class LastReport:
    """Observer that keeps the newest report until it is taken."""

    def __init__(self) -> None:
        self._report: StepReport | None = None

    def step(self, report: StepReport) -> None:
        self._report = report

    def take(self) -> StepReport | None:
        report, self._report = self._report, None
        return report


class Host:
    """Runs an engine until a Stop arrives; then every live generation ends with DRAINED.

    `send` gets one `Stepped` per step, and one before it if something has ended meanwhile. While
    there is nothing to do the host sleeps. A request that is not ready is held until it is; no step
    waits for it.
    """

    def __init__(
        self,
        engine: Engine,
        reports: LastReport,
        inbox: Inbox,
        send: Callable[[Stepped], None],
    ) -> None:
        self._engine = engine
        self._reports = reports
        self._inbox = inbox
        self._send = send
        self._held: dict[str, FinishReason | None] = {}  # by id; the reason if cancelled meanwhile
        self._stopped = False

    def run(self) -> None:
        """Serve until stopped. What the engine raises goes to the caller."""
        while not self._stopped:
            if not self._engine.busy:
                self._inbox.wait()
            self._apply()
            if ended := self._engine.collect():
                self._send(Stepped(tuple(ended), None))
            if self._engine.busy:
                chunks = self._engine.step(self._apply)
                self._send(Stepped(tuple(chunks), self._reports.take()))

    def _apply(self) -> None:
        for command in self._inbox.drain():
            match command:
                case Submit(request):
                    self._submit(request)
                case Cancel(request_id, reason) if request_id in self._held:
                    self._held[request_id] = reason
                case Cancel(request_id, reason):
                    self._engine.cancel(request_id, reason)
                case Stop():
                    for request_id in self._engine.scheduler.live:
                        self._engine.cancel(request_id, FinishReason.DRAINED)
                    self._stopped = True

    def _submit(self, request: Request) -> None:
        if not self._engine.prepare(request, lambda: self._inbox.put(Submit(request))):
            self._held.setdefault(request.id, None)
            return
        self._engine.submit(request)
        reason = self._held.pop(request.id, None)
        if reason is not None:
            self._engine.cancel(request.id, reason)
