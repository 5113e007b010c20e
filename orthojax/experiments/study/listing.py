"""What experiments there are, how much of each is done, and what the rest costs on this machine."""

import dataclasses
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.experiments.base_configs import LANGUAGE_MODEL
from orthojax.experiments.study.calculation import Calculation
from orthojax.experiments.study.places import Place
from orthojax.experiments.study.runs import TRAINED, is_trained, left
from orthojax.experiments.study.study import Experiment
from orthojax.experiments.study.tasks import Task, training_flops
from orthojax.experiments.study.variant import Run, run_name
from orthojax.fields import from_json, replace
from orthojax.train import init_state, make_train_step

_CALIBRATION_SECONDS = 1.0
_LONGEST_HOURS = 1000  # an estimate above it only says that this is not the machine for it


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast one place trains.

    Attributes:
      flops_per_second: Of the model's own matrix products.
      source: Where that is from, in words.
    """

    flops_per_second: float
    source: str


def short_names(names: Sequence[str]) -> str:
    """Names in one line; numbered ones that follow each other as a range.

    >>> short_names(["figure7", "figure8", "figure9", "sinks", "table2", "table3"])
    'figure7 ... figure9, sinks, table2, table3'
    """
    told: list[list[str]] = []
    for name in names:
        stem, number = _numbered(name)
        before = _numbered(told[-1][-1]) if told else ("", None)
        if number is not None and before[1] is not None and before == (stem, number - 1):
            told[-1].append(name)
        else:
            told.append([name])
    return ", ".join(f"{run[0]} ... {run[-1]}" if len(run) > 2 else ", ".join(run) for run in told)


def _numbered(name: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(.*?)(\d+)", name)
    return (found[1], int(found[2])) if found else (name, None)


def measured_speed(runs_dir: Path) -> Speed | None:
    """The median over the runs that are finished there; None where there are none.

    Args:
      runs_dir: Folder of trained runs.
    """
    speeds = []
    for path in runs_dir.glob(f"*/{TRAINED}"):
        try:
            config = from_json(Config, (path.parent / "config.json").read_text(encoding="utf-8"))
            speeds.append(training_flops(config) / float(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ZeroDivisionError):
            continue  # of another version, or damaged: whoever wants the run will be told
    if not speeds:
        return None
    return Speed(statistics.median(speeds), f"median of the {len(speeds)} runs that are finished in {runs_dir}")


def calibrated_speed(place: Place) -> Speed:
    """That of a small model's training step, after compiling it; takes seconds.

    Args:
      place: Where to run it; this process is there afterwards, as far as JAX is concerned.
    """
    with _at(place):
        config = replace(LANGUAGE_MODEL, {"model.num_layers": 1})
        shape = (config.train.batch_size, config.data.sequence_length + 1)
        tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
        state, step, count = init_state(config), make_train_step(config), 0
        state, metrics = step(state, jax.device_put(tokens))
        jax.block_until_ready(metrics)
        started = time.monotonic()
        while (seconds := time.monotonic() - started) < _CALIBRATION_SECONDS:
            state, metrics = step(state, jax.device_put(tokens))
            jax.block_until_ready(metrics)
            count += 1
    flops = training_flops(config) / config.train.steps * count
    return Speed(flops / seconds, f"one of {count} steps of a small model just now; other sizes differ")


@contextmanager
def _at(place: Place) -> Iterator[None]:
    cores = os.sched_getaffinity(0) if place.cores else set()
    place.enter()
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)


def _tasks(experiment: Experiment, scale: str, seeds: Sequence[int] | None, runs_dir: Path) -> dict[Path, Task]:
    variants = experiment.variants(scale) if experiment.trains and scale in experiment.scales else ()
    return {
        folder: Task(Run(variant, seed, folder), experiment.measures, runs_dir)
        for seed in (experiment.seeds if seeds is None else seeds)
        for variant in variants
        for folder in [runs_dir / run_name(variant, seed)]
    }


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _minutes(tasks: dict[Path, Task], speed: Speed, places: int) -> float:
    """What is left of them, on so many places at once; none is faster than its longest run."""
    minutes = [left(task) / speed.flops_per_second / 60 for task in tasks.values()]
    return max(sum(minutes) / places, max(minutes, default=0.0))


def _clock(minutes: float) -> str:
    if minutes == 0.0:
        return "-"
    if minutes < 1:
        return "under 1"
    if minutes > 60 * _LONGEST_HOURS:
        return f"over {_LONGEST_HOURS:,} hours here"
    return f"{minutes:.0f}" if minutes < 600 else f"{minutes:,.0f} ({minutes / 60:,.0f} hours)"


def listing(
    experiments: Sequence[Experiment | Calculation],
    scale: str,
    seeds: Sequence[int] | None,
    runs_dir: Path,
    where: Sequence[Place],
) -> str:
    """A table of all experiments for a console.

    Args:
      experiments: In order.
      scale: What is told of runs and minutes is of this one.
      seeds: As given, or None for those of each experiment.
      runs_dir: Folder of trained runs, which are done.
      where: Of the workers.

    Raises:
      UserError: For a scale that none has.
    """
    trained = [found for found in experiments if isinstance(found, Experiment)]
    if not any(scale in found.scales for found in trained):
        known = sorted({name for found in trained for name in found.scales})
        raise UserError(f"no experiment has the scale {scale!r}", allowed=" | ".join(known))
    speed = measured_speed(runs_dir) or calibrated_speed(where[0])
    rows = [["--experiment=", "runs", "minutes left", "scales", ""]]
    every: dict[Path, Task] = {}
    for found in experiments:
        names = short_names([found.name, *found.also])
        if isinstance(found, Calculation):
            rows.append([names, "-", "under 1", "tiny", found.title])
            continue
        tasks = _tasks(found, scale, seeds, runs_dir)
        for folder, task in tasks.items():  # with all that is measured of a shared run
            measures = (*every[folder].measures, *task.measures) if folder in every else task.measures
            every[folder] = dataclasses.replace(task, measures=tuple(dict.fromkeys(measures)))
        minutes = _clock(_minutes(tasks, speed, len(where)))
        if scale not in found.scales:
            minutes = f"not at {scale}"
        elif not tasks:
            minutes = "needs --model" if found.trains else "a few"
        rows.append([names, _count(tasks), minutes, " ".join(found.scales), found.title])
    rows.append(["all experiments together", _count(every), _clock(_minutes(every, speed, len(where))), "", ""])
    head, *body, total = _aligned(rows)
    rule = "-" * max(map(len, (head, *body)))
    told = "" if seeds is None else f", seeds {', '.join(map(str, seeds))}"
    at_once = "one run at a time" if len(where) == 1 else f"{len(where)} runs at once"
    about = [
        f"Runs and minutes are those of scale {scale}{told}; experiments share runs, which the last line counts once.",
        f"Minutes are an estimate: training and measuring at {speed.flops_per_second:.3g} FLOP/s a run, {at_once}.",
        f"That speed is the {speed.source}.",
    ]
    return "\n".join([head, rule, *body, rule, total, "", *about])


def _count(tasks: dict[Path, Task]) -> str:
    return f"{len(tasks)} ({sum(map(is_trained, tasks))} done)" if tasks else "-"
