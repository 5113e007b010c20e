"""Every experiment by name, and the listing of what is done and what the rest takes on this machine."""

import contextlib
import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from orthojax.config import Config, from_dict, replace
from orthojax.errors import UserError, nearest
from orthojax.experiments.active_dormant import (
    backcopy_cure,
    backcopy_rules,
    break_conditions_cells,
    break_conditions_map,
    norm_toys,
    one_layer,
    orthoadam_peak,
    peak_blocks,
    peak_slope,
    pixel_sinks,
    published_size,
    simplified_models,
    sink_conditions,
    sink_reinforcement,
    sink_theory,
    softmax1_sinks,
    three_layers,
)
from orthojax.experiments.base_configs import SHALLOW_MODEL
from orthojax.experiments.costs import Stepper
from orthojax.experiments.experiment import Experiment, Run, run_name
from orthojax.experiments.from_attention import (
    appendix_e,
    appendix_g,
    appendix_h,
    figure1,
    figure2,
    figure3,
    figure4,
    figure6,
    layers,
    maps,
    table1,
    table2,
    table3,
    table4,
    table5,
    table6,
    table7,
    table8,
    table9,
    training_curves,
)
from orthojax.experiments.ours import (
    adam_betas,
    damage,
    depth,
    downstream,
    haar,
    long_pair,
    normalizers,
    optimizer_outliers,
    ordinary_text,
    parity,
    quick,
    remaining_outliers,
    repeated_passages,
    repeated_settings,
    rotation_ablation,
    streaming,
    tiny_setting,
    tuning,
)
from orthojax.experiments.pretrained import aligned, curing, quantised, streamed
from orthojax.experiments.runs import TRAINED, Task, is_trained, parse_seconds, training_flops
from orthojax.files import read_again, read_json
from orthojax.formatting import align

# In the order in which they are listed.
_TABLES = (table1, table2, table3, table4, table5, table6, table7, table8, table9)
_LATER = (training_curves, appendix_e, appendix_g, appendix_h)
_OURS = (
    rotation_ablation, optimizer_outliers, normalizers, streaming, tiny_setting, depth, tuning, parity,
    remaining_outliers, repeated_passages, ordinary_text, damage, haar, adam_betas, downstream, long_pair,
)  # fmt: skip
_ON_THE_TASK = (one_layer, three_layers, peak_blocks, peak_slope, backcopy_rules, backcopy_cure)
_BREAK_CONDITIONS = (break_conditions_map, break_conditions_cells)
_ACTIVE_DORMANT = (sink_theory, norm_toys, orthoadam_peak, sink_reinforcement, softmax1_sinks)
ALL: tuple[Experiment, ...] = (
    *(module.EXPERIMENT for module in (quick, *_TABLES, figure1, figure2, figure3, figure4, figure6)),
    *(*layers.EXPERIMENTS, maps.HIDDEN_STATES, maps.ATTENTION_MAPS),
    *(module.EXPERIMENT for module in (*_LATER, *_OURS)),
    depth.WITHOUT_BOS,
    *repeated_settings.EXPERIMENTS,
    *(module.EXPERIMENT for module in (*_ON_THE_TASK, *_BREAK_CONDITIONS)),
    *simplified_models.EXPERIMENTS,
    *(module.EXPERIMENT for module in _ACTIVE_DORMANT),
    *sink_conditions.EXPERIMENTS,
    pixel_sinks.EXPERIMENT,
    published_size.EXPERIMENT,
    quantised.EXPERIMENT,
    streamed.EXPERIMENT,
    curing.EXPERIMENT,
    aligned.EXPERIMENT,
)
_CALIBRATION_SECONDS = 1.0
_LONGEST_HOURS = 1000  # a longer estimate only means that this is not the machine for it


def find(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
      UserError: For an unknown one.
    """
    known = {name: experiment for experiment in ALL for name in (experiment.name, *experiment.also)}
    if name not in known:
        allowed = f"one of the {len(ALL)} that orthojax reproduce --list shows"
        raise UserError(f"unknown experiment {name!r}", allowed=allowed, hint=nearest(name, known))
    return known[name]


def short_names(names: Sequence[str]) -> str:
    """Names in one line; consecutive numbers as a range.

    >>> short_names(["figure7", "figure8", "figure9", "sinks", "table2", "table3"])
    'figure7 ... figure9, sinks, table2, table3'
    """

    def numbered(name: str) -> tuple[str, int | None]:
        found = re.fullmatch(r"(.*?)(\d+)", name)
        return (found[1], int(found[2])) if found else (name, None)

    runs: list[list[str]] = []
    for name in names:
        stem, number = numbered(name)
        if not runs or number is None or numbered(runs[-1][-1]) != (stem, number - 1):
            runs.append([])
        runs[-1].append(name)
    return ", ".join(f"{run[0]} ... {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


class Speed(NamedTuple):
    """How fast one worker trains: FLOP/s of the model's own matrix products, and where that is from, in words."""

    flops_per_second: float
    source: str


def measured_speed(runs_dir: Path, say: Callable[[str], object]) -> Speed | None:
    """The median over the runs that are finished there; None where there are none. `say` takes what is damaged."""
    speeds = []
    for path in sorted(runs_dir.glob(f"*/{TRAINED}")):
        try:
            values = read_json(path.parent / "config.json", "config")
            seconds = read_again(path, "seconds of a training", parse_seconds, say)
        except (OSError, UserError) as error:
            say(f"warning: {str(error).splitlines()[0]}")
            continue
        with contextlib.suppress(UserError):  # of another version
            speeds += [training_flops(from_dict(Config, values)) / seconds] if seconds else []
    if not speeds:
        return None
    return Speed(statistics.median(speeds), f"median of the {len(speeds)} finished runs in {runs_dir}")


def calibrated_speed() -> Speed:
    """That of a small model's training step, after compiling it; takes seconds."""
    config = replace(SHALLOW_MODEL, {"model.num_layers": 1})
    step, count = Stepper(config), 0
    jax.block_until_ready(step())
    started = time.monotonic()
    while (seconds := time.monotonic() - started) < _CALIBRATION_SECONDS:
        jax.block_until_ready(step())
        count += 1
    flops = training_flops(config) / config.train.steps * count
    return Speed(flops / seconds, f"speed of {count} steps of a small model just now; other sizes differ")


def listing(
    experiments: Sequence[Experiment], scale: str, seeds: Sequence[int] | None, runs_dir: Path, workers: int
) -> str:
    """A console table of all experiments: runs, how many are done, and an estimate of the minutes left.

    Args:
      experiments: In order.
      scale: Of the runs and minutes.
      seeds: As given, or None for those of each experiment.
      runs_dir: Folder of trained runs.
      workers: Runs at once.

    Raises:
      UserError: For a scale that none has.
    """
    known = sorted({name for experiment in experiments if experiment.variants for name in experiment.scales})
    if scale not in known:
        raise UserError(f"no experiment has the scale {scale!r}", allowed=" | ".join(known))
    damaged: dict[str, None] = {}
    speed = measured_speed(runs_dir, damaged.setdefault) or calibrated_speed()

    def progress(tasks: dict[Path, Task]) -> tuple[str, float]:
        """How many runs there are and how many are done, and the minutes left."""
        each = [_progress(task, damaged.setdefault) for task in tasks.values()]
        left = [work / speed.flops_per_second / 60 for _, work in each]
        count = f"{len(each)} ({sum(done for done, _ in each)} done)" if each else "-"
        return count, max(sum(left) / workers, max(left, default=0.0))  # none is faster than its longest run

    rows = [["--experiment=", "runs", "minutes left", "scales", ""]]
    every: dict[Path, Task] = {}
    for found in experiments:
        tasks = _tasks(found, scale, seeds, runs_dir)
        for folder, task in tasks.items():  # with all that is measured of a shared run
            measures = (*every[folder].measures, *task.measures) if folder in every else task.measures
            every[folder] = dataclasses.replace(task, measures=tuple(dict.fromkeys(measures)))
        count, minutes = progress(tasks)
        left = _clock(minutes)
        if found.compute:
            left = _clock(found.seconds_per_seed * len(found.seeds if seeds is None else seeds) / 60)
        elif scale not in found.scales:
            left = f"not at {scale}"
        elif not tasks:
            left = "needs --model" if found.trains else "a few"
        names = short_names([found.name, *found.also])
        rows.append([names, count, left, " ".join(found.scales), found.title])
    count, minutes = progress(every)
    rows.append(["all experiments together", count, _clock(minutes), "", ""])
    head, *body, total = align(rows)
    rule = "-" * max(map(len, (head, *body)))
    of_seeds = "" if seeds is None else f", seeds {', '.join(map(str, seeds))}"
    at_once = "one run at a time" if workers == 1 else f"{workers} runs at once"
    about = (
        f"Runs and minutes are those of scale {scale}{of_seeds}; experiments share runs, which the last line counts "
        "once.\nMinutes are an estimate: training and measuring at "
        f"{speed.flops_per_second:.3g} FLOP/s a run, {at_once}.\nThat is the {speed.source}."
    )
    return "\n".join([head, rule, *body, rule, total, "", about, *damaged])


def _progress(task: Task, say: Callable[[str], object]) -> tuple[bool, float]:
    """Whether a run was trained, and the work that is left; all of it where its files cannot be read."""
    try:
        return is_trained(task.run.folder, say), task.remaining(say)
    except (OSError, UserError) as error:
        say(f"warning: {str(error).splitlines()[0]}")
        return False, task.cost


def _tasks(experiment: Experiment, scale: str, seeds: Sequence[int] | None, runs_dir: Path) -> dict[Path, Task]:
    variants = experiment.variants_at(scale) if experiment.trains and scale in experiment.scales else ()
    return {
        folder: Task(Run(variant, seed, folder), experiment.measures, runs_dir)
        for seed in (experiment.seeds if seeds is None else seeds)
        for variant in variants
        for folder in [runs_dir / run_name(variant, seed)]
    }


def _clock(minutes: float) -> str:
    if minutes < 1:
        return "under 1" if minutes else "-"
    if minutes > 60 * _LONGEST_HOURS:
        return f"over {_LONGEST_HOURS:,} hours here"
    return f"{minutes:.0f}" if minutes < 600 else f"{minutes:,.0f} ({minutes / 60:,.0f} hours)"
