"""The swinging load over engines whose steps take a known time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from engine.request import Request, SamplingParams, StopParams
from tests.engine.fakes import Rig
from tests.streams import Streams
from tests.swing import ADAPTIVE, ratios, swing


def source() -> Iterator[Request]:
    for number in count():
        yield Request(str(number), (1, 2, 3), StopParams(20), SamplingParams(0.0))


def test_every_phase_has_its_streams_and_its_rate() -> None:
    """A step takes a second, and gives a token to each stream."""
    rig = Rig(max_seqs=8, max_step_rows=64)
    clock = 0.0

    class Stepped(Streams):
        def step(self) -> int:
            nonlocal clock
            clock += 1.0
            return super().step()

    streams = Stepped(rig.engine, source(), 1)
    rates = swing(streams, [1, 4, 1], 50.0, lambda: clock)
    assert rates == [1.0, 4.0, 1.0]
    assert len(rig.scheduler.live) <= 1  # those of the phase before were cancelled


def test_adaptive_is_compared_with_the_best_of_each_phase() -> None:
    found = ratios(
        {
            ADAPTIVE: {64: [100.0, 90.0, 110.0], 1: [50.0]},
            "k = 0": {64: [120.0, 80.0, 100.0], 1: [30.0]},
            "k = 4": {64: [60.0, 60.0, 60.0], 1: [40.0]},
        }
    )
    assert found == {64: (pytest.approx(1.0), "k = 0"), 1: (pytest.approx(1.25), "k = 4")}
