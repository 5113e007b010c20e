"""How `rotation_ablation` is told."""

from collections.abc import Callable, Sequence

import numpy as np

from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.criteria import GAUSSIAN, NO_OUTLIERS, OUTLIERS
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.reporting.summaries import metric_table
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range as spread
from orthojax.formatting import number
from orthojax.model import parameter_count

_METRICS = {
    "perplexity": "perplexity",
    "kurtosis_first": "kurtosis, first token",
    "kurtosis_rest": "kurtosis, others",
    "max_abs_first": "max |x|, first token",
    "max_abs_rest": "max |x|, others",
    "first_attention_mass": "attention on first token",
}
_DRAWN = ("vanilla", "adam", "hadamard_output", "haar_output", "hadamard_both", "hadamard_input")


def _kurtosis(study: Study, name: str, prefix: str = "") -> tuple[float, float]:
    return study.mean(name, f"{prefix}kurtosis_first"), study.mean(name, f"{prefix}kurtosis_rest")


def _show(kurtosis: tuple[float, float]) -> str:
    return f"{kurtosis[0]:.2f} / {kurtosis[1]:.2f}"


def _paired(study: Study, name: str, reference: str) -> list[float]:
    """By which fraction the perplexity of a variant is above that of another, seed by seed."""
    return [a / b - 1 for a, b in study.pairs(name, reference, "perplexity").values()]


def _percent(value: float) -> str:
    return f"{value:+.2%}"


def _variant_table(
    caption: str, study: Study, columns: Sequence[str], cells: Callable[[Variant], Sequence[str]]
) -> Table:
    return Table(caption, ["", *columns], [[v.label, *cells(v)] for v in study.variants])


def _tables(study: Study) -> list[Table]:
    layers = study.variants[0].config.model.num_layers

    def by_layer(variant: Variant) -> list[str]:
        first, rest = (study.by_layer(variant.name, f"kurtosis_{part}") for part in ("first", "rest"))
        if not first.size:
            return ["failed"] * layers
        return [f"{number(a)} / {number(b)}" for a, b in zip(first.mean(0), rest.mean(0), strict=True)]

    def paired(variant: Variant) -> list[str]:
        pairs = study.pairs(variant.name, "adam", "perplexity")
        by_seed = [_percent(pairs[seed][0] / pairs[seed][1] - 1) if seed in pairs else "failed" for seed in study.seeds]
        return [spread(_paired(study, variant.name, "adam"), _percent), *by_seed]

    settings = {key: label for key, label in summaries.QUANTIZATION.items() if key != "perplexity"}

    def quantized(variant: Variant) -> list[str]:
        return [spread(summaries.penalties(study, variant.name, key), _percent) for key in settings]

    tables = [
        metric_table(study, "Perplexity, outliers, attention", study.variants, _METRICS, rows="variants"),
        _variant_table(
            "Kurtosis after each layer, first token / others, mean over seeds",
            study,
            [f"layer {layer + 1}" for layer in range(layers)],
            by_layer,
        ),
        _variant_table("Change of perplexity by quantisation", study, list(settings.values()), quantized),
        _variant_table(
            "Perplexity relative to softmax-1 with Adam, seed by seed",
            study,
            ["mean (range)", *(f"seed {seed}" for seed in study.seeds)],
            paired,
        ),
    ]
    return [*tables, _cost_table(study)]


def _cost_table(study: Study) -> Table:
    costs = study.results["costs"]
    adam_bytes = costs["adam"]["optimizer_state_bytes"]

    def cells(variant: Variant) -> list[str]:
        cost = costs[variant.name]
        median, lower, upper = cost["step_ratio"]
        size = cost["optimizer_state_bytes"]
        return [f"{median:.2f} ({lower:.2f} to {upper:.2f})", f"{size:,}", f"{size / adam_bytes:.3f}"]

    columns = ["step time / Adam's: median (quartiles)", "optimizer state, bytes", "/ Adam's"]
    return _variant_table("Cost of a training step", study, columns, cells)


def _claims(study: Study) -> list[Claim]:
    return [*_cure_claims(study), *_axes_claims(study), *_control_claims(study)]


def _cure_claims(study: Study) -> list[Claim]:
    adam = max(_kurtosis(study, "adam"))
    kinds = {kind: _kurtosis(study, f"{kind}_output") for kind in ("haar", "hadamard", "dct")}
    shown = ", ".join(f"{kind} {_show(kurtosis)}" for kind, kurtosis in kinds.items())
    gaps = {kind: _paired(study, f"{kind}_output", "haar_output") for kind in ("hadamard", "dct")}
    return [
        Claim(
            verdict(all(max(kurtosis) < NO_OUTLIERS for kurtosis in kinds.values()), visible=adam > OUTLIERS),
            f"A structured rotation cures as a dense one does. Kurtosis first / others, output axis: {shown}; "
            f"softmax-1 with Adam {_show(_kurtosis(study, 'adam'))} (criterion: all below {NO_OUTLIERS}; visible where "
            f"Adam is above {OUTLIERS:g}). Perplexity against haar: "
            + ", ".join(f"{kind} {spread(values, _percent)}" for kind, values in gaps.items())
            + ".",
        )
    ]


def _axes_claims(study: Study) -> list[Claim]:
    output, inputs = _kurtosis(study, "hadamard_output"), _kurtosis(study, "hadamard_input")
    settings = {"warmup_300": "warm-up 300", "b2_095": "b2 0.95", "eps_1e-4": "eps 1e-4"}
    gaps = {words: _paired(study, f"both_{name}", f"output_{name}") for name, words in settings.items()}
    main = _paired(study, "hadamard_both", "hadamard_output")
    both = _kurtosis(study, "hadamard_both")
    return [
        Claim(
            verdict(max(output) < NO_OUTLIERS < max(inputs)),
            f"It is the axis that writes which matters. Kurtosis first / others: output axis {_show(output)}, input "
            f"axis {_show(inputs)}, residual axis {_show(_kurtosis(study, 'hadamard_residual'))}, what writes to the "
            f"residual stream only {_show(_kurtosis(study, 'hadamard_writers'))} (criterion: output below "
            f"{NO_OUTLIERS}, input above).",
        ),
        Claim(
            verdict(max(output) < NO_OUTLIERS < max(_kurtosis(study, "no_embeddings"))),
            f"The embedding tables must be rotated. Kurtosis first / others, output axis: {_show(output)} with them, "
            f"{_show(_kurtosis(study, 'no_embeddings'))} without; input axis {_show(inputs)} with, "
            f"{_show(_kurtosis(study, 'input_no_embeddings'))} without; the tables alone "
            f"{_show(_kurtosis(study, 'embeddings_only'))} (criterion: output below {NO_OUTLIERS} with them, above "
            f"without).",
        ),
        Claim(
            verdict(min(main) > 0),
            f"Both axes cost perplexity against the output axis alone: {spread(main, _percent)} (criterion: worse in "
            f"every seed); kurtosis {_show(both)} against {_show(output)}. With other settings: "
            + ", ".join(f"{words} {spread(values, _percent)}" for words, values in gaps.items())
            + ".",
        ),
    ]


def _control_claims(study: Study) -> list[Claim]:
    differences = {
        name: max(abs(np.log1p(_paired(study, name, "adam")))) for name in ("identity", "signed_permutation")
    }
    shared, own = _kurtosis(study, "shared"), _kurtosis(study, "shared", "rotated_")
    adam, writers = _kurtosis(study, "adam"), _kurtosis(study, "hadamard_writers")
    fixed = _kurtosis(study, "fixed_in_model")
    return [
        Claim(
            verdict(differences["identity"] == 0 and differences["signed_permutation"] < 0.01),
            f"The identity and a signed permutation are no rotation for Adam. Largest difference of the loss from "
            f"Adam's over all seeds: {differences['identity']:.1e} and {differences['signed_permutation']:.1e} nats "
            f"(criterion: 0, and below 0.01, since rounding differs).",
        ),
        Claim(
            verdict(max(shared) < NO_OUTLIERS < max(own)),
            f"One matrix for the whole tree only looks like a cure. Kurtosis first / others: {_show(shared)} in the "
            f"model's basis, {_show(own)} in its own, where it is Adam ({_show(adam)}) (criterion: below and above "
            f"{NO_OUTLIERS}).",
        ),
        Claim(
            verdict(max(abs(np.log(np.divide(fixed, writers)))) < 0.1),
            f"A fixed matrix inside the model does what one inside the optimizer does. Kurtosis first / others: "
            f"{_show(fixed)} with Adam and fixed matrices behind what writes to the residual stream, {_show(writers)} "
            f"with OrthoAdam on the same parts; perplexity "
            f"{spread(_paired(study, 'fixed_in_model', 'hadamard_writers'), _percent)} (criterion: kurtosis "
            f"within 10%).",
        ),
    ]


def _pictures(study: Study) -> list[Picture]:
    drawn = [v for v in study.variants if v.name in _DRAWN]
    pictures = []
    for part, words in (("first", "first token"), ("rest", "other tokens")):
        figure = drawing.lines(
            summaries.layer_curves(study, drawn, f"kurtosis_{part}"), x_label="layer", y_label=f"kurtosis, {words}",
            y_scale="log", reference=(GAUSSIAN, "Gaussian"), integer_x=True,
        )  # fmt: skip
        pictures.append(Picture(f"kurtosis_{part}_by_layer", f"Kurtosis after each layer, {words}.", figure))
    points = [(v, max(_kurtosis(study, v.name))) for v in study.variants]
    return [*pictures, summaries.perplexity_and_kurtosis(study, {"all variants": points})]


def report(study: Study) -> Report:
    """Tables by variant, claims about kinds, axes and controls, figures by layer."""
    config = study.variants[0].config
    finished = not study.failures()
    return summaries.study_report(
        study,
        "Which rotation for OrthoAdam",
        [
            f"One language model ({parameter_count(config.model):,} parameters, RMSNormSingle, no biases), "
            f"{config.train.steps} steps of {config.train.batch_size} x {config.data.sequence_length} tokens. All but "
            f"the first variant have softmax-1 attention; they differ in the rotation, or in one setting, alone.",
        ],
        claims=_claims(study) if finished else [],
        tables=_tables(study),
        pictures=_pictures(study) if finished else [],
    )
