"""Whether a generation may start now: counters and state that live ahead of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Request
from engine.types import ModelInfo
from service.status import ENGINE_RETRY_S, Reason, refused
from service.tokenize import TextCodec

LEAST_RETRY_S = 0.1
MOST_RETRY_S = 30.0
# Weight of the newest interval in the mean of intervals between departures from the queue.
NEWEST = 0.1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is needed to take requests for the model that is being served."""

    info: ModelInfo
    codec: TextCodec


class Ticket:
    """A place among those that wait for their first token. `leave` gives it back, once."""

    def __init__(self, admission: Admission, priority: int, tokens: int, position: int) -> None:
        self._admission: Admission | None = admission
        self.priority = priority
        self.tokens = tokens
        self.position = position

    def leave(self) -> None:
        if self._admission is not None:
            self._admission.left(self)
            self._admission = None


class Admission:
    """Refuses at once what cannot be served soon. Event loop only.

    Waiting is a generation from its submission to its first output (or its end). `model` is set
    while the engine is ready; `draining` once the server is about to stop.
    """

    def __init__(
        self, max_waiting: int, max_waiting_tokens: int, clock: Callable[[], float]
    ) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._waiting = [0, 0, 0]
        self._tokens = 0
        self._departed: float | None = None
        self._interval = LEAST_RETRY_S
        self.model: ServedModel | None = None
        self.draining = False

    @property
    def waiting(self) -> int:
        return sum(self._waiting)

    def open_for_business(self) -> ServedModel:
        """The model to generate with. Refuses while draining or without a ready engine."""
        if self.draining:
            raise refused(
                Reason.DRAINING, "the server is about to stop", retry_after_s=ENGINE_RETRY_S
            )
        return self.ready_model()

    def ready_model(self) -> ServedModel:
        """The model that is being served, also while draining."""
        if self.model is None:
            raise refused(Reason.NOT_READY, "the engine is not ready", retry_after_s=ENGINE_RETRY_S)
        return self.model

    def enter(self, request: Request, samples: int = 1) -> list[Ticket]:
        """Take a place in the queue for each of the samples, or refuse all. Their prompt counts
        once."""
        self.open_for_business()
        # An empty queue takes any request, whatever its samples and its length.
        if self.waiting and self.waiting + samples > self._max_waiting:
            raise refused(
                Reason.QUEUE_FULL,
                f"{self.waiting} requests are waiting, the limit is {self._max_waiting}",
                retry_after_s=self.retry_after_s(),
                quota="max_waiting",
            )
        if self._tokens and self._tokens + len(request.prompt) > self._max_waiting_tokens:
            raise refused(
                Reason.QUEUE_FULL,
                f"{self._tokens} prompt tokens are waiting, the limit is "
                f"{self._max_waiting_tokens}",
                retry_after_s=self.retry_after_s(),
                quota="max_waiting_tokens",
            )
        ahead = sum(self._waiting[: request.priority + 1])
        if not self.waiting:
            self._departed = self._clock()
        self._waiting[request.priority] += samples
        self._tokens += len(request.prompt)
        tokens = [len(request.prompt)] + [0] * (samples - 1)
        return [Ticket(self, request.priority, count, ahead) for count in tokens]

    def left(self, ticket: Ticket) -> None:
        """Called by the ticket."""
        self._waiting[ticket.priority] -= 1
        self._tokens -= ticket.tokens
        now = self._clock()
        if self._departed is not None:
            self._interval += NEWEST * (now - self._departed - self._interval)
        self._departed = now

    def retry_after_s(self) -> float:
        """When to try again: the time in which half of the queue leaves, at the recent rate."""
        return min(max(self._interval * self.waiting / 2, LEAST_RETRY_S), MOST_RETRY_S)
