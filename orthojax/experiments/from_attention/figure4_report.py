"""How `figure4` is told."""

import numpy as np

from orthojax.analysis import outlier_scores, top_count
from orthojax.analysis.channels import OUTLIER_SCORE
from orthojax.experiments.from_attention.output_weights import MEASURE, WORDS, output_weight_pictures
from orthojax.experiments.reporting import summaries
from orthojax.experiments.reporting.page import Claim, Report, Table, verdict
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range as spread
from orthojax.formatting import number

_USUAL_SCORE = 3.5  # see OUTLIER_SCORE
_COLUMNS = {
    "outlier_channels": "outlier channels of a layer",
    "norm_peak": "largest norm / median",
    "moment_spread": "std of log moment",
    "rank_correlation": "rank correlation, norm and moment",
    "overlap": "top channels in common",
    "own_outlier_channels": "outliers in the moments' basis",
    "explained_outlier_channels": "of them with small moments",
}


def _of(study: Study, vanilla: bool) -> list[Variant]:
    return [v for v in study.variants if (v.config.optim.optimizer == "adam") == vanilla]


def _layers(study: Study, variants: list[Variant], metric: str) -> list[float]:
    """A metric of every layer of every seed."""
    return [float(value) for v in variants for value in study.by_layer(v.name, metric).ravel()]


def _totals(study: Study, variants: list[Variant], metric: str) -> list[float]:
    """A count by layer, summed over the layers, of every model and seed."""
    return [float(sum(layers)) for v in variants for layers in study.by_layer(v.name, metric)]


def _tables(study: Study) -> list[Table]:
    rows = []
    for variant in study.variants:
        for part, words in WORDS.items():
            cells = [spread(study.values(variant.name, f"{part}_{name}")) for name in _COLUMNS]
            rows.append([f"{variant.label}: {words}", *cells])
    layers = []
    for variant in study.variants:
        columns = [
            study.by_layer(variant.name, f"mlp_output_{name}")
            for name in ("own_outlier_channels", "explained_outlier_channels", "rank_correlation", "overlap")
        ]
        for layer in range(columns[0].shape[1] if columns[0].size else 0):
            large, small, correlation, overlap = (column[:, layer] for column in columns)
            held = "" if not large.sum() else "holds" if small.sum() == large.sum() else "does not hold"
            told = [f"{large.sum():g}", f"{small.sum():g}", held]
            shown = [spread([float(value) for value in values]) for values in (correlation, overlap)]
            layers.append([f"{variant.label}: layer {layer + 1}", *told, *shown])
    chance = [top_count(v.config.model.d_model) / v.config.model.d_model for v in study.variants]
    return [
        Table(
            f"By channel, mean over layers. An outlier is over {OUTLIER_SCORE:g} scaled median deviations from the "
            f"median, in logarithms; top channels: a 32nd, of which chance would have "
            f"{spread(chance, '{:.1%}'.format)} in common",
            ["", *_COLUMNS.values()],
            rows,
        ),
        Table(
            "MLP output, layer by layer, in the basis of the moments: outlier channels of all seeds, and how many of "
            "them have moments that are small outliers",
            ["", "large outlier weights", "with small moments", "appendix E", "rank correlation", "top in common"],
            layers,
        ),
    ]


def _claims(study: Study) -> list[Claim]:
    return [*_moment_claims(study), *_weight_claims(study)]


def _counts_beyond(study: Study, variants: list[Variant], score: float) -> str:
    """How much a claim on outliers of the MLP outputs, in the basis of the moments, depends on what counts as one."""
    large = both = small = 0
    for v in variants:
        for seed in study.by_seed(v.name, "mlp_output_norm_peak"):
            kept = study.arrays(v.name, seed, MEASURE.name)
            is_large = outlier_scores(kept["mlp_output_own_norms"]) > score
            is_small = outlier_scores(kept["mlp_output_moments"]) < -score
            large, both, small = (
                total + int(np.sum(mask))
                for total, mask in ((large, is_large), (both, is_large & is_small), (small, is_small))
            )
    return f"{both} of {large} outlier channels, {small} channels having such small moments"


def _moment_claims(study: Study) -> list[Claim]:
    vanilla, cured = _of(study, True), _of(study, False)
    large, explained = (
        _layers(study, vanilla, f"mlp_output_{name}") for name in ("own_outlier_channels", "explained_outlier_channels")
    )
    cases = [(a, b) for a, b in zip(large, explained, strict=True) if a]
    correlations = _layers(study, vanilla, "mlp_output_rank_correlation")
    overlap = _layers(study, vanilla, "mlp_output_overlap")
    counts = [top_count(v.config.model.d_model) / v.config.model.d_model for v in vanilla]
    spreads = [
        pair
        for v, w in zip(vanilla, cured, strict=True)
        for pair in _paired(study, w.name, v.name, "mlp_output_moment_spread")
    ]
    return [
        Claim(
            verdict(all(a == b for a, b in cases), visible=bool(cases)),
            f"In all cases of large outlier weights the summed second moments are small outliers (appendix E). Softmax "
            f"and Adam, MLP output: so in {sum(a == b for a, b in cases)} of {len(cases)} layers with outlier weights, "
            f"of {len(large)}, and for {_counts_beyond(study, vanilla, OUTLIER_SCORE)} (criterion: all, of all seeds "
            f"and models; visible where there are such weights; an outlier is beyond {OUTLIER_SCORE:g} scaled median "
            f"deviations; with the usual {_USUAL_SCORE:g} it is {_counts_beyond(study, vanilla, _USUAL_SCORE)}).",
        ),
        Claim(
            verdict(max(correlations) < 0),
            f"Channels whose second moments are small have large weights (appendix E). Softmax and Adam, MLP output: "
            f"rank correlation {spread(correlations)} over layers and seeds, top channels in common "
            f"{spread(overlap, '{:.0%}'.format)} where chance has {spread(counts, '{:.1%}'.format)} (criterion: "
            f"correlation below 0 in every layer).",
        ),
        Claim(
            verdict(all(a <= 0.5 * b for a, b in spreads)),
            f"OrthoAdam's moments are considerably more uniform (Figure 5). Standard deviation of the log of the "
            f"summed moments, MLP output, mean over layers: {spread([a for a, _ in spreads])} in OrthoAdam's own "
            f"basis, {spread([b for _, b in spreads])} for Adam's (criterion: at most half, in every model and seed).",
        ),
    ]


def _paired(study: Study, variant: str, reference: str, metric: str) -> list[tuple[float, float]]:
    return list(study.pairs(variant, reference, metric).values())


def _weight_claims(study: Study) -> list[Claim]:
    vanilla, cured = _of(study, True), _of(study, False)
    mlp, attention = (_totals(study, vanilla, f"{part}_outlier_channels") for part in WORDS)
    cases = [(a, b) for a, b in zip(mlp, attention, strict=True) if a + b]
    left = _totals(study, cured, "mlp_output_outlier_channels")
    peaks = [study.mean(v.name, "mlp_output_norm_peak") for v in vanilla]
    cured_peaks = [study.mean(v.name, "mlp_output_norm_peak") for v in cured]
    return [
        Claim(
            verdict(sum(left) <= 0.1 * sum(mlp), visible=sum(mlp) > 0),
            f"OrthoAdam and softmax-1 remove outlier weights (Figure 5). Outlier channels of the MLP outputs of a "
            f"model, all layers: {spread(mlp, number)} with Adam and softmax, {spread(left, number)} cured; largest "
            f"norm over median {spread(peaks)} and {spread(cured_peaks)} (criterion: at most a tenth; visible where "
            f"Adam has any).",
        ),
        Claim(
            verdict(all(a > b for a, b in cases), visible=bool(cases)),
            f"Outlier weights are generally in the output layer of the MLP (appendix E). Outlier channels of a model "
            f"with softmax and Adam, all layers: {spread(mlp, number)} in MLP outputs, {spread(attention, number)} in "
            f"attention outputs; {len(cases)} of {len(mlp)} models and seeds have any (criterion: more in the MLP's, "
            f"in every one of these).",
        ),
    ]


def report(study: Study) -> Report:
    """Weights and moments by channel, layer by layer, and what appendix E says of them."""
    finished = not study.failures()
    config = study.variants[0].config
    return summaries.study_report(
        study,
        "Weights of the output projections and their second moments",
        [
            f"The models of Table 2 after {config.train.steps} steps, vanilla (softmax, Adam) and cured (softmax-1, "
            f"OrthoAdam). For each output channel of the two projections that write to the residual stream: the norm "
            f"of its weights, and Adam's second moments of their gradients, summed, both as the last "
            f"step left them.",
            "OrthoAdam's moments live in a basis of its own. There the weights are shown both in the model's basis and "
            "turned into that of OrthoAdam, and all comparisons with moments are made in the latter.",
        ],
        claims=_claims(study) if finished else [],
        tables=_tables(study),
        pictures=output_weight_pictures(study, study.variants) if finished else [],
    )
