"""What is observed of a model on rows of text, as sums that add up over batches, and what follows from the sums.

Legend: L layers, B batch, N query heads, T positions, D d_model, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.analysis.sink_logits import sink_logit_gap_sum
from orthojax.files import finite
from orthojax.model import Taps
from orthojax.ops.cross_entropy import cross_entropy_nats, perplexity

Sums = dict[str, np.ndarray]

# Of `Statistics`, what is no metric but an array: vectors that have an axis of channels or positions.
_VECTORS = ("mean_attention_output", "mean_mlp_output", "residual_norm_by_position", "value_norm_by_position")
_LARGEST = ("max_abs_by_channel", "max_abs_by_position")
BY_HEAD = (
    *("first_attention_fraction", "first_attention_mass", "value_norm_first", "value_norm_rest"),
    *("attention_entropy_nats", "null_mass", "sink_logit_gap"),
)


def observe(taps: Taps, targets: jax.Array) -> analysis.Statistics:
    """`analysis.observe_language_model`, by head where there are heads, and by channel and position.

    Definitions: those of `orthojax.analysis`. `sink_logit_gap` is of all queries from the third on;
    `max_abs_by_channel` [D] and `max_abs_by_position` [T] are the largest |x| after a block over the whole text;
    `mean_attention_output` and `mean_mlp_output` [D] are means over positions and sequences of what a block adds to the
    residual stream.
    """
    seen, weights, B = analysis.observe_language_model(taps), taps.attention_weights, taps.residual.shape[0]
    fraction = jax.vmap(lambda head: analysis.first_attention_fraction(head[:, None]), in_axes=1)
    magnitude = jnp.abs(taps.residual.astype(jnp.float32))
    norms = jnp.linalg.norm(taps.residual.astype(jnp.float32), axis=-1)
    means = {
        "first_attention_fraction": fraction(weights),
        "value_norm_first": analysis.value_norm_first_by_head(taps.value_norms),
        "value_norm_rest": analysis.value_norm_rest_by_head(taps.value_norms),
        "attention_entropy_nats": analysis.attention_entropy_by_head(weights),
        "null_mass": analysis.null_mass_by_head(weights),
        "mean_attention_output": jnp.mean(taps.attention_output.astype(jnp.float32), axis=(0, 1)),
        "mean_mlp_output": jnp.mean(taps.mlp_output.astype(jnp.float32), axis=(0, 1)),
        "residual_norm_by_position": jnp.mean(norms, axis=0),
        "value_norm_by_position": jnp.mean(taps.value_norms, axis=(0, 1)),
    }
    gap, queries = sink_logit_gap_sum(taps.attention_logits, jnp.zeros(norms.shape, bool))
    largest = {"max_abs_by_channel": jnp.max(magnitude, (0, 1)), "max_abs_by_position": jnp.max(magnitude, (0, 2))}
    return seen._replace(
        total=seen.total | {name: mean * B for name, mean in means.items()} | {"sink_logit_gap": gap},
        count=seen.count | dict.fromkeys(means, seen.sequences) | {"sink_logit_gap": queries},
        maximum=seen.maximum | largest,
    )


def observe_nothing(taps: Taps, targets: jax.Array) -> tuple[()]:
    """Where the loss is all that is wanted."""
    return ()


def observe_windows(taps: Taps, targets: jax.Array) -> dict[str, jax.Array]:
    """What each window shows of heads.

    Returns:
      `dormant_score` [B, N], the mean over queries of the weight on the first token or on none at all (what a row of
      weights lacks to 1): 1 where a head does nothing but attend to the first token. `activity`
      [1, bins, N], from `analysis.activity_histogram`.
    """
    weights = taps.attention_weights.astype(jnp.float32)
    nothing = jnp.maximum(1.0 - jnp.sum(weights, axis=-1), 0.0)
    activity = analysis.head_activity(taps.head_norms, taps.residual_before)
    domain = jnp.zeros(taps.residual.shape[:2], int)
    return {
        "dormant_score": jnp.mean(weights[..., 0] + nothing, axis=-1),
        "activity": analysis.activity_histogram(activity, domain, 1),
    }


@functools.cache  # the same function for the same model, so that a later call finds its program
def row_losses(relaxed_causal_tokens: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """For `analysis.measure`: (logits [B, T, V], targets [B, T]) -> mean loss of every row in nats, [B].

    Positions whose target a relaxed causal mask shows are not counted.
    """

    def losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
        first = max(relaxed_causal_tokens - 1, 0)
        return jnp.mean(cross_entropy_nats(logits[:, first:], targets[:, first:]), axis=1)

    return losses


# Sums on the host, in float64.


def as_sums(statistics: Any) -> Sums:
    """Statistics of a batch as arrays by name, for a file."""
    sums = {"sequences": np.asarray(statistics.sequences), "attends": np.asarray(statistics.attends)}
    for part in ("total", "count", "maximum"):
        sums |= {f"{part}/{name}": np.asarray(x, np.float64) for name, x in getattr(statistics, part).items()}
    return sums


def add(a: Sums | None, b: Sums) -> Sums:
    """The sums of both: maxima are compared, what is by row is put one after the other, all else added."""
    if a is None:
        return dict(b)

    def both(name: str) -> np.ndarray:
        if name.startswith("maximum/"):
            return np.maximum(a[name], b[name])
        if name in ("loss_nats", "dormant_score"):
            return np.concatenate([a[name], b[name]], axis=int(name == "dormant_score"))
        return a[name] + b[name]  # of `attends`, which is the same in both, the logical or

    return {name: both(name) for name in a}


def metrics_of(sums: Sums, threshold: float, bits_per_nat_of_loss: float | None) -> dict[str, float]:
    """The metrics of a model, names as everywhere, `name/layer_i` those of layers."""
    loss = float(np.mean(sums["loss_nats"]))
    metrics = {"perplexity": perplexity(loss), "loss_nats": loss}
    if bits_per_nat_of_loss is not None:
        metrics["bits_per_byte"] = loss * bits_per_nat_of_loss
    parts: dict[str, dict[str, Any]] = {"total": {}, "count": {}, "maximum": {}}
    for name, array in sums.items():
        part, _, metric = name.partition("/")
        if part in parts and metric not in (*_VECTORS, *_LARGEST):
            parts[part][metric] = array
    statistics = analysis.Statistics(
        np.asarray(sums["sequences"]),  # pyright: ignore[reportArgumentType]
        **parts,
        attends=sums["attends"],
    )
    metrics |= finite(analysis.finalize(statistics, sink_threshold=threshold))  # a layer without attention has nan
    for part in ("first", "rest"):
        kurtosis, ratio = (_layers(metrics, f"{name}_{part}") for name in ("kurtosis", "norm_ratio"))
        if len(kurtosis) > 1:
            metrics[f"correlation_{part}"] = analysis.correlation(kurtosis, ratio)
    return metrics


def _layers(metrics: Mapping[str, float], name: str) -> list[float]:
    values: list[float] = []
    while (value := metrics.get(f"{name}/layer_{len(values)}")) is not None:
        values.append(value)
    return values


def arrays_of(sums: Sums) -> Sums:
    """What has an axis of heads [L, N], of channels [L, D] or of positions [L, T], float32."""
    arrays = {name: sums[f"maximum/{name}"] for name in _LARGEST}
    for name in (*BY_HEAD, *_VECTORS):
        total, count = sums[f"total/{name}"], sums[f"count/{name}"]
        with np.errstate(invalid="ignore", divide="ignore"):
            arrays[name] = total / count[:, None]
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}
