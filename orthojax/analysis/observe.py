"""From what one block shows to the metrics of a run.

An observe function reduces one layer's taps to `Statistics` inside the layer scan, so nothing but scalars leaves a
layer. Statistics are sums and counts: `combine` adds those of two batches, `finalize` divides. Whatever the split into
batches, the result is that of one batch of all sequences.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis import activations, attention, backcopy, values

# Maxima over layers although each layer's value is a mean; see `finalize`.
_MAXIMUM_OVER_LAYERS = ("sink_attention", "sink_attention_rest")

_HIDDEN_STATE_MEANS = {
    "kurtosis_first": activations.kurtosis_first,
    "kurtosis_rest": activations.kurtosis_rest,
    "kurtosis_pooled": activations.kurtosis_pooled,
    "max_abs_first": activations.max_abs_first,
    "max_abs_rest": activations.max_abs_rest,
    "norm_ratio_first": activations.norm_ratio_first,
    "norm_ratio_rest": activations.norm_ratio_rest,
    "residual_norm_first": activations.residual_norm_first,
    "residual_norm_rest": activations.residual_norm_rest,
}
_HIDDEN_STATE_MAXIMA = {
    "max_abs_first_maximum": activations.max_abs_first_maximum,
    "max_abs_rest_maximum": activations.max_abs_rest_maximum,
}


class Taps(Protocol):
    """The part of one block's taps that is read here; B batch, N query heads, T queries, S keys, D d_model."""

    @property
    def attention_logits(self) -> jax.Array:
        """Scaled logits before the mask, [B, N, T, S] float32."""
        ...

    @property
    def attention_weights(self) -> jax.Array:
        """Weights, zero on masked keys, [B, N, T, S] float32."""
        ...

    @property
    def value_norms(self) -> jax.Array:
        """||W_o^h v_j||_2, [B, N, S] float32."""
        ...

    @property
    def post_attention(self) -> jax.Array:
        """Residual stream after attention, [B, T, D]."""
        ...

    @property
    def residual(self) -> jax.Array:
        """Residual stream after the block: the hidden state, [B, T, D]."""
        ...


class Statistics(NamedTuple):
    """What batches add up to; every leaf has the same leading axis [num_layers], or none where there are no layers.

    Attributes:
      sequences: Number of sequences, int32.
      total: Metric -> sum of what it is the mean of; may have one more axis (heads), floating.
      count: Metric -> number of terms in that sum, int32; the same names as `total`.
      maximum: Metric -> largest value so far, floating.
    """

    sequences: jax.Array
    total: dict[str, jax.Array]
    count: dict[str, jax.Array]
    maximum: dict[str, jax.Array]


def observe_language_model(taps: Taps, *, post_attention: bool = False, basis: ArrayLike | None = None) -> Statistics:
    """The outlier and attention statistics of one layer of a language model.

    Args:
      taps: What the block shows.
      post_attention: Also take the statistics of hidden states from the residual stream after attention, under names
        that start with `post_attention_`.
      basis: An orthogonal matrix Q [D, D]; also take the statistics of Q x for every hidden state x, under names that
        start with `rotated_`.

    Returns:
      Means over sequences as sums, and maxima over sequences.
    """
    sequences = jnp.asarray(taps.residual.shape[0], jnp.int32)
    hidden_states = {"": taps.residual} | ({"post_attention_": taps.post_attention} if post_attention else {})
    if basis is not None:
        hidden_states["rotated_"] = taps.residual @ jnp.asarray(basis, taps.residual.dtype).T
    means, maximum = {}, {}
    for prefix, hidden in hidden_states.items():
        means |= {prefix + name: metric(hidden) for name, metric in _HIDDEN_STATE_MEANS.items()}
        maximum |= {prefix + name: metric(hidden) for name, metric in _HIDDEN_STATE_MAXIMA.items()}
    means["first_attention_fraction"] = attention.first_attention_fraction(taps.attention_weights)
    # By head, because the sink rate is a count of heads over the whole evaluation set.
    means["first_attention_mass"] = attention.first_attention_mass_by_head(taps.attention_weights)
    means["value_norm_first"] = values.value_norm_first(taps.value_norms)
    means["value_norm_rest"] = values.value_norm_rest(taps.value_norms)
    total = {name: mean * sequences for name, mean in means.items()}
    return Statistics(sequences, total, dict.fromkeys(total, sequences), maximum)


def observe_backcopy(is_trigger: ArrayLike) -> Callable[[Taps], Statistics]:
    """An observe function for Bigram-Backcopy.

    Args:
      is_trigger: Whether the token at a position is a trigger, bool [B, T], of the batch that the model will see.

    Returns:
      A function of one layer's taps: sink attention and logit gap at non-triggers, value and residual norms.
    """
    is_trigger = jnp.asarray(is_trigger)

    def observe(taps: Taps) -> Statistics:
        sequences = jnp.asarray(taps.residual.shape[0], jnp.int32)
        means = {
            "value_norm_first": values.value_norm_first(taps.value_norms),
            "value_norm_rest": values.value_norm_rest(taps.value_norms),
            "residual_norm_first": activations.residual_norm_first(taps.residual),
            "residual_norm_rest": activations.residual_norm_rest(taps.residual),
        }
        sums = {name: (mean * sequences, sequences) for name, mean in means.items()}
        sums["sink_attention"] = backcopy.sink_attention_sum(taps.attention_weights, is_trigger)
        sums["sink_attention_rest"] = backcopy.sink_attention_rest_sum(taps.attention_weights, is_trigger)
        sums["sink_logit_gap"] = backcopy.sink_logit_gap_sum(taps.attention_logits, is_trigger)
        return _from_sums(sequences, sums)

    return observe


def observe_backcopy_risks(log_probs: ArrayLike, oracle_probs: ArrayLike, is_trigger: ArrayLike) -> Statistics:
    """The two risks of Bigram-Backcopy as statistics without a layer axis.

    Args:
      log_probs: Log-probabilities of the model in nats, [B, T, V].
      oracle_probs: Probabilities of the next token under the law of the data, [B, T, V].
      is_trigger: Whether the token at a position is a trigger, bool [B, T].
    """
    sums = {
        "backcopy_risk_nats": backcopy.backcopy_risk_sum(log_probs, oracle_probs, is_trigger),
        "bigram_excess_risk_nats": backcopy.bigram_excess_risk_sum(log_probs, oracle_probs, is_trigger),
    }
    return _from_sums(jnp.asarray(jnp.shape(is_trigger)[0], jnp.int32), sums)


def _from_sums(sequences: jax.Array, sums: dict[str, backcopy.SumAndCount]) -> Statistics:
    total = {name: total for name, (total, _) in sums.items()}
    count = {name: count for name, (_, count) in sums.items()}
    return Statistics(sequences, total, count, {})


def combine(a: Statistics, b: Statistics) -> Statistics:
    """The statistics of two batches together; pure, so it works inside and outside of jit."""
    added = jax.tree.map(jnp.add, a._replace(maximum={}), b._replace(maximum={}))
    return added._replace(maximum=jax.tree.map(jnp.maximum, a.maximum, b.maximum))


def finalize(statistics: Statistics, *, sink_threshold: float = 0.3) -> dict[str, float]:
    """The metrics by name, on the host in float64.

    Definitions: a key without `/layer_i` is the mean over layers; Bigram-Backcopy's `sink_attention` and
    `sink_attention_rest` are the maximum over layers, and so are the keys that end in `_maximum`. `sink_rate` is the
    share of (layer, head) whose mean weight on key 0 exceeds the threshold.

    Args:
      statistics: Of all batches, leaves stacked over layers (or without layers).
      sink_threshold: Mean weight on key 0 above which a head counts as a sink.

    Returns:
      `name` and, where there are layers, `name/layer_0` ...; `sequences` is the number of sequences behind them.
    """
    statistics = jax.tree.map(np.asarray, jax.device_get(statistics))
    by_layer = {}
    for name, total in statistics.total.items():
        count = statistics.count[name]
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total.astype(np.float64) / count.reshape(count.shape + (1,) * (total.ndim - count.ndim))
        if name == "first_attention_mass":
            by_layer["sink_rate"] = np.mean(mean > sink_threshold, axis=-1)
        by_layer[name] = mean.mean(axis=tuple(range(count.ndim, total.ndim)))  # over heads, where it has them
    by_layer |= {name: value.astype(np.float64) for name, value in statistics.maximum.items()}

    metrics = {"sequences": float(np.ravel(statistics.sequences)[0])}
    for name, layers in by_layer.items():
        largest = name in _MAXIMUM_OVER_LAYERS or name.endswith("_maximum")
        metrics[name] = float(np.max(layers) if largest else np.mean(layers))
        if layers.ndim == 1:
            metrics |= {f"{name}/layer_{layer}": float(value) for layer, value in enumerate(layers)}
    return metrics
