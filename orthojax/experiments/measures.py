"""What is measured of a trained model, each stored in the folder of its run."""

import dataclasses
import functools
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.config import Config
from orthojax.data import load_tokenizer
from orthojax.errors import UserError
from orthojax.files import parse_json, read_again, write_atomically, write_text
from orthojax.model import LoadedModel, Taps
from orthojax.train import Inputs, evaluate, evaluation_stages

MAPS: tuple[str, ...] = ("mean over layers", "first layer", "a quarter of the layers", "three quarters of the layers")


class Measured(NamedTuple):
    """What one measure gives: metrics for results.json, and arrays for pictures."""

    metrics: dict[str, float]
    arrays: dict[str, np.ndarray]


def _one(config: Config) -> int:
    return 1


@dataclasses.dataclass(frozen=True)
class Measure:
    """Something to measure of a model.

    Attributes:
      name: Of the files that store it, so a new definition needs a new name.
      measure: (model, inputs, on_progress) -> `Measured`; on_progress is called with the name of each finished part. A
        module-level function, so that worker processes find it.
      stages: How many parts that has, each about as long as a pass over the evaluation set.
    """

    name: str
    measure: Callable[[LoadedModel, Inputs, Callable[[str], None]], Measured]
    stages: Callable[[Config], int] = _one  # a Measure travels between processes


def by_layer(name: str, values: np.ndarray) -> dict[str, float]:
    """The metrics of one value for each layer, [layers]: the mean as `name`, each as `name/layer_i`."""
    layers = {f"{name}/layer_{layer}": float(value) for layer, value in enumerate(values)}
    return {name: float(np.mean(values)), **layers}


def _evaluate(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    return Measured(evaluate(loaded, inputs, on_progress=on_progress), {})


def _observe_maps(taps: Taps) -> tuple[jax.Array, jax.Array]:
    return jnp.mean(taps.attention_weights, axis=1), jnp.abs(taps.residual)


def example_maps(loaded: LoadedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Attention and hidden states on one sequence, as in Figures 1 and 27 to 40 of From Attention to Activation.

    Args:
      loaded: The model.
      tokens: int [T + 1].

    Returns:
      `attention` [4, T, T], mean weight over heads, and `hidden` [4, T, D], |hidden state|, both of `MAPS`: the mean
      over layers, then layers 0, L / 4 and 3 L / 4 of L, rounded down; `tokens` [T].
    """
    observed: Any = analysis.measure(loaded, [tokens[None, :-1]], _observe_maps)
    attention, hidden = (
        np.stack([x[:, 0].mean(0), x[0, 0], x[len(x) // 4, 0], x[3 * len(x) // 4, 0]])
        for x in map(np.asarray, observed)
    )
    return {"attention": attention, "hidden": hidden, "tokens": tokens[:-1]}


def _maps(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    maps = example_maps(loaded, inputs.evaluation[0])
    on_progress("maps")
    return Measured({}, maps)


# Of every run. A metric that is added to `evaluate` needs another name here, since what is stored lacks it.
ALWAYS = (Measure("evaluation", _evaluate, evaluation_stages), Measure("maps", _maps))


def require_same_ids(loaded: LoadedModel, inputs: Inputs, label: str) -> None:
    """Refuses to measure a model on rows of another run whose ids are other text to it.

    Args:
      loaded: The model.
      inputs: Of that run.
      label: Of the model.

    Raises:
      UserError: Where they are, or where either tokenizer is not known.
    """
    ids = inputs.evaluation[:, 1:].ravel()  # without a begin token, which has no text
    if loaded.tokenizer and inputs.tokenizer_path:
        if load_tokenizer(inputs.tokenizer_path).decode(ids) == loaded.tokenizer.decode(ids):
            return
        problem = f"{label}: its tokenizer reads other text from the rows of the model that it is compared with"
    else:
        problem = f"{label}: whether it has the tokenizer of the model that it is compared with is not known"
    raise UserError(problem, allowed="two models with the same token ids, each with its tokenizer")


def stored(folder: Path, measure: Measure, say: Callable[[str], object]) -> dict[str, float] | None:
    """The metrics that an earlier call stored; None where none did, or where `say` was told that a file is damaged.

    Raises:
      UserError: Where something else than a file is in its place.
    """
    path = folder / "measured" / f"{measure.name}.json"
    metrics = read_again(path, "measurement", _parse_metrics, say)
    if metrics is None:
        return None
    arrays = path.with_suffix(".npz")
    if os.path.lexists(arrays):
        return metrics if read_again(arrays, "arrays", parse_arrays, say) is not None else None
    return metrics or None  # neither metrics nor arrays: something was lost


def _parse_metrics(content: bytes) -> dict[str, float]:
    metrics = parse_json(content, "its content")
    if not isinstance(metrics, dict) or not all(type(value) in (int, float) for value in metrics.values()):
        raise ValueError("it does not hold numbers by name")
    return metrics


def parse_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name.

    Raises:
      ValueError: Where it is damaged.
    """
    try:
        with np.load(io.BytesIO(content)) as loaded:
            return dict(loaded)
    except MemoryError:
        raise
    except Exception as error:  # of zip files, of compression, of NumPy
        raise ValueError(f"{type(error).__name__}: {error}") from error


def store(folder: Path, measure: Measure, measured: Measured) -> None:
    """Writes what was measured: arrays first, so that the metrics stand for both."""
    (folder / "measured").mkdir(parents=True, exist_ok=True)
    path = folder / "measured" / f"{measure.name}.json"
    if measured.arrays:
        arrays = functools.partial(np.savez_compressed, **cast(Any, measured.arrays))
        write_atomically(path.with_suffix(".npz"), arrays)
    write_text(path, json.dumps(measured.metrics, indent=2) + "\n")
