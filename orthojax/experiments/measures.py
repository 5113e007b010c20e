"""Measurements of a trained model, each stored in the folder of its run."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis, quant
from orthojax.data import load_tokenizer
from orthojax.errors import UserError
from orthojax.experiments.stored import check_metrics
from orthojax.files import finite, kept, write_atomically
from orthojax.model import LoadedModel, Taps
from orthojax.train import Inputs, evaluate, rounded_perplexities
from orthojax.train.step import split_tokens

Say = Callable[[str], None]
Metrics = dict[str, float]
Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measurement of a model."""

    name: str  # of the files that store it, so a new definition needs a new name
    # (model, inputs, say) -> metrics for results.json, or these and arrays for pictures; `say` takes finished parts.
    measure: Callable[[LoadedModel, Inputs, Say], Metrics | tuple[Metrics, Arrays]]

    def of(self, folder: Path, load: Callable[[], LoadedModel], inputs: Inputs, say: Say) -> Metrics:
        """Returns the metrics that an earlier call stored in a run's folder, or loads, measures and stores them.

        Raises UserError if the stored files were changed.
        """
        path = folder / "measured" / f"{self.name}.json"

        def measured() -> Metrics:
            result = self.measure(load(), inputs, say)
            metrics, arrays = result if isinstance(result, tuple) else (result, {})
            say(self.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if arrays:  # first, so that the metrics imply both
                save = functools.partial(np.savez_compressed, **cast(Any, arrays))
                write_atomically(path.with_suffix(".npz"), save)
            return finite(metrics)

        return check_metrics(kept(path, f"measurement {self.name}", measured), str(path))


def by_layer(name: str, values: np.ndarray) -> Metrics:
    """Returns the metrics of a value for each layer, [layers]: the mean as `name`, each as `name/layer_i`."""
    layers = {f"{name}/layer_{layer}": float(value) for layer, value in enumerate(values)}
    return {name: float(np.mean(values)), **layers}


def _observe_maps(taps: Taps) -> tuple[jax.Array, jax.Array]:
    return jnp.mean(taps.attention_weights, axis=1), jnp.abs(taps.residual)


def _maps(loaded: LoadedModel, inputs: Inputs, say: Say) -> tuple[Metrics, Arrays]:
    """Measures attention and hidden states on one sequence: Figures 1 and 27 to 40 of From Attention to Activation.

    Mean weights over heads, [4, T, T], and |hidden state|, [4, T, D], each for the mean over layers, then for layers 0,
    L / 4 and 3 L / 4 of L, rounded down; tokens [T].
    """
    tokens = split_tokens(inputs.evaluation[:1], loaded.config.model)[0]
    observed: Any = analysis.measure(loaded, [tokens], _observe_maps)
    attention, hidden = (
        np.stack([x[:, 0].mean(0), x[0, 0], x[len(x) // 4, 0], x[3 * len(x) // 4, 0]])
        for x in map(np.asarray, observed)
    )
    return {}, {"attention": attention, "hidden": hidden, "tokens": tokens[0]}


def rounded(name: str, formats: Collection[str]) -> Measure:
    """Returns the measure of the perplexities of a language model at some formats."""

    def measure(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
        settings = {key: quant.setting_named(key) for key in formats if inputs.task is None}
        return rounded_perplexities(loaded, inputs, settings, on_progress=say)

    return Measure(name, measure)


# For every run. If a metric is added to `evaluate`, the name here must change, since stored files lack the metric.
ALWAYS = (
    Measure("evaluation", lambda loaded, inputs, say: evaluate(loaded, inputs, settings={}, on_progress=say)),
    Measure("maps", _maps),
)
# For every run unless `Study.rounding` is off: each setting compiles a program of its own.
ROUNDING = rounded("rounding", quant.SETTINGS)
FOUR_BIT = ("w4a8", "w4a4")  # kernels of 4 bits, with inputs of 8 and 4
FOUR_BITS = rounded("four_bits", FOUR_BIT)


def require_same_ids(loaded: LoadedModel, inputs: Inputs, name: str) -> None:
    """Refuses to measure a model on rows of another run whose ids mean other text to the model.

    Raises UserError if they do, or if either tokenizer is not known.
    """
    ids = inputs.evaluation[:, 1:].ravel()  # without a begin token, which has no text
    allowed = "two models with the same token ids, each with its tokenizer"
    if not (loaded.tokenizer and inputs.tokenizer_path):
        raise UserError(f"{name}: its tokenizer, or that of the rows, is not known", allowed=allowed)
    if load_tokenizer(inputs.tokenizer_path).decode(ids) != loaded.tokenizer.decode(ids):
        raise UserError(f"{name}: its tokenizer reads other text from these rows", allowed=allowed)
