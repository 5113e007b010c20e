"""The simplified models of Active-Dormant Attention Heads in training: one layer, and three under three optimizers."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.active_dormant import simplified
from orthojax.experiments.active_dormant.simplified_training import (
    B1,
    B2,
    BATCH,
    CHUNK,
    COPY_RATE,
    DRAWN,
    EVALUATED,
    LENGTH,
    OUTER_RATE,
    SGD_RATE,
    WEIGHT_DECAY,
    adamw,
    one_layer,
    outer_optimizer,
    train,
)
from orthojax.experiments.active_dormant.sink_theory import letters
from orthojax.experiments.claims import Claim, all_within, every, within
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.page import Picture
from orthojax.experiments.results import Quantity, Results, metric
from orthojax.experiments.tables import MetricTable

STEPS = 5000  # of the published script; its notebook has 10,000
SHOWN = (
    *(0, 10, 20, 30, 40, 50, 60, 80, 100, 120, 150, 200, 250, 300, 400, 500, 600, 800, 1000, 1200, 1500, 2000, 2500),
    *(3000, 3500, 4000, 4500, STEPS),
)
LATE = tuple(step for step in SHOWN if step >= 200)
CURVES = {
    "backcopy_risk": "backcopy risk",
    "bigram_excess_risk": "bigram excess risk",
    "sink_attention": "attention to <s>",
    "sink_logit": "logit on <s>",
    "value_norm_bos": "value of <s>",
}
# Of either sign, as its factor in every logit, alpha, may be.
TURNED = Quantity("|cosine| of <s> with its key", lambda of: abs(of.key_cosine))
OUTER = {"adam": "Adam", "sgd": "SGD", "orthoadam": "OrthoAdam"}
# The one-layer model after 10,000 steps, one seed, of 67 characters and 256 positions.
PUBLISHED = {"backcopy_risk": 2.13e-7, "value_norm_bos": 0.3, "value_norm_triggers": 2.5}


def half_step(curve: Mapping[int, float]) -> float:
    """The first recorded step at which a curve has made half of its total change."""
    start, end = curve[SHOWN[0]], curve[SHOWN[-1]]
    return float(next(step for step in SHOWN if abs(curve[step] - start) >= 0.5 * abs(end - start)))


def _metrics(found: Mapping[int, Mapping[str, float]], curves: Sequence[str]) -> dict[str, float]:
    metrics = dict(found[SHOWN[-1]])
    for name in curves:
        curve = {step: of[name] for step, of in found.items()}
        metrics |= {f"{name}/step_{step}": value for step, value in curve.items()}
        metrics[f"{name}_half_step"] = half_step(curve)
    logs, gaps = np.log(LATE), [found[step]["sink_logit"] for step in LATE]
    metrics["log_r"] = float(np.corrcoef(logs, gaps)[0, 1])
    metrics["log_slope"] = float(np.polyfit(logs, gaps, 1)[0])
    return metrics


def compute_one_layer(seed: int) -> list[Case]:
    """The one-layer model."""
    task = letters()
    params = simplified.init(jax.random.key(seed), task.vocab_size)
    found = train(one_layer, params, adamw(COPY_RATE), task, STEPS, SHOWN, seed)
    return [Case("one_layer", {"label": "one layer"}, _metrics(found, tuple(CURVES)))]


def compute_three_layers(seed: int) -> list[Case]:
    """The three-layer model on letters; the middle layer has AdamW, the others AdamW, SGD or OrthoAdam."""
    task, cases = letters(), []
    for name, label in OUTER.items():
        params = simplified.init_three_layers(jax.random.key(seed), task.vocab_size)
        found = train(simplified.apply_three_layers, params, outer_optimizer(name, seed), task, STEPS, SHOWN, seed)
        metrics = _metrics(found, ("sink_logit", "key_cosine", *(f"residual_norm_{layer}" for layer in (1, 2, 3))))
        norms = np.array([found[step]["residual_norm_1"] for step in SHOWN])
        late = np.array(SHOWN) >= 1000
        metrics["growth"] = float(norms[-1] / norms[0])
        metrics["linear_r"] = float(np.corrcoef(np.array(SHOWN)[late], norms[late])[0, 1])
        metrics["slope_per_1000"] = float(1000 * np.polyfit(np.array(SHOWN)[late], norms[late], 1)[0])
        cases.append(Case(name, {"label": f"three layers, outer ones under {label}"}, metrics))
    return cases


_SETTINGS = [STEPS, SHOWN, COPY_RATE, OUTER_RATE, SGD_RATE, B1, B2, WEIGHT_DECAY, BATCH, LENGTH, EVALUATED, CHUNK,
             DRAWN, simplified.HIDDEN]  # fmt: skip
_ONE = ("one_layer",)
_COPY_TO_BIGRAM = Quantity(
    "steps from half of the copy to half of the bigram",
    lambda of: of.bigram_excess_risk_half_step - of.backcopy_risk_half_step,
)
_SINK_TO_COPY = Quantity(
    "steps from half of the sink to half of the copy",
    lambda of: of.backcopy_risk_half_step - of.sink_attention_half_step,
)
_VALUE_RATIO = Quantity("value norm of <s> over the others'", lambda of: of.value_norm_bos / of.value_norm_rest)
ONE_LAYER_CLAIMS = (
    Claim("It learns both halves of the task.", _ONE, ("backcopy_risk", "bigram_excess_risk"),
          lambda of: all_within(of, ("backcopy_risk", 0, 1e-3), ("bigram_excess_risk", -1, 0.02)),
          "backcopy risk below 1e-3 and bigram excess below 0.02 nats, in every seed"),
    Claim("The bigram is learned first.", _ONE, ("bigram_excess_risk_half_step", "backcopy_risk_half_step"),
          lambda of: every(of, _COPY_TO_BIGRAM, lambda steps: steps < 0),
          "half of the total change at an earlier step, in every seed"),
    Claim("A sink forms: non-triggers attend to <s>.", _ONE, ("sink_attention",),
          lambda of: within(of, "sink_attention", 0.7, 2), "mean weight above 0.7 in every seed"),
    Claim("It forms after backcopy is learned.", _ONE, ("backcopy_risk_half_step", "sink_attention_half_step"),
          lambda of: every(of, _SINK_TO_COPY, lambda steps: steps <= 0),
          "half of the total change not earlier, in every seed"),
    Claim("The value of <s> is drained.", _ONE, ("value_norm_bos", "value_norm_triggers", "value_norm_rest"),
          lambda of: within(of, _VALUE_RATIO, -1, 0.2),
          "centred norm below 0.2 of the other tokens' mean, in every seed"),
    Claim("Its logits grow straight in ln t.", _ONE, ("log_r", "log_slope"),
          lambda of: within(of, "log_r", 0.97, 2), "r > 0.97 from step 200 on, in every seed"),
    Claim("The slope is not the 1/2 of gradient flow: Adam is faster.", _ONE, ("log_slope",),
          lambda of: within(of, "log_slope", 1, 100), "slope in ln t above 1 in every seed"),
    Claim("The logits of different positions concentrate.", _ONE, ("sink_logit", "sink_logit_spread"),
          lambda of: of.sink_logit_spread < 0.35 * of.sink_logit,
          "standard deviation below 0.35 of the mean"),
)  # fmt: skip
THREE_LAYER_CLAIMS = (
    Claim("Under Adam the residual norm of <s> after the first layer grows linearly.", ("adam",),
          ("growth", "linear_r", "slope_per_1000"),
          lambda of: all_within(of, ("growth", 3, 1e9), ("linear_r", 0.97, 2)),
          "to more than 3 times its start, r of a line above 0.97 from step 1,000 on, in every seed"),
    Claim("Under SGD it does not grow, while the sink stays.", ("sgd",), ("growth", "sink_attention"),
          lambda of: all_within(of, ("growth", 0, 1.5), ("sink_attention", 0.5, 2)),
          "to less than 1.5 times its start and attention above 0.5, in every seed"),
    Claim("Prediction: OrthoAdam keeps the growth.", ("adam", "orthoadam"), ("growth", "slope_per_1000"),
          lambda adam, ortho: ortho.slope_per_1000 >= 0.5 * adam.slope_per_1000 and ortho.growth > 3,
          "at least half of Adam's slope, and to more than 3 times the start; testable where Adam's grows so",
          testable=lambda adam, ortho: adam.growth > 3),
    Claim("Prediction: OrthoAdam removes its channel.", ("adam", "orthoadam"), ("largest_share", "kurtosis"),
          lambda adam, ortho: ortho.largest_share < 0.5 * adam.largest_share,
          "the largest coordinate has less than half of Adam's share of the squared norm; testable where Adam's is "
          "above 0.4, of 28 coordinates", testable=lambda adam, ortho: adam.largest_share > 0.4),
    Claim("The first layer turns <s> towards the key, whichever optimizer.", {label: (name,) for name, label in
          OUTER.items()}, (TURNED,), lambda of: every(of, "key_cosine", lambda cosine: abs(cosine) > 0.8),
          "cosine with the direction above 0.8 in size, in every seed"),
)  # fmt: skip


def _one_layer_pictures(results: Results) -> list[Picture]:
    of, at = results["one_layer"], [np.log10(step) for step in SHOWN[1:]]
    normalised, logits = {}, {}
    for name, label in CURVES.items():
        values = np.array([of.values(f"{name}/step_{step}") for step in SHOWN[1:]]).T
        normalised[label] = (at, values / np.abs(values).max(1, keepdims=True))
        if name == "sink_logit":
            logits[label] = ([np.log(step) for step in SHOWN[1:]], values)
    dynamics = drawing.lines(normalised, x_label="log10 of the step", y_label="of its largest value")
    growth = drawing.lines(logits, x_label="ln of the step", y_label="logit on <s>")
    return [
        Picture("dynamics", "The simplified model: risks, sink and value drain; range over seeds.", dynamics),
        Picture("sink_logit", "Mean logit on <s> of non-triggers; range over seeds.", growth),
    ]


def _three_layer_pictures(results: Results) -> list[Picture]:
    at = SHOWN
    norms, cosines = {}, {}
    for name, label in OUTER.items():
        for curves, key in ((norms, "residual_norm_1"), (cosines, "key_cosine")):
            curves[label] = (at, np.abs([results[name].values(f"{key}/step_{step}") for step in at]).T)
    by_layer = {
        label: np.array([results[name].values(f"residual_norm_{layer}") for layer in (1, 2, 3)]).T
        for name, label in OUTER.items()
    }
    growth = drawing.lines(norms, x_label="step", y_label="residual norm of <s>, layer 1", y_scale="log")
    turned = drawing.lines(cosines, x_label="step", y_label="|cosine| of <s> with the key direction")
    layers = drawing.bars(["layer 1", "layer 2", "layer 3"], by_layer, y_label="residual norm of <s>")
    return [
        Picture("residual_norm", "Residual norm of <s> after the first layer, by the outer layers' optimizer.", growth),
        Picture("key_cosine", "How far the first layer has turned <s> towards its key.", turned),
        Picture("residual_norm_by_layer", "Residual norm of <s> after each layer, at the end.", layers),
    ]


def _about(results: Results) -> list[str]:
    return [
        "The reparametrised model of the paper: one free logit for each token, on <s> or (triggers) on the token "
        "before; diagonal values; a vector as the value of <s>; an MLP of 128 hidden units. Cross-entropy on fresh "
        "sequences.",
        f"Task: letters and spaces of the default text, three triggers. {STEPS:,} steps of {BATCH} x {LENGTH} tokens "
        f"(published: 512 x 256), AdamW with rate {COPY_RATE:g}, betas 0.9 and 0.99, decay 1e-4, as published. The "
        "bigram excess is against the true law after <s>.",
    ]


def _about_three(results: Results) -> list[str]:
    return [
        *_about(results),
        "The middle layer has AdamW in all three; the layer below, the layer above and the read-out have AdamW or "
        f"OrthoAdam (Haar matrices, others in each seed) with rate {OUTER_RATE:g}, or SGD with momentum 0.9 and rate "
        f"{SGD_RATE:g}. Only <s> has a residual stream that is more than its embedding, of norm 1.",
    ]


_SHARED = ("backcopy_risk", "bigram_excess_risk", "sink_attention", "sink_logit", "sink_logit_spread")
ONE_LAYER = Experiment(
    name="simplified_model",
    title="Active-dormant: the simplified one-layer model in training",
    compute=compute_one_layer,
    settings=_SETTINGS,
    seconds_per_seed=60.0,
    about=_about,
    paper={"one_layer": PUBLISHED},
    tables=(
        MetricTable(f"After {STEPS:,} steps", [metric(name, name.replace("_", " ")) for name in
                    (*_SHARED, "value_norm_bos", "value_norm_triggers", "value_norm_rest", "log_slope", "log_r")]),
        MetricTable("Order of events: first step at half of the total change",
                    [metric(f"{name}_half_step", label) for name, label in CURVES.items()]),
    ),
    claims=ONE_LAYER_CLAIMS,
    pictures=(_one_layer_pictures,),
)  # fmt: skip
THREE_LAYERS = Experiment(
    name="simplified_three_layers",
    title="Active-dormant: the simplified three-layer model and the residual norm of <s> under three optimizers",
    compute=compute_three_layers,
    settings=_SETTINGS,
    seconds_per_seed=180.0,
    about=_about_three,
    tables=(
        MetricTable(f"After {STEPS:,} steps", [*(metric(name, name.replace("_", " ")) for name in
                    (*_SHARED, "value_norm_bos", "value_norm_rest")), TURNED]),
        MetricTable("The residual stream of <s>", [metric(name, name.replace("_", " ")) for name in
                    ("residual_norm_1", "residual_norm_2", "residual_norm_3", "growth", "slope_per_1000", "linear_r",
                     "largest_share", "kurtosis")]),
    ),
    claims=THREE_LAYER_CLAIMS,
    pictures=(_three_layer_pictures,),
)  # fmt: skip
EXPERIMENTS = (ONE_LAYER, THREE_LAYERS)
