"""Who has to end when. Cost follows those who are due, not those who wait."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort


class Deadlines:
    """Deadlines of live requests in order. Add, discard: O(log n) compares."""

    def __init__(self) -> None:
        self._order: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, request_id: str, deadline: float | None) -> None:
        if deadline is not None:
            insort(self._order, (deadline, request_id))

    def discard(self, request_id: str, deadline: float | None) -> None:
        """To be called with what was added, once."""
        if deadline is not None:
            del self._order[bisect_left(self._order, (deadline, request_id))]

    def due(self, now: float) -> list[str]:
        """Ids whose deadline has passed, earliest first; they stay until they are discarded."""
        end = bisect_right(self._order, now, key=lambda entry: entry[0])
        return [request_id for _, request_id in self._order[:end]]
