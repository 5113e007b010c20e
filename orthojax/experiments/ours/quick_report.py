"""How the main job is told: tables, claims with their criteria, figures."""

import numpy as np

from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.criteria import GAUSSIAN, NO_OUTLIERS, OUTLIERS
from orthojax.experiments.reporting.model_pictures import model_pictures
from orthojax.experiments.reporting.page import Claim, Picture, Report, verdict
from orthojax.experiments.reporting.summaries import (
    METRICS,
    QUANTIZATION,
    layer_curves,
    metric_table,
    training_curves,
)
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant
from orthojax.model import parameter_count

_BACKCOPY_METRICS = {
    "sink_attention": "attention on <s> at non-triggers",
    "sink_attention_rest": "the same without the row of <s> itself",
    "sink_logit_gap": "logit gap to <s> at non-triggers",
    "value_norm_first": "value norm of <s>",
    "value_norm_rest": "value norm of other tokens",
    "residual_norm_first": "residual norm of <s>",
    "residual_norm_rest": "residual norm of other tokens",
    "backcopy_risk_nats": "backcopy risk (nats)",
    "bigram_excess_risk_nats": "bigram excess risk (nats)",
}


def _split(study: Study) -> tuple[list[Variant], list[Variant]]:
    backcopy = [v for v in study.variants if v.config.data.kind == "bigram_backcopy"]
    return [v for v in study.variants if v not in backcopy], backcopy


def _layer_pictures(study: Study, models: list[Variant]) -> list[Picture]:
    pictures, labels = [], [variant.label for variant in models]
    for metric, name, y_label, reference in (
        ("kurtosis", "kurtosis_by_layer", "kurtosis of hidden states", (GAUSSIAN, "Gaussian")),
        ("max_abs", "max_abs_by_layer", "max |activation|", None),
    ):
        curves = {}
        for part, words in (("first", "first"), ("rest", "others")):
            curves |= {(label, words): y for label, y in layer_curves(study, models, f"{metric}_{part}").items()}
        figure = drawing.lines(
            {
                f"{label}, {words}": curves[label, words]
                for label, words in sorted(curves, key=lambda k: labels.index(k[0]))
            },
            x_label="layer",
            y_label=y_label,
            y_scale="log",
            reference=reference,
            integer_x=True,
            pairs=True,
        )
        pictures.append(
            Picture(name, f"{y_label[0].upper()}{y_label[1:]} after each layer, first token and others.", figure)
        )
    mass = drawing.lines(
        layer_curves(study, models, "first_attention_mass"),
        x_label="layer",
        y_label="attention mass on the first token",
        integer_x=True,
    )
    return [*pictures, Picture("first_attention_by_layer", "Mean attention weight on the first token.", mass)]


def _penalty(study: Study, variant: str, metric: str) -> float:
    return study.mean(variant, metric) / study.mean(variant, "perplexity") - 1


def _pictures(study: Study, models: list[Variant], backcopy: list[Variant]) -> list[Picture]:
    training = drawing.lines(
        training_curves(study, models, "validation_loss_nats"), x_label="step", y_label="held-out loss (nats per token)"
    )
    quantization = drawing.bars(
        list(QUANTIZATION.values()),
        {v.label: np.array([study.values(v.name, key) for key in QUANTIZATION]).T for v in models},
        y_label="perplexity",
        texts={
            v.label: ["", *(f"{_penalty(study, v.name, key):+.2%}" for key in QUANTIZATION if key != "perplexity")]
            for v in models
        },
    )
    sink = drawing.bars(
        ["attention on <s>", "value norm of <s> / others"],
        {
            v.label: np.array(
                [
                    study.values(v.name, "sink_attention_rest"),
                    np.divide(study.values(v.name, "value_norm_first"), study.values(v.name, "value_norm_rest")),
                ]
            ).T
            for v in backcopy
        },
        y_label="",
    )
    return [
        Picture("training_curves", "Held-out loss during training.", training),
        *_layer_pictures(study, models),
        Picture(
            "quantization", "Perplexity by quantisation setting, and its change; linear layers only.", quantization
        ),
        Picture("backcopy", "Bigram-Backcopy: sink and value drain by normalizer.", sink),
        *model_pictures(study, models),
    ]


def _language_claims(study: Study) -> list[Claim]:
    def both(metric: str) -> tuple[float, float]:
        return study.mean("vanilla", metric), study.mean("cured", metric)

    k_first, k_rest = both("kurtosis_first"), both("kurtosis_rest")
    m_first, m_rest = both("max_abs_first"), both("max_abs_rest")
    perplexity = both("perplexity")
    gap = perplexity[1] / perplexity[0] - 1
    return [
        Claim(
            verdict(max(k_first[1], k_rest[1]) < NO_OUTLIERS, visible=min(k_first[0], k_rest[0]) > OUTLIERS),
            f"softmax-1 with OrthoAdam removes outlier channels. Kurtosis of hidden states, first / other tokens: "
            f"{k_first[0]:.1f} / {k_rest[0]:.1f} vanilla, {k_first[1]:.1f} / {k_rest[1]:.1f} cured "
            f"(criterion: cured below {NO_OUTLIERS:g}; visible where vanilla is above {OUTLIERS:g}; a Gaussian has 3).",
        ),
        Claim(
            verdict(m_first[1] < 0.67 * m_first[0] and m_rest[1] < 0.67 * m_rest[0]),
            f"It shrinks the largest activations. Mean largest |activation|, first / other tokens: {m_first[0]:.0f} / "
            f"{m_rest[0]:.0f} vanilla, {m_first[1]:.0f} / {m_rest[1]:.0f} cured (criterion: by a third or more, both).",
        ),
        *_attention_claims(study, both("first_attention_mass"), both("first_attention_fraction")),
        Claim(
            verdict(gap < 0.03),
            f"It costs no performance: perplexity {perplexity[0]:.1f} vanilla, {perplexity[1]:.1f} cured, "
            f"{gap:+.1%} (criterion: at most 3% worse).",
        ),
        _quantization_claim(study),
    ]


def _attention_claims(study: Study, mass: tuple[float, float], fraction: tuple[float, float]) -> list[Claim]:
    length = study.variants[0].config.data.sequence_length
    # With equal logits query t gives each of its t keys 1/t (softmax) or 1/(t + 1) (softmax-1).
    uniform = [sum(1 / (t + extra) for t in range(1, length + 1)) / length for extra in (0, 1)]
    return [
        Claim(
            verdict(mass[1] < 0.5 * mass[0], visible=mass[0] > 2 * uniform[0]),
            f"It takes attention off the first token. Mass on it: {mass[0]:.1%} vanilla, {mass[1]:.1%} cured; equal "
            f"logits would give {uniform[0]:.1%} and {uniform[1]:.1%} (criterion: at most half; visible where vanilla "
            f"has twice what equal logits give).",
        ),
        Claim(
            verdict(fraction[1] < 0.5 * fraction[0], visible=fraction[0] > 0.2),
            f"The first token is the most attended key less often: {fraction[0]:.1%} of (query, head) pairs vanilla, "
            f"{fraction[1]:.1%} cured (criterion: at most half; visible where vanilla has more than 20%).",
        ),
    ]


def _quantization_claim(study: Study) -> Claim:
    coarse, four = (
        [_penalty(study, variant, f"perplexity_{setting}") for variant in ("vanilla", "cured")]
        for setting in ("int8_coarse", "int4_zeropoint")
    )
    return Claim(
        verdict(coarse[1] < coarse[0] and four[1] < four[0], visible=max(coarse[0], four[0]) > 0.01),
        f"It survives crude quantisation better. Perplexity penalty at int8 coarse: {coarse[0]:+.2%} vanilla, "
        f"{coarse[1]:+.2%} cured; at int4 zeropoint: {four[0]:+.2%} vanilla, {four[1]:+.2%} cured (criterion: both "
        f"smaller; visible where vanilla loses more than 1%).",
    )


def _backcopy_claims(study: Study) -> list[Claim]:
    names = ("backcopy_softmax", "backcopy_softmax1", "backcopy_relu")
    sink = [study.mean(name, "sink_attention_rest") for name in names]
    drain = [study.mean(name, "value_norm_first") / study.mean(name, "value_norm_rest") for name in names]
    return [
        Claim(
            verdict(sink[0] > 0.5 and drain[0] < 0.5),
            f"Bigram-Backcopy: softmax attention parks on <s> and drains its value. Attention {sink[0]:.2f}, value "
            f"norm {drain[0]:.2f} of the others' (criterion: above 0.5 and below 0.5).",
        ),
        Claim(
            verdict(sink[1] < 0.5 * sink[0], visible=sink[0] > 0.5),
            f"Bigram-Backcopy: softmax-1 alone removes that sink. Attention on <s> {sink[1]:.2f} against {sink[0]:.2f} "
            f"with softmax; value norm {drain[1]:.2f} of the others' (criterion: at most half the attention).",
        ),
        Claim(
            verdict(sink[2] < 0.05),
            f"Bigram-Backcopy: ReLU attention has no sink. Attention on <s> {sink[2]:.3f} (criterion: below 0.05).",
        ),
    ]


def report(study: Study) -> Report:
    """Tables, claims and figures of the main job."""
    models, backcopy = _split(study)
    config = models[0].config
    finished = not study.failures()
    return summaries.study_report(
        study,
        "Two small language models: softmax + Adam, and softmax-1 + OrthoAdam",
        [
            f"Both models have {parameter_count(config.model):,} parameters ({config.model.num_layers} layers, d_model "
            f"{config.model.d_model}, RMSNormSingle, no biases), the same initial parameters and the same "
            f"{config.train.steps} batches of {config.train.batch_size} x {config.data.sequence_length} tokens. They "
            f"differ in the attention normalizer and the optimizer only.",
        ],
        claims=[*_language_claims(study), *_backcopy_claims(study)] if finished else [],
        tables=[
            metric_table(study, "Language models on held-out files", models, METRICS),
            metric_table(study, "Bigram-Backcopy, one layer, Adam, by normalizer", backcopy, _BACKCOPY_METRICS),
        ],
        pictures=_pictures(study, models, backcopy) if finished else [],
    )
