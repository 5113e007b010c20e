"""What is wanted of a run, and how much work that is, in training FLOPs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from orthojax.config import Config
from orthojax.experiments.study.learning_rates import TRIAL_STEPS
from orthojax.experiments.study.measures import ALWAYS, Measure
from orthojax.experiments.study.variant import Run
from orthojax.experiments.study.workers import Teller
from orthojax.model import flops_per_token


@dataclasses.dataclass(frozen=True)
class Task:
    """A run, and what is wanted of it.

    Attributes:
      run: Which.
      measures: Beyond those of every run.
      cache_dir: Folder of tokenised corpora.
    """

    run: Run
    measures: tuple[Measure, ...]
    cache_dir: Path

    @property
    def all_measures(self) -> tuple[Measure, ...]:
        """Those of every run, and its own."""
        return (*ALWAYS, *self.measures)


def training_flops(config: Config) -> float:
    """FLOPs of all training steps of a run."""
    flops = flops_per_token(config.model, config.data.sequence_length) * config.data.sequence_length
    return flops * config.train.steps * config.train.batch_size


def stage_cost(config: Config) -> float:
    """Work of one part of a measure."""
    # Forward only, so a third; that much again for compiling each stage at the small scales where it matters.
    flops = flops_per_token(config.model, config.data.sequence_length) * config.data.sequence_length / 3
    return 2 * flops * config.eval.sequences


def trial_cost(task: Task) -> float:
    """Work of the trials of its learning rates."""
    config = task.run.config
    return len(task.run.variant.learning_rates) * TRIAL_STEPS * training_flops(config) / config.train.steps


def training_cost(task: Task) -> float:
    """Work of the training and its trials; a model that exists needs none."""
    return 0.0 if task.run.variant.checkpoint else training_flops(task.run.config) + trial_cost(task)


def measuring_cost(task: Task, measures: Sequence[Measure]) -> float:
    """Work of some measures of a task."""
    config = task.run.config
    return sum(measure.stages(config) for measure in measures) * stage_cost(config)


def cost(task: Task) -> float:
    """Expected work of a task, in training FLOPs, done or not."""
    return training_cost(task) + measuring_cost(task, task.all_measures)


class Tally:
    """A `Teller` that knows how much work of one task was told, done or skipped."""

    def __init__(self, tell: Teller):
        self._tell, self._told, self.say = tell, 0.0, tell.say

    def advance(self, work: float, message: str = "") -> None:
        """Work that was done."""
        self._told += work
        self._tell.advance(work, message)

    def reach(self, work: float) -> None:
        """Skips up to so much of the task: an earlier call did it, or it fell away."""
        if work > self._told:
            self._tell.skip(work - self._told)
            self._told = work
