"""The runs of a study: what is missing of their training and of what is measured, and their rows of results.json."""

import contextlib
import fcntl
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from orthojax.config import Config
from orthojax.experiments.study.learning_rates import TRIAL_STEPS, best_learning_rate, try_learning_rates
from orthojax.experiments.study.measures import keep, kept
from orthojax.experiments.study.tasks import (
    Tally,
    Task,
    cost,
    measuring_cost,
    stage_cost,
    training_cost,
    training_flops,
    trial_cost,
)
from orthojax.experiments.study.workers import Teller
from orthojax.fields import changed_fields, replace
from orthojax.train import (
    DivergedError,
    Inputs,
    check_workdir,
    find_checkpoint,
    make_folder,
    open_inputs,
    require_same_data,
    train,
    train_seeds,
    write_text,
)

Row = dict[str, Any]
# What a study writes into the folder of a run, beside what `train` does.
TRAINED = "trained.seconds"  # when it is trained to its end: seconds of training, of all calls that were not killed
_STOPPED = "stopped.seconds"  # of calls that were stopped before
_DIVERGED = "diverged.txt"  # why; a deterministic run does so again
_SEEDS = "trained.seeds"  # the seeds that were trained in one compiled call with it


def finish(tasks: Sequence[Task], tell: Teller) -> list[Row]:
    """The rows of runs, training and measuring only what is missing.

    Args:
      tasks: One, or several seeds of a variant, which are then trained in one compiled call.
      tell: Gets the progress.

    Returns:
      For each `variant`, `seed`, `overrides` (what differs from `Config()`), `metrics`, `seconds` (of training), `data`
      (provenance), `trained_with` (seeds) where several were trained together, and where it diverged or did not fit
      into memory `failed` with the reason and no metrics.

    Raises:
      UserError: Where a folder holds another run, or one of other data.
      Interrupted: On SIGINT or SIGTERM, when the state is saved.
    """
    tallies = [Tally(tell) for _ in tasks]
    if len(tasks) > 1:
        _train_together(tasks, tallies)
    return [_finish(task, tally) for task, tally in zip(tasks, tallies, strict=True)]


def _finish(task: Task, tell: Tally) -> Row:
    run, config = task.run, task.run.config
    make_folder(run.folder, "folder of a run")
    with _alone_in(run.folder, run.label, tell):
        inputs = open_inputs(config, task.cache_dir)
        row: Row = {"variant": run.variant.name, "seed": run.seed, "overrides": changed_fields(Config(), config)}
        row["data"] = inputs.provenance
        try:
            if run.variant.learning_rates:
                losses = _try_learning_rates(task, inputs, tell)
                config = replace(config, {"optim.learning_rate": best_learning_rate(losses)})
                row |= {"learning_rates": losses, "overrides": changed_fields(Config(), config)}
            checkpoint = run.variant.checkpoint or _trained(task, config, inputs, tell)
            require_same_data(checkpoint, inputs.provenance)
            row |= _measured(task, config, checkpoint, inputs, tell)
        except (DivergedError, jax.errors.JaxRuntimeError) as error:
            tell.say(f"{run.label}: {error}")
            row |= {"metrics": {}, "failed": (str(error) or type(error).__name__).splitlines()[0]}
        tell.reach(cost(task))
        return row


def is_trained(folder: Path) -> bool:
    """Whether the run of this folder is trained to its end, which divergence is as well."""
    return any((folder / name).exists() for name in (TRAINED, _DIVERGED))


def left(task: Task) -> float:
    """Expected work of a task that no earlier call did, in training FLOPs."""
    folder = task.run.folder
    if (folder / _DIVERGED).exists():
        return 0.0
    measuring = measuring_cost(task, [measure for measure in task.all_measures if kept(folder, measure) is None])
    return measuring if is_trained(folder) else measuring + training_cost(task)


def lost(tasks: Sequence[Task], reason: str, tell: Teller) -> list[Row]:
    """The rows of runs whose process died, which is told; a later call goes on with them."""
    for task in tasks:
        tell.say(f"{task.run.label}: {reason}")
    return [
        {
            "variant": task.run.variant.name,
            "seed": task.run.seed,
            "overrides": changed_fields(Config(), task.run.config),
            "metrics": {},
            "failed": reason,
        }
        for task in tasks
    ]


@contextlib.contextmanager
def _alone_in(folder: Path, label: str, tell: Tally) -> Iterator[None]:
    """Waits while another process works on the same run, which two experiments may share."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            tell.say(f"{label}: another process is at it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _timed(folders: Sequence[Path]) -> Iterator[None]:
    """Writes the seconds of a training, with those of earlier calls that were stopped, shared among its runs.

    What diverged inside is not marked as trained.
    """
    started = time.monotonic()
    before = {folder: _number(folder / _STOPPED) or 0.0 for folder in folders}

    def write(name: str) -> None:
        share = (time.monotonic() - started) / len(folders)
        for folder, seconds in before.items():
            if not (folder / _DIVERGED).exists():
                write_text(folder / name, f"{seconds + share:.1f}\n")

    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # what stopped it matters more
            write(_STOPPED)
        raise
    write(TRAINED)


def _number(path: Path) -> float | None:
    return float(path.read_text(encoding="utf-8")) if path.exists() else None


def _try_learning_rates(task: Task, inputs: Inputs, tell: Tally) -> dict[str, float | None]:
    run, step_cost = task.run, training_flops(task.run.config) / task.run.config.train.steps

    def on_step(rate: str, step: int, loss: float) -> None:
        message = f"{run.variant.label}: trying learning rate {rate}: step {step}/{TRIAL_STEPS} {loss:.3f}"
        tell.advance(step_cost, message)

    losses = try_learning_rates(run.config, run.variant.learning_rates, run.folder / "learning_rates", inputs, on_step)
    tell.reach(trial_cost(task))  # what an earlier call did, or divergence spared
    return losses


def _trained(task: Task, config: Config, inputs: Inputs, tell: Tally) -> Path:
    """The folder of the last step's checkpoint."""
    run, before, step_cost = task.run, trial_cost(task), training_flops(config) / config.train.steps
    check_workdir(run.folder, config)
    if (run.folder / _DIVERGED).exists():
        raise DivergedError((run.folder / _DIVERGED).read_text(encoding="utf-8").strip())
    if not (run.folder / TRAINED).exists():
        tell.say(f"{run.label}: {describe_data(inputs.provenance)}")

        def on_step(step: int, loss: float) -> None:
            tell.advance(step_cost, f"{run.label}: step {step}/{config.train.steps} loss {loss:.3f}")

        def on_start(step: int) -> None:
            tell.reach(before + step * step_cost)

        with _timed([run.folder]), _noting_divergence(run.folder):
            train(config, inputs, run.folder, on_start=on_start, on_step=on_step)
    tell.reach(before + training_flops(config))
    return find_checkpoint(run.folder)


@contextlib.contextmanager
def _noting_divergence(folder: Path) -> Iterator[None]:
    try:
        yield
    except DivergedError as error:
        write_text(folder / _DIVERGED, f"{error}\n")
        raise


def _train_together(tasks: Sequence[Task], tallies: Sequence[Tally]) -> None:
    """Trains the runs of a variant that are not trained yet in one compiled call."""
    for task in tasks:
        make_folder(task.run.folder, "folder of a run")
    with contextlib.ExitStack() as locks:
        for task, tell in sorted(zip(tasks, tallies, strict=True), key=lambda pair: pair[0].run.folder):
            locks.enter_context(_alone_in(task.run.folder, task.run.label, tell))
        missing = [
            (task.run, open_inputs(task.run.config, task.cache_dir), tally)
            for task, tally in zip(tasks, tallies, strict=True)
            if not is_trained(task.run.folder)
        ]
        if len(missing) < 2:
            return  # alone, as `finish` does it
        runs, inputs, tells = zip(*missing, strict=True)
        config, folders, seeds = runs[0].config, [run.folder for run in runs], [run.seed for run in runs]
        step_cost = training_flops(config) / config.train.steps
        label = f"{runs[0].variant.label}, seeds {', '.join(map(str, seeds))} together"
        tells[0].say(f"{label}: {describe_data(inputs[0].provenance)}")

        def on_step(i: int, step: int, loss: float) -> None:
            tells[i].advance(step_cost, f"{label}: step {step}/{config.train.steps} loss {loss:.3f}")

        def on_start(i: int, step: int) -> None:
            tells[i].reach(step * step_cost)

        try:
            with _timed(folders):
                configs = [run.config for run in runs]
                ends = train_seeds(configs, inputs, folders, on_start=on_start, on_step=on_step)
                for folder, end in zip(folders, ends, strict=True):
                    name, text = (
                        (_DIVERGED, str(end)) if isinstance(end, DivergedError) else (_SEEDS, json.dumps(seeds))
                    )
                    write_text(folder / name, f"{text}\n")
        except jax.errors.JaxRuntimeError as error:  # as for want of memory
            tells[0].say(f"{label}: {str(error).splitlines()[0]}; now one by one")


def _measured(task: Task, config: Config, checkpoint: Path, inputs: Inputs, tell: Tally) -> Row:
    """Metrics and seconds of a trained run; numbers that are not finite, which JSON does not have, are left out."""
    run, part_cost = task.run, stage_cost(config)
    row: Row = {"metrics": {}}
    for measure in task.all_measures:
        found = kept(run.folder, measure)
        if found is None:
            measured = measure.measure(
                config, checkpoint, inputs, lambda part: tell.advance(part_cost, f"{run.label}: measured {part}")
            )
            keep(run.folder, measure, measured)
            found = measured.metrics
        row["metrics"] |= {name: value for name, value in found.items() if math.isfinite(value)}
    if (seconds := _number(run.folder / TRAINED)) is not None:
        row["seconds"] = seconds
    if (run.folder / _SEEDS).exists():
        row["trained_with"] = json.loads((run.folder / _SEEDS).read_text(encoding="utf-8"))
    return row


def describe_data(provenance: dict[str, Any]) -> str:
    """Where the tokens of a run come from, in one line."""
    if "file_count" not in provenance:
        return provenance["source"]
    return (
        f"{provenance['source']}: {provenance['file_count']} files, sha256 {provenance['source_sha256'][:12]}, "
        f"{provenance['train']['n_tokens']:,} training tokens, {provenance['tokenizer']}"
    )
