"""An ear for engine clients: keeps all it hears, and waits for what should come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from engine.client import EngineState
from engine.observer import StepReport
from engine.outcome import Finish, TokenChunk
from engine.types import ModelInfo


class RecordingListener:
    """`EngineListener` that keeps all it hears; `wait` blocks until enough was heard."""

    def __init__(self) -> None:
        self._heard = threading.Condition()
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.reports: list[StepReport] = []
        self.states: list[tuple[EngineState, ModelInfo | None, str]] = []

    def deliver(self, chunks: Seq[TokenChunk]) -> None:
        with self._heard:
            for chunk in chunks:
                self.chunks.setdefault(chunk.request_id, []).append(chunk)
            self._heard.notify_all()

    def report(self, report: StepReport) -> None:
        self.reports.append(report)

    def changed(self, state: EngineState, info: ModelInfo | None, cause: str) -> None:
        with self._heard:
            self.states.append((state, info, cause))
            self._heard.notify_all()

    def wait(self, until: Callable[[], object], seconds: float = 30.0) -> None:
        with self._heard:
            assert self._heard.wait_for(until, seconds), f"not within {seconds} s: {self.states}"

    def wait_for_state(self, state: EngineState, times: int = 1, seconds: float = 60.0) -> None:
        self.wait(lambda: [s for s, _, _ in self.states].count(state) >= times, seconds)

    def wait_for_ends(self, ids: Iterable[str], seconds: float = 30.0) -> None:
        wanted = list(ids)
        self.wait(lambda: all(self._ended(i) for i in wanted), seconds)

    def _ended(self, request_id: str) -> bool:
        return any(c.finish is not None for c in self.chunks.get(request_id, ()))

    def tokens(self, request_id: str) -> list[int]:
        """Delivered tokens; checks that offsets are gapless."""
        out: list[int] = []
        for chunk in self.chunks.get(request_id, ()):
            assert chunk.offset == len(out)
            out.extend(chunk.tokens)
        return out

    def finish(self, request_id: str) -> Finish:
        """The end of a generation; checks that it came once, and last."""
        ends = [c.finish for c in self.chunks[request_id]]
        assert [e is None for e in ends] == [True] * (len(ends) - 1) + [False]
        finish = ends[-1]
        assert finish is not None
        assert finish.completion_tokens == len(self.tokens(request_id))
        return finish
