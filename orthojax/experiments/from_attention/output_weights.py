"""The output projections, which write to the residual stream: weights, second moments and bases by output channel.

From Attention to Activation (arXiv 2410.17174), appendix E, Figures 4 and 5. OrthoAdam's moments live in a basis of its
own: there the weights are rotated into that basis too, and compared in it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.experiments.figures import maps
from orthojax.experiments.from_attention.channels import (
    OUTLIER_SCORE,
    channel_norms,
    extreme_overlap,
    outlier_scores,
    rank_correlation,
    summed_second_moments,
    top_count,
)
from orthojax.experiments.measures import Measure, Measured, Say, by_layer
from orthojax.experiments.report import Picture
from orthojax.experiments.results import Missing, Results
from orthojax.model import LoadedModel
from orthojax.optim import RotatedAxes, rotate
from orthojax.train import Inputs, make_rotation, read_optimizer_state

# Name -> path of the kernel [I, D] in a layer; I are its input features, D is d_model.
PARTS = {"mlp_output": "mlp/output", "attention_output": "attention/output"}


def output_kernels(tree: Any, part: str) -> np.ndarray:
    """Returns the kernels of one output projection of all layers, scanned or not.

    Args:
      tree: Parameters, or a tree like them, as Adam's second moments are.
      part: One of `PARTS`.

    Returns:
      [layers, I, D].
    """

    def kernel(layer: Any) -> np.ndarray:
        for name in (*PARTS[part].split("/"), "kernel"):
            layer = layer[name]
        return np.asarray(layer)

    if "layers" in tree:
        return kernel(tree["layers"])
    count = sum(name.startswith("layers_") for name in tree)
    return np.stack([kernel(tree[f"layers_{layer}"]) for layer in range(count)])


def _group(config: Config, path: str) -> int | None:
    """Returns which of the rotated groups of axes is the output axis of a kernel [I, D]."""
    if not config.optim.is_rotated or config.optim.rotation.kind == "identity":
        return None
    rule: Any = make_rotation(config.seeded_optim.rotation).axes
    axes = rule(path, jax.ShapeDtypeStruct((config.model.d_mlp, config.model.d_model), jnp.float32))
    return axes.groups.index((1,)) if axes and (1,) in axes.groups else None


def rotates_output(config: Config, part: str) -> bool:
    """Returns whether the optimizer of a run rotates the output channels of a projection."""
    return _group(config, f"layers_0/{PARTS[part]}/kernel") is not None


def output_bases(config: Config, part: str) -> np.ndarray:
    """Returns the orthogonal matrices by which the optimizer rotates the output channels of a projection.

    A gradient row g [D] becomes Q g, so that a kernel W [I, D] of the model is W Q^T in the optimizer's basis, and
    activations X [T, D] that the kernel writes are X Q^T there.

    Args:
      config: The run.
      part: One of `PARTS`.

    Returns:
      Q, [layers, D, D] float32.

    Raises:
      UserError: If the optimizer does not rotate these channels.
    """
    if not rotates_output(config, part):
        raise UserError(
            f"optimizer {config.optim.optimizer!r} has no d_model x d_model basis for {PARTS[part]}",
            allowed="orthoadam with rotation.axes output, both, residual or writers, and a kind that rotates",
        )
    return np.stack([_basis(config, part, layer) for layer in range(config.model.num_layers)])


def _basis(config: Config, part: str, layer: int) -> np.ndarray:
    path, D = f"layers_{layer}/{PARTS[part]}/kernel", config.model.d_model
    group = _group(config, path)
    assert group is not None
    # The name of a basis has the number of its group. An input axis of length 1 takes the first number if the kernel's
    # own does, and is not rotated.
    axes = RotatedAxes(((1,), (2,))[1 - group :])
    rotation = rotate(dataclasses.replace(make_rotation(config.seeded_optim.rotation), axes=lambda path, leaf: axes))
    tree: Any = jnp.eye(D)[:, None]
    for name in reversed(path.split("/")):
        tree = {name: tree}
    rotated = jax.tree.leaves(rotation.update(tree, rotation.init(tree))[0])[0]
    return np.asarray(rotated[:, 0]).T  # its rows were the images of the unit vectors


def second_moments(state: Any) -> Any:
    """Returns the tree of Adam's second moments in an optimizer state, wherever it is; None without."""
    if not isinstance(state, dict):
        return None
    if isinstance(state.get("nu"), dict):
        return state["nu"]
    return next((found for part in state.values() if (found := second_moments(part)) is not None), None)


def _measure(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    config, moments = loaded.config, second_moments(read_optimizer_state(loaded.source))
    metrics, arrays = {}, {}
    for part in PARTS:
        kernels = output_kernels(loaded.params, part).astype(np.float64)
        norms = own = channel_norms(kernels)
        if rotates_output(config, part):
            own = channel_norms(kernels @ output_bases(config, part).swapaxes(1, 2))
        summed = None if moments is None else summed_second_moments(output_kernels(moments, part))
        for name, values in channel_metrics(norms, own, summed).items():
            metrics |= by_layer(f"{part}_{name}", np.asarray(values))
        arrays |= {f"{part}_norms": norms, f"{part}_own_norms": own}
        arrays |= {} if summed is None else {f"{part}_moments": summed}
    say("output weights")
    return Measured(metrics, arrays)


def channel_metrics(norms: np.ndarray, own: np.ndarray, moments: np.ndarray | None) -> dict[str, list[float]]:
    """Computes the metrics of the channels of one output projection, layer by layer.

    Args:
      norms: By channel of the model, [layers, D].
      own: By channel of the basis in which the optimizer keeps its moments, [layers, D].
      moments: Summed, in that basis, [layers, D]; None for an optimizer without.

    Returns:
      Metric -> its value of each layer. Of the model's channels: `outlier_channels` (how many have an outlier score
      above `OUTLIER_SCORE`) and `norm_peak` (largest norm / median). Of those of the moments: `moment_spread` (standard
      deviation of log moment), `rank_correlation` (Spearman's, of norm and moment), `overlap` (of the `top_count`
      channels with the largest norms and with the smallest moments), `own_outlier_channels`, and
      `explained_outlier_channels` (those of them whose moment is a small outlier, its score below -`OUTLIER_SCORE`).
    """
    metrics = {
        "outlier_channels": np.sum(outlier_scores(norms) > OUTLIER_SCORE, axis=-1),
        "norm_peak": norms.max(-1) / np.median(norms, axis=-1),
    }
    if moments is not None:
        large, count = outlier_scores(own) > OUTLIER_SCORE, top_count(own.shape[-1])
        metrics |= {
            "moment_spread": np.std(np.log(np.maximum(moments, np.finfo(np.float64).tiny)), axis=-1),
            "rank_correlation": [rank_correlation(a, b) for a, b in zip(own, moments, strict=True)],
            "overlap": [extreme_overlap(a, b, count) for a, b in zip(own, moments, strict=True)],
            "own_outlier_channels": np.sum(large, axis=-1),
            "explained_outlier_channels": np.sum(large & (outlier_scores(moments) < -OUTLIER_SCORE), axis=-1),
        }
    return {name: [float(value) for value in values] for name, values in metrics.items()}


OUTPUT_WEIGHTS = Measure("output_weights", _measure)


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
