"""The results of an experiment, as claims, tables and pictures read them.

`results["vanilla"].kurtosis_first` is the mean over seeds of a metric of one variant; the paper's numbers and those of
a single seed are read in the same way.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.config import Config, DataConfig
from orthojax.errors import UserError
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.labels import LABELS
from orthojax.experiments.measures import parse_arrays
from orthojax.files import require_file
from orthojax.formatting import mean_and_range, number, percent
from orthojax.train import read_metrics


class NotMeasured(AttributeError):
    """A metric that a run does not have, because it failed or because the model has no such metric."""


class Numbers:
    """Metrics as attributes: of the paper, of one seed, or of a variant's mean over seeds."""

    def __init__(self, metrics: Mapping[str, float]):
        self._metrics = metrics

    def __getattr__(self, metric: str) -> float:
        if metric.startswith("__"):
            raise AttributeError(metric)
        return self[metric]

    def __getitem__(self, metric: str) -> float:
        try:
            return self._metrics[metric]
        except KeyError:
            raise NotMeasured(metric) from None

    def __contains__(self, metric: str) -> bool:
        return metric in self._metrics

    def by_layer(self, name: str) -> np.ndarray:
        """A metric of every layer, [layers]; nan where a layer does not have it.

        Raises:
          NotMeasured: Where there is none.
        """
        prefix = f"{name}/layer_"
        found = {key.removeprefix(prefix): key for key in self._metrics if key.startswith(prefix)}
        layers = {int(layer): self._metrics[key] for layer, key in found.items() if layer.isdigit()}
        if not layers:
            raise NotMeasured(f"{prefix}0")
        return np.array([layers.get(layer, math.nan) for layer in range(max(layers) + 1)])


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number of a variant that a claim, table or picture shows.

    Called with the numbers of one seed or of the paper it is their value, with a `Result` the mean over its seeds.

    Attributes:
      label: In tables and claims.
      value: Computes it from one seed's metrics, or from the paper's.
      show: The number as text.
    """

    label: str
    value: Callable[[Numbers], float]
    show: Callable[[float], str] = number

    def __call__(self, numbers: Numbers) -> float:
        """The value, or the mean over seeds."""
        return numbers.mean(self) if isinstance(numbers, Result) else self.value(numbers)


def metric(name: str, label: str = "", show: Callable[[float], str] = number) -> Quantity:
    """A metric as a quantity, under its usual label (`LABELS`) where none is given."""
    return Quantity(label or LABELS.get(name, name), lambda numbers: numbers[name], show)


def as_quantity(given: str | Quantity) -> Quantity:
    """The quantity of a metric's name; a quantity as it is."""
    return metric(given) if isinstance(given, str) else given


def penalty(setting: str, label: str = "") -> Quantity:
    """The fraction by which a quantisation setting, the metric of its perplexity, raises perplexity."""
    label = label or f"perplexity lost at {LABELS[setting]}"
    return Quantity(label, lambda of: of[setting] / of.perplexity - 1, percent)


class Result(Numbers):
    """All finished seeds of one variant; an attribute is the mean over seeds of a metric.

    Besides the metrics there are numbers of its config: `d_model`, `num_layers`, `sequence_length`, `steps`,
    `learning_rate`; and with `Experiment.cost_reference` those of `_cost_numbers`.

    Attributes:
      name: Of the variant.
      label: Of the variant.
      config: Of the variant; None in a computation.
      data: What it was measured on; None in a computation.
      given: Whether it is an existing model (--model) and not trained here.
      paper: What the paper prints for it.
      seeds: Seed -> its numbers, of the seeds that finished.
      folders: Seed -> the folder of the run.
      without: What its cells say where no seed finished.
    """

    def __init__(
        self,
        name: str,
        variant: Variant | None,
        rows: Sequence[Mapping[str, Any]],
        *,
        paper: Mapping[str, float],
        costs: Mapping[str, float],
        folder: Path,
    ):
        """Collects the rows of results.json, which is in `folder`; `costs` are those of its training step."""
        self.name, self.paper = name, Numbers(paper)
        self.label = variant.label if variant else rows[0]["overrides"].get("label", name)
        self.given = variant is not None and variant.checkpoint is not None
        self.config: Config = variant and variant.config  # pyright: ignore[reportAttributeAccessIssue]
        self.data: DataConfig = variant and (variant.measured_on or variant.config).data  # pyright: ignore[reportAttributeAccessIssue]
        self._settings = (_config_numbers(variant.config, self.data) if variant else {}) | dict(costs)
        self.without = "failed" if rows else "not run"
        finished = [row for row in rows if row["metrics"] and "failed" not in row]
        self._found = {row["seed"]: {**_tuned(row), **row["metrics"]} for row in finished}
        self.folders = {row["seed"]: folder / row["run"] for row in finished if "run" in row}
        self._take(list(self._found))

    def _take(self, seeds: Sequence[int]) -> None:
        self.seeds = {seed: Numbers({**self._settings, **self._found[seed]}) for seed in seeds}
        # Of those that every seed has: means over different seeds do not compare.
        names = set.intersection(*(set(self._found[seed]) for seed in seeds)) if seeds else set()
        super().__init__(self._settings | {key: float(np.mean(self.values(key))) for key in names})

    def only(self, seeds: Collection[int]) -> "Result":
        """The same variant, of these seeds alone."""
        kept = copy.copy(self)
        kept._take([seed for seed in self.seeds if seed in seeds])
        kept.folders = {seed: folder for seed, folder in self.folders.items() if seed in seeds}
        return kept

    def by_seed(self, quantity: str | Quantity) -> dict[int, float]:
        """The quantity of every seed that has it."""
        value, found = as_quantity(quantity).value, {}
        for seed, numbers in self.seeds.items():
            with contextlib.suppress(NotMeasured):
                found[seed] = value(numbers)
        return found

    def values(self, quantity: str | Quantity) -> list[float]:
        """The values of `by_seed`."""
        return list(self.by_seed(quantity).values())

    def mean(self, quantity: str | Quantity) -> float:
        """The mean of `values`.

        Raises:
          NotMeasured: Where not every seed has it.
        """
        values = self.values(quantity)
        if not values or len(values) < len(self.seeds):
            raise NotMeasured(as_quantity(quantity).label)
        return float(np.mean(values))

    def layers(self, name: str) -> np.ndarray:
        """A metric by layer, [seeds, layers]; nan where a layer does not have it, as one without attention.

        Raises:
          NotMeasured: Where there is none, or not of every seed.
        """
        layers = [numbers.by_layer(name) for numbers in self.seeds.values()]
        if len({tuple(np.isnan(of_seed)) for of_seed in layers}) != 1:
            raise NotMeasured(name)
        return np.array(layers)

    def arrays(self, measure: str, seed: int | None = None) -> dict[str, np.ndarray]:
        """The arrays that a measure stored for a seed, for the first that finished where None.

        Raises:
          UserError: Where they are gone.
        """
        folder = self.folders.get(next(iter(self.folders), 0) if seed is None else seed)
        if folder is None:
            raise UserError(f"{self.name} has no folder of a run", allowed="results of runs that are there")
        path = folder / "measured" / f"{measure}.npz"
        try:
            require_file(path, "arrays")
            return parse_arrays(path.read_bytes())
        except ValueError as error:
            problem = str(error) if isinstance(error, UserError) else f"arrays {path} are damaged: {error}"
            hint = f"delete {path.with_suffix('.json')} and run the same command: they are measured again"
            raise UserError(problem.splitlines()[0], hint=hint) from None

    def logged(self, key: str) -> tuple[list[int], np.ndarray]:
        """One entry of metrics.jsonl, at the steps that all seeds have: (steps [n], values [seeds, n]).

        Raises:
          UserError: Where a run is gone.
        """
        if gone := [folder for folder in self.folders.values() if not folder.exists()]:
            raise UserError(f"run {gone[0]} is gone", allowed="results of runs that are there")
        runs = [read_metrics(folder / "metrics.jsonl") for folder in self.folders.values()]
        points = [{line["step"]: line[key] for line in run if isinstance(line.get(key), int | float)} for run in runs]
        steps = sorted(set.intersection(*(set(point) for point in points))) if points else []
        return steps, np.array([[point[step] for step in steps] for point in points])

    def cell(self, quantity: Quantity) -> str:
        """Mean, and where seeds differ the range; 'failed' or 'not run' where none finished, '-' where none has it.

        Where some seeds have it and others do not, it says how many.
        """
        if not self.seeds:
            return self.without
        values = self.values(quantity)
        fewer = f" ({len(values)} of {len(self.seeds)} seeds)" if len(values) < len(self.seeds) else ""
        return f"{mean_and_range(values, quantity.show)}{fewer}" if values else "-"

    def mean_cell(self, quantity: Quantity) -> str:
        """The mean alone; '-' where not every seed has it."""
        try:
            return quantity.show(self.mean(quantity))
        except NotMeasured:
            return "-"

    def paper_cell(self, quantity: Quantity) -> str:
        """What the paper prints, '-' where it prints nothing."""
        try:
            return quantity.show(quantity.value(self.paper))
        except NotMeasured:
            return "-"


def _config_numbers(config: Config, data: DataConfig) -> dict[str, float]:
    return {
        "d_model": config.model.d_model,
        "num_layers": config.model.num_layers,
        "sequence_length": data.sequence_length,
        "steps": config.train.steps,
        "learning_rate": config.optim.learning_rate,
    }


def _tuned(row: Mapping[str, Any]) -> dict[str, float]:
    """The learning rate that trials chose for one seed."""
    return {"learning_rate": row["overrides"]["optim.learning_rate"]} if "learning_rates" in row else {}


def _cost_numbers(cost: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float]:
    """The costs of a training step; ratios are to the reference's, that of times with its quartiles."""
    if "step_ratio" not in cost:
        return {}
    ratios = zip(("step_ratio", "step_ratio_lower", "step_ratio_upper"), cost["step_ratio"], strict=True)
    numbers = dict(ratios) | {"steps_per_second": 1 / cost["step_seconds"]}
    for name in ("program", "optimizer_state"):
        if (size := cost.get(f"{name}_bytes")) is not None:  # the compiler may not report it
            numbers |= {f"{name}_bytes": size, f"{name}_ratio": size / reference[f"{name}_bytes"]}
    return {f"cost_{name}": value for name, value in numbers.items()}


def on_shared_seeds(of: Sequence[Result]) -> tuple[list[Result], list[int] | None]:
    """Variants on the seeds that all have which are trained here, and these seeds where some variant has more.

    A mean over the seeds that survived would favour the variant that fails.
    """
    finished = [set(result.seeds) for result in of if result.seeds and not result.given]
    if all(seeds == finished[0] for seeds in finished):
        return list(of), None
    shared = sorted(set.intersection(*finished))
    return [result if result.given else result.only(shared) for result in of], shared


def pairs(result: Result, reference: Result, quantity: str | Quantity) -> dict[int, tuple[float, float]]:
    """A quantity of two variants, of every seed that both have; of two existing models, whose seeds say nothing, one.

    Raises:
      NotMeasured: Where there is no such seed.
    """
    if result.given and reference.given:
        return {0: (result.mean(quantity), reference.mean(quantity))}
    a, b = result.by_seed(quantity), reference.by_seed(quantity)
    if not a.keys() & b.keys():
        raise NotMeasured(as_quantity(quantity).label)
    return {seed: (a[seed], b[seed]) for seed in a if seed in b}


class Results:
    """A finished experiment: iterates over its variants' `Result`s, and finds one by name.

    Attributes:
      experiment: What was run.
      scale: At which scale.
      seeds: With which seeds.
      workdir: Where.
      raw: The content of results.json.
      variants: As given.
    """

    def __init__(
        self,
        experiment: Experiment,
        scale: str,
        seeds: Sequence[int],
        workdir: Path,
        raw: dict[str, Any],
        variants: Sequence[Variant] | None = None,
    ):
        """Sorts the rows of results.json by variant, in the order of `variants`; without them in that of the rows."""
        self.experiment, self.scale, self.seeds = experiment, scale, tuple(seeds)
        self.workdir, self.raw, self.variants = workdir, raw, tuple(variants or ())
        rows: dict[str, list[Mapping[str, Any]]] = {v.name: [] for v in self.variants}
        for row in raw["rows"]:
            rows.setdefault(row["variant"], []).append(row)
        known, paper = {v.name: v for v in self.variants}, experiment.paper_at(scale)
        measured, reference = raw.get("costs", {}), experiment.cost_reference
        costs = {n: _cost_numbers(cost, measured[reference(n)]) for n, cost in measured.items()} if reference else {}
        if not experiment.trains:  # what is known of a variant is its cost
            rows |= {name: [{"seed": 0, "metrics": cost}] for name, cost in costs.items()}
        self._results = {
            name: Result(
                name, known.get(name), found, paper=paper.get(name, {}), costs=costs.get(name, {}), folder=workdir
            )
            for name, found in rows.items()
        }

    def __getitem__(self, name: str) -> Result:
        return self._results[name]

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results.values())

    @property
    def finished(self) -> list[Result]:
        """The variants of which at least one seed finished."""
        return [result for result in self if result.seeds]

    @property
    def first(self) -> Result:
        """The first variant, whose config stands for all in sentences such as 'steps of B x T tokens'."""
        return next(iter(self))

    def groups(self) -> Mapping[str, Mapping[str, str]]:
        """Label -> role -> variant name; see `Experiment.groups`."""
        if self.experiment.groups is None:
            return {"": {name: name for name in self._results}}
        return self.experiment.groups(self)

    def failures(self) -> list[str]:
        """One sentence for each run that did not finish, or whose cost could not be measured."""
        runs = [f"{r['variant']}, seed {r['seed']}: {r['failed']}" for r in self.raw["rows"] if "failed" in r]
        costs = self.raw.get("costs", {}).items()
        return runs + [f"{name}, cost of a step: {cost['failed']}" for name, cost in costs if "failed" in cost]
