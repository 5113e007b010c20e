"""Norms of both output projections by output channel, beside the second moments that Adam has of them.

From Attention to Activation (arXiv 2410.17174), appendix E, Figures 4 and 5. OrthoAdam's moments live in a basis of its
own: there the weights are turned into that basis too, and compared in it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.analysis import (
    channel_norms,
    extreme_overlap,
    outlier_scores,
    rank_correlation,
    summed_second_moments,
    top_count,
)
from orthojax.analysis.channels import OUTLIER_SCORE
from orthojax.config import Config
from orthojax.experiments.from_attention.output_bases import PARTS, output_bases, output_kernels, turns_output
from orthojax.experiments.reporting import drawing
from orthojax.experiments.reporting.page import Picture
from orthojax.experiments.study.measures import Measure, Measured
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant
from orthojax.train import Inputs, read_optimizer_state, read_params

WORDS = {"mlp_output": "MLP output", "attention_output": "attention output"}


def second_moments(state: Any) -> Any:
    """The tree of Adam's second moments in an optimizer state, wherever it is; None for an optimizer without."""
    if not isinstance(state, dict):
        return None
    if isinstance(state.get("nu"), dict):
        return state["nu"]
    return next((found for part in state.values() if (found := second_moments(part)) is not None), None)


def _measure(config: Config, checkpoint: Path, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    params, moments = read_params(checkpoint), second_moments(read_optimizer_state(checkpoint))
    metrics, arrays = {}, {}
    for part in PARTS:
        kernels = output_kernels(params, part).astype(np.float64)
        norms = own = channel_norms(kernels)
        if turns_output(config, part):
            own = channel_norms(kernels @ output_bases(config, part).swapaxes(1, 2))
        summed = None if moments is None else summed_second_moments(output_kernels(moments, part))
        by_layer = channel_metrics(norms, own, summed)
        for name, values in by_layer.items():
            metrics[f"{part}_{name}"] = float(np.mean(values))
            metrics |= {f"{part}_{name}/layer_{layer}": float(value) for layer, value in enumerate(values)}
        arrays |= {f"{part}_norms": norms, f"{part}_own_norms": own}
        arrays |= {} if summed is None else {f"{part}_moments": summed}
    on_progress("output weights")
    return Measured(metrics, arrays)


def channel_metrics(norms: np.ndarray, own: np.ndarray, moments: np.ndarray | None) -> dict[str, list[float]]:
    """What is said of the channels of one output projection, layer by layer.

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


MEASURE = Measure("output_weights", _measure)


def output_weight_pictures(study: Study, variants: Sequence[Variant]) -> list[Picture]:
    """Norms and summed second moments by channel, a picture for each variant, of its first seed that finished.

    Args:
      study: An experiment that has `MEASURE` among its measures.
      variants: Which of its variants.
    """
    pictures = []
    for variant in variants:
        seeds = study.by_seed(variant.name, "mlp_output_norm_peak")
        if not seeds:
            continue
        seed = min(seeds)
        kept = study.arrays(variant.name, seed, MEASURE.name)
        rows, turned = [], False
        for part, words in WORDS.items():
            turned = turns_output(variant.config, part)
            own = ", OrthoAdam's basis" if turned else ""
            row = {f"{words}: norm": kept[f"{part}_norms"]}
            row |= {f"{words}: norm{own}": kept[f"{part}_own_norms"]} if turned else {}
            if f"{part}_moments" in kept:
                row[f"{words}: moments{own}"] = kept[f"{part}_moments"]
            rows.append(row)
        caption = (
            f"{variant.label}: Euclidean norm of the weights of each output channel"
            f"{', in the basis of the model and in that of OrthoAdam' if turned else ''}, and Adam's second "
            f"moments summed over the same weights; a line for each layer (seed {seed})."
        )
        figure = drawing.profiles(rows, x_label="channel")
        pictures.append(Picture(f"output_weights_{variant.name}", caption, figure))
    return pictures
