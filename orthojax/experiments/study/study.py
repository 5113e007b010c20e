"""Running an experiment: every variant with every seed, resumable, into one results.json."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.config import Config
from orthojax.errors import UserError, nearest
from orthojax.experiments.study.costs import measure_costs
from orthojax.experiments.study.measures import Measure, arrays
from orthojax.experiments.study.places import Place
from orthojax.experiments.study.runs import Row, finish, lost
from orthojax.experiments.study.schedule import grouped
from orthojax.experiments.study.tasks import Task, cost
from orthojax.experiments.study.variant import Run, Variant, run_name
from orthojax.experiments.study.workers import do_nothing, run_all
from orthojax.fields import replace
from orthojax.progress import Progress, tokenizing_progress
from orthojax.train import environment, find_checkpoint, make_folder, open_inputs, read_config, write_text


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A table or figure: which models are trained, and how the result is told.

    Attributes:
      name: As in --experiment.
      title: Of the report.
      scales: Scale name -> its variants.
      report: Makes the report from the finished study.
      also: Further names of it, as of figures that differ only by model.
      seeds: Where none are given.
      measures: What is measured of every model beyond `measures.ALWAYS`.
      takes_models: Whether --model=NAME=CHECKPOINT adds rows of existing models.
      cost_reference: Where given, the cost of a training step of each variant is measured: its name -> that of the
        variant which its time is relative to.
      trains: Whether its variants are trained and measured, or only their cost is.
    """

    name: str
    title: str
    scales: dict[str, Callable[[], tuple[Variant, ...]]]
    report: Callable[["Study"], Any]
    also: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    measures: tuple[Measure, ...] = ()
    takes_models: bool = False
    cost_reference: Callable[[str], str] | None = None
    trains: bool = True

    def variants(self, scale: str) -> tuple[Variant, ...]:
        """The variants of one scale.

        Raises:
          UserError: Where the experiment does not have it.
        """
        if scale not in self.scales:
            raise UserError(
                f"experiment {self.name!r} has no scale {scale!r}",
                allowed=" | ".join(self.scales),
                hint=nearest(scale, self.scales),
            )
        return self.scales[scale]()


@dataclasses.dataclass(frozen=True)
class Study:
    """A finished experiment.

    Attributes:
      experiment: What was run.
      scale: At which scale.
      variants: Of that scale.
      seeds: With which seeds.
      workdir: Where.
      results: What results.json holds.
    """

    experiment: Experiment
    scale: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    workdir: Path
    results: dict[str, Any]

    def run_dir(self, variant: str, seed: int) -> Path:
        """The folder of one run."""
        row = next(row for row in self.results["rows"] if (row["variant"], row["seed"]) == (variant, seed))
        return self.workdir / row["run"]

    def arrays(self, variant: str, seed: int, measure: str) -> dict[str, np.ndarray]:
        """What a measure keeps for pictures."""
        return arrays(self.run_dir(variant, seed), measure)

    def by_seed(self, variant: str, metric: str) -> dict[int, float]:
        """One metric of one variant, of every seed that finished."""
        rows = [row for row in self.results["rows"] if row["variant"] == variant]
        return {row["seed"]: row["metrics"][metric] for row in rows if metric in row["metrics"]}

    def values(self, variant: str, metric: str) -> list[float]:
        """The values of `by_seed`."""
        return list(self.by_seed(variant, metric).values())

    def pairs(self, variant: str, reference: str, metric: str) -> dict[int, tuple[float, float]]:
        """One metric of two variants, of every seed that both finished."""
        a, b = self.by_seed(variant, metric), self.by_seed(reference, metric)
        return {seed: (a[seed], b[seed]) for seed in a if seed in b}

    def mean(self, variant: str, metric: str) -> float:
        """The mean of `values`; nan where no seed finished."""
        values = self.values(variant, metric)
        return float(np.mean(values)) if values else float("nan")

    def by_layer(self, variant: str, metric: str) -> np.ndarray:
        """One metric by layer, [seeds, layers]."""
        layers = []
        while values := self.values(variant, f"{metric}/layer_{len(layers)}"):
            layers.append(values)
        return np.array(layers).T

    def failures(self) -> list[str]:
        """One sentence for each run that did not finish."""
        rows = [row for row in self.results["rows"] if "failed" in row]
        return [f"{row['variant']}, seed {row['seed']}: {row['failed']}" for row in rows]


def given_model(name: str, path: Path) -> Variant:
    """An existing model as a variant that is measured and not trained.

    Args:
      name: Of its row.
      path: A run's workdir, its checkpoints folder or one step's folder.

    Raises:
      UserError: Where there is no checkpoint.
    """
    checkpoint = find_checkpoint(path)
    return Variant(name, name, read_config(checkpoint), checkpoint=checkpoint)


def run_study(
    experiment: Experiment,
    scale: str,
    seeds: Sequence[int],
    workdir: Path,
    *,
    runs_dir: Path,
    cache_dir: Path,
    models: Sequence[Variant] = (),
    where: Sequence[Place] = (Place(),),
    prepare: Callable[[], object] = do_nothing,
) -> Study:
    """Trains and measures what is not done yet and writes results.json.

    Args:
      experiment: What to run.
      scale: One of its scales.
      seeds: Seeds of parameters and data order; the same for every variant.
      workdir: The folder of the study.
      runs_dir: Folder of trained runs, shared with other experiments; see `run_name`.
      cache_dir: Folder of tokenised corpora.
      models: Existing models to measure beside those that are trained; see `given_model`.
      where: Of the workers, from `places`.
      prepare: Called once in every worker.

    Raises:
      UserError: For an unknown scale, models where the experiment takes none, or what `train` refuses.
      Interrupted: On SIGINT or SIGTERM, when the state of every run is saved.
    """
    trained = experiment.variants(scale)
    variants = (*trained, *models)
    if models and not experiment.takes_models:
        raise UserError(f"experiment {experiment.name!r} measures no existing models", allowed="no --model")
    if clash := {v.name for v in models} & {v.name for v in trained}:
        raise UserError(f"--model {min(clash)!r} has the name of a variant", allowed="another name")
    if not variants:
        raise UserError(f"experiment {experiment.name!r} needs a model", allowed="--model=NAME=CHECKPOINT[,...]")
    make_folder(workdir, "workdir")
    runs = [Run(v, seed, runs_dir / run_name(v, seed)) for seed in seeds for v in trained if experiment.trains]
    runs += [Run(v, v.config.train.seed, workdir / "models" / run_name(v, v.config.train.seed)) for v in models]
    tasks = [Task(run, experiment.measures, cache_dir) for run in runs]
    for config in {_data_of(run.config): run.config for run in runs}.values():
        open_inputs(config, cache_dir, progress=tokenizing_progress())  # tokenises once, before the workers start
    groups, where = grouped(tasks, where)
    costs = {}
    with Progress(sum(map(cost, tasks))) as progress:
        finished = run_all(finish, groups, where, progress, prepare=prepare, lost=lost)
        by_run = {(row["variant"], row["seed"]): row for rows in finished for row in rows}
        rows = [by_run[run.variant.name, run.seed] for run in runs]
        if experiment.cost_reference:
            configs = {variant.name: variant.config for variant in trained}
            measured = measure_costs(configs, experiment.cost_reference, workdir / "costs.json", progress.say)
            costs = {"costs": measured}
    results = {
        "experiment": experiment.name,
        "scale": scale,
        "provenance": _provenance(seeds, rows),
        "rows": [
            {key: value for key, value in row.items() if key != "data"} | {"run": os.path.relpath(run.folder, workdir)}
            for row, run in zip(rows, runs, strict=True)
        ],
    } | costs
    write_text(workdir / "results.json", json.dumps(results, indent=2) + "\n")
    return Study(experiment, scale, variants, tuple(seeds), workdir, results)


def _data_of(config: Config) -> object:
    return replace(config, {"data.seed": 0}).data, config.train.batch_size, config.eval


def _provenance(seeds: Sequence[int], rows: list[Row]) -> dict[str, Any]:
    sources = {json.dumps(row["data"], sort_keys=True): row["data"] for row in rows if "data" in row}
    return environment() | {
        "seeds": list(seeds),
        "data": list(sources.values()),
        # Summed over runs, of which several may run at once, by whichever call and experiment.
        "training_seconds": round(sum(row.get("seconds", 0.0) for row in rows), 1),
    }
