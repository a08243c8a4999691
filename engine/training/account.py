"""What has become of an order, over all of the runs that it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Entries:
    """`weights_hash` and `tokenizer_hash` of the target, `vocabulary` and `seed` must stay what
    they were. `spent` seconds so far; `written`: the corpus is complete. What writing took:
    `load_s` to load the model, `token_s` a token."""

    weights_hash: str
    tokenizer_hash: str
    vocabulary: int
    seed: int
    spent: float = 0.0
    written: bool = False
    load_s: float = 0.0
    token_s: float = 0.0


FIXED = ("weights_hash", "tokenizer_hash", "vocabulary", "seed")


class Account:
    """Kept in a file, which is always whole. The time of a run that was killed counts up to a few
    seconds before."""

    def __init__(self, path: Path, order: Entries, clock: Callable[[], float]) -> None:
        """Raises ValueError if what was begun was another order."""
        self._path = path
        self._clock = clock
        self.entries = order
        if path.exists():
            self.entries = Entries(**json.loads(path.read_text()))
        for name in FIXED:
            if (found := getattr(self.entries, name)) != (wanted := getattr(order, name)):
                raise ValueError(
                    f"{path.parent} was begun with {name} {found}, not {wanted}; remove it to "
                    "begin anew, or go on with what it was begun with"
                )
        self._before = self.entries.spent
        self._begun = self._saved = clock()
        self.save()

    @property
    def spent(self) -> float:
        """Seconds, this run's included."""
        return self._before + self._clock() - self._begun

    def tick(self) -> None:
        """Now and then the time is noted."""
        if self._clock() - self._saved >= EVERY_S:
            self.save()

    def save(self, **changes: float | bool) -> None:
        self.entries = replace(self.entries, spent=self.spent, **changes)  # type: ignore[arg-type]
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self.entries), indent=1) + "\n")
        partial.replace(self._path)
        self._saved = self._clock()
