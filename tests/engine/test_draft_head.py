"""A head's own KV, and the hidden states it reads: with a perfect one every guess must be accepted.

The output cannot show a head that has forgotten its KV, or that reads what the target has not
computed yet or has computed for a draft that was refused. Acceptance can.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from engine.draft_head import HeadDraft
from engine.prefix import Hit
from engine.request import SpeculationParams
from engine.scheduler import Scheduler
from engine.types import Drawn, Feed, Proposal, Sequence, StepPlan, Verdict
from tests.engine.fakes import VOCAB, HashModel, Rig, choice, hash_next, reference

Patch = pytest.MonkeyPatch
NEVER = frozenset[int]()
NOBODY = -1


def state(context: Seq[int]) -> int:
    """The target's hidden state after these tokens."""
    h = 99991
    for token in context:
        h = ((h ^ (token + 7)) * 16777619) & 0xFFFFFFFF
    return h


class HashHead(HashModel):
    """A head over `target`, which it watches write its hidden states, by slot.

    A slot of its KV holds the hidden state that it read and its token. It guesses what the target
    says if all that it can see is as it should be; every `flaw`th time it is wrong all the same,
    and so is the state that it leaves then.
    """

    def __init__(self, target: HashModel, num_blocks: int, flaw: int = 0) -> None:
        super().__init__(hash_next, num_blocks)
        self.states: list[int | None] = [None] * len(self.kv)
        self._read: list[int | None] = [None] * len(self.kv)
        self._target = target
        self._flaw = flaw
        self._guesses = 0

    def write_states(self, feeds: Seq[Feed]) -> None:
        for feed in feeds:
            context: list[int] = []
            for position in range(feed.start + len(feed.tokens)):
                token = self._target.kv[self._slot(feed, position)]
                assert token is not None
                context.append(token)
                if position >= feed.start:
                    self.states[self._slot(feed, position)] = state(context)

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        for feed in feeds:
            for position in range(feed.start, feed.start + len(feed.tokens)):
                before = self.states[self._slot(feed, position - 1)] if position else NOBODY
                self._read[self._slot(feed, position)] = before
        return super().run(feeds)

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        super().copy_blocks(pairs)
        size = self._block_size
        for pool in (self.states, self._read):
            held = [pool[source * size : (source + 1) * size] for source, _ in pairs]
            for (_, target), content in zip(pairs, held, strict=True):
                pool[target * size : (target + 1) * size] = content

    def _answers(self, feed: Feed) -> tuple[int, ...]:
        if not feed.sample:
            return ()
        assert feed.sample == 1
        end = feed.start + len(feed.tokens)
        slots = [self._slot(feed, position) for position in range(end)]
        context = [self.kv[slot] for slot in slots]
        fine = None not in context
        for position, slot in enumerate(slots):
            expected = state(context[:position]) if position else NOBODY  # type: ignore[arg-type]
            fine = fine and self._read[slot] == expected
        self._guesses += 1
        right = hash_next(context, feed.sampling) if fine else 0  # type: ignore[arg-type]
        if not fine or (self._flaw and self._guesses % self._flaw == 0):
            self.states[slots[-1]] = NOBODY
            return ((right + 1) % VOCAB,)
        self.states[slots[-1]] = state(context)  # type: ignore[arg-type]
        return (right,)


class Told:
    """The target, which tells the head what it has computed."""

    def __init__(self, target: HashModel, head: HashHead) -> None:
        self._target = target
        self._head = head

    def run(self, feeds: Seq[Feed]) -> list[Drawn]:
        drawn = self._target.run(feeds)
        self._head.write_states(feeds)
        return drawn


def rig_with(flaw: int = 0, rows: int = 24, num_blocks: int = 64, **settings: int) -> Rig:
    """A rig whose draft is a head; `rows` are the head's of a step."""
    target = HashModel(hash_next, num_blocks)
    head = HashHead(target, num_blocks, flaw)
    source = choice([HeadDraft(head, rows, 10_000)])
    rig = Rig(
        source=source, num_blocks=num_blocks, wrap=lambda _: Told(target, head), **settings  # type: ignore[arg-type]
    )  # fmt: skip
    rig.models = [target, head]
    return rig


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def first_come(rig: Rig) -> None:
    rng = random.Random(1)
    for i in range(12):
        rig.submit(str(i), prompt_of(rng, rng.randint(1, 40)), 40, ignore_eos=True)
    rig.drain()


def short_of_blocks(rig: Rig) -> None:
    """Whoever loses its blocks is computed again, by target and head."""
    rng = random.Random(2)
    for i in range(6):
        rig.submit(str(i), prompt_of(rng, 20), 60, ignore_eos=True)
    rig.drain()
    assert sum(rig.finish(str(i)).preemptions for i in range(6)) > 3


def begins_alike(rig: Rig) -> None:
    """With a prefix that is there, and with samples of one prompt that share and copy blocks."""
    rng = random.Random(3)
    shared = prompt_of(rng, 30)
    for i in range(10):
        own = prompt_of(rng, i) if i > 3 else [1]
        rig.submit(str(i), [*shared, *own], 30, ignore_eos=True, group="g" * (i < 4))
        for _ in range(rng.randint(0, 9)):
            rig.step()
    rig.drain()
    assert rig.finish("9").cached_tokens >= 28


def now_and_then(rig: Rig) -> None:
    """Steps in which some may not draft, or nobody: too many rows, or their own wish."""
    rng = random.Random(4)
    for turn in range(30):
        for i in range(rng.randint(0, 3)):
            own = SpeculationParams(rng.choice([None, 0, 1, 2]))
            prompt = prompt_of(rng, rng.randint(1, 30))
            rig.submit(f"{turn}.{i}", prompt, 25, ignore_eos=True, speculation=own)
        for _ in range(rng.randint(0, 6)):
            rig.step()
    rig.drain()


def short_ones(rig: Rig) -> None:
    """Prompts that are computed in the step of their first token, with rows left for drafts."""
    rng = random.Random(5)
    for i in range(60):
        rig.submit(str(i), prompt_of(rng, rng.randint(3, 8)), 20, ignore_eos=True)
        for _ in range(rng.randint(1, 4)):
            rig.step()
    rig.drain()


SCENES: dict[str, tuple[Callable[[Rig], None], dict[str, int]]] = {
    "first come": (first_come, {}),
    "few rows": (first_come, {"rows": 9}),
    "short ones": (short_ones, {"max_step_rows": 64, "num_blocks": 100}),
    "short of blocks": (short_of_blocks, {"num_blocks": 40}),
    "begins alike": (begins_alike, {"prefix_cache": True}),
    "now and then": (now_and_then, {"draft_rows": 6}),
}


def accepted_of_drafted(scene: str, flaw: int = 0) -> tuple[int, int]:
    play, settings = SCENES[scene]
    rig = rig_with(flaw, **settings)
    play(rig)
    for name, chunks in rig.chunks.items():
        assert chunks[-1].finish is not None, name
    drafted, accepted = rig.totals()
    return accepted, drafted


@pytest.mark.parametrize("scene", SCENES)
def test_all_of_a_perfect_head_is_accepted(scene: str) -> None:
    accepted, drafted = accepted_of_drafted(scene)
    assert accepted == drafted > 30


@pytest.mark.parametrize("scene", SCENES)
def test_after_a_wrong_guess_it_goes_on_from_what_the_target_computed(scene: str) -> None:
    """Each fifth guess is wrong and ends its chain; none of the others is."""
    accepted, drafted = accepted_of_drafted(scene, flaw=5)
    assert drafted > 30
    assert accepted / drafted > 0.5
    assert accepted < drafted


def test_the_output_is_the_target_s() -> None:
    rig = rig_with(flaw=3)
    prompts = {str(i): prompt_of(random.Random(i), 3 + i) for i in range(12)}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 50, ignore_eos=True)
    rig.drain()
    for name, prompt in prompts.items():
        assert rig.tokens(name) == reference(prompt, 50, stop_ids=NEVER)


# ---- what is easily done wrong, done on purpose -------------------------------------------------

preempt, admit, observe = Scheduler._preempt, Scheduler._admit, HeadDraft.observe


def forgets_nothing_on_preemption(patch: Patch) -> None:
    drafted: dict[str, int] = {}

    def lose(self: Scheduler, seq: Sequence) -> None:
        drafted[seq.request.id] = seq.drafted
        preempt(self, seq)

    def take_up(self: Scheduler, seq: Sequence, hit: Hit, now: float) -> None:
        admit(self, seq, hit, now)
        seq.drafted = drafted.get(seq.request.id, 0)

    patch.setattr(Scheduler, "_preempt", lose)
    patch.setattr(Scheduler, "_admit", take_up)
    patch.setattr(Scheduler, "check", lambda self: None)


def takes_a_prefix_for_read(patch: Patch) -> None:
    """All of it, whether the head has seen it or not."""

    def wrong(self: Scheduler, seq: Sequence, hit: Hit, now: float) -> None:
        admit(self, seq, hit, now)
        seq.drafted = seq.computed

    patch.setattr(Scheduler, "_admit", wrong)


def skips_steps_in_which_it_did_not_draft(patch: Patch) -> None:
    def wrong(
        self: HeadDraft, plan: StepPlan, proposals: Seq[Proposal], verdicts: Seq[Verdict]
    ) -> None:
        observe(self, plan, proposals, verdicts)
        for work, proposal in zip(plan.work, proposals, strict=True):
            if not proposal.tokens and work.samples:
                work.seq.drafted = work.start + work.count

    patch.setattr(HeadDraft, "observe", wrong)


def keeps_what_it_made_of_its_own_guesses(patch: Patch) -> None:
    """Of refused ones, too."""
    patch.setattr(HeadDraft, "_kept", lambda self, accepted: accepted + 1)
    patch.setattr(Scheduler, "check", lambda self: None)


def reads_ahead_of_the_target(patch: Patch) -> None:
    patch.setattr(HeadDraft, "_readable", lambda self, work: work.start + work.count)


@pytest.mark.parametrize(
    ("mutate", "scene"),
    [
        (forgets_nothing_on_preemption, "short of blocks"),
        (takes_a_prefix_for_read, "begins alike"),
        (skips_steps_in_which_it_did_not_draft, "now and then"),
        (keeps_what_it_made_of_its_own_guesses, "first come"),
        (reads_ahead_of_the_target, "short ones"),
    ],
)
def test_acceptance_shows_it(
    mutate: Callable[[Patch], None], scene: str, monkeypatch: Patch
) -> None:
    flaw = 5 if scene == "first come" else 0
    good, _ = accepted_of_drafted(scene, flaw)
    mutate(monkeypatch)
    accepted, _ = accepted_of_drafted(scene, flaw)
    assert accepted < 0.9 * good
