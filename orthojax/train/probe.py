"""A look at the outliers and the attention of a model while it trains, on a few fixed validation rows."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from orthojax import analysis
from orthojax.config import Config
from orthojax.model import Transformer
from orthojax.train.inputs import Inputs
from orthojax.train.mesh import constrain, in_mesh, place_rows
from orthojax.train.step import split_tokens

# Of all that `analysis.observe_language_model` defines; what is not named here is not computed.
PROBED = (
    "kurtosis_first",
    "kurtosis_rest",
    "max_abs_first",
    "max_abs_rest",
    "first_attention_fraction",
    "first_attention_mass",
)


def _observe(taps: analysis.Taps) -> analysis.Statistics:
    every = analysis.observe_language_model(taps)
    total, count = ({name: part[name] for name in PROBED} for part in (every.total, every.count))
    return every._replace(total=total, count=count, maximum={})


@partial(jax.jit, static_argnums=0)
def _statistics(model: Transformer, params: Any, tokens: jax.Array, is_trigger: jax.Array | None):
    inputs, _ = split_tokens(tokens)
    observe = _observe if is_trigger is None else analysis.observe_backcopy(is_trigger)
    observed: Any = model.apply({"params": params}, inputs, observe=observe)
    return constrain(observed[1], PartitionSpec())


def _part(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    return array[start:stop]


class Probe:
    """Looks every `train.probe_every_steps`; the device does the work after the step, and nobody waits for it."""

    def __init__(self, config: Config, inputs: Inputs, mesh: Mesh | None):
        """Puts the rows on the devices.

        Args:
          config: Its `train.probe_every_steps` and `train.probe_sequences`.
          inputs: The rows are spread evenly over their evaluation set; Bigram-Backcopy has statistics of its own.
          mesh: Where the parameters will be.
        """
        self._every, self._model, self._mesh = config.train.probe_every_steps, Transformer(config.model), mesh
        if not self._every:
            return
        n, wanted = len(inputs.evaluation), min(len(inputs.evaluation), config.train.probe_sequences)
        rows = inputs.evaluation[[i * n // wanted for i in range(wanted)]]
        is_trigger = None if inputs.task is None else inputs.task.is_trigger(rows[:, :-1])
        self._tokens, self._is_trigger = (
            None if array is None else place_rows(mesh, wanted, partial(_part, array)) for array in (rows, is_trigger)
        )

    def __call__(self, step: int, params: Any) -> analysis.Statistics | None:
        """The statistics of the parameters after a step, still on the device; None between the looks."""
        if not self._every or step % self._every:
            return None
        with in_mesh(self._mesh):
            return _statistics(self._model, params, self._tokens, self._is_trigger)


def probe_metrics(statistics: analysis.Statistics) -> dict[str, float]:
    """Their names and values, over all layers and by layer, as `evaluate` calls them; what has no value is left out."""
    metrics = analysis.finalize(statistics)
    metrics["probe_sequences"] = metrics.pop("sequences")
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
