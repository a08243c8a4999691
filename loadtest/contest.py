"""Interleaved rounds: in every round everybody does the same job, one after another, alone.

A shared machine is now faster, now slower. Measured in turn, contenders meet the same weather, so
what is compared is the ratio of two rates of the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from loadtest.peers.contender import Broken, Contender, Job, Missing
from loadtest.statistics import Spread, spread
from loadtest.tasks import Task

Say = Callable[[str], None]


@dataclass(slots=True)
class Entry:
    """A contender and what has become of it. `rates` and `details` by task, one per round."""

    contender: Contender
    facts: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    failure: str = ""
    rates: dict[str, list[float]] = field(default_factory=dict)
    details: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def fit(self) -> bool:
        return not self.missing and not self.failure


def contest(
    contenders: Sequence[Contender], tasks: Sequence[Task], warm_up: Job, say: Say
) -> list[Entry]:
    """Start all, run all rounds, end all. Who is missing or breaks takes no further part."""
    entries = [Entry(contender) for contender in contenders]
    try:
        for entry in entries:
            say(f"starting {entry.name}")
            with _failing_alone(entry, say):
                entry.facts = entry.contender.start()
        for task, number in _rounds(tasks):
            for entry in entries:
                if entry.fit:
                    with _failing_alone(entry, say):
                        rate = _measure(entry, task, number, warm_up)
                        say(f"{number + 1}: {task.name}, {entry.name}: {rate:.1f} {task.unit}")
    finally:
        for entry in entries:
            entry.contender.close()
    return entries


def ratios(entry: Entry, baseline: Entry, task: str) -> Spread | None:
    """The rates of `entry` over those of `baseline`, round by round; None without a common one."""
    pairs = list(zip(entry.rates.get(task, []), baseline.rates.get(task, []), strict=False))
    return spread([ours / theirs for ours, theirs in pairs]) if pairs else None


def _rounds(tasks: Sequence[Task]) -> Iterator[tuple[Task, int]]:
    for number in range(max(len(task.jobs) for task in tasks)):
        for task in tasks:
            yield task, number


def _measure(entry: Entry, task: Task, number: int, warm_up: Job) -> float:
    """One job, after a short one that wakes the contender; its rate. Raises Broken."""
    job = task.jobs[number]
    entry.contender.run(warm_up)
    outcome = entry.contender.run(job)
    expected = (job.max_tokens,) * len(job.prompts)
    if outcome.counts != expected:
        odd = sorted(set(outcome.counts) - {job.max_tokens})
        raise Broken(
            f"{task.name}: {len(outcome.counts)} outputs, some of {odd} tokens; "
            f"asked for {len(expected)} of {job.max_tokens}"
        )
    rate = task.amount(job) / outcome.seconds
    entry.rates.setdefault(task.name, []).append(rate)
    entry.details.setdefault(task.name, []).append(outcome.details)
    return rate


@contextmanager
def _failing_alone(entry: Entry, say: Say) -> Iterator[None]:
    try:
        yield
    except Missing as error:
        entry.missing = str(error)
        say(f"{entry.name} is not here: {error}")
    except Broken as error:
        entry.failure = str(error)
        say(f"{entry.name} is out: {error}")
    if not entry.fit:
        entry.contender.close()
