"""Follows the engine's state: what may be admitted, what health says, and when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from engine.client import EngineState
from engine.errors import ModelError
from engine.types import ModelInfo
from service.admission import Admission, ServedModel
from service.health import Health
from service.record import Log, Recorder
from service.tokenize import TextCodec

Change = tuple[EngineState, ModelInfo | None, str]


class Lifecycle:
    """`StateWatcher` of the router. `run` does what needs awaiting, change by change.

    `failed` is set, with `cause`, once the engine cannot work as configured or is gone.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        health: Health,
        recorder: Recorder,
        load_codec: Callable[[Path], TextCodec],
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self._admission = admission
        self._health = health
        self._recorder = recorder
        self._load_codec = load_codec
        self._log = log
        self._clock = clock
        self._started = clock()
        self._changes: asyncio.Queue[Change] = asyncio.Queue()
        self._state = EngineState.STARTING
        self._codecs: dict[str, TextCodec] = {}
        self.address = ""
        self.cause = ""
        self.stopping = False
        self.failed = asyncio.Event()

    def engine_changed(self, state: EngineState, info: ModelInfo | None, cause: str) -> None:
        if self._state is EngineState.READY and state is not EngineState.READY:
            self._started = self._clock()
        self._state = state
        if state is not EngineState.READY:
            self._admission.model = None  # at once; the rest in order
        self._changes.put_nowait((state, info, cause))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            state, info, cause = await self._changes.get()
            if state is EngineState.READY and info is not None:
                await self._ready(info)
            else:
                await self._health.set_serving(False)
                self._not_ready(state, cause)

    async def _ready(self, info: ModelInfo) -> None:
        try:
            codec = await self._codec(info.directory)
        except ModelError as error:
            self._fail(str(error))
            return
        if self._state is not EngineState.READY:
            return  # it changed meanwhile; that change is next in the queue
        self._recorder.fingerprint = info.fingerprint
        self._admission.model = ServedModel(info, codec)
        await self._health.set_serving(True)
        self._log.info(
            "ready",
            address=self.address,
            model=info.model,
            device=info.device,
            dtype=info.dtype,
            draft_sources=list(info.draft_sources),
            fingerprint=info.fingerprint,
            strict=info.strict or info.not_strict_because,
            seconds=round(self._clock() - self._started, 3),
        )

    async def _codec(self, directory: str) -> TextCodec:
        if directory not in self._codecs:
            self._codecs = {directory: await asyncio.to_thread(self._load_codec, Path(directory))}
        return self._codecs[directory]

    def _not_ready(self, state: EngineState, cause: str) -> None:
        if state is EngineState.FAILED or (state is EngineState.STOPPED and not self.stopping):
            self._fail(cause or "the engine stopped")
        elif state is EngineState.RESTARTING:
            self._log.warning("engine restarting", cause=cause)

    def _fail(self, cause: str) -> None:
        self.cause = cause
        self.failed.set()
