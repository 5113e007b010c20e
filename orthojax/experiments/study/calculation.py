"""Experiments that train nothing: formulas and samples, seed by seed, into one results.json."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from orthojax.errors import UserError
from orthojax.formatting import mean_and_range, number
from orthojax.progress import Progress
from orthojax.train import environment, make_folder, write_text


class Case(NamedTuple):
    """What one seed gives for one setting: a row of results.json.

    Attributes:
      variant: Name of the row.
      overrides: The setting.
      metrics: Its numbers.
    """

    variant: str
    overrides: dict[str, Any]
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Calculation:
    """A figure or an appendix whose numbers follow from formulas and random samples; takes seconds.

    Attributes:
      name: As in --experiment.
      title: Of the report.
      compute: Makes the rows of one seed; it runs with float64 on.
      report: Makes the report from all of them.
      also: Further names of it.
      seeds: Where none are given.
    """

    name: str
    title: str
    compute: Callable[[int], Sequence[Case]]
    report: Callable[["Calculated"], Any]
    also: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)

    def require_scale(self, scale: str) -> None:
        """Refuses all scales but `tiny`: nothing here grows with a model.

        Raises:
          UserError: For another one.
        """
        if scale != "tiny":
            raise UserError(f"experiment {self.name!r} has no scale {scale!r}: it trains nothing", allowed="tiny")


@dataclasses.dataclass(frozen=True)
class Calculated:
    """A finished calculation.

    Attributes:
      calculation: What was computed.
      seeds: With which seeds.
      results: What results.json holds.
    """

    calculation: Calculation
    seeds: tuple[int, ...]
    results: dict[str, Any]

    def values(self, variant: str, metric: str) -> list[float]:
        """One number of one row, of every seed."""
        return [row["metrics"][metric] for row in self.results["rows"] if row["variant"] == variant]

    def mean(self, variant: str, metric: str) -> float:
        """The mean of `values`."""
        return float(np.mean(self.values(variant, metric)))

    def show(self, variant: str, metric: str, form: Callable[[float], str] = number) -> str:
        """Mean, and with several seeds the range."""
        return mean_and_range(self.values(variant, metric), form)

    def notes(self) -> list[str]:
        """The command, the machine and the time."""
        provenance = self.results["provenance"]
        seeds = ",".join(map(str, self.seeds))
        return [
            f"python launch/reproduce.py --experiment={self.calculation.name} --scale=tiny --seeds={seeds}",
            f"{provenance['date']}, {provenance['device']}, "
            + ", ".join(f"{name} {version}" for name, version in provenance["versions"].items()),
            f"{provenance['wall_seconds']} seconds; nothing is trained; all numbers in float64; cells with brackets "
            f"are the mean and the range over seeds",
        ]

    def links(self) -> list[tuple[str, str]]:
        """The raw results."""
        return [("results.json", "results.json"), ("report.md", "report.md")]


def run_calculation(calculation: Calculation, scale: str, seeds: Sequence[int], workdir: Path) -> Calculated:
    """Computes every seed and writes results.json; always anew, since it takes seconds.

    Args:
      calculation: What to compute.
      scale: `tiny`.
      seeds: Of everything random.
      workdir: Folder of the results.

    Raises:
      UserError: For another scale, or a workdir that is a file.
    """
    calculation.require_scale(scale)
    make_folder(workdir, "workdir")
    rows, started, progress = [], time.monotonic(), Progress(len(seeds))
    for seed in seeds:
        with jax.enable_x64(True):
            cases = calculation.compute(seed)
        rows += [{"variant": c.variant, "seed": seed, "overrides": c.overrides, "metrics": c.metrics} for c in cases]
        progress.advance(1, f"{calculation.name}: seed {seed}")
    progress.close()
    results = {
        "experiment": calculation.name,
        "scale": scale,
        "provenance": environment()
        | {"seeds": list(seeds), "data": [], "wall_seconds": round(time.monotonic() - started, 1)},
        "rows": rows,
    }
    write_text(workdir / "results.json", json.dumps(results, indent=2) + "\n")
    return Calculated(calculation, tuple(seeds), results)
