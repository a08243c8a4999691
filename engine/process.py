"""The engine in a supervised child process.

Native code that dies takes no stream with it, and engine and service do not share an interpreter
lock. A child that ends or hangs is replaced, with back-off; its generations end with a retryable
ERROR at once.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from engine.client import EngineListener, EngineState, Ledger
from engine.config import EngineConfig
from engine.errors import EngineDead
from engine.messages import Cancel, Command, Failed, Ready, Reply, Stepped, Stop, Submit
from engine.outcome import Finish, FinishReason
from engine.request import Request
from engine.types import ModelInfo

CHILD_ENV = {
    # Weights and activations in huge pages: the memory bus gives up to twice as much.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # How long a thread spins at a barrier before it sleeps (libgomp's own default is thirty times
    # this). Too long, and it keeps the core from whoever would let it pass: a step took seven times
    # as long beside busy neighbours. Not at all, and waking up costs half a step.
    "GOMP_SPINCOUNT": "10000",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Supervision:
    """When a child counts as dead, and how it is replaced. Seconds.

    `watchdog_s`: work but no step for so long. `start_s`: longest time to load a model.
    `backoff_s` doubles with each failure in a row up to `backoff_most_s`; a child that was READY
    for `backoff_most_s` starts the row again. `first_tries`: failures before the first READY after
    which the state is FAILED.
    """

    watchdog_s: float = 10.0
    start_s: float = 900.0
    stop_s: float = 10.0
    backoff_s: float = 0.25
    backoff_most_s: float = 10.0
    first_tries: int = 3


class Child:
    """One child process and the two ends of talking to it."""

    def __init__(self, config: EngineConfig, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**env, **{k: v for k, v in CHILD_ENV.items() if k not in env}},
            )
            self._connection: Connection = Connection(ours.detach())
        self._outbox: queue.SimpleQueue[Command | EngineConfig | None] = queue.SimpleQueue()
        # A pipe can be full, so sending has a thread of its own: callers never block.
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._writer.start()
        self._outbox.put(config)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    def receive(self, timeout: float) -> Reply | None:
        """The next reply, None after `timeout`. Raises EOFError when the child is gone."""
        try:
            return self._connection.recv() if self._connection.poll(timeout) else None
        except OSError as error:
            raise EOFError from error

    def dump_stacks(self) -> None:
        """Ask the child to write its stacks to stderr."""
        self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._process.kill()

    def end(self, grace: float) -> int:
        """Wait up to `grace` for it to end by itself, then kill it. Returns the exit status."""
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._outbox.put(None)
        self._writer.join()
        self._connection.close()
        return self._process.returncode

    def _write(self) -> None:
        while (item := self._outbox.get()) is not None:
            try:
                self._connection.send(item)
            except OSError:
                return  # the reader sees the end of the pipe and says so


class ProcessClient:
    """`EngineClient` around a child process; see `Supervision` for when it is replaced."""

    def __init__(
        self,
        config: EngineConfig,
        listener: EngineListener,
        supervision: Supervision | None = None,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._listener = listener
        self._rules = supervision or Supervision()
        self._env = dict(os.environ if env is None else env)
        self._clock = clock
        self._ledger = Ledger()
        self._lock = threading.Lock()
        self._state = EngineState.STARTING
        self._child: Child | None = None
        self._stopping = threading.Event()
        self._was_ready = False
        self._failures = 0
        self._heard = self._ready_at = clock()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def pid(self) -> int | None:
        """Process id of the child, for tests and for an operator's eyes."""
        child = self._child
        return None if child is None else child.pid

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        # Under the lock, so that a request is either in the ledger before the child is declared
        # dead, and ended with the others, or refused.
        with self._lock:
            if self._state is not EngineState.READY or self._child is None:
                raise EngineDead(f"the engine is {self._state}")
            self._ledger.open(request)
            self._child.send(Submit(request))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        with self._lock:
            if self._child is not None:
                self._child.send(Cancel(request_id, reason))

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._child is not None:
                self._child.send(Stop())
        if self._thread.is_alive():
            self._thread.join(self._rules.stop_s + 5)
        # The supervisor has ended its child by now; nothing may outlive this, whatever happened.
        if (child := self._child) is not None:
            child.kill()

    # ---- the supervisor's thread ---------------------------------------------------------------

    def _supervise(self) -> None:
        while not self._stopping.is_set():
            ending, status = self._run_child()
            if self._stopping.is_set():
                break
            self._failures += 1
            hopeless = not self._was_ready and self._failures >= self._rules.first_tries
            if ending.final or hopeless:
                self._change(EngineState.FAILED, None, ending.cause)
                return
            self._change(EngineState.RESTARTING, None, ending.cause + status)
            self._stopping.wait(self._backoff())
        self._change(EngineState.STOPPED, None, "")

    def _run_child(self) -> tuple[Failed, str]:
        """One child, from start to end; its requests end with it. Why it ended, and how."""
        try:
            child = Child(self._config, self._env)
        except OSError as error:
            return Failed(f"the engine's process cannot be started: {error}", final=False), ""
        with self._lock:
            self._child = child
        if self._stopping.is_set():
            child.send(Stop())
        ending = self._watch(child)
        with self._lock:
            self._child = None
            self._state = EngineState.RESTARTING
        if self._stopping.is_set():
            finish = Finish(FinishReason.DRAINED)
        else:
            finish = Finish(FinishReason.ERROR, error=ending.cause, retryable=True)
        if lost := self._ledger.close_all(finish, self._clock()):
            self._listener.deliver(lost)
        status = child.end(self._rules.stop_s if self._stopping.is_set() else 0.0)
        return ending, f" (exit status {status})"

    def _backoff(self) -> float:
        doubled: float = self._rules.backoff_s * 2 ** min(self._failures - 1, 16)
        return min(doubled, self._rules.backoff_most_s)

    def _watch(self, child: Child) -> Failed:
        """Pass on what the child says until it ends or hangs; returns why."""
        ending = Failed("the engine's process ended", final=False)
        self._heard = self._clock()
        while True:
            try:
                reply = child.receive(0.2)
            except EOFError:
                return ending
            if isinstance(reply, Failed):
                ending = reply
            elif reply is not None:
                self._take(reply)
            now = self._clock()
            if reply is not None or self._idle():
                self._heard = now
            elif (overdue := now - self._heard) > self._patience():
                if not self._stopping.is_set():
                    child.dump_stacks()
                    self._stopping.wait(0.5)
                child.kill()
                return Failed(f"the engine hangs: no step for {overdue:.0f} s", final=False)

    def _take(self, reply: Ready | Stepped) -> None:
        if isinstance(reply, Ready):
            self._was_ready = True
            self._ready_at = self._clock()
            self._change(EngineState.READY, reply.info)
            return
        if self._clock() - self._ready_at > self._rules.backoff_most_s:
            self._failures = 0
        self._deliver(reply)

    def _idle(self) -> bool:
        """Nothing is expected of the child, so its silence says nothing."""
        return (
            self._state is EngineState.READY
            and not len(self._ledger)
            and not self._stopping.is_set()
        )

    def _patience(self) -> float:
        if self._stopping.is_set():
            return self._rules.stop_s
        ready = self._state is EngineState.READY
        return self._rules.watchdog_s if ready else self._rules.start_s

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
