"""One run of an experiment: trains and measures what is missing, and gives its row of results.json."""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from orthojax.config import FIRST_DEFAULTS, Config, changed_fields, replace
from orthojax.errors import UserError
from orthojax.experiments.experiment import Run
from orthojax.experiments.measures import ALWAYS, Measure, require_same_ids, store, stored
from orthojax.files import finite, make_folder, parse_json, read_again, require_file, try_lock, write_text
from orthojax.machine import environment
from orthojax.model import flops_per_token
from orthojax.published import is_pretrained
from orthojax.train import (
    DivergedError,
    Inputs,
    check_workdir,
    find_checkpoint,
    load,
    open_inputs,
    require_same_data,
    train,
    validation_losses,
)

Row = dict[str, Any]
# What an experiment adds to the folder of a run.
TRAINED = "trained.seconds"  # when training is complete: its seconds, summed over calls that were not killed
_TRAINED_ON = "trained.json"  # when and where that was, with the versions; runs before 2026-11-26 have none
_STOPPED = "stopped.seconds"  # of earlier calls that were stopped
_DIVERGED = "diverged.txt"  # the reason; a deterministic run diverges again
TRIAL_STEPS = 200  # of a learning rate
_ORIGIN = ("date", "device", "versions")  # of `environment`, what is said of a run


class Reporter(Protocol):
    """Takes the progress of long work, as `orthojax.progress.Progress` does; the unit is training FLOPs here."""

    def advance(self, work: float, message: str = "") -> None:
        """Work that was done."""

    def skip(self, work: float) -> None:
        """Work that an earlier call did."""

    def say(self, message: str) -> None:
        """A line of its own."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A run, and what is wanted of it.

    Attributes:
      run: Which.
      measures: Beyond `ALWAYS`.
      cache_dir: Folder of tokenised corpora.
    """

    run: Run
    measures: tuple[Measure, ...]
    cache_dir: Path

    @property
    def all_measures(self) -> tuple[Measure, ...]:
        """`ALWAYS`, and its own."""
        return (*ALWAYS, *self.measures)

    @property
    def trial_cost(self) -> float:
        """Training FLOPs of the trials of its learning rates."""
        config = self.run.config
        return len(self.run.variant.learning_rates) * TRIAL_STEPS * training_flops(config) / config.train.steps

    @property
    def training_cost(self) -> float:
        """Training FLOPs with the trials; none of an existing model."""
        return 0.0 if self.run.variant.checkpoint else training_flops(self.run.config) + self.trial_cost

    @property
    def cost(self) -> float:
        """Expected work, done or not, in training FLOPs."""
        return self.training_cost + self._measuring_cost(self.all_measures)

    @property
    def stage_cost(self) -> float:
        """Work of one stage of a measure."""
        # Forward only, so a third; that much again for compiling each stage at the small scales where it matters.
        config = self.run.measured_config
        flops = flops_per_token(config.model, config.data.sequence_length) * config.data.sequence_length / 3
        return 2 * flops * config.eval.sequences

    def _measuring_cost(self, measures: Sequence[Measure]) -> float:
        return sum(measure.stages(self.run.measured_config) for measure in measures) * self.stage_cost

    def remaining(self, say: Callable[[str], object]) -> float:
        """Expected work that no earlier call did; `say` takes a line for each damaged file.

        Raises:
          UserError: Where something else than a file is in the place of one.
        """
        folder = self.run.folder
        if _divergence(folder, say) is not None:
            return 0.0
        missing = [measure for measure in self.all_measures if stored(folder, measure, say) is None]
        return self._measuring_cost(missing) + (0.0 if is_trained(folder, say) else self.training_cost)


def training_flops(config: Config) -> float:
    """FLOPs of all training steps of a run."""
    flops = flops_per_token(config.model, config.data.sequence_length) * config.data.sequence_length
    return flops * config.train.steps * config.train.batch_size


def is_trained(folder: Path, say: Callable[[str], object]) -> bool:
    """Whether the run of this folder was trained to its end, which divergence is as well; `say` as in `read_again`."""
    return _seconds(folder / TRAINED, say) is not None or _divergence(folder, say) is not None


class _Tally:
    """Counts how much of one task was reported, so that what was skipped can be reported too."""

    def __init__(self, reporter: Reporter):
        self._reporter, self._done, self.say = reporter, 0.0, reporter.say

    def advance(self, work: float, message: str = "") -> None:
        self._done += work
        self._reporter.advance(work, message)

    def reach(self, work: float) -> None:
        if work > self._done:
            self._reporter.skip(work - self._done)
            self._done = work


def finish(task: Task, reporter: Reporter) -> Row:
    """Trains and measures what is missing of a run.

    Args:
      task: The run.
      reporter: Gets the progress.

    Returns:
      `variant`, `seed`, `overrides` (fields that differ from `FIRST_DEFAULTS`), `measured_on` (the same of the run on
      whose rows it was measured, where not on its own), `metrics` (finite ones), `seconds` (of training), `trained`
      (when, where and by which versions), `data` (provenance); where it diverged or did not fit into memory the
      metrics that were measured before that, and the reason as `failed`.

    Raises:
      UserError: Where the folder holds another run, or one of other data.
      Interrupted: On SIGINT or SIGTERM, after the state was saved.
    """
    tally, run, config = _Tally(reporter), task.run, task.run.measured_config
    make_folder(run.folder, "folder of a run")
    with _locked(run, tally):
        inputs = open_inputs(config, task.cache_dir)
        row = _empty_row(run) | {"data": inputs.provenance}
        try:
            if run.variant.learning_rates:
                losses = _try_learning_rates(task, inputs, tally)
                config = replace(config, {"optim.learning_rate": best_learning_rate(losses)})
                row |= {"learning_rates": losses, "overrides": changed_fields(FIRST_DEFAULTS, config)}
            checkpoint = run.variant.checkpoint or _trained(task, config, inputs, tally)
            if not is_pretrained(checkpoint) and not run.variant.measured_on:
                require_same_data(checkpoint, inputs.provenance)
            _measure(task, config, checkpoint, inputs, tally, row["metrics"])
            if (seconds := _seconds(run.folder / TRAINED, tally.say)) is not None:
                row["seconds"] = seconds
            if (made := _trained_on(run.folder / _TRAINED_ON, tally.say)) is not None:
                row["trained"] = made
        except (DivergedError, jax.errors.JaxRuntimeError) as error:
            tally.say(f"{run.label}: {error}")
            row["failed"] = (str(error) or type(error).__name__).splitlines()[0]
        tally.reach(task.cost)
        return row


def failed_row(run: Run, reason: str) -> Row:
    """The row of a run that did not finish; a later call resumes it."""
    return _empty_row(run) | {"failed": reason}


def _empty_row(run: Run) -> Row:
    overrides = changed_fields(FIRST_DEFAULTS, run.config)
    row: Row = {"variant": run.variant.name, "seed": run.seed, "overrides": overrides, "metrics": {}}
    if run.variant.measured_on:
        row["measured_on"] = changed_fields(FIRST_DEFAULTS, run.variant.measured_on)
    return row


@contextlib.contextmanager
def _locked(run: Run, tally: _Tally) -> Iterator[None]:
    """Waits while another process works on the same run, which two experiments may share."""
    with (run.folder / "lock").open("w") as file:
        if not try_lock(file):
            tally.say(f"{run.label}: another process is working on it, waiting")
            while not try_lock(file):
                time.sleep(0.5)
        yield


def _seconds(path: Path, say: Callable[[str], object]) -> float | None:
    return read_again(path, "seconds of a training", parse_seconds, say)


def parse_seconds(content: bytes) -> float:
    """The content of `TRAINED`.

    Raises:
      ValueError: Where it is damaged.
    """
    seconds = float(content)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} seconds")
    return seconds


def _trained_on(path: Path, say: Callable[[str], object]) -> dict[str, Any] | None:
    """`_ORIGIN` of a run; None where the file is missing, or damaged, since nothing can make it again."""
    if not os.path.lexists(path):
        return None
    require_file(path, "note on a training")
    try:
        made = parse_json(path.read_bytes(), "its content")
        if not isinstance(made, dict) or set(made) != set(_ORIGIN) or not isinstance(made["versions"], dict):
            raise ValueError(f"it does not hold {', '.join(_ORIGIN)}")
    except ValueError as error:
        say(f"warning: note on a training {path} is damaged and left out: {error}")
        return None
    return made


def _divergence(folder: Path, say: Callable[[str], object]) -> str | None:
    """The reason that an earlier call noted."""

    def parse(content: bytes) -> str:
        if not (reason := content.decode().strip()):
            raise ValueError("it is empty")
        return reason

    return read_again(folder / _DIVERGED, "note on divergence", parse, say)


@contextlib.contextmanager
def _timed(folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Writes the seconds of a training, with those of earlier calls that were stopped; notes divergence."""
    started, before = time.monotonic(), _seconds(folder / _STOPPED, say) or 0.0

    def write(name: str) -> None:
        write_text(folder / name, f"{before + time.monotonic() - started:.1f}\n")

    try:
        yield
    except DivergedError as error:
        write_text(folder / _DIVERGED, f"{error}\n")
        raise
    except BaseException:
        with contextlib.suppress(OSError):  # what stopped it matters more
            write(_STOPPED)
        raise
    made = environment()
    write_text(folder / _TRAINED_ON, json.dumps({name: made[name] for name in _ORIGIN}) + "\n")
    write(TRAINED)


def _trained(task: Task, config: Config, inputs: Inputs, tally: _Tally) -> Path:
    """The step folder of the last checkpoint."""
    run, before, step_cost = task.run, task.trial_cost, training_flops(config) / config.train.steps
    check_workdir(run.folder, config)
    if (reason := _divergence(run.folder, tally.say)) is not None:
        hint = f"delete {run.folder / _DIVERGED} to train it again"
        raise DivergedError(f"{reason}\n{hint}")
    if _seconds(run.folder / TRAINED, tally.say) is None:
        tally.say(f"{run.label}: {describe_data(inputs.provenance)}")
        with _timed(run.folder, tally.say):
            train(
                config,
                inputs,
                run.folder,
                on_start=lambda step: tally.reach(before + step * step_cost),
                on_step=lambda step, loss: tally.advance(
                    step_cost, f"{run.label}: step {step}/{config.train.steps} loss {loss:.3f}"
                ),
            )
    tally.reach(before + training_flops(config))
    return find_checkpoint(run.folder)


def _measure(
    task: Task, config: Config, checkpoint: Path, inputs: Inputs, tally: _Tally, metrics: dict[str, float]
) -> None:
    """Adds the metrics of a trained run; numbers that are not finite, which JSON does not have, are left out."""
    run, loaded = task.run, None

    def on_progress(part: str) -> None:
        tally.advance(task.stage_cost, f"{run.label}: measured {part}")

    for measure in task.all_measures:
        found = stored(run.folder, measure, tally.say)
        if found is None:
            if loaded is None:
                loaded = load(checkpoint)._replace(config=config)
                if run.variant.measured_on:
                    require_same_ids(loaded, inputs, run.label)
            measured = measure.measure(loaded, inputs, on_progress)
            store(run.folder, measure, measured)
            found = measured.metrics
        metrics |= finite(found)


def describe_data(provenance: dict[str, Any]) -> str:
    """Where the tokens of a run come from, in one line."""
    if "file_count" not in provenance:
        return provenance["source"]
    return (
        f"{provenance['source']}: {provenance['file_count']} files, sha256 {provenance['source_sha256'][:12]}, "
        f"{provenance['train']['n_tokens']:,} training tokens, {provenance['tokenizer']}"
    )


# A fair learning rate for optimizers whose updates differ in size: short trials, then the best one.


def trial_config(config: Config, rate: float) -> Config:
    """The trial of one learning rate: the same run, shorter, with a quarter of its steps as warm-up at most."""
    steps = dict.fromkeys(("train.steps", "train.eval_every_steps", "train.checkpoint_every_steps"), TRIAL_STEPS)
    warmup = {"optim.warmup_steps": min(config.optim.warmup_steps, TRIAL_STEPS // 4)}
    unprobed = {"train.probe_steps": (), "train.probe_details": False}
    return replace(config, {"optim.learning_rate": rate, **warmup, **steps, **unprobed})


def _try_learning_rates(task: Task, inputs: Inputs, tally: _Tally) -> dict[str, float | None]:
    """Learning rate, with six digits, -> held-out loss in nats after a short run; None where it diverged."""
    run, folder = task.run, task.run.folder / "learning_rates"
    step_cost = training_flops(run.config) / run.config.train.steps
    trials = {name: trial_config(run.config, float(name)) for name in (f"{r:g}" for r in run.variant.learning_rates)}
    for name, trial in trials.items():
        check_workdir(folder / name, trial)
    path = folder / "losses.json"
    losses = read_again(path, "losses of the trials", _parse_losses, tally.say) or {}
    if list(losses) != list(trials):
        losses = {}
        for name, trial in trials.items():

            def on_step(step: int, loss: float, name: str = name) -> None:
                message = f"trying learning rate {name}: step {step}/{TRIAL_STEPS} {loss:.3f}"
                tally.advance(step_cost, f"{run.variant.label}: {message}")

            try:
                train(trial, inputs, folder / name, on_step=on_step)
            except DivergedError:
                losses[name] = None
            else:
                losses[name] = _last_loss(folder / name / "metrics.jsonl")
        write_text(path, json.dumps(losses) + "\n")
    tally.reach(task.trial_cost)  # what an earlier call did, or divergence spared
    return losses


def _parse_losses(content: bytes) -> dict[str, float | None]:
    losses = parse_json(content, "its content")
    if not isinstance(losses, dict) or not all(type(loss) in (int, float, type(None)) for loss in losses.values()):
        raise ValueError("it does not hold losses by learning rate")
    return losses


def _last_loss(path: Path) -> float:
    if not (losses := validation_losses(path)):
        raise UserError(f"{path} has no validation loss", hint=f"delete {path.parent}: the trial is run again")
    return losses[max(losses)]


def best_learning_rate(losses: dict[str, float | None]) -> float:
    """The rate of the smallest loss; the smallest rate where every trial diverged.

    >>> best_learning_rate({"0.1": None, "0.03": 4.5, "0.01": 4.7})
    0.03
    """
    finite = {name: loss for name, loss in losses.items() if loss is not None}
    return float(min(finite, key=finite.__getitem__)) if finite else min(map(float, losses))
