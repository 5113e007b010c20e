"""The channels with the largest hidden states: whether they are the same for inputs, positions and layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax import analysis
from orthojax.experiments.from_attention.channels import channel_norms, top_count
from orthojax.experiments.from_attention.output_weights import PARTS, output_kernels
from orthojax.experiments.measures import Measure, Measured, Say, by_layer
from orthojax.model import LoadedModel, Taps
from orthojax.train import Inputs


def ranks(magnitude: ArrayLike) -> jax.Array:
    """Returns the ranks of the channels, 0 for the largest; the lower index comes first if two are equal.

    Args:
      magnitude: [..., D].

    Returns:
      int32 [..., D].
    """
    return jnp.argsort(jnp.argsort(-jnp.asarray(magnitude), axis=-1, stable=True), axis=-1)


def mean_overlap(members: ArrayLike, axis: int) -> jax.Array:
    r"""Returns the mean of :math:`|A_i \cap A_j| / k` over all pairs of different sets, each of k channels.

    With :math:`c_d` the number of the n sets that hold channel d it is :math:`(\sum_d c_d^2 - n k) / (n (n - 1) k)`.
    Independent random sets of k among D channels overlap by k / D in the mean.

    Args:
      members: Membership of channels in each set, bool [..., D], all with the same number.
      axis: The axis of the sets; at least two.

    Returns:
      float32 of the shape of `members` without that axis and the last.
    """
    members = jnp.asarray(members)
    n = members.shape[axis]
    k = jnp.sum(members, axis=-1).max()
    counts = jnp.sum(members, axis=axis, dtype=jnp.float32)  # their squares may be too large for int32
    return (jnp.sum(counts * counts, axis=-1) / (n * k) - 1) / (n - 1)


def _counts(d_model: int) -> dict[str, int]:
    """Returns prefix of the metrics -> k."""
    return {"largest_channels": top_count(d_model), "largest_channel": 1}


def _observe_sets(taps: Taps) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns by prefix the set of each sequence, bool [B, D], and the overlap of its positions [B]."""
    magnitude = jnp.abs(taps.residual.astype(jnp.float32))
    of_sequence, of_positions = ranks(jnp.mean(magnitude, axis=1)), ranks(magnitude)
    counts = _counts(magnitude.shape[-1])
    return {name: (of_sequence < k, mean_overlap(of_positions < k, axis=1)) for name, k in counts.items()}


def channel_overlap(loaded: LoadedModel, tokens: np.ndarray) -> dict[str, float]:
    """Measures the overlap of the largest channels of hidden states between inputs, positions and layers.

    The set of a sequence and layer are the k channels of largest mean |x| over positions, that of a position those of
    largest |x|. Overlaps are `mean_overlap`s. Two k, since nobody knows how many outlier channels a model has: if
    there are fewer than k, ordinary channels fill the sets; if there are several, k = 1 sees them take turns.

    Args:
      loaded: The model.
      tokens: int [B, T + 1], B and T at least 2.

    Returns:
      Metrics `largest_channels_*` for k = `top_count(D)` and `largest_channel_*` for k = 1: `between_sequences`, mean
      over layers; `between_positions` of a sequence, mean over sequences and layers; both also by layer;
      `between_layers` of a sequence, mean over sequences, if there are several; `by_chance`, k / D.
    """
    # In batches of the evaluation's size, since a paper's model has 100 sequences of 1,024 positions to remember.
    size, D = loaded.config.eval.batch_size, loaded.config.model.d_model
    batches = (tokens[i : i + size, :-1] for i in range(0, len(tokens), size))
    observed: Any = jax.device_get(analysis.measure(loaded, batches, _observe_sets, join=analysis.concatenate))
    metrics = {}
    for name, (members, positions) in observed.items():
        metrics |= by_layer(f"{name}_between_sequences", np.asarray(mean_overlap(members, axis=1), np.float64))
        metrics |= by_layer(f"{name}_between_positions", positions.astype(np.float64).mean(axis=1))
        if len(members) > 1:
            metrics[f"{name}_between_layers"] = float(np.mean(mean_overlap(members, axis=0)))
        metrics[f"{name}_by_chance"] = _counts(D)[name] / D
    return metrics


def _measure(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    metrics = channel_overlap(loaded, inputs.evaluation[:100])
    say("channel overlap")
    return Measured(metrics)


LARGEST_CHANNELS = Measure("largest_channels", _measure)


def largest_channels(hidden: np.ndarray, count: int) -> np.ndarray:
    """Returns the channels of the largest values at any position of the first panel, in increasing order.

    Args:
      hidden: |hidden state| of `measures.example_maps`, [4, T, D].
      count: How many at most.
    """
    return np.sort(np.argsort(-hidden[0].max(axis=0), kind="stable")[:count])


def _magnitude(taps: Taps) -> jax.Array:
    return jnp.mean(jnp.abs(taps.residual.astype(jnp.float32)), axis=1)


def ranks_of_largest_channel(loaded: LoadedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Ranks the channel of the largest hidden states among the output channels of the same layer.

    Args:
      loaded: The model.
      tokens: int [B, T + 1].

    Returns:
      One of `PARTS` -> how many channels of that projection have a larger norm of their weights than the channel with
      the largest mean |hidden state| over sequences and positions, of D, [layers]: 0 if it has the largest.
    """
    hidden: Any = analysis.measure(loaded, [tokens[:, :-1]], _magnitude)
    channels = np.asarray(hidden).mean(1).argmax(-1)[:, None]
    norms = {part: channel_norms(output_kernels(loaded.params, part)) for part in PARTS}
    return {part: np.sum(of > np.take_along_axis(of, channels, -1), -1) for part, of in norms.items()}


def _measure_weights(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    ranks = ranks_of_largest_channel(loaded, inputs.evaluation[:64])
    say("largest channel")
    return Measured({k: v for part, of in ranks.items() for k, v in by_layer(f"{part}_larger_norms", of).items()})


LARGEST_CHANNEL_WEIGHTS = Measure("largest_channel_weights", _measure_weights)
