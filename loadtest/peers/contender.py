"""What a comparison asks of every engine in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts as token ids, in waves of `at_once`: a wave is submitted at once, and the next when
    all of it has ended. Greedy, EOS ignored, exactly `max_tokens` new tokens per prompt."""

    prompts: Prompts
    at_once: int
    max_tokens: int

    @property
    def waves(self) -> tuple[Prompts, ...]:
        starts = range(0, len(self.prompts), self.at_once)
        return tuple(self.prompts[i : i + self.at_once] for i in starts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`seconds` from the first submission to the last token, as whoever submits sees it.

    `counts` are new tokens per prompt. `details` are further numbers that only some can tell.
    """

    seconds: float
    counts: tuple[int, ...]
    details: dict[str, float] = field(default_factory=dict)


class Missing(Exception):
    """The engine is not installed here; the message says how to get it."""


class Broken(Exception):
    """The engine has failed: it does not start, has died, or does not answer in time."""


class Contender(Protocol):
    """An engine under comparison. Between calls it is paused and takes no processor time."""

    @property
    def name(self) -> str: ...

    def start(self) -> dict[str, str]:
        """Load the model; versions and the settings worth telling. Raises Missing or Broken."""
        ...

    def run(self, job: Job) -> Outcome:
        """Do one job. Raises Broken."""
        ...

    def close(self) -> None:
        """End every process of it; harmless if it never started."""
        ...
