"""Training learns, and the same order learns the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load
from engine.training.corpus import Corpus
from engine.training.pace import Pace
from engine.training.start import common_ids, frozen_parts, new_head
from engine.training.trainer import PROMPT_WEIGHT, Batch, Schedule, Trainer, Windows
from tests.engine.training.models import write_target

SCHEDULE = Schedule(steps=24, windows=4, length=32)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_target(tmp_path_factory.mktemp("target")), "float32", "cpu")


@pytest.fixture(scope="module")
def corpus(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """What the target says after some tokens, by transformers."""
    made = Corpus(tmp_path_factory.mktemp("corpus"), 64)
    for number in range(16):
        ids = torch.tensor([[5 + 23 * number % 300, 50 + number, 60]])
        with torch.inference_mode():
            ids = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=60 - 3 * number,
                do_sample=False,
                eos_token_id=None,
            )
            states = target.model(ids, output_hidden_states=True)
            inner = target.model.model
            hidden = run_layers(inner, ids)
        assert states.logits.shape[1] == ids.shape[1]
        made.add(ids[0].tolist(), hidden[0], 3, 0.0, number > 13, number)
    return made


def run_layers(inner: torch.nn.Module, ids: Tensor) -> Tensor:
    """What goes into the last norm."""
    found: list[Tensor] = []
    hook = inner.norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    inner(ids)
    hook.remove()
    return found[0]


def trainer_of(target: LoadedModel, corpus: Corpus, seed: int = 0, steps: int = 24) -> Trainer:
    module = new_head(target, corpus, common_ids(corpus, 100), seed)
    return Trainer(module, *frozen_parts(target), Schedule(steps, windows=4, length=32))


def train(trainer: Trainer, corpus: Corpus, start: int, end: int, seed: int = 0) -> list[float]:
    windows = Windows(corpus, held_out=False, seed=seed)
    return [trainer.step(i, windows.batch(i, 4, 32)) for i in range(start, end)]


def same(a: Trainer, b: Trainer) -> bool:
    ours, theirs = a.module.own_state(), b.module.own_state()
    return all(torch.equal(t, theirs[n]) for n, t in ours.items())


def held_batches(corpus: Corpus) -> list[Batch]:
    windows = Windows(corpus, held_out=True, seed=1)
    return [windows.batch(i, 4, 32) for i in range(3)]


def test_it_learns(target: LoadedModel, corpus: Corpus) -> None:
    trainer = trainer_of(target, corpus, steps=60)
    before = trainer.accuracy(held_batches(corpus))
    losses = train(trainer, corpus, 0, 60)
    after = trainer.accuracy(held_batches(corpus))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert len(after) == SCHEDULE.depth
    assert all(b > a + 0.2 for a, b in zip(before, after, strict=True)), (before, after)


def test_the_same_seed_gives_the_same_bits(target: LoadedModel, corpus: Corpus) -> None:
    one, two, other = (trainer_of(target, corpus, seed) for seed in (0, 0, 1))
    losses = [train(t, corpus, 0, 12, seed) for t, seed in ((one, 0), (two, 0), (other, 1))]
    assert losses[0] == losses[1] != losses[2]
    assert same(one, two)
    assert not same(one, other)


@pytest.mark.parametrize("stop", [0, 1, 13, 23])
def test_interrupted_and_resumed_it_gives_the_same_bits(
    target: LoadedModel, corpus: Corpus, tmp_path: Path, stop: int
) -> None:
    """Also by a trainer that thought of another number of steps."""
    whole = trainer_of(target, corpus)
    losses = train(whole, corpus, 0, 24)
    first = trainer_of(target, corpus)
    train(first, corpus, 0, stop)
    first.save(tmp_path / "state.pt", stop)
    second = trainer_of(target, corpus, seed=5, steps=77)
    train(second, corpus, 0, 3)
    assert second.load(tmp_path / "state.pt") == stop
    assert second.schedule == SCHEDULE
    assert train(second, corpus, stop, 24) == losses[stop:]
    assert same(whole, second)
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_a_window_is_of_one_document(tmp_path: Path) -> None:
    """Rows say which document and which position they are."""
    corpus = Corpus(tmp_path, 4)
    lengths = (1, 2, 5, 40, 100)
    for number, length in enumerate(lengths):
        rows = torch.tensor([number, 0, 0, 0]).repeat(length, 1).float()
        rows[:, 1] = torch.arange(length)
        tokens = [1000 * number + i for i in range(length)]
        corpus.add(tokens, rows, min(3, length), 0.0, False)
    windows = Windows(corpus, held_out=False, seed=0)
    met = set()
    for step in range(40):
        batch = windows.batch(step, 6, 16)
        assert batch.tokens.shape == batch.weight.shape == batch.features.shape[:2] == (6, 16)
        for tokens, features, weight in zip(
            batch.tokens, batch.features, batch.weight, strict=True
        ):
            count = int((weight > 0).sum())
            number, first = divmod(int(tokens[0]), 1000)
            met.add(number)
            assert count == min(16, lengths[number] - first) == min(16, lengths[number])
            assert tokens[:count].tolist() == [1000 * number + first + i for i in range(count)]
            assert (features[:count, 0] == number).all()
            assert features[:count, 1].tolist() == list(range(first, first + count))
            assert not tokens[count:].any()
            assert not features[count:].any()
            assert not weight[count:].any()
            written = torch.arange(first, first + count) >= min(3, lengths[number]) - 1
            assert torch.equal(weight[:count] == 1.0, written)
            assert (weight[:count][~written] == PROMPT_WEIGHT).all()
    assert met == {1, 2, 3, 4}  # one token has nothing to be asked


def test_padding_changes_nothing(target: LoadedModel, corpus: Corpus) -> None:
    batch = Windows(corpus, held_out=False, seed=0).batch(0, 2, 16)
    losses = []
    for noise in (0.0, 5.0):
        tokens = torch.nn.functional.pad(batch.tokens, (0, 4), value=int(noise))
        features = torch.nn.functional.pad(batch.features, (0, 0, 0, 4), value=noise)
        weight = torch.nn.functional.pad(batch.weight, (0, 4))
        losses.append(trainer_of(target, corpus).step(20, Batch(tokens, features, weight)))
    assert losses[0] == losses[1]


def test_prompts_that_take_up_whole_windows_have_no_accuracy(
    target: LoadedModel, corpus: Corpus
) -> None:
    batch = Windows(corpus, held_out=False, seed=0).batch(0, 2, 16)
    only = Batch(batch.tokens, batch.features, torch.full_like(batch.weight, PROMPT_WEIGHT))
    assert trainer_of(target, corpus).accuracy([only]) == [0.0] * 3


def test_the_steps_that_fit_into_a_time() -> None:
    """Chains of one guess for 15 % of the steps, of two up to the half, then of three."""
    pace, schedule = Pace((1.0, 2.0, 3.0)), Schedule(1)
    steps = pace.steps(schedule, 0, 1000.0)
    taken = sum(1.0 + (i >= 0.15 * steps) + (i >= 0.5 * steps) for i in range(steps))
    assert 990 <= taken <= 1000
    assert pace.steps(schedule, 0, 0.0) == pace.steps(schedule, 3, -1.0) == 10  # never none
    assert pace.steps(schedule, 300, 0.0) == pace.steps(schedule, 300, -7.0) == 300  # no more
    assert pace.steps(schedule, 300, 30.0) == 310
    for _ in range(100):
        pace.note(3, 6.0)  # half as fast by now
    assert abs(pace.steps(schedule, 0, 2000.0) - steps) <= 2
    assert pace.deepest == pytest.approx(6.0, rel=0.01)
