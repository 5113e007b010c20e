"""Channels: output weights, their moments and bases (Figures 4 and 5), and the largest hidden states (27 to 33).

OrthoAdam's moments live in a basis of its own, in which weights are compared with them. Legend: I input features, D
output channels, which is d_model, T positions. Metrics of weights are float64 on the host.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax import analysis
from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.experiments.measures import Arrays, Measure, Metrics, Say, by_layer
from orthojax.model import LoadedModel, Taps
from orthojax.optim import RotatedAxes, rotate
from orthojax.report.figures import maps
from orthojax.report.page import Picture
from orthojax.report.results import Missing, Results
from orthojax.train import Inputs, make_rotation, read_optimizer_state
from orthojax.train.step import split_tokens

# Name -> path of the kernel [I, D] of an output projection, which writes to the residual stream, in a layer.
PARTS = {"mlp_output": "mlp/output", "attention_output": "attention/output"}
# Iglewicz and Hoaglin (How to Detect and Handle Outliers, 1993) use 3.5 for one sample; a model has thousands of
# channels, and of Gaussian ones 1 in 4,300 exceeds 3.5, and 1 in 3.5 million exceeds this.
OUTLIER_SCORE = 5.0


def top_count(size: int) -> int:
    """Returns how many of D channels count as the top ones: a thirty-second, at least one."""
    return max(1, size // 32)


def channel_norms(kernel: ArrayLike) -> np.ndarray:
    """Returns the Euclidean norm of the weights of each output channel: [..., I, D] -> [..., D]."""
    return np.linalg.norm(np.asarray(kernel, np.float64), axis=-2)


def outlier_scores(values: ArrayLike) -> np.ndarray:
    """Returns modified z-scores of logarithms [..., D]: 0.6745 (log x - median) / MAD, positive for large values.

    MAD is the median of |log x - median|, 0.6745 the MAD of a standard Gaussian. Norms and moments are positive and
    differ by factors; a zero counts as the smallest positive number. A value at the median has 0; if MAD is 0, others
    are infinite.
    """
    logs = _logs(np.asarray(values, np.float64))
    away = logs - np.median(logs, axis=-1, keepdims=True)
    deviation = np.median(np.abs(away), axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(away == 0.0, 0.0, 0.6745 * away / deviation)


def _logs(values: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(values, np.finfo(np.float64).tiny))


def correlation(a: ArrayLike | Sequence[float], b: ArrayLike | Sequence[float], *, of_ranks: bool = False) -> float:
    """Returns Pearson's correlation of [D] and [D], or Spearman's (of ranks); nan if all values of one are equal.

    >>> round(correlation([1.0, 2.0, 3.0], [5.0, 3.0, 1.0]), 9)
    -1.0
    >>> correlation([1.0, 2.0, 30.0], [-1.0, -5.0, -6.0], of_ranks=True)
    -1.0
    """
    from scipy import stats  # here, because it takes a second to import

    with warnings.catch_warnings(action="ignore", category=stats.ConstantInputWarning):
        test: Any = stats.spearmanr if of_ranks else stats.pearsonr
        return float(test(np.asarray(a, np.float64), np.asarray(b, np.float64)).statistic)


# Figures 4 and 5: weights and second moments.


def output_kernels(tree: Any, part: str) -> np.ndarray:
    """Returns the kernels of one of `PARTS` in all layers, from parameters or moments: [layers, I, D]."""

    def kernel(layer: Any) -> np.ndarray:
        for name in (*PARTS[part].split("/"), "kernel"):
            layer = layer[name]
        return np.asarray(layer)

    if "layers" in tree:
        return kernel(tree["layers"])
    count = sum(name.startswith("layers_") for name in tree)
    return np.stack([kernel(tree[f"layers_{layer}"]) for layer in range(count)])


def _group(config: Config, part: str) -> int | None:
    """Returns which rotated group of axes has the output axis of a projection; None if the axis is not rotated."""
    if not config.optim.is_rotated or config.optim.rotation.kind == "identity":
        return None
    rule: Any = make_rotation(config.seeded_optim.rotation).axes
    kernel = jax.ShapeDtypeStruct((config.model.d_mlp, config.model.d_model), jnp.float32)
    axes = rule(f"layers_0/{PARTS[part]}/kernel", kernel)
    return axes.groups.index((1,)) if axes and (1,) in axes.groups else None


def output_bases(config: Config, part: str) -> np.ndarray:
    """Returns the matrices Q by which the optimizer rotates the output channels of one of `PARTS`: [layers, D, D].

    A gradient row g [D] becomes Q g, so that in the optimizer's basis a kernel W [I, D] is W Q^T, and activations X [T,
    D] that it writes are X Q^T. Raises UserError if the optimizer does not rotate these channels.
    """
    group = _group(config, part)
    if group is None:
        allowed = "orthoadam with rotation.axes output, both, d_model or writers, and a kind that rotates"
        problem = f"optimizer {config.optim.optimizer!r} has no d_model x d_model basis for {PARTS[part]}"
        raise UserError(problem, allowed=allowed)
    return np.stack([_basis(config, part, group, layer) for layer in range(config.model.num_layers)])


def _basis(config: Config, part: str, group: int, layer: int) -> np.ndarray:
    # The name of a basis has the number of its group. An input axis of length 1 takes the first number if the kernel's
    # own does, and is not rotated.
    axes = RotatedAxes(((1,), (2,))[1 - group :])
    rotation = rotate(dataclasses.replace(make_rotation(config.seeded_optim.rotation), axes=lambda path, leaf: axes))
    tree: Any = jnp.eye(config.model.d_model)[:, None]
    for name in reversed(f"layers_{layer}/{PARTS[part]}/kernel".split("/")):
        tree = {name: tree}
    rotated = jax.tree.leaves(rotation.update(tree, rotation.init(tree))[0])[0]
    return np.asarray(rotated[:, 0]).T  # its rows were the images of the unit vectors


def second_moments(state: Any) -> Any:
    """Returns the tree of Adam's second moments in an optimizer state, wherever it is; None if there is none."""
    if not isinstance(state, dict):
        return None
    if isinstance(state.get("nu"), dict):
        return state["nu"]
    return next((found for part in state.values() if (found := second_moments(part)) is not None), None)


def _measure_output_weights(loaded: LoadedModel, inputs: Inputs, say: Say) -> tuple[Metrics, Arrays]:
    config, moments = loaded.config, second_moments(read_optimizer_state(loaded.source))
    metrics, arrays = {}, {}
    for part in PARTS:
        kernels = output_kernels(loaded.params, part).astype(np.float64)
        norms = own = channel_norms(kernels)
        if _group(config, part) is not None:
            own = channel_norms(kernels @ output_bases(config, part).swapaxes(1, 2))
        # Without bias correction, which is the same factor for all.
        summed = None if moments is None else output_kernels(moments, part).astype(np.float64).sum(-2)
        for name, values in channel_metrics(norms, own, summed).items():
            metrics |= by_layer(f"{part}_{name}", np.asarray(values))
        arrays |= {f"{part}_norms": norms, f"{part}_own_norms": own}
        arrays |= {} if summed is None else {f"{part}_moments": summed}
    return metrics, arrays


def channel_metrics(norms: np.ndarray, own: np.ndarray, moments: np.ndarray | None) -> dict[str, list[float]]:
    """Computes metrics by layer from norms, norms in the optimizer's basis and summed moments, [layers, D].

    Of the model's channels: `outlier_channels`, the number with a score above `OUTLIER_SCORE`, and `norm_peak`, the
    largest norm over the median. Of the moments' channels: `moment_spread`, the standard deviation of the log moment;
    `rank_correlation`, Spearman's, of norm and moment; `own_outlier_channels`; `explained_outlier_channels`, own
    outliers whose moment has a score below -`OUTLIER_SCORE`.
    """
    metrics = {
        "outlier_channels": np.sum(outlier_scores(norms) > OUTLIER_SCORE, axis=-1),
        "norm_peak": norms.max(-1) / np.median(norms, axis=-1),
    }
    if moments is not None:
        large = outlier_scores(own) > OUTLIER_SCORE
        metrics |= {
            "moment_spread": np.std(_logs(moments), axis=-1),
            "rank_correlation": [correlation(a, b, of_ranks=True) for a, b in zip(own, moments, strict=True)],
            "own_outlier_channels": np.sum(large, axis=-1),
            "explained_outlier_channels": np.sum(large & (outlier_scores(moments) < -OUTLIER_SCORE), axis=-1),
        }
    return {name: [float(value) for value in values] for name, values in metrics.items()}


OUTPUT_WEIGHTS = Measure("output_weights", _measure_output_weights)


def output_norms(results: Results) -> list[Picture]:
    """Draws norms of output channels over the median of their layer, by variant (the paper's appendix B)."""
    stored = {result.name: result.arrays(OUTPUT_WEIGHTS.name) for result in results.finished}
    if not stored:
        raise Missing(OUTPUT_WEIGHTS.name)
    pictures = []
    for part, path in PARTS.items():
        norms = {name: arrays[f"{part}_norms"] for name, arrays in stored.items()}
        panels = {name: values / np.median(values, axis=1, keepdims=True) for name, values in norms.items()}
        figure = maps(panels, x_label="channel", y_label="layer, from 0", value_label="norm / median")
        caption = f"Norm of the weights of each output channel of {path}, over the median of the layer."
        pictures.append(Picture(f"{part}_norms", caption, figure))
    return pictures


# Figures 27 to 33: the channels of the largest hidden states.


def ranks(magnitude: ArrayLike) -> jax.Array:
    """Returns ranks of channels, 0 for the largest, the lower index first if two are equal: [..., D] -> int32."""
    return jnp.argsort(jnp.argsort(-jnp.asarray(magnitude), axis=-1, stable=True), axis=-1)


def mean_overlap(members: ArrayLike, axis: int) -> jax.Array:
    r"""Returns the mean of :math:`|A_i \cap A_j| / k` over all pairs of different sets, each of k channels.

    With :math:`c_d` the number of the n sets that hold channel d it is :math:`(\sum_d c_d^2 - n k) / (n (n - 1) k)`.
    Independent random sets of k among D channels overlap by k / D on average. `members` are bool [..., D], and `axis`,
    that of at least two sets, is missing in the result as is the last.
    """
    members = jnp.asarray(members)
    n = members.shape[axis]
    k = jnp.sum(members, axis=-1).max()
    counts = jnp.sum(members, axis=axis, dtype=jnp.float32)  # their squares may be too large for int32
    return (jnp.sum(counts * counts, axis=-1) / (n * k) - 1) / (n - 1)


def _counts(d_model: int) -> dict[str, int]:
    return {"largest_channels": top_count(d_model), "largest_channel": 1}


def _observe_sets(taps: Taps) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns by prefix the set of each sequence, bool [B, D], and the overlap of its positions [B]."""
    magnitude = jnp.abs(taps.residual.astype(jnp.float32))
    of_sequence, of_positions = ranks(jnp.mean(magnitude, axis=1)), ranks(magnitude)
    counts = _counts(magnitude.shape[-1])
    return {name: (of_sequence < k, mean_overlap(of_positions < k, axis=1)) for name, k in counts.items()}


def channel_overlap(loaded: LoadedModel, tokens: np.ndarray) -> dict[str, float]:
    """Measures the overlap of the largest channels of hidden states between inputs, positions and layers.

    The set of a sequence and layer has the k channels with the largest mean |x| over positions, the set of a position
    the k with the largest |x|; overlaps are `mean_overlap`s. Metrics are `largest_channels_*` with k = `top_count(D)`
    and `largest_channel_*` with k = 1: if there are fewer outliers than k, ordinary channels fill the sets; if there
    are several, they take turns at k = 1. They are `between_sequences` and `between_positions` of a sequence, means and
    by layer; with several layers `between_layers` of a sequence; and `by_chance`, k / D.
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


LARGEST_CHANNELS = Measure(
    "largest_channels", lambda loaded, inputs, say: channel_overlap(loaded, inputs.evaluation[:100])
)


def ranks_of_largest_channel(loaded: LoadedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Ranks the channel of the largest hidden states among the output channels of the same layer.

    Returns for each of `PARTS` how many channels, [layers], have a larger weight norm than the channel with the largest
    mean |hidden state| over sequences and positions.
    """

    def magnitude(taps: Taps) -> jax.Array:
        return jnp.mean(jnp.abs(taps.residual.astype(jnp.float32)), axis=1)

    hidden: Any = analysis.measure(loaded, [split_tokens(tokens, loaded.config.model)[0]], magnitude)
    channels = np.asarray(hidden).mean(1).argmax(-1)[:, None]
    norms = {part: channel_norms(output_kernels(loaded.params, part)) for part in PARTS}
    return {part: np.sum(of > np.take_along_axis(of, channels, -1), -1) for part, of in norms.items()}


def _measure_weights(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    ranks = ranks_of_largest_channel(loaded, inputs.evaluation[:64])
    return {k: v for part, of in ranks.items() for k, v in by_layer(f"{part}_larger_norms", of).items()}


LARGEST_CHANNEL_WEIGHTS = Measure("largest_channel_weights", _measure_weights)
