"""The simplified models of Active-Dormant Attention Heads in training: one layer, and three under three optimizers."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from orthojax.experiments.active_dormant import simplified
from orthojax.experiments.active_dormant.runs import letters
from orthojax.experiments.active_dormant.simplified_training import (
    BATCH,
    COPY_RATE,
    LENGTH,
    OUTER_RATE,
    SGD_RATE,
    adamw,
    one_layer,
    outer_optimizer,
    train,
)
from orthojax.experiments.claims import Claim, Metric
from orthojax.experiments.pictures import Bars, ByStep
from orthojax.experiments.study import Row, Study
from orthojax.experiments.tables import Columns

_STEPS = 5000  # of the published script; its notebook has 10,000
_SHOWN = (
    *(0, 10, 20, 30, 40, 50, 60, 80, 100, 120, 150, 200, 250, 300, 400, 500, 600, 800, 1000, 1200, 1500, 2000, 2500),
    *(3000, 3500, 4000, 4500, _STEPS),
)
_CURVES = ("backcopy_risk", "bigram_excess_risk", "sink_attention", "sink_logit", "value_norm_bos")


def half_step(curve: Mapping[int, float]) -> float:
    """Returns the first recorded step at which a curve has made half of its total change.

    >>> half_step({0: 3.0, 50: 2.5, 100: 1.5, 200: 1.0})
    100.0
    """
    start, end = curve[min(curve)], curve[max(curve)]
    return float(next(step for step in sorted(curve) if abs(curve[step] - start) >= 0.5 * abs(end - start)))


def _metrics(found: Mapping[int, Mapping[str, float]], curves: Sequence[str]) -> dict[str, float]:
    metrics = dict(found[_STEPS])
    for name in curves:
        curve = {step: of[name] for step, of in found.items()}
        metrics |= {f"{name}/step_{step}": value for step, value in curve.items()}
        metrics[f"{name}_half_step"] = half_step(curve)
    late = [step for step in _SHOWN if step >= 200]
    logits = [found[step]["sink_logit"] for step in late]
    metrics["log_r"] = float(np.corrcoef(np.log(late), logits)[0, 1])
    metrics["log_slope"] = float(np.polyfit(np.log(late), logits, 1)[0])
    return metrics


def _one_layer(seed: int) -> list[Row]:
    task = letters()
    params = simplified.init(jax.random.key(seed), task.vocab_size)
    found = train(one_layer, params, adamw(COPY_RATE), task, _STEPS, _SHOWN, seed)
    return [Row("one_layer", _metrics(found, _CURVES))]


def _three_layers(seed: int) -> list[Row]:
    task, rows = letters(), []
    for name in ("adam", "sgd", "orthoadam"):
        params = simplified.init_three_layers(jax.random.key(seed), task.vocab_size)
        found = train(simplified.apply_three_layers, params, outer_optimizer(name, seed), task, _STEPS, _SHOWN, seed)
        metrics = _metrics(found, ("sink_logit", "key_cosine", "residual_norm_1"))
        norms = np.array([found[step]["residual_norm_1"] for step in _SHOWN])
        late = np.array(_SHOWN) >= 1000
        metrics["growth"] = float(norms[-1] / norms[0])
        metrics["linear_r"] = float(np.corrcoef(np.array(_SHOWN)[late], norms[late])[0, 1])
        metrics["slope_per_1000"] = float(1000 * np.polyfit(np.array(_SHOWN)[late], norms[late], 1)[0])
        rows.append(Row(name, metrics))
    return rows


_COPY, _BIGRAM = Metric("backcopy_risk"), Metric("bigram_excess_risk")
_SINK, _LOGIT, _SPREAD = Metric("sink_attention"), Metric("sink_logit"), Metric("sink_logit_spread")
_COPY_HALF, _BIGRAM_HALF, _SINK_HALF = (
    Metric(f"{name}_half_step") for name in ("backcopy_risk", "bigram_excess_risk", "sink_attention")
)
_VALUE_RATIO = Metric("value norm of <s> over the others'", lambda of: of["value_norm_bos"] / of["value_norm_rest"])
_LOG_R, _LOG_SLOPE = Metric("log_r"), Metric("log_slope")
_ONE = "one_layer"

SIMPLIFIED_MODEL = Study(
    name="simplified_model",
    title="The simplified one-layer model in training",
    rows=_one_layer,
    note="The reparametrised model of the paper: one free logit for each token, on <s> or (triggers) on the token before; "
    "diagonal values; a vector as the value of <s>; an MLP of 128 hidden units. Letters and spaces of the default text, "
    f"three triggers, {_STEPS:,} steps of {BATCH} x {LENGTH} tokens (published: 512 x 256), AdamW as published. The bigram "
    "excess is against the true law after <s>. A value's norm is that without its mean.",
    # After 10,000 steps, one seed, of 67 characters and 256 positions.
    paper={_ONE: {"backcopy_risk": 2.13e-7, "value_norm_bos": 0.3, "value_norm_triggers": 2.5}},
    columns=[_COPY, _BIGRAM, _SINK, _LOGIT, _SPREAD, "value_norm_bos value_norm_triggers value_norm_rest", _LOG_SLOPE,
             _LOG_R],
    tables=[Columns("Order of events: first step at half of the total change", [f"{name}_half_step" for name in _CURVES])],
    claims=[
        Claim("It learns both halves of the task.", ((_COPY[_ONE] < 1e-3) & (_BIGRAM[_ONE] < 0.02)).in_every_seed()),
        Claim("The bigram is learned first.", (_BIGRAM_HALF[_ONE] < _COPY_HALF[_ONE]).in_every_seed()),
        Claim("A sink forms: non-triggers attend to <s>.", (_SINK[_ONE] > 0.7).in_every_seed()),
        Claim("It forms after backcopy is learned.", (_COPY_HALF[_ONE] <= _SINK_HALF[_ONE]).in_every_seed()),
        Claim("The value of <s> is drained.", (_VALUE_RATIO[_ONE] < 0.2).in_every_seed()),
        Claim("Its logits grow straight in ln t, from step 200 on.", (_LOG_R[_ONE] > 0.97).in_every_seed()),
        Claim("The slope is not the 1/2 of gradient flow: Adam is faster.", (_LOG_SLOPE[_ONE] > 1).in_every_seed()),
        Claim("The logits of different positions concentrate.", _SPREAD[_ONE] < 0.35 * _LOGIT[_ONE]),
    ],
    pictures=[
        ByStep("backcopy_risk bigram_excess_risk", y_scale="log", x_scale="log", name="risks"),
        ByStep("sink_attention", x_scale="log"), ByStep("sink_logit", x_scale="log"),
        ByStep("value_norm_bos", x_scale="log"),
    ],
)  # fmt: skip

_GROWTH, _LINEAR, _SLOPE = Metric("growth"), Metric("linear_r"), Metric("slope_per_1000")
_SHARE = Metric("largest_share")
# Of either sign, as its factor in every logit, alpha, may be.
_TURNED = Metric("|cosine| of <s> with its key", lambda of: abs(of["key_cosine"]))

SIMPLIFIED_THREE_LAYERS = Study(
    name="simplified_three_layers",
    title="The simplified three-layer model and the residual norm of <s> under three optimizers",
    rows=_three_layers,
    note="The middle layer is the simplified one-layer model and has AdamW; the layer below, the layer above and the "
    f"read-out have AdamW or OrthoAdam (Haar matrices, others in each seed) with rate {OUTER_RATE:g}, or SGD with "
    f"momentum 0.9 and rate {SGD_RATE:g}. Only <s> has a residual stream that is more than its embedding, of norm 1. The "
    "largest share is that of a coordinate, of 28, in the squared norm after the first layer.",
    columns=[_COPY, _BIGRAM, _SINK, _LOGIT, "value_norm_bos", _TURNED],
    tables=[Columns("The residual stream of <s>", ["residual_norm_1 residual_norm_2 residual_norm_3", _GROWTH, _SLOPE,
                                                   _LINEAR, _SHARE, "kurtosis"])],
    claims=[
        Claim("Under Adam the residual norm of <s> after the first layer grows linearly, from step 1,000 on.",
              ((_GROWTH["adam"] > 3) & (_LINEAR["adam"] > 0.97)).in_every_seed()),
        Claim("Under SGD it does not grow, while the sink stays.",
              ((_GROWTH["sgd"] < 1.5) & (_SINK["sgd"] > 0.5)).in_every_seed()),
        Claim("(Ours, predicted) OrthoAdam keeps the growth.",
              (_SLOPE["orthoadam"] >= 0.5 * _SLOPE["adam"]) & (_GROWTH["orthoadam"] > 3), _GROWTH["adam"] > 3),
        Claim("(Ours, predicted) OrthoAdam removes its channel.", _SHARE["orthoadam"] < 0.5 * _SHARE["adam"],
              _SHARE["adam"] > 0.4),
        Claim("The first layer turns <s> towards the key, whichever optimizer.", (_TURNED["*"] > 0.8).in_every_seed()),
    ],
    pictures=[
        ByStep("residual_norm_1", y_scale="log", name="residual_norm"),
        Bars("residual_norm_by_layer", "Residual norm of <s> after each layer, at the end.",
             [f"residual_norm_{layer}" for layer in (1, 2, 3)]),
    ],
)  # fmt: skip
