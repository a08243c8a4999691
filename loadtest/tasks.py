"""The jobs of a comparison: the same prompts for everybody, and in every round fresh ones.

Fresh, because an engine that keeps the KV of earlier prompts would otherwise be timed at finding
them again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.peers.contender import Job

Encode = Callable[[str], Sequence[int]]
WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the comparison: a job per round, and what its rate counts.

    `unit` is "tok/s" for new tokens or "prompt tok/s" for tokens of the prompts.
    """

    name: str
    unit: str
    jobs: tuple[Job, ...]

    def amount(self, job: Job) -> int:
        """What the rate divides by the seconds."""
        if self.unit == "tok/s":
            return len(job.prompts) * job.max_tokens
        return sum(map(len, job.prompts))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. `repeats` prompts per round at least, at every level of `at_once`."""

    at_once: tuple[int, ...] = (1, 8, 32)
    max_tokens: int = 128
    rounds: int = 3
    repeats: int = 4
    prefill_tokens: int = 1500  # 0: no prefill task


def read_texts(path: Path) -> list[str]:
    """Prompts from JSON lines with `prompt`, or Spec-Bench's `turns` (the first one).

    Raises ValueError for a line that has neither, or a file without prompts.
    """
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            item = json.loads(line)
            texts.append(str(item["prompt"] if "prompt" in item else item["turns"][0]))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path}:{number}: no prompt") from error
    if not texts:
        raise ValueError(f"{path}: no prompts")
    return texts


class Deck:
    """Texts in a shuffled order; who has gone through all gets them again, made different."""

    def __init__(self, texts: Sequence[str], seed: int = 0) -> None:
        self._texts = list(texts)
        random.Random(seed).shuffle(self._texts)
        self._taken = 0

    def take(self) -> str:
        turn, index = divmod(self._taken, len(self._texts))
        self._taken += 1
        return f"# {turn}\n{self._texts[index]}" if turn else self._texts[index]


def tasks(texts: Sequence[str], encode: Encode, plan: Plan) -> tuple[Task, ...]:
    """Decoding at every level, then prefill; no prompt comes twice."""
    deck = Deck(texts)

    def decode(at_once: int) -> Job:
        count = max(at_once, plan.repeats)
        prompts = tuple(tuple(encode(deck.take())) for _ in range(count))
        return Job(prompts, at_once, plan.max_tokens)

    def prefill() -> Job:
        prompts = tuple(_long(deck, encode, plan.prefill_tokens) for _ in range(plan.repeats))
        return Job(prompts, 1, 1)

    made = [
        Task(f"{n} at once", "tok/s", tuple(decode(n) for _ in range(plan.rounds)))
        for n in plan.at_once
    ]
    if plan.prefill_tokens:
        jobs = tuple(prefill() for _ in range(plan.rounds))
        made.append(Task(f"prefill {plan.prefill_tokens}", "prompt tok/s", jobs))
    return tuple(made)


def warm_up(encode: Encode) -> Job:
    """Something short that shares no prompt with the tasks: wakes who has slept."""
    return Job((tuple(encode("Once upon a time")),), 1, WARM_TOKENS)


def _long(deck: Deck, encode: Encode, tokens: int) -> tuple[int, ...]:
    """`tokens` ids of several prompts, one after another."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += encode(deck.take() + "\n\n")
    return tuple(ids[:tokens])
