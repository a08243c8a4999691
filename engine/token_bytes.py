"""What the tokens of a vocabulary say, in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class TokenBytes:
    """The bytes of each token of a vocabulary; empty for those that are no text."""

    def __init__(self, of: Iterable[bytes]) -> None:
        self._of = tuple(of)
        self.fitting = lru_cache(256)(self._fitting)

    def __getitem__(self, token: int) -> bytes:
        return self._of[token]

    def _fitting(self, rest: bytes) -> NDArray[np.bool_]:
        """(vocabulary,): which tokens begin `rest`, or begin with it."""
        fits = (b and (b.startswith(rest) or rest.startswith(b)) for b in self._of)
        return np.fromiter((bool(fit) for fit in fits), np.bool_, len(self._of))
