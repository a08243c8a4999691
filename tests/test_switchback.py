"""The measuring tools over engines whose steps take a known time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.outcome import FinishReason
from engine.request import Request, SamplingParams, StopParams
from tests.batching import Round, expected_bound, report, take_round, take_tokens
from tests.bench import run
from tests.engine.fakes import Rig
from tests.streams import Streams
from tests.switchback import Clocks, Settings, compare, parse, sitting, take_block


@dataclass(slots=True)
class Clock:
    """Moves only when told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Side:
    """Steps of `wall` and `cpu` seconds that yield `tokens`; preparing takes a second."""

    name: str
    wall_clock: Clock
    cpu_clock: Clock
    journal: list[str]
    wall: float
    cpu: float
    tokens: int = 1

    def prepare(self) -> None:
        self.wall_clock.now += 1.0
        self.cpu_clock.now += 1.0

    def step(self) -> int:
        self.journal.append(self.name)
        self.wall_clock.now += self.wall
        self.cpu_clock.now += self.cpu
        return self.tokens


@dataclass(slots=True)
class Pair:
    """A toggle of two such sides; `journal` has makings and steps in order."""

    name: str = "pair"
    clock: Clock = field(default_factory=Clock)
    cpu: Clock = field(default_factory=Clock)
    journal: list[str] = field(default_factory=list)

    def sides(self) -> tuple[Callable[[], Side], Callable[[], Side]]:
        return self._maker("a", 0.1, 0.2, 2), self._maker("b", 0.2, 0.1, 1)

    def _maker(self, name: str, wall: float, cpu: float, tokens: int) -> Callable[[], Side]:
        def make() -> Side:
            self.journal.append(f"make {name}")
            return Side(name, self.clock, self.cpu, self.journal, wall, cpu, tokens)

        return make

    @property
    def clocks(self) -> Clocks:
        return Clocks(self.clock, self.cpu)

    @property
    def turns(self) -> str:
        """A letter per block of five steps."""
        names = [name for name in self.journal if not name.startswith("make")]
        return "".join(names[::5])


def test_only_steps_are_timed() -> None:
    pair = Pair()
    block = take_block(pair.sides()[0](), 10, pair.clocks)
    assert (block.steps, block.tokens) == (10, 20)
    assert (block.wall, block.cpu) == (pytest.approx(1.0), pytest.approx(2.0))


def test_sides_take_turns_in_changing_order() -> None:
    pair = Pair()
    a, b = sitting(pair, False, 40.0, 5, pair.clocks)
    assert pair.turns.startswith("abab" + "abbaabba")
    assert len(a.blocks) == len(b.blocks) >= 4


def test_even_no_time_at_all_gives_two_pairs() -> None:
    pair = Pair()
    a, b = sitting(pair, False, 0.0, 5, pair.clocks)
    assert len(a.blocks) == len(b.blocks) == 2


def test_ratios_and_the_order_of_loading() -> None:
    pair = Pair()
    found, pairs = compare(pair, 2, 100.0, 5, pair.clocks)
    made = [name for name in pair.journal if name.startswith("make")]
    assert made == ["make a", "make b", "make b", "make a"]
    assert pairs >= 4
    assert found["tokens per second"].ratio == pytest.approx(4.0)
    assert found["steps per second"].ratio == pytest.approx(2.0)
    assert found["steps per CPU second"].ratio == pytest.approx(0.5)


def test_settings_of_either_side_lie_over_the_common_ones() -> None:
    seen: list[EngineConfig] = []

    def make(config: EngineConfig) -> Any:
        seen.append(config)

    base = EngineConfig(draft="none", max_seqs=8)
    toggle = Settings("t", {"draft": "ngram"}, {"max_seqs": 4}, base, make)
    for side in toggle.sides():
        side()
    assert [(c.draft, c.max_seqs) for c in seen] == [("ngram", 8), ("none", 4)]


def test_parsing() -> None:
    given = ["draft=none", "max-seqs=4", "prefix_cache=false"]
    assert parse(given) == {"draft": "none", "max_seqs": 4, "prefix_cache": False}
    for wrong in ("frobnicate=1", "max_seqs=many", "prefix_cache=maybe"):
        with pytest.raises(ValueError, match=r"frobnicate|many|maybe"):
            parse([wrong])


def streams(at_once: int, source: Iterator[Request], context_limit: int = 1000) -> Streams:
    rig = Rig(num_blocks=256, max_seqs=8, max_step_rows=64, context_limit=context_limit)
    return Streams(rig.engine, source, at_once)


def asked(name: str, tokens: int) -> Request:
    return Request(name, (1, 2, 3, 4, 5), StopParams(tokens), SamplingParams(0.0))


def test_streams_keep_so_many_in_flight() -> None:
    source = (asked(str(i), 3 + i % 4) for i in range(10**6))
    busy = streams(6, source)
    tokens, _ = take_tokens(busy, 200, Clock())
    assert tokens >= 200
    assert len(busy._live) <= 6
    busy.prepare()
    assert len(busy._live) + len(busy._ready) == 6


def test_a_request_that_fails_is_not_counted_as_speed() -> None:
    busy = streams(1, iter([asked("x", 10**6)]), context_limit=20)
    with pytest.raises(RuntimeError, match=FinishReason.CONTEXT):
        take_tokens(busy, 10**6, Clock())


def test_a_round_is_a_wave_and_as_many_tokens() -> None:
    wave = [asked(f"w{i}", tokens) for i, tokens in enumerate((2, 4, 12, 6))]
    beside = streams(4, (asked(str(i), 6) for i in range(10**6)))
    ticks = iter(range(10**6))
    got = take_round(wave, streams(4, iter(())), beside, lambda: float(next(ticks)))
    assert got.bound == 12 * 4 / 24
    # A step takes one tick: 12 or 13 (the prompts' own) for the wave, 4 tokens a step beside it.
    assert got.static == pytest.approx(24 / 12, rel=0.1)
    assert got.continuous == pytest.approx(4, rel=0.2)


def test_the_bound_of_a_mix() -> None:
    assert expected_bound((5, 5), 32) == 1.0
    assert expected_bound((0, 10), 1) == pytest.approx(1.0)
    assert expected_bound((1, 2), 2) == pytest.approx(1.75 / 1.5)
    assert expected_bound((8, 512), 32) == pytest.approx(1.91, abs=0.01)


def test_the_report_ends_with_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    report([Round(100.0, 150.0, 2.0), Round(100.0, 170.0, 2.0)], 1.9)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["share_of_bound"] == pytest.approx(0.8)
    assert line["ratio"] == {"median": 1.6, "least": 1.5, "most": 1.7}


def test_bench_gathers_the_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "tool.py"
    script.write_text(
        "import sys\nprint('a table')\nprint(sys.argv[1])\nsys.exit(int(sys.argv[2]))"
    )
    assert run(f"""{script} '{{"x": 1}}' 0""") == ({"x": 1}, 0)
    assert capsys.readouterr().out == "a table\n"
    assert run(f"{script} oops 3") == (None, 3)
    assert run(f"{script} oops 0") == (None, 1)
