"""Whether the same channels are the largest for every input, at every position and in every layer."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis import top_count
from orthojax.config import Config, ModelConfig
from orthojax.experiments.study.measures import Measure, Measured
from orthojax.model import Taps, Transformer
from orthojax.train import Inputs, read_params

SEQUENCES = 100


def ranks(magnitude: ArrayLike) -> jax.Array:
    """Places of the channels, 0 for the largest; the lower index comes first where two are equal.

    Args:
      magnitude: [..., D].

    Returns:
      int32 [..., D].
    """
    return jnp.argsort(jnp.argsort(-jnp.asarray(magnitude), axis=-1, stable=True), axis=-1)


def mean_overlap(members: ArrayLike, axis: int) -> jax.Array:
    r"""Mean of :math:`|A_i \cap A_j| / k` over all pairs of different sets, each of k channels.

    With :math:`c_d` the number of the n sets that hold channel d it is :math:`(\sum_d c_d^2 - n k) / (n (n - 1) k)`.
    Independent random sets of k among D channels overlap by k / D in the mean.

    Args:
      members: Which channels are in each set, bool [..., D], all with the same number.
      axis: Along which the sets are; at least two.

    Returns:
      float32 of the shape of `members` without that axis and the last.
    """
    members = jnp.asarray(members)
    n = members.shape[axis]
    k = jnp.sum(members, axis=-1).max()
    counts = jnp.sum(members, axis=axis, dtype=jnp.float32)  # their squares may be too large for int32
    return (jnp.sum(counts * counts, axis=-1) / (n * k) - 1) / (n - 1)


def channel_overlap(config: Config, params: Any, tokens: np.ndarray) -> Measured:
    """Overlap of the largest channels of hidden states between inputs, positions and layers.

    The set of a sequence and layer are the k channels of largest mean |x| over positions, that of a position those of
    largest |x|. Overlaps are `mean_overlap`s. Two k, since nobody knows how many outlier channels a model has: where
    there are fewer than k, ordinary channels fill the sets; where there are several, k = 1 sees them take turns.

    Args:
      config: Of the model.
      params: Its parameters.
      tokens: int [B, T + 1], B and T at least 2.

    Returns:
      Metrics `largest_channels_*` for k = `top_count(D)` and `largest_channel_*` for k = 1: `between_sequences`, mean
      over layers; `between_positions` of a sequence, mean over sequences and layers; both also by layer;
      `between_layers` of a sequence, mean over sequences, where there are several; `by_chance`, k / D.
    """
    D = config.model.d_model
    measure = _sets(config.model)
    # In batches of the evaluation's size, since a paper's model has 100 sequences of 1,024 positions to remember.
    size = config.eval.batch_size
    batches = [jax.device_get(measure(params, tokens[i : i + size, :-1])) for i in range(0, len(tokens), size)]
    sets = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *batches)
    metrics = {}
    for name, (members, positions) in sets.items():
        metrics |= {f"{name}_{key}": value for key, value in _overlaps(members, positions).items()}
        metrics[f"{name}_by_chance"] = _counts(D)[name] / D
    return Measured(metrics, {})


def _overlaps(members: np.ndarray, positions: np.ndarray) -> dict[str, float]:
    """From the sets of all sequences, bool [layers, B, D], and the overlaps between positions [layers, B]."""
    by_layer = {
        "between_sequences": np.asarray(mean_overlap(members, axis=1), np.float64),
        "between_positions": positions.astype(np.float64).mean(axis=1),
    }
    metrics = {}
    for name, values in by_layer.items():
        metrics[name] = float(values.mean())
        metrics |= {f"{name}/layer_{layer}": float(value) for layer, value in enumerate(values)}
    if len(members) > 1:
        metrics["between_layers"] = float(np.mean(mean_overlap(members, axis=0)))
    return metrics


def _counts(d_model: int) -> dict[str, int]:
    """Prefix of the metrics -> k."""
    return {"largest_channels": top_count(d_model), "largest_channel": 1}


@functools.lru_cache(maxsize=32)  # variants that differ in their optimizer share a program, and so do seeds
def _sets(model: ModelConfig) -> Callable[[Any, ArrayLike], dict[str, tuple[jax.Array, jax.Array]]]:
    """The jitted (params, tokens [B, T]) -> by prefix: sets [layers, B, D], overlaps of positions [layers, B]."""
    counts = _counts(model.d_model)

    def observe(taps: Taps) -> dict[str, tuple[jax.Array, jax.Array]]:
        magnitude = jnp.abs(taps.residual.astype(jnp.float32))
        of_sequence, of_positions = ranks(jnp.mean(magnitude, axis=1)), ranks(magnitude)
        return {name: (of_sequence < k, mean_overlap(of_positions < k, axis=1)) for name, k in counts.items()}

    def measure(params: Any, tokens: ArrayLike) -> dict[str, tuple[jax.Array, jax.Array]]:
        observed: Any = Transformer(model).apply({"params": params}, tokens, observe=observe)
        return observed[1]

    return jax.jit(measure)


def _measure(config: Config, checkpoint: Path, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    measured = channel_overlap(config, read_params(checkpoint), inputs.evaluation[:SEQUENCES])
    on_progress("channel overlap")
    return measured


CHANNEL_OVERLAP = Measure("largest_channels", _measure)
