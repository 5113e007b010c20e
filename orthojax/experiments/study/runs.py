"""One run of a study: what is missing of its training and of what is measured, and its row of results.json."""

import contextlib
import dataclasses
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax

from orthojax.config import Config
from orthojax.experiments.study.learning_rates import TRIAL_STEPS, best_learning_rate, try_learning_rates
from orthojax.experiments.study.measures import ALWAYS, Measure, keep, kept
from orthojax.experiments.study.variant import Run
from orthojax.fields import changed_fields, replace
from orthojax.model import flops_per_token
from orthojax.train import (
    DivergedError,
    Inputs,
    check_workdir,
    find_checkpoint,
    make_folder,
    open_inputs,
    require_same_data,
    train,
    write_text,
)

Row = dict[str, Any]
_SECONDS = "trained.seconds"  # written when a run is trained to its end


class Teller(Protocol):
    """Takes what there is to tell of long work, as `orthojax.progress.Progress` does; work is in training FLOPs."""

    def advance(self, work: float, message: str = "") -> None:
        """Work that was done."""
        ...

    def skip(self, work: float) -> None:
        """Work that an earlier call did."""
        ...

    def say(self, message: str) -> None:
        """A line of its own."""
        ...


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


def _stage_cost(config: Config) -> float:
    # Forward only, so a third; that much again for compiling each stage at the small scales where it matters.
    flops = flops_per_token(config.model, config.data.sequence_length) * config.data.sequence_length / 3
    return 2 * flops * config.eval.sequences


def _measure_cost(task: Task) -> float:
    config = task.run.config
    return sum(measure.stages(config) for measure in task.all_measures) * _stage_cost(config)


def _trial_cost(task: Task) -> float:
    config = task.run.config
    return len(task.run.variant.learning_rates) * TRIAL_STEPS * training_flops(config) / config.train.steps


def cost(task: Task) -> float:
    """Expected work of a task, in training FLOPs, done or not."""
    trained = 0.0 if task.run.variant.checkpoint else training_flops(task.run.config) + _trial_cost(task)
    return trained + _measure_cost(task)


def finish(task: Task, tell: Teller) -> Row:
    """The row of a run, training and measuring only what is missing.

    Returns:
      `variant`, `seed`, `overrides` (what differs from `Config()`), `metrics`, `seconds` (of the call that trained it),
      `data` (provenance), and where it diverged or did not fit into memory, `failed` with the reason and no metrics.

    Raises:
      UserError: Where the folder holds another run, or one of other data.
      Interrupted: On SIGINT or SIGTERM, when the state is saved.
    """
    run, config = task.run, task.run.config
    make_folder(run.folder, "folder of a run")
    with _alone_in(run.folder, run.label, tell):
        inputs = open_inputs(config, task.cache_dir)
        row: Row = {"variant": run.variant.name, "seed": run.seed, "data": inputs.provenance}
        try:
            if run.variant.learning_rates:
                losses = _try_learning_rates(task, inputs, tell)
                config = replace(config, {"optim.learning_rate": best_learning_rate(losses)})
                row["learning_rates"] = losses
            row["overrides"] = changed_fields(Config(), config)
            checkpoint = run.variant.checkpoint or _trained(task, config, inputs, tell)
            require_same_data(checkpoint, inputs.provenance)
            return row | _measured(task, config, checkpoint, inputs, tell)
        except (DivergedError, jax.errors.JaxRuntimeError) as error:
            tell.say(f"{run.label}: {error}")
            return row | {"metrics": {}, "failed": str(error).splitlines()[0]}


def lost(task: Task) -> Row:
    """The row of a run whose process died."""
    return {
        "variant": task.run.variant.name,
        "seed": task.run.seed,
        "overrides": changed_fields(Config(), task.run.config),
        "metrics": {},
        "failed": "its process was killed, as for want of memory",
    }


@contextlib.contextmanager
def _alone_in(folder: Path, label: str, tell: Teller) -> Iterator[None]:
    """Waits while another process works on the same run, which two experiments may share."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            tell.say(f"{label}: another process is at it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_learning_rates(task: Task, inputs: Inputs, tell: Teller) -> dict[str, float | None]:
    run, cost, advanced = task.run, training_flops(task.run.config) / task.run.config.train.steps, 0.0

    def on_step(rate: str, step: int, loss: float) -> None:
        nonlocal advanced
        advanced += cost
        tell.advance(cost, f"{run.variant.label}: trying learning rate {rate}: step {step}/{TRIAL_STEPS} {loss:.3f}")

    losses = try_learning_rates(run.config, run.variant.learning_rates, run.folder / "learning_rates", inputs, on_step)
    tell.skip(max(_trial_cost(task) - advanced, 0.0))  # what an earlier call did, or divergence spared
    return losses


def _trained(task: Task, config: Config, inputs: Inputs, tell: Teller) -> Path:
    """The folder of the last step's checkpoint."""
    run, step_cost, done = task.run, training_flops(config) / config.train.steps, task.run.folder / _SECONDS
    check_workdir(run.folder, config)
    if done.exists():
        tell.skip(training_flops(config))
        return find_checkpoint(run.folder)
    tell.say(f"{run.label}: {describe_data(inputs.provenance)}")

    def on_step(step: int, loss: float) -> None:
        tell.advance(step_cost, f"{run.label}: step {step}/{config.train.steps} loss {loss:.3f}")

    started = time.monotonic()
    train(config, inputs, run.folder, on_start=lambda step: tell.skip(step * step_cost), on_step=on_step)
    write_text(done, f"{time.monotonic() - started:.1f}\n")
    return find_checkpoint(run.folder)


def _measured(task: Task, config: Config, checkpoint: Path, inputs: Inputs, tell: Teller) -> Row:
    """Metrics and seconds of a trained run."""
    run, metrics, stage_cost = task.run, {}, _stage_cost(config)
    for measure in task.all_measures:
        found = kept(run.folder, measure)
        if found is None:
            measured = measure.measure(
                config, checkpoint, inputs, lambda part: tell.advance(stage_cost, f"{run.label}: measured {part}")
            )
            keep(run.folder, measure, measured)
            found = measured.metrics
        else:
            tell.skip(measure.stages(config) * stage_cost)
        metrics |= found
    seconds = run.folder / _SECONDS
    return {"metrics": metrics} | ({"seconds": float(seconds.read_text())} if seconds.exists() else {})


def describe_data(provenance: dict[str, Any]) -> str:
    """Where the tokens of a run come from, in one line."""
    if "file_count" not in provenance:
        return provenance["source"]
    return (
        f"{provenance['source']}: {provenance['file_count']} files, sha256 {provenance['source_sha256'][:12]}, "
        f"{provenance['train']['n_tokens']:,} training tokens, {provenance['tokenizer']}"
    )
