"""From the engine's thread to the streams: one hand-over per step, one slot per generation.

    engine thread   deliver(chunks of a step) ── call_soon_threadsafe ──▶ event loop
    event loop      chunk ─▶ its generation ─▶ Mailbox ─▶ Outbox of its stream ─▶ writer

A reader that is behind finds its chunks merged into one, so what waits for it is bounded by the
length of its output, whatever the number of steps. With logprobs it is a few, of a size that fits
into a message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.client import EngineState
from engine.observer import StepReport
from engine.outcome import Finish, Logprobs, TokenChunk
from engine.types import ModelInfo

# Logprobs in a chunk: those of a token take up to 0.3 KiB each, clients accept messages of 4 MiB.
MOST_LOGPROBS = 1024


class Receiver(Protocol):
    """Whoever takes the chunks of one request, on the event loop. Must not raise or block."""

    def deliver(self, chunk: TokenChunk) -> None: ...


class StateWatcher(Protocol):
    """Told of every change of the engine's state, in order, on the event loop."""

    def engine_changed(self, state: EngineState, info: ModelInfo | None, cause: str) -> None: ...


class Mailbox:
    """What one generation still has to say to its reader: a single, growing chunk, behind those
    that hold as many logprobs as a chunk may.

    `name` is the generation's id on its stream, `index` says which sample of it this is.
    """

    def __init__(self, name: str, outbox: Outbox, index: int = 0) -> None:
        self.name = name
        self.index = index
        self._outbox = outbox
        self._offset = 0
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prompt: list[Logprobs] = []
        self._offsets: list[int] = []
        self._text: list[str] = []
        self._finish: Finish | None = None
        self._empty = True
        self._full: deque[TokenChunk] = deque()

    def put(self, chunk: TokenChunk) -> None:
        """Add the chunk that follows what was put before."""
        self._tokens += chunk.tokens
        self._logprobs += chunk.logprobs
        self._prompt += chunk.prompt_logprobs
        self._offsets += chunk.text_offsets
        if chunk.text:
            self._text.append(chunk.text)
        self._finish = chunk.finish
        self._empty = False
        if len(self._logprobs) + len(self._prompt) >= MOST_LOGPROBS:
            self._full.append(self._cut())
        self._outbox.mark(self)

    def take(self) -> TokenChunk | None:
        """What was put since the last time, as one chunk, or the first of a few: then there is more
        to take. None if there is nothing."""
        if self._full:
            chunk = self._full.popleft()
            if self._full or not self._empty:
                self._outbox.mark(self)
            return chunk
        return None if self._empty else self._cut()

    def _cut(self) -> TokenChunk:
        chunk = TokenChunk(
            self.name,
            self._offset,
            tuple(self._tokens),
            "".join(self._text),
            self._finish,
            tuple(self._logprobs),
            tuple(self._prompt),
            tuple(self._offsets),
        )
        self._offset += len(self._tokens)
        self._tokens, self._text, self._logprobs, self._prompt = [], [], [], []
        self._offsets = []
        self._empty = True
        return chunk


class Outbox:
    """The mailboxes of one stream that have something, in the order in which they got it."""

    def __init__(self) -> None:
        self._marked: dict[Mailbox, None] = {}
        self._wake = asyncio.Event()

    def mark(self, mailbox: Mailbox) -> None:
        self._marked[mailbox] = None
        self._wake.set()

    def wake(self) -> None:
        """Let the writer look around: something other than a mailbox changed."""
        self._wake.set()

    def next(self) -> Mailbox | None:
        """The mailbox that has waited longest, no longer marked; None if there is none."""
        mailbox = next(iter(self._marked), None)
        if mailbox is not None:
            del self._marked[mailbox]
        return mailbox

    async def wait(self) -> None:
        """Until something is marked or `wake` is called. One waiter."""
        await self._wake.wait()
        self._wake.clear()

    async def chunk(self) -> tuple[int, TokenChunk]:
        """The next chunk of any mailbox, once there is one, and that one's index."""
        while True:
            mailbox = self.next()
            if mailbox is not None and (chunk := mailbox.take()) is not None:
                return mailbox.index, chunk
            await self.wait()


class Router:
    """Brings chunks to their receivers. `EngineListener` towards the engine client.

    Made on the event loop. `steps` gets every report, in the engine client's thread; it must not
    raise. `close` ends all hand-over; call it once the engine client is stopped.
    """

    def __init__(self, states: StateWatcher, steps: Callable[[StepReport], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._states = states
        self._steps = steps
        self._receivers: dict[str, Receiver] = {}
        self._closed = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the requests whose last chunk has not come."""
        return tuple(self._receivers)

    def add(self, request_id: str, receiver: Receiver) -> None:
        """Route a request, before it is submitted; its last chunk removes it."""
        self._receivers[request_id] = receiver
        self.idle.clear()

    def remove(self, request_id: str) -> None:
        """Undo `add` for a request that could not be submitted."""
        self._receivers.pop(request_id, None)
        if not self._receivers:
            self.idle.set()

    def close(self) -> None:
        self._closed = True

    # ---- EngineListener: any thread ----------------------------------------------------------

    def deliver(self, chunks: Sequence[TokenChunk]) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(self._dispatch, chunks)

    def report(self, report: StepReport) -> None:
        self._steps(report)

    def changed(self, state: EngineState, info: ModelInfo | None, cause: str) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(self._states.engine_changed, state, info, cause)

    # ---- event loop --------------------------------------------------------------------------

    def _dispatch(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            receiver = self._receivers.get(chunk.request_id)
            if receiver is None:
                continue
            if chunk.finish is not None:
                self.remove(chunk.request_id)
            receiver.deliver(chunk)
