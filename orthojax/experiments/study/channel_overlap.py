"""Whether the same channels are the largest for every input, at every position and in every layer."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.config import Config, ModelConfig
from orthojax.experiments.study.measures import Measure, Measured
from orthojax.model import Taps, Transformer
from orthojax.train import Inputs, read_params

SEQUENCES = 100


def top_count(d_model: int) -> int:
    """How many channels count as the largest: a thirty-second of them, one at least."""
    return max(1, d_model // 32)


def top_channels(magnitude: ArrayLike) -> jax.Array:
    """Which channels are among the `top_count(D)` largest, the lower index first where two are equal.

    Args:
      magnitude: [..., D].

    Returns:
      bool [..., D].
    """
    magnitude = jnp.asarray(magnitude)
    D = magnitude.shape[-1]
    rank = jnp.argsort(jnp.argsort(-magnitude, axis=-1, stable=True), axis=-1)
    return rank < top_count(D)


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

    The set of a sequence and layer are the `top_count(D)` channels of largest mean |x| over positions, that of a
    position those of largest |x|. Overlaps are `mean_overlap`s.

    Args:
      config: Of the model.
      params: Its parameters.
      tokens: int [B, T + 1], B and T at least 2.

    Returns:
      Metrics `channel_overlap_sequences`: between sequences, mean over layers; `channel_overlap_positions`: between
      the positions of a sequence, mean over sequences and layers; both also by layer; `channel_overlap_layers`:
      between the layers of a sequence, mean over sequences, where there are several; `channel_overlap_chance`: k / D;
      `channel_most_frequent_fraction`: share of sequences of which the most frequent channel is among the largest, mean
      over layers.
      Arrays `frequency` [layers, D]: share of sequences of which a channel is among the largest, and `magnitude`
      [layers, D]: mean |x| over positions and sequences.
    """
    measure = _overlaps(config.model)
    # In batches of the evaluation's size, since a paper's model has 100 sequences of 1,024 positions to remember.
    size = config.eval.batch_size
    batches = [jax.device_get(measure(params, tokens[i : i + size, :-1])) for i in range(0, len(tokens), size)]
    members, positions, magnitude = (np.concatenate(parts, axis=1) for parts in zip(*batches, strict=True))
    by_layer = {
        "channel_overlap_sequences": np.asarray(mean_overlap(members, axis=1), np.float64),
        "channel_overlap_positions": positions.astype(np.float64).mean(axis=1),
    }
    layers, D = members.shape[0], members.shape[-1]
    frequency = members.mean(axis=1)
    metrics = {
        "channel_overlap_chance": top_count(D) / D,
        "channel_most_frequent_fraction": float(frequency.max(axis=-1).mean()),
    }
    for name, values in by_layer.items():
        metrics[name] = float(values.mean())
        metrics |= {f"{name}/layer_{layer}": float(value) for layer, value in enumerate(values)}
    if layers > 1:
        metrics["channel_overlap_layers"] = float(np.mean(mean_overlap(members, axis=0)))
    return Measured(metrics, {"frequency": frequency, "magnitude": magnitude.mean(axis=1)})


@functools.lru_cache(maxsize=32)  # variants that differ in their optimizer share a program, and so do seeds
def _overlaps(model: ModelConfig) -> Callable[[Any, ArrayLike], tuple[jax.Array, ...]]:
    """The jitted (params, tokens [B, T]) -> by layer `top_channels`, `mean_overlap` of positions, mean |x|."""

    def observe(taps: Taps) -> tuple[jax.Array, jax.Array, jax.Array]:
        magnitude = jnp.abs(taps.residual.astype(jnp.float32))
        by_sequence = jnp.mean(magnitude, axis=1)
        return top_channels(by_sequence), mean_overlap(top_channels(magnitude), axis=1), by_sequence

    def measure(params: Any, tokens: ArrayLike) -> tuple[jax.Array, ...]:
        observed: Any = Transformer(model).apply({"params": params}, tokens, observe=observe)
        return observed[1]

    return jax.jit(measure)


def _measure(config: Config, checkpoint: Path, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    measured = channel_overlap(config, read_params(checkpoint), inputs.evaluation[:SEQUENCES])
    on_progress("channel overlap")
    return measured


CHANNEL_OVERLAP = Measure("channel_overlap", _measure)
