"""Interleaved rounds over workers in processes of their own, which do what their options say."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from loadtest.contest import Entry, contest, ratios
from loadtest.peers.contender import Broken, Job, Missing
from loadtest.peers.piped import Piped, Setup
from loadtest.tasks import Task

FAKE = Path(__file__).with_name("fake_worker.py")
WARM = Job(((0,),), 1, 2)
TASKS = (
    Task("two", "tok/s", (Job(((1,), (2,)), 2, 10), Job(((3,), (4,)), 2, 10))),
    Task("long", "prompt tok/s", (Job(((5, 5, 5),), 1, 1), Job(((6, 6, 6),), 1, 1))),
)
# Jobs per round: a warm-up before each measured one.
FIRST_ROUND = 2 * len(TASKS)


def peer(tmp_path: Path, name: str, patience: float = 30.0, **options: Any) -> Piped:
    given = {"name": name, "journal": str(tmp_path / "journal"), **options}
    setup = Setup("fake", sys.executable, f"get {name}", given, patience=patience, script=FAKE)
    return Piped(name, setup, tmp_path)


def held(tmp_path: Path, *peers: Piped) -> tuple[dict[str, Entry], list[str], list[str]]:
    """Entries by name, the journal without the warm-ups, and what was said."""
    said: list[str] = []
    entries = contest(peers, TASKS, WARM, said.append)
    journal = (tmp_path / "journal").read_text().splitlines()
    return {e.name: e for e in entries}, [x for x in journal if "[0]" not in x], said


def test_rounds_are_interleaved_and_jobs_are_the_same(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    entries, journal, _ = held(tmp_path, *(peer(tmp_path, name) for name in names))
    jobs = ("[1] 2", "[5, 5, 5] 1", "[3] 2", "[6, 6, 6] 1")
    assert journal == [f"{name} {job}" for job in jobs for name in names]
    assert all(entry.fit and entry.facts == {"version": "1"} for entry in entries.values())


def test_rates_and_ratios(tmp_path: Path) -> None:
    slow, fast = peer(tmp_path, "slow", seconds=2.0), peer(tmp_path, "fast", seconds=0.5)
    entries, _, _ = held(tmp_path, slow, fast)
    assert entries["slow"].rates == {"two": [5.0, 5.0], "long": [1.5, 1.5]}
    ratio = ratios(entries["fast"], entries["slow"], "two")
    assert ratio is not None
    assert (ratio.median, ratio.least, ratio.most) == (4.0, 4.0, 4.0)
    assert ratios(entries["fast"], entries["slow"], "no such task") is None


@pytest.mark.parametrize("python", [sys.executable, "no-such-python"])
def test_who_is_missing_is_left_out_with_a_hint(tmp_path: Path, python: str) -> None:
    setup = Setup("fake", python, "pip install it", {"missing": True}, script=FAKE)
    entries, journal, said = held(tmp_path, Piped("m", setup, tmp_path), peer(tmp_path, "a"))
    assert entries["m"].missing == "pip install it"
    assert not entries["m"].failure
    assert len(journal) == len(entries["a"].rates) * 2
    assert any("m is not here: pip install it" in line for line in said)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"dies_at": FIRST_ROUND + 1}, "it ended with status 9"),
        ({"fails_at": FIRST_ROUND + 1}, "RuntimeError: out of memory"),
        ({"miscounts_at": FIRST_ROUND + 1}, "two: 2 outputs, some of [9] tokens"),
    ],
    ids=["dies", "fails", "miscounts"],
)
def test_who_breaks_is_out_and_the_others_go_on(
    tmp_path: Path, how: dict[str, Any], why: str
) -> None:
    entries, journal, _ = held(tmp_path, peer(tmp_path, "x", **how), peer(tmp_path, "a"))
    assert why in entries["x"].failure
    assert len(entries["x"].rates["two"]) == len(entries["x"].rates["long"]) == 1
    assert len(entries["a"].rates["two"]) == len(entries["a"].rates["long"]) == 2
    assert journal[-3:] == ["x [3] 2", "a [3] 2", "a [6, 6, 6] 1"]


def test_the_failure_tells_what_it_said_last(tmp_path: Path) -> None:
    entries, _, _ = held(tmp_path, peer(tmp_path, "x", dies_at=1), peer(tmp_path, "a"))
    assert "Segmentation fault" in entries["x"].failure


def test_who_does_not_answer_in_time_is_out(tmp_path: Path) -> None:
    began = time.monotonic()
    entries, _, _ = held(tmp_path, peer(tmp_path, "x", patience=3.0, hangs_at=1))
    assert "no answer for 3 s" in entries["x"].failure
    assert time.monotonic() - began < 30


def test_who_waits_is_stopped_by_the_system_and_ends_with_the_rest(tmp_path: Path) -> None:
    one = peer(tmp_path, "a")
    one.start()
    group = one._group
    assert group is not None
    assert _state(group.process.pid) == "T"
    one.run(WARM)
    assert _state(group.process.pid) == "T"
    one.close()
    with pytest.raises(ProcessLookupError):
        os.kill(group.process.pid, 0)


def test_start_says_what_is_wrong(tmp_path: Path) -> None:
    missing = peer(tmp_path, "m", missing=True)
    with pytest.raises(Missing, match="get m"):
        missing.start()
    missing.close()
    broken = Piped("b", Setup("", "/bin/false", "", script=FAKE), tmp_path)
    with pytest.raises(Broken):
        broken.start()
    broken.close()


def _state(pid: int) -> str:
    """The letter of the process's state; waits a little for the signal to take effect."""
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            break
        time.sleep(0.01)
    return state
