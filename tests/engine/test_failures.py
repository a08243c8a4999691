"""Something raises: whoever caused it ends with the cause, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import pytest

from engine.core import MAX_EMPTY_PLANS, MAX_FAILED_STEPS
from engine.errors import EngineDead
from engine.observer import StepReport
from engine.outcome import FinishReason
from engine.policy import ClassArrival
from engine.request import Request, SamplingParams
from engine.types import Drawn, Feed, Model, Sequence, TextStream
from tests.engine.fakes import PlainText, Rig, reference

NEVER = frozenset[int]()
PROMPTS = {str(i): [1 + i, 2, 3] for i in range(4)}
POISON = [6, 6, 6]


class Failing:
    """A model that raises when told to."""

    def __init__(self, model: Model, when: Callable[[int, Seq[Feed]], bool]) -> None:
        self._model = model
        self._when = when
        self.runs = 0

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        self.runs += 1
        if self._when(self.runs, feeds):
            raise MemoryError("out of memory")
        return self._model.run(feeds)


class Unusable:
    """A model that gives no usable row for one seed from position `start` on."""

    def __init__(self, model: Model, seed: int, start: int) -> None:
        self._model = model
        self._seed = seed
        self._start = start

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        return [
            Drawn(
                tuple(
                    -1 if f.sampling.seed == self._seed and position >= self._start else token
                    for position, token in enumerate(
                        d.tokens, f.start + len(f.tokens) - f.sample + 1
                    )
                )
            )
            for f, d in zip(feeds, self._model.run(feeds), strict=True)
        ]


def rig_failing(when: Callable[[int, Seq[Feed]], bool], draft: str = "perfect") -> Rig:
    return Rig(draft=draft, wrap=lambda model: Failing(model, when))


def poisoned(_: int, feeds: Seq[Feed]) -> bool:
    return any(f.start == 0 and f.tokens[:3] == tuple(POISON) for f in feeds)


def submit_all(rig: Rig) -> None:
    for i, prompt in PROMPTS.items():
        rig.submit(i, prompt, 30, ignore_eos=True)


def check_all(rig: Rig) -> None:
    for i, prompt in PROMPTS.items():
        assert rig.finish(i).reason is FinishReason.LENGTH
        assert rig.tokens(i) == reference(prompt, 30, stop_ids=NEVER)
    assert rig.pool.free == rig.pool.num_blocks


@pytest.mark.parametrize("draft", ["none", "perfect", "ngram,model"])
def test_one_request_that_the_model_cannot_compute(draft: str) -> None:
    rig = rig_failing(poisoned, draft)
    submit_all(rig)
    rig.step()
    for number in range(3):
        rig.submit(f"poison{number}", POISON, 10)
        rig.step()
    rig.drain()
    check_all(rig)
    for number in range(3):
        finish = rig.finish(f"poison{number}")
        assert (finish.reason, finish.completion_tokens) == (FinishReason.ERROR, 0)
        assert finish.error == "MemoryError: out of memory"


def test_a_poisonous_request_alone() -> None:
    rig = rig_failing(poisoned)
    rig.submit("poison", POISON, 10)
    rig.drain()
    assert rig.finish("poison").reason is FinishReason.ERROR
    submit_all(rig)
    rig.drain()
    check_all(rig)


@pytest.mark.parametrize("draft", ["none", "perfect"])
@pytest.mark.parametrize("run", range(1, 12))
def test_a_step_that_fails_as_a_whole_is_computed_one_by_one(draft: str, run: int) -> None:
    """As when memory is short: in the prompt, in decoding, in verification. Nobody ends."""
    rig = rig_failing(lambda n, feeds: n == run and len(feeds) > 1, draft)
    submit_all(rig)
    rig.drain()
    check_all(rig)
    drafted, accepted = rig.totals()
    assert drafted == accepted


def test_large_batches_always_fail() -> None:
    rig = rig_failing(lambda _, feeds: len(feeds) > 1)
    submit_all(rig)
    rig.drain()
    check_all(rig)


def test_a_broken_device_stops_the_engine() -> None:
    """Every step fails for everyone: those that are there end with the cause, then it is over."""
    rig = rig_failing(lambda *_: True)
    for number in range(MAX_FAILED_STEPS - 1):
        rig.submit(str(number), [1], 5)
        rig.step()
        assert rig.finish(str(number)).error == "MemoryError: out of memory"
    rig.submit("last", [1], 5)
    with pytest.raises(EngineDead, match="out of memory"):
        rig.step()


def test_one_good_step_starts_the_count_again() -> None:
    rig = rig_failing(lambda n, _: n % MAX_FAILED_STEPS != 0, "none")
    for number in range(4 * MAX_FAILED_STEPS):
        rig.submit(str(number), [1], 1)
        rig.step()
    failed = [rig.finish(str(n)).reason is FinishReason.ERROR for n in range(4 * MAX_FAILED_STEPS)]
    assert failed == ([True] * (MAX_FAILED_STEPS - 1) + [False]) * 4


@pytest.mark.parametrize("draft", ["none", "perfect", "wrong"])
def test_logits_that_are_not_numbers(draft: str) -> None:
    """Only when the output gets there: rows behind a wrong guess say nothing."""
    rig = Rig(draft=draft, wrap=lambda model: Unusable(model, seed=7, start=3 + 12))
    sampling = SamplingParams(temperature=0.5, seed=7)
    submit_all(rig)
    rig.submit("nan", [1, 2, 3], 30, sampling=sampling, ignore_eos=True)
    rig.submit("short", [1, 2, 3], 12, sampling=sampling, ignore_eos=True)
    rig.drain()
    check_all(rig)
    want = reference([1, 2, 3], 12, sampling, NEVER)
    assert rig.finish("short").reason is FinishReason.LENGTH
    assert rig.tokens("short") == want
    finish, got = rig.finish("nan"), rig.tokens("nan")
    assert (finish.reason, "not numbers" in finish.error) == (FinishReason.ERROR, True)
    assert got == want[: len(got)]
    assert len(got) >= 12 - rig.config.max_draft_tokens


class Mute(PlainText):
    """A text stream that cannot go on after some tokens, as with an id that is none."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._left = tokens

    def push(self, token: int) -> tuple[str, str | None]:
        self._left -= 1
        if self._left < 0:
            raise OverflowError("out of range")
        return super().push(token)

    def flush(self) -> str:
        raise OverflowError("out of range")


@pytest.mark.parametrize("draft", ["none", "perfect"])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_tokenizer_that_cannot_decode(draft: str, after: int) -> None:
    def texts(request: Request) -> TextStream:
        return Mute(after) if request.id == "mute" else PlainText()

    rig = Rig(draft=draft, texts=texts)
    submit_all(rig)
    rig.submit("mute", [5, 5], 30, ignore_eos=True)
    rig.drain()
    check_all(rig)
    finish = rig.finish("mute")
    assert (finish.reason, finish.error) == (FinishReason.ERROR, "detokenizing: out of range")
    assert len(rig.text("mute")) == after


def test_an_end_comes_even_if_the_last_text_does_not() -> None:
    rig = Rig(texts=lambda _: Mute(100))
    rig.submit("a", [1, 2], 5, ignore_eos=True)
    rig.drain()
    assert (rig.finish("a").reason, len(rig.text("a"))) == (FinishReason.LENGTH, 5)


class Complaining:
    """An observer that raises, as a metrics library does for a negative count."""

    def step(self, report: StepReport) -> None:
        raise ValueError("counters may only go up")


def test_telemetry_that_raises() -> None:
    rig = Rig(draft="perfect", num_blocks=24)
    rig.engine._observer = Complaining()
    submit_all(rig)
    rig.drain()
    check_all(rig)
    assert rig.engine.observer_errors > 5


def test_no_count_ever_falls() -> None:
    """Through preemptions, rollbacks and cancellations; a negative count would be refused."""
    rig = Rig(draft="junk", num_blocks=20)
    for number in range(200):
        rig.submit(str(number), [1 + number % 6] * 5, 20)
        rig.step((lambda n=number: rig.engine.cancel(str(n - 3))) if number % 5 == 0 else _nothing)
    rig.drain()
    reports = rig.observer.reports
    assert sum(r.preempted for r in reports) > 10
    for r in reports:
        counts = [r.rows, r.prefill_rows, r.drafted, r.accepted, r.emitted, r.preempted]
        counts += [
            *r.waiting,
            r.free_blocks,
            r.used_blocks,
            *(n for _, s in r.by_source for n in s.accepted_at),
        ]
        assert min(counts) >= 0
        assert all(seconds >= 0 for _, seconds in r.phases)
        assert all(0 <= s.accepted <= s.drafted for _, s in r.by_source)


class Forgetful(ClassArrival):
    """A policy with a defect: nobody ever gets his turn."""

    def waiting(self) -> Iterator[Sequence]:
        return iter(())


def test_a_planner_that_never_plans_is_no_silent_spin() -> None:
    rig = Rig(policy=Forgetful())
    rig.submit("a", [1], 5)
    for _ in range(MAX_EMPTY_PLANS):
        rig.step()
    with pytest.raises(EngineDead, match="none could be planned"):
        rig.step()


def _nothing() -> None:
    return None
