"""Numbers by variant and seed, as claims, tables and figures read them."""

import dataclasses
import io
import math
import operator
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.analysis.catalogue import define, label
from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.files import read_json_lines
from orthojax.formatting import number, share


class Missing(Exception):
    """A variant that did not finish, or that lacks a metric or a file."""


class Numbers:
    """Metrics of one seed, or those a paper prints, and fields of the config: `numbers["data.sequence_length"]`."""

    def __init__(self, metrics: Mapping[str, float], config: Config | None = None):
        self._metrics, self._config = metrics, config

    def __getitem__(self, name: str) -> float:
        if name in self._metrics:
            return self._metrics[name]
        if self._config is not None and name.split(".")[0] in ("model", "optim", "data", "train", "eval"):
            return operator.attrgetter(name)(self._config)
        raise Missing(name)

    def __contains__(self, name: object) -> bool:
        return name in self._metrics

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def layers(self, name: str) -> np.ndarray:
        """Returns `name/layer_i` of every layer, [layers]; nan for a layer that does not have it."""
        keys = [key for key in self._metrics if key.startswith(f"{name}/layer_")]
        by_layer = {int(layer): self[key] for key in keys if (layer := key.rpartition("_")[2]).isdigit()}
        if not by_layer:
            raise Missing(f"{name}/layer_0")
        return np.array([by_layer.get(layer, math.nan) for layer in range(max(by_layer) + 1)])


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number for every seed of a variant; `claims.Metric` can also be indexed by a variant's name."""

    name: str  # a key of results.json, or with `of` the label of what `of` computes
    of: Callable[[Numbers], float] | None = None  # computes it from the numbers of one seed
    show: Callable[[float], str] | None = None  # None for three digits, or percent for a metric that is a fraction

    @property
    def label(self) -> str:
        """The label in tables."""
        return self.name if self.of else label(self.name)

    @property
    def is_share(self) -> bool:
        """Whether it is a fraction of a whole, written in percent."""
        if self.of or self.show:
            return self.show is share
        definition = define(self.name)
        return definition is not None and definition.fraction

    def text(self, value: float) -> str:
        """Formats a value."""
        return (self.show or (share if self.is_share else number))(value)

    def __call__(self, numbers: Numbers) -> float:
        """Returns the value of one seed; raises `Missing` if a formula has none, such as a ratio to 0."""
        try:
            return self.of(numbers) if self.of else numbers[self.name]
        except ArithmeticError:
            raise Missing(self.name) from None


def as_quantity(metric: "str | Quantity") -> Quantity:
    """Returns the quantity for a metric's name; returns a quantity unchanged."""
    return Quantity(metric) if isinstance(metric, str) else metric


@dataclasses.dataclass(frozen=True)
class Result:
    """All finished seeds of one variant; `result["perplexity"]` is the mean over them."""

    name: str
    config: Any  # of its run, with the data that it was measured on; None for a computation
    seeds: Mapping[int, Numbers]
    paper: Numbers = dataclasses.field(default_factory=lambda: Numbers({}))  # what the paper prints for it
    given: bool = False  # whether it is an existing model, whose seed has no meaning
    folders: Mapping[int, Path] = dataclasses.field(default_factory=dict)  # of the run of each seed
    started: bool = True  # whether any seed was run, finished or not

    def printed(self, metric: Quantity) -> str:
        """Returns the words "paper 31.2" with the number that the paper prints; "" if it prints none."""
        try:
            return f"paper {metric.text(metric(self.paper))}"
        except Missing:
            return ""

    def by_seed(self, metric: str | Quantity) -> dict[int, float]:
        """Returns the metric of every seed that has it."""
        quantity, by_seed = as_quantity(metric), {}
        for seed, numbers in self.seeds.items():
            try:
                by_seed[seed] = quantity(numbers)
            except Missing:
                continue
        return by_seed

    def values(self, metric: str | Quantity) -> list[float]:
        """Returns the values of `by_seed`."""
        return list(self.by_seed(metric).values())

    def __getitem__(self, metric: str | Quantity) -> float:
        values = self.values(metric)
        if not values or len(values) < len(self.seeds):
            raise Missing(f"{as_quantity(metric).name} of {self.name}")
        return float(np.mean(values))

    def layers(self, name: str) -> np.ndarray:
        """Returns a metric by layer, [seeds, layers]; nan for layers without it, such as those without attention."""
        layers = [numbers.layers(name) for numbers in self.seeds.values()]
        if len({tuple(np.isnan(of_seed)) for of_seed in layers}) != 1:
            raise Missing(f"{name} of {self.name}")
        return np.array(layers)

    def only(self, seeds: Collection[int]) -> "Result":
        """Returns the same variant with some of its seeds."""
        return dataclasses.replace(self, seeds={seed: numbers for seed, numbers in self.seeds.items() if seed in seeds})

    def arrays(self, measure: str, seed: int | None = None) -> dict[str, np.ndarray]:
        """Reads the arrays that a measure stored for a seed, the first one if None.

        Raises Missing if the run's folder is gone, as for committed results.
        """
        folder = self.folders.get(next(iter(self.seeds), 0) if seed is None else seed)
        path = folder / "measured" / f"{measure}.npz" if folder else None
        if path is None or not path.exists():
            raise Missing(f"arrays {measure} of {self.name}")
        try:
            with np.load(io.BytesIO(path.read_bytes())) as loaded:
                return dict(loaded)
        except (ValueError, EOFError, zipfile.BadZipFile):
            raise UserError(f"{path} is no .npz file of arrays", allowed="to delete it: it is measured again") from None

    def logged(self, key: str) -> tuple[list[int], np.ndarray]:
        """Reads one entry of metrics.jsonl at the steps that all seeds have: (steps [n], values [seeds, n]).

        Raises Missing if a run's folder is gone, or the entry was not logged.
        """
        paths = [self.folders[seed] / "metrics.jsonl" for seed in self.seeds if seed in self.folders]
        if not paths or not all(path.exists() for path in paths):
            raise Missing(f"metrics.jsonl of {self.name}")
        logs = [read_json_lines(path, "metrics file") for path in paths]
        runs = [{line["step"]: line[key] for line in log if _is_number(line.get("step")) and _is_number(line.get(key))}
                for log in logs]  # fmt: skip
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        if not steps:
            raise Missing(f"{key} of {self.name}")
        return steps, np.array([[run[step] for step in steps] for run in runs])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Results(Mapping[str, Result]):
    """Variant -> `Result`, in order; also by the names in `aliases`."""

    def __init__(self, results: Mapping[str, Result]):
        self._results, self.aliases = dict(results), {}

    def __getitem__(self, name: str) -> Result:
        name = self.aliases.get(name, name)
        if name not in self._results:
            raise Missing(name)
        return self._results[name]

    def __contains__(self, name: object) -> bool:
        return name in self._results or name in self.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    @property
    def finished(self) -> list[Result]:
        """The variants with at least one finished seed."""
        return [result for result in self._results.values() if result.seeds]

    def matching(self, patterns: str) -> list[Result]:
        """Returns the variants that match one of several patterns, such as 'vanilla *_cured'; all if there is none."""
        if not patterns:
            return list(self.values())
        return [each for each in self.values() if any(case_in(p, each.name) is not None for p in patterns.split())]


def case_in(pattern: str, name: str) -> str | None:
    """Returns what `*` in a pattern stands for in a name, "" for a pattern without `*`; None if they do not match.

    >>> case_in("*_adam", "relu_adam"), case_in("relu_adam", "relu_adam"), case_in("*_adam", "relu_sgd")
    ('relu', '', None)
    """
    start, star, end = pattern.partition("*")
    if not star:
        return "" if name == pattern else None
    fits = name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end)
    return name[len(start) : len(name) - len(end)] if fits else None


def shared_seeds(variants: Sequence[Result]) -> list[Result]:
    """Returns variants on the seeds that all variants trained here finished, so that means are comparable."""
    trained = [set(result.seeds) for result in variants if result.seeds and not result.given]
    if not trained or all(seeds == trained[0] for seeds in trained):
        return list(variants)
    shared = set.intersection(*trained)
    if not shared:
        raise Missing("no seed that every variant finished")
    return [result if result.given else result.only(shared) for result in variants]


def pairs(result: Result, reference: Result, metric: str | Quantity) -> dict[int, tuple[float, float]]:
    """Returns a metric of two variants for every seed that both have; one pair for two existing models.

    Raises Missing if there is no such seed.
    """
    if result.given and reference.given:
        return {0: (result[metric], reference[metric])}
    a, b = result.by_seed(metric), reference.by_seed(metric)
    if not a.keys() & b.keys():
        raise Missing(as_quantity(metric).name)
    return {seed: (a[seed], b[seed]) for seed in a if seed in b}
