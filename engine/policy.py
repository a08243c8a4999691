"""Who is served first. A policy is one ordering, read from the front to serve and from the back
to find a victim, plus the container that keeps waiting sequences in that order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from engine.types import Sequence

Rank = tuple[float | str, ...]


class Policy(Protocol):
    """Orders sequences. `rank` is total and does not change while a sequence is live."""

    def rank(self, seq: Sequence) -> Rank:
        """Smaller is served first; victims of preemption are taken from the largest."""
        ...

    def push(self, seq: Sequence) -> None:
        """`seq` starts to wait (on arrival, or again after preemption)."""
        ...

    def discard(self, seq: Sequence) -> None:
        """`seq` waits no longer: admitted, cancelled or expired."""
        ...

    def waiting(self) -> Iterator[Sequence]:
        """Waiting sequences, first to serve first. Lazy: cost follows what is taken."""
        ...

    def __len__(self) -> int: ...

    def charge(self, seq: Sequence, computed: int, emitted: int) -> None:
        """`seq` had `computed` prompt positions computed and got `emitted` output tokens."""
        ...


class ClassArrival:
    """Strict classes, first come first served inside a class. Push, discard: O(log n) compares."""

    def __init__(self) -> None:
        self._order: list[Rank] = []
        self._seqs: dict[str, Sequence] = {}

    def rank(self, seq: Sequence) -> Rank:
        return (seq.request.priority, seq.request.arrived, seq.request.id)

    def push(self, seq: Sequence) -> None:
        self._seqs[seq.request.id] = seq
        insort(self._order, self.rank(seq))

    def discard(self, seq: Sequence) -> None:
        if self._seqs.pop(seq.request.id, None) is not None:
            del self._order[bisect_left(self._order, self.rank(seq))]

    def waiting(self) -> Iterator[Sequence]:
        return (self._seqs[str(rank[-1])] for rank in self._order)

    def __len__(self) -> int:
        return len(self._order)

    def charge(self, seq: Sequence, computed: int, emitted: int) -> None:
        return None
