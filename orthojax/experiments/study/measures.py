"""What is measured of a trained model, each kept in the folder of its run."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from orthojax.config import Config
from orthojax.experiments.study.example import example_maps
from orthojax.train import Inputs, evaluate, evaluation_stages, read_params, write_text


class Measured(NamedTuple):
    """What one measure gives.

    Attributes:
      metrics: For results.json.
      arrays: For pictures.
    """

    metrics: dict[str, float]
    arrays: dict[str, np.ndarray]


def _one(config: Config) -> int:
    return 1


@dataclasses.dataclass(frozen=True)
class Measure:
    """Something to measure of a checkpoint.

    Attributes:
      name: Of the files that keep it, so a new definition wants a new name.
      measure: (config, folder of the checkpoint's step, inputs, progress) -> `Measured`; progress is called with the
        name of each part that is done. A function of a module, so that other processes find it.
      stages: How many parts that has, each about as long as a pass over the evaluation set.
    """

    name: str
    measure: Callable[[Config, Path, Inputs, Callable[[str], None]], Measured]
    stages: Callable[[Config], int] = _one


def _evaluate(config: Config, checkpoint: Path, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    return Measured(evaluate(config, read_params(checkpoint), inputs, on_progress=on_progress), {})


def _maps(config: Config, checkpoint: Path, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    maps = example_maps(config, read_params(checkpoint), inputs.evaluation[0])
    on_progress("maps")
    return Measured({}, maps)


# Of every run.
ALWAYS = (Measure("evaluation", _evaluate, evaluation_stages), Measure("maps", _maps))


def kept(folder: Path, measure: Measure) -> dict[str, float] | None:
    """The metrics that an earlier call measured, if it did."""
    path = folder / "measured" / f"{measure.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def keep(folder: Path, measure: Measure, measured: Measured) -> None:
    """Writes what was measured: arrays first, so that the metrics stand for both."""
    (folder / "measured").mkdir(parents=True, exist_ok=True)
    path = folder / "measured" / f"{measure.name}.json"
    if measured.arrays:
        temporary = path.with_suffix(".tmp.npz")
        np.savez_compressed(temporary, **cast(Any, measured.arrays))
        temporary.replace(path.with_suffix(".npz"))
    write_text(path, json.dumps(measured.metrics, indent=2) + "\n")


def arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of a measure."""
    with np.load(folder / "measured" / f"{name}.npz") as loaded:
        return dict(loaded)
