"""An engine that does what the test says, behind the real `EngineClient` protocol."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.client import EngineListener, EngineState
from engine.errors import EngineDead
from engine.observer import StepReport
from engine.outcome import Finish, FinishReason, Logprobs, SourceStats, TokenChunk
from engine.request import Request
from engine.types import ModelInfo

TIMEOUT_S = 10.0


def text_of(count: int, start: int = 0) -> str:
    """What the scripted engine says in its tokens `start` to `start + count`."""
    return "".join(f"{i} " for i in range(start, start + count))


def logprobs_of(tokens: Sequence[int], count: int) -> tuple[Logprobs, ...]:
    """What it says of tokens: alternative `i` is 100 + i."""
    ids, values = tuple(range(100, 100 + count)), tuple(-0.25 - i for i in range(count))
    return tuple(Logprobs(token, -token / 8, ids, values) for token in tokens)


async def eventually(done: Callable[[], bool]) -> None:
    """Until `done()`, for what nobody announces."""
    async with asyncio.timeout(TIMEOUT_S):
        while not done():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.002)


@dataclass
class Live:
    request: Request
    sent: int = 0
    scheduled: float | None = None
    first_token: float | None = None
    steps: int = 0
    waiting: bool = True


@dataclass
class ScriptedEngine:
    """Thread-safe. Token `i` of every output has the id `i % vocab` and the text "i ".

    Nothing happens by itself except: READY on `start` (unless `hold_start`), the end of a
    cancelled request (unless `hold_cancels`), and steps while `play`ing.
    """

    listener: EngineListener
    info: ModelInfo
    hold_start: bool = False
    hold_cancels: bool = False
    clock: Callable[[], float] = time.monotonic
    state: EngineState = EngineState.STARTING
    live: dict[str, Live] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    cancels: list[tuple[str, FinishReason]] = field(default_factory=list)
    finishes: list[tuple[str, Finish]] = field(default_factory=list)
    before_submit: Callable[[Request], None] = lambda request: None
    steps: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._player: threading.Thread | None = None
        self._pause = threading.Event()

    # ---- EngineClient --------------------------------------------------------------------------

    def start(self) -> None:
        if not self.hold_start:
            self.ready()

    def submit(self, request: Request) -> None:
        self.before_submit(request)
        with self._lock:
            if self.state is not EngineState.READY:
                raise EngineDead(f"the engine is {self.state}")
            assert request.id not in self.live, "request ids must be unique"
            self.live[request.id] = Live(request)
            self.requests.append(request)
        self._note()

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        with self._lock:
            self.cancels.append((request_id, reason))
            if request_id in self.live and not self.hold_cancels:
                self.end(request_id, reason)
        self._note()

    def stop(self) -> None:
        self.pause()
        with self._lock:
            for request_id in list(self.live):
                self.end(request_id, FinishReason.DRAINED)
            self._change(EngineState.STOPPED, "")

    # ---- what the test makes it do -------------------------------------------------------------

    def ready(self) -> None:
        self._change(EngineState.READY, "")

    def fail(self, cause: str) -> None:
        self._change(EngineState.FAILED, cause)

    def die(self, cause: str = "the engine's process ended") -> None:
        """As when the child is killed: every request ends with a retryable ERROR."""
        with self._lock:
            self.state = EngineState.RESTARTING
            chunks = [
                self._last(live, FinishReason.ERROR, error=cause, retryable=True)
                for live in self.live.values()
            ]
            self.live.clear()
            self.listener.deliver(chunks)
            self._change(EngineState.RESTARTING, cause)

    def step(self, tokens: int = 1) -> None:
        """Every live request gets `tokens` more; those that have all end. One hand-over."""
        with self._lock:
            self.steps += 1
            now = self.clock()
            chunks = [self._advance(live, tokens, now) for live in list(self.live.values())]
            if chunks:
                self.listener.deliver(chunks)
            self.listener.report(self._report(chunks, now))

    def end(self, request_id: str, reason: FinishReason, **finish: object) -> None:
        """Finish one request without more output."""
        with self._lock:
            self.listener.deliver([self._last(self.live.pop(request_id), reason, **finish)])

    def say(self, request_id: str, tokens: tuple[int, ...], text: str, **finish: object) -> None:
        """Deliver this very chunk; ends the request if there is a `reason` in `finish`."""
        with self._lock:
            live = self.live[request_id]
            chunk = TokenChunk(request_id, live.sent, tokens, text)
            live.sent += len(tokens)
            if "reason" in finish:
                last = self._last(self.live.pop(request_id), **finish)  # type: ignore[arg-type]
                chunk = replace(chunk, finish=last.finish)
            self.listener.deliver([chunk])

    def play(self, tokens: int = 1, pause_s: float = 0.001) -> None:
        """Step in a thread until `pause`."""

        def run() -> None:
            while not self._pause.wait(pause_s):
                self.step(tokens)

        self._pause.clear()
        self._player = threading.Thread(target=run, daemon=True)
        self._player.start()

    def pause(self) -> None:
        self._pause.set()
        if self._player is not None:
            self._player.join()
            self._player = None

    # ---- what the test waits for ---------------------------------------------------------------

    async def until(self, done: Callable[[], bool]) -> None:
        """Until `done()`, looked at after every submit and cancel."""
        async with asyncio.timeout(TIMEOUT_S):
            while not done():
                self._changed.clear()
                await self._changed.wait()

    async def submitted(self, count: int = 1) -> list[Request]:
        await self.until(lambda: len(self.requests) >= count)
        return self.requests

    async def freed(self, count: int = 1) -> None:
        """Until `count` requests were cancelled."""
        await self.until(lambda: len({request_id for request_id, _ in self.cancels}) >= count)

    # ---- inside --------------------------------------------------------------------------------

    def _note(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    def _change(self, state: EngineState, cause: str) -> None:
        with self._lock:
            self.state = state
            self.listener.changed(state, self.info if state is EngineState.READY else None, cause)

    def _advance(self, live: Live, tokens: int, now: float) -> TokenChunk:
        request = live.request
        live.waiting = False
        live.steps += 1
        live.scheduled = live.scheduled or now
        if request.deadline is not None and now >= request.deadline:
            del self.live[request.id]
            return self._last(live, FinishReason.DEADLINE)
        count = min(tokens, request.stopping.max_tokens - live.sent)
        if count:
            live.first_token = live.first_token or now
        ids = tuple(i % self.info.vocab_size for i in range(live.sent, live.sent + count))
        chunk = TokenChunk(request.id, live.sent, ids, text_of(count, live.sent))
        if request.output.logprobs is not None:
            chunk = replace(chunk, logprobs=logprobs_of(ids, request.output.logprobs))
        if request.output.prompt_logprobs is not None and not live.sent:
            told = logprobs_of(request.prompt[1:], request.output.prompt_logprobs)
            chunk = replace(chunk, prompt_logprobs=told)
        if request.output.text_offsets:
            begins = tuple(len(text_of(i)) for i in range(live.sent, live.sent + count))
            chunk = replace(chunk, text_offsets=begins)
        live.sent += count
        if live.sent >= request.stopping.max_tokens:
            del self.live[request.id]
            chunk = replace(chunk, finish=self._last(live, FinishReason.LENGTH).finish)
        return chunk

    def _last(self, live: Live, reason: FinishReason, **more: object) -> TokenChunk:
        values: dict[str, object] = {
            "prompt_tokens": len(live.request.prompt),
            "completion_tokens": live.sent,
            "arrived": live.request.arrived,
            "scheduled": live.scheduled,
            "prefilled": live.first_token,
            "first_token": live.first_token,
            "finished": self.clock(),
            "target_steps": live.steps,
            "by_source": (
                (
                    "ngram",
                    SourceStats(2 * live.steps, live.steps, (live.steps,) * 2, (live.steps,)),
                ),
            ),
        }
        finish = Finish(reason, **{**values, **more})  # type: ignore[arg-type]
        self.finishes.append((live.request.id, finish))
        return TokenChunk(live.request.id, live.sent, (), "", finish)

    def _report(self, chunks: list[TokenChunk], now: float) -> StepReport:
        emitted = sum(len(chunk.tokens) for chunk in chunks)
        waiting = [0, 0, 0]
        for live in self.live.values():
            waiting[live.request.priority] += live.waiting
        return StepReport(
            number=self.steps,
            started=now,
            ended=now,
            rows=max(emitted, 1),
            prefill_rows=0,
            drafted=2,
            accepted=1,
            emitted=emitted,
            sequences=len(chunks),
            waiting=(waiting[0], waiting[1], waiting[2]),
            free_blocks=50,
            used_blocks=4,
            preempted=0,
            cached_blocks=10,
            prefix_queries=3,
            prefix_hits=2,
            phases=(("plan", 0.001), ("forward", 0.01)),
            by_source=(("ngram", SourceStats.of(2, 1)),),
        )
