"""The second part: the head is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from engine.loader import LoadedModel
from engine.training.corpus import Corpus
from engine.training.order import Run
from engine.training.pace import Pace, measured
from engine.training.start import frozen_parts, new_head
from engine.training.trainer import Schedule, Trainer, Windows

CHECKPOINTS = 20  # of the whole time, but at least one a minute
DRIFT = 0.02  # of the steps; less is not worth another schedule


@dataclass(slots=True)
class Fit:
    """A training under way. `pace` None: the number of steps is settled."""

    trainer: Trainer
    windows: Windows
    state: Path
    pace: Pace | None
    reserve: float  # seconds that must be left at the end

    def plan(self, run: Run, done: int) -> None:
        """As many steps as there is time for, by what they have taken of late."""
        if self.pace is None:
            return
        schedule = self.trainer.schedule
        steps = self.pace.steps(schedule, done, run.left() - self.reserve)
        if abs(steps - schedule.steps) > DRIFT * schedule.steps:
            self.trainer.schedule = replace(schedule, steps=steps)


def fit(
    run: Run, target: LoadedModel, corpus: Corpus, vocabulary: Tensor, state: Path, reserve: float
) -> Trainer:
    """Until the schedule is through. Goes on from the last checkpoint, by its schedule. `reserve`:
    seconds that the rest will take. Raises Interrupted."""
    order = run.order
    module = new_head(target, corpus, vocabulary, order.seed)
    trainer = Trainer(module, *frozen_parts(target), Schedule(order.steps or 1))
    windows = Windows(corpus, held_out=False, seed=order.seed)
    pace = None if order.steps else measured(trainer, windows, run.clock)
    going = Fit(trainer, windows, state, pace, reserve + 4 * (pace.deepest if pace else 0.0))
    if state.exists():
        done = trainer.load(state)
    else:
        done = 0
        module.load_state_dict(new_head(target, corpus, vocabulary, order.seed).state_dict())
        trainer.reset()
        going.plan(run, done)
        trainer.save(state, done)
    _train(run, going, done)
    return trainer


def _train(run: Run, going: Fit, done: int) -> None:
    trainer, saved = going.trainer, run.clock()
    every = min(60.0, 60 * run.order.minutes / CHECKPOINTS)
    with run.progress.phase("training", trainer.schedule.steps, done, "steps") as bar:
        while done < (schedule := trainer.schedule).steps:
            begun = run.clock()
            batch = going.windows.batch(done, schedule.windows, schedule.length)
            loss = trainer.step(done, batch)
            now = run.clock()
            if going.pace is not None:
                going.pace.note(schedule.depth_at(done), now - begun)
            done += 1
            bar(done, f"loss {loss:.3f}", schedule.steps)
            stopped = run.stopped()
            if now - saved > every and done < schedule.steps:
                going.plan(run, done)
            if now - saved > every or stopped or done == trainer.schedule.steps:
                trainer.save(going.state, done)
                saved = run.clock()
            run.check()
