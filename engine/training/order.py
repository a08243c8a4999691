"""What is to be made, and how to be told to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.training.account import Account
from engine.training.progress import Progress


class Interrupted(Exception):
    """Stopped from outside; everything that it takes to go on is on the disk."""


@dataclass(frozen=True, slots=True)
class Order:
    """A set of drafts for the `model` in a directory, out of what it writes after the prompts in
    `data`. `tokens` and `steps` 0: as many as there is time for in `minutes`; both given, it takes
    as long as it takes."""

    model: str
    data: tuple[str, ...]
    out: str
    minutes: float = 60.0
    tokens: int = 0
    steps: int = 0
    vocabulary: int = 4096
    seed: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.minutes > 0, "minutes must be more than 0"),
            (min(self.tokens, self.steps, self.threads) >= 0, "numbers must not be negative"),
            (self.vocabulary > 0, "vocabulary must be more than 0"),
            ("," not in self.out, f"{self.out}: --draft takes no folder with a comma in its name"),
        )
        for ok, message in checks:
            if not ok:
                raise ValueError(message)


@dataclass(frozen=True, slots=True)
class Run:
    """One of the runs that an order takes. `stopped` is asked often."""

    order: Order
    account: Account
    clock: Callable[[], float]
    progress: Progress
    stopped: Callable[[], bool]

    def left(self, share: float = 1.0) -> float:
        """Seconds of this share of the whole time."""
        return share * 60 * self.order.minutes - self.account.spent

    def check(self) -> None:
        """Raises Interrupted."""
        self.account.tick()
        if self.stopped():
            self.account.save()
            raise Interrupted
