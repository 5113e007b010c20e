"""Figures 4 and 5: do large weights of the output projections go with small second moments of their gradients?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.experiments.claims import OUTLIERS, C, Claim, Revision, V, rest_has_outliers
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.channels import OUTLIER_SCORE, channel_norms, top_count
from orthojax.experiments.from_attention.models import GRID, SCALES, by_model, grid
from orthojax.experiments.from_attention.output_weights import (
    OUTPUT_WEIGHTS,
    WORDS,
    output_kernels,
    weights_and_moments,
)
from orthojax.experiments.measures import Measure, Measured, by_layer
from orthojax.experiments.results import Quantity, Result, Results, metric, pairs
from orthojax.experiments.tables import LayerTable, MetricTable
from orthojax.model import LoadedModel, Taps
from orthojax.train import Inputs

_COLUMNS = {
    "outlier_channels": "outlier channels of a layer",
    "norm_peak": "largest norm / median",
    "moment_spread": "std of log moment",
    "rank_correlation": "rank correlation, norm and moment",
    "overlap": "top channels in common",
    "own_outlier_channels": "outliers in the moments' basis",
    "explained_outlier_channels": "of them with small moments",
}


def variants(scale: str) -> tuple[Variant, ...]:
    """130M, as in the paper; where models are cheap, a smaller and a larger one too."""
    models = ("gpt2_130m",) if scale == "paper" else ("gpt2_60m", "gpt2_130m", "gpt2_350m")
    return grid(scale, models, ("vanilla", "cured"))


def _explained(vanilla: Result) -> list[tuple[float, float]]:
    """Of every layer and seed with outlier channels in the basis of the moments: their number, and with small ones."""
    counts = (vanilla.layers(f"mlp_output_{name}") for name in ("own_outlier_channels", "explained_outlier_channels"))
    return [(float(a), float(b)) for a, b in zip(*(values.ravel() for values in counts), strict=True) if a]


def _outliers(result: Result, part: str) -> np.ndarray:
    """The outlier channels of a projection, over all layers, of each seed."""
    return result.layers(f"{part}_outlier_channels").sum(1)


def _outliers_of(method: str, of: tuple[Result, ...]) -> float:
    """The outlier channels of the MLP outputs of all models and seeds of a method."""
    return sum(float(_outliers(result, "mlp_output").sum()) for result in of if GRID[result.name][1] == method)


def _more_uniform(vanilla: Result, cured: Result) -> bool:
    return all(ours <= 0.5 * theirs for ours, theirs in pairs(cured, vanilla, "mlp_output_moment_spread").values())


def _mlp_has_more(vanilla: Result) -> bool:
    mlp, attention = (_outliers(vanilla, part) for part in WORDS)
    return all(a > b for a, b in zip(mlp, attention, strict=True) if a + b)


SEQUENCES = 64  # of the evaluation set, at most


def _magnitude(taps: Taps) -> jax.Array:
    return jnp.mean(jnp.abs(taps.residual.astype(jnp.float32)), axis=1)


def ranks_of_largest_channel(loaded: LoadedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Where the channel of the largest hidden states stands among the output channels of the same layer.

    Args:
      loaded: The model.
      tokens: int [B, T + 1].

    Returns:
      One of `WORDS` -> how many channels of that projection have a larger norm of their weights than the channel with
      the largest mean |hidden state| over sequences and positions, of D, [layers]: 0 where it has the largest.
    """
    hidden: Any = analysis.measure(loaded, [tokens[:, :-1]], _magnitude)
    channels = np.asarray(hidden).mean(1).argmax(-1)[:, None]
    norms = {part: channel_norms(output_kernels(loaded.params, part)) for part in WORDS}
    return {part: np.sum(of > np.take_along_axis(of, channels, -1), -1) for part, of in norms.items()}


def _measure(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    ranks = ranks_of_largest_channel(loaded, inputs.evaluation[:SEQUENCES])
    on_progress("largest channel")
    return Measured({k: v for part, of in ranks.items() for k, v in by_layer(f"{part}_larger_norms", of).items()}, {})


def _acts_on_outlier(vanilla: Result) -> bool:
    """Whether in every layer and seed one of the projections has the channel among its top ones."""
    fewest = np.minimum(*(vanilla.layers(f"{part}_larger_norms") for part in WORDS))
    return bool((fewest < top_count(int(vanilla.d_model))).all())


_TOTALS = [
    Quantity(f"outlier channels, {words}", lambda of, part=part: of[f"{part}_outlier_channels"] * of.num_layers)
    for part, words in WORDS.items()
]
CLAIMS = (
    Claim("In all cases of large outlier weights the summed second moments are small outliers (appendix E; softmax and "
          "Adam, MLP output).", (V,), (),
          lambda v: all(a == b for a, b in _explained(v)), "all, of all seeds and models; testable where there are "
          f"such weights; an outlier is beyond {OUTLIER_SCORE:g} scaled median deviations",
          lambda v: bool(_explained(v)),
          detail=lambda v: f"in {sum(a == b for a, b in _explained(v))} of {len(_explained(v))} layers with outliers, "
          f"{sum(b for _, b in _explained(v)):g} of {sum(a for a, _ in _explained(v)):g} channels",
          revised=Revision(f"the limit of {OUTLIER_SCORE:g} was chosen with the runs at hand; by the usual 3.5 the "
                           "first report counted 0 of 70 channels")),
    Claim("Channels whose second moments are small have large weights (appendix E; softmax and Adam, MLP output).",
          (V,),
          (metric("mlp_output_rank_correlation", "rank correlation, mean over layers"), metric("mlp_output_overlap",
          "top channels in common", "{:.0%}".format), Quantity("by chance",
          lambda of: top_count(int(of.d_model)) / of.d_model, "{:.1%}".format)),
          lambda v: v.layers("mlp_output_rank_correlation").max() < 0, "correlation below 0 in every layer and seed"),
    Claim("OrthoAdam's moments are considerably more uniform (Figure 5).", (V, C),
          (metric("mlp_output_moment_spread", "std of the log of the summed moments, MLP output"),), _more_uniform,
          "at most half, each optimizer in its own basis, in every model and seed"),
    Claim("OrthoAdam and softmax-1 remove outlier weights (Figure 5).",
          lambda results: {"": [result.name for result in results.finished]}, (),
          lambda *of: _outliers_of("cured", of) <= 0.1 * _outliers_of("vanilla", of),
          "at most a tenth; testable where Adam has any", lambda *of: _outliers_of("vanilla", of) > 0,
          detail=lambda *of: f"outlier channels of the MLP outputs, all models and seeds: "
          f"{_outliers_of('vanilla', of):g} vanilla → {_outliers_of('cured', of):g} cured"),
    Claim("Outlier weights are generally in the output layer of the MLP (appendix E; softmax and Adam).", (V,), _TOTALS,
          _mlp_has_more, "more than in the output layer of attention, summed over layers, in every model and seed that "
          "has any; testable where one has", lambda v: any(_outliers(v, part).any() for part in WORDS)),
    Claim("The largest parameters act on the channels with outliers, as the output channels of the projections (4.2; "
          "softmax and Adam).", (V,),
          [metric(f"{part}_larger_norms", f"channels with larger weights, {words}") for part, words in WORDS.items()],
          _acts_on_outlier, "the channel of the largest mean |hidden state| is among the D / 32 of the largest norm in "
          "one of the two projections of its layer, in every layer, seed and model; testable where the kurtosis of "
          f"other tokens is above {OUTLIERS:g}", rest_has_outliers),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    return [
        f"The models of Table 2 after {results.first.config.train.steps} steps, vanilla (softmax, Adam) and cured "
        "(softmax-1, OrthoAdam). For each output channel of the two projections that write to the residual stream: the "
        "norm of its weights, and Adam's second moments of their gradients, summed, both as the last step left them.",
        "OrthoAdam's moments live in a basis of its own. There the weights are shown both in the model's basis and "
        "rotated into that of OrthoAdam, and all comparisons with moments are made in the latter.",
        f"An outlier is over {OUTLIER_SCORE:g} scaled median deviations from the median, in logarithms; top channels "
        "are a 32nd of all, which is also what chance has in common.",
    ]


EXPERIMENT = Experiment(
    name="figure4",
    title="Figures 4 and 5: norms of the output projections by channel beside their summed second moments",
    variants=variants,
    scales=SCALES,
    also=("figure5",),
    about=_about,
    groups=by_model,
    tables=(
        *(
            MetricTable(
                f"{words[:1].upper()}{words[1:]} by channel, mean over layers",
                [metric(f"{part}_{name}", label) for name, label in _COLUMNS.items()],
            )
            for part, words in WORDS.items()
        ),
        LayerTable(
            "MLP output, layer by layer, in the basis of the moments; mean and range over seeds",
            {
                "mlp_output_own_outlier_channels": "large outlier weights",
                "mlp_output_explained_outlier_channels": "of them with moments that are small outliers",
                "mlp_output_rank_correlation": "rank correlation",
                "mlp_output_overlap": "top channels in common",
            },
        ),
    ),
    claims=CLAIMS,
    pictures=(weights_and_moments,),
    measures=(OUTPUT_WEIGHTS, Measure("largest_channel_weights", _measure)),
)
