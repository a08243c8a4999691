"""Medians, spreads and bootstrap intervals of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample of repetitions in three numbers."""

    median: float
    least: float
    most: float

    @property
    def relative(self) -> float:
        """(most - least) / median: how far repetitions of the same thing lie apart."""
        return (self.most - self.least) / self.median if self.median else 0.0


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    return Spread(float(np.median(values)), float(min(values)), float(max(values)))


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio with the interval that holds it with 95 % confidence."""

    ratio: float
    low: float
    high: float


Blocks = Sequence[tuple[float, float]]


def ratio_of_rates(a: Blocks, b: Blocks, seed: int = 0) -> Interval:
    """rate(a) / rate(b), where each block is (amount, cost) and a rate is amount over cost.

    `a[i]` and `b[i]` were measured side by side, so blocks are drawn in pairs: what slows the
    machine for both does not widen the interval. Percentile bootstrap (Efron 1979), which is
    deterministic in `seed`. Raises ValueError unless there are as many of either, at least two,
    and both rates are positive.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError("blocks come in pairs, at least two of them")
    pairs = np.array([(*x, *y) for x, y in zip(a, b, strict=True)], dtype=float)
    if (pairs.sum(axis=0) <= 0).any():
        raise ValueError("a rate is not positive")
    drawn = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    sums = pairs[drawn].sum(axis=1)
    sums = sums[(sums > 0).all(axis=1)]
    low, high = np.percentile(_ratio(sums), [2.5, 97.5])
    return Interval(float(_ratio(pairs.sum(axis=0)[None])[0]), float(low), float(high))


def _ratio(sums: np.ndarray) -> np.ndarray:
    """Per row of (amount a, cost a, amount b, cost b): the ratio of the rates."""
    return np.asarray((sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]))
