"""What comes of a request: frozen types, standard library only. They cross the process line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a generation ended; the names are those of the wire."""

    STOP = "STOP"
    EOS = "EOS"
    LENGTH = "LENGTH"
    CONTEXT = "CONTEXT"
    CANCELLED = "CANCELLED"
    REPLACED = "REPLACED"
    DEADLINE = "DEADLINE"
    TIME_BUDGET = "TIME_BUDGET"
    STALLED = "STALLED"
    DRAINED = "DRAINED"
    ERROR = "ERROR"


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Drafts of one source: how many were verified, how many were accepted and delivered; and the
    same by their position in a proposal."""

    drafted: int = 0
    accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @staticmethod
    def of(drafted: int, accepted: int) -> SourceStats:
        """Of one proposal."""
        return SourceStats(drafted, accepted, (1,) * drafted, (1,) * accepted)

    def __add__(self, other: SourceStats) -> SourceStats:
        return SourceStats(
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            _added(self.drafted_at, other.drafted_at),
            _added(self.accepted_at, other.accepted_at),
        )


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation: reason, exact usage, times and speculation counts.

    `cached_tokens` of the prompt were never computed: their KV was found. `matched` is the stop
    string or stop id for STOP. `error` and `retryable` are set for ERROR. Times are monotonic
    seconds; `scheduled` and `first_token` are None if never reached.
    """

    reason: FinishReason
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    matched: str | int | None = None
    error: str = ""
    retryable: bool = False
    arrived: float = 0.0
    scheduled: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    finished: float = 0.0
    target_steps: int = 0
    preemptions: int = 0
    by_source: tuple[tuple[str, SourceStats], ...] = ()

    @property
    def drafts(self) -> SourceStats:
        """Of all sources together."""
        return sum((s for _, s in self.by_source), SourceStats())


class Logprobs(NamedTuple):
    """How likely `token` was, and the most likely tokens: natural logarithms of probabilities.

    `ids` are in descending order of `values`, the lower id first among equals. What cannot be
    drawn at all is not among them.
    """

    token: int
    logprob: float
    ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What leaves the engine for one generation: `tokens` follow the first `offset` ones.

    `logprobs` has one entry per token, or none if they were not asked for. `prompt_logprobs` are
    those of the next tokens of the prompt; together, in order, of all but the first.
    `text_offsets` say where in the output's text each token begins, in characters; one per token,
    or none.
    """

    request_id: str
    offset: int
    tokens: tuple[int, ...]
    text: str
    finish: Finish | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[type[TokenChunk], tuple[object, ...]]:
        # Dozens cross the process line in each step; what pickle does by itself takes five times
        # as long.
        fields = (
            self.request_id,
            self.offset,
            self.tokens,
            self.text,
            self.finish,
            self.logprobs,
            self.prompt_logprobs,
            self.text_offsets,
        )
        return TokenChunk, fields
