"""One layer on Bigram-Backcopy: the order of events, static panels, interventions, and ReLU attention.

Active-Dormant Attention Heads (arXiv 2410.13835), sections 2 and 3.
"""

import itertools
import math
from collections.abc import Sequence

from orthojax.config import replace
from orthojax.data import open_task
from orthojax.experiments import drawing
from orthojax.experiments.active_dormant.models import (
    HISTORY,
    INTERVENTIONS,
    RISKS,
    SEEDS,
    STATIC,
    config,
    layer_curves,
)
from orthojax.experiments.active_dormant.views import training_view
from orthojax.experiments.claims import Claim, Revision, all_within, within
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.page import Picture
from orthojax.experiments.pictures import StepCurves, draw_attention
from orthojax.experiments.results import Quantity, Result, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.experiments.training_view import TrainingView

RATES = (0.3, 0.5, 1, 2, 4)  # of the common learning rate: a grid for each kind of attention
_SINK, _GAP, _DRAIN = "sink_attention_rest", "sink_logit_gap", "value_drain"
_GAP_TOKENS, _VALUE = "sink_logit_gap_tokens", "value_norm_first/layer_0"
_ATTENTION = {"softmax": "softmax", "relu": "ReLU"}
# The code's oracle at <s> allows triggers, from which the true law differs: its bigram risk is too high by 0.0107.
PUBLISHED = {
    "softmax": {
        RISKS[0]: 7.9e-5, "sink_attention": 0.811, _GAP_TOKENS: 16.8, "sink_logit_gap_q10": 9.5,
        "sink_logit_gap_q90": 20.9, f"{_GAP}/layer_0/log_r": 0.989, "sink_logit_spread": 2.1,
        "other_logit_spread": 9.13,
        f"none: {RISKS[0]}": 0.0, f"none: {RISKS[1]}": 0.0,
        f"no_attention: {RISKS[0]}": 7.6865, f"no_attention: {RISKS[1]}": 0.0,
        f"no_mlp: {RISKS[0]}": 3.1685, f"no_mlp: {RISKS[1]}": 1.9833,
        f"{_VALUE}/start": 5.2, f"{_VALUE}/largest": 9.14, "value_norm_first": 1.4,
    },
    "relu": {RISKS[0]: 3.9e-6, "sink_attention": 1e-5},
}  # fmt: skip


def _variants(scale: str) -> tuple[Variant, ...]:
    variants = []
    for (normalizer, words), factor in itertools.product(_ATTENTION.items(), RATES):
        of = config(1, published=scale == "small", model__normalizer=normalizer)
        rate = factor * of.optim.learning_rate
        label = words if factor == 1 else f"{words}, rate {rate:g}"
        variants.append(Variant(_at(normalizer, factor), label, replace(of, {"optim.learning_rate": rate})))
    return tuple(variants)


def _at(normalizer: str, factor: float) -> str:
    """The name of the variant at a multiple of the common rate."""
    return normalizer if factor == 1 else f"{normalizer}_x{factor:g}"


def _best(results: Results) -> dict[str, tuple[str, ...]]:
    """ReLU's and softmax's variant of the smallest sum of both mean excess risks."""
    names = []
    for normalizer in ("relu", "softmax"):
        grid = [_at(normalizer, factor) for factor in RATES]
        finished = [name for name in grid if name in results and results[name].values(RISKS[0])]
        if len(finished) < len(grid):
            return {}
        names.append(min(grid, key=lambda name: sum(results[name].mean(risk) for risk in RISKS)))
    return {"": tuple(names)}


def _in_order(result: Result, *keys: str | Quantity) -> bool:
    """Whether the values of metrics do not fall from one to the next, in every seed."""
    result.mean(keys[0])  # there is a seed
    rows = zip(*(result.values(key) for key in keys), strict=True)
    return all(list(row) == sorted(row) for row in rows)


def _change(name: str, words: str, risk: str) -> Quantity:
    change = lambda of: of[f"{name}: {risk}"] - of[f"none: {risk}"]  # noqa: E731
    return Quantity(f"{risk.split('_')[0]} excess risk, change {words}", change)


_HALF = [
    metric(f"{name}/half_step", words)
    for name, words in {
        RISKS[1]: "bigram risk", RISKS[0]: "backcopy risk", f"{_SINK}/layer_0": "attention to <s>",
        f"{_GAP}/layer_0": "logit gap", _VALUE: "value norm of <s>, from its largest",
    }.items()
]  # fmt: skip
_NO_ATTENTION = [_change("no_attention", "without attention", risk) for risk in RISKS]
_NO_MLP = [_change("no_mlp", "without the MLP", risk) for risk in RISKS]
_FORCED = {"no_value_of_bos": "with the value of <s> zeroed", "clean_attention": "with the ideal head",
           "all_on_bos": "with all attention on <s>", "all_on_themselves": "with each query on itself"}  # fmt: skip
_SOFTMAX, _RELU = ("softmax",), ("relu",)


_RISE = Quantity("largest over first value norm of <s>", lambda of: of[f"{_VALUE}/largest"] / of[f"{_VALUE}/start"])
_FALL = Quantity("last over largest", lambda of: of.value_norm_first / of[f"{_VALUE}/largest"])


def _inside(*of: Result) -> bool:
    """Whether no rate is the smallest or the largest of the grid."""
    return not any(result.name.endswith((f"_x{RATES[0]:g}", f"_x{RATES[-1]:g}")) for result in of)


def _at_most(relu: Result, softmax: Result) -> bool:
    return all(relu.mean(risk) <= 1.1 * softmax.mean(risk) + 2e-3 for risk in RISKS)


CLAIMS = (
    Claim("It learns both halves of the task.", _SOFTMAX, RISKS,
          lambda of: all_within(of, ("backcopy_excess_risk_nats", -1, 0.01), ("bigram_excess_risk_nats", -1, 0.05)),
          "backcopy excess below 0.01 and bigram excess below 0.05 nats, in every seed"),
    Claim("The bigram is learned first, then backcopy, with the sink.", _SOFTMAX, _HALF,
          lambda of: _in_order(of, *_HALF[:3]),
          "half of the last large change of the bigram risk not later than of the backcopy risk, and that not later "
          "than of the attention to <s>, in every seed"),
    Claim("Non-triggers attend to <s>.", _SOFTMAX, (_SINK, "sink_attention"), lambda of: within(of, _SINK, 0.7, 2),
          "mean weight above 0.7 in every seed, the row of <s> left out"),
    Claim("For all kinds of tokens: the whole band of logit gaps is positive.", _SOFTMAX,
          (_GAP, _GAP_TOKENS, "sink_logit_gap_q10", "sink_logit_gap_q90"),
          lambda of: all_within(of, (_GAP, 8, 1e9), ("sink_logit_gap_q10", 0, 1e9)),
          "mean gap above 8 and its 10% quantile over tokens above 0, in every seed"),
    Claim("The gap grows straight in ln t.", _SOFTMAX,
          (metric(f"{_GAP}/layer_0/log_r", "r"), metric(f"{_GAP}/layer_0/log_slope", "slope")),
          lambda of: within(of, f"{_GAP}/layer_0/log_r", 0.97, 2), "r > 0.97 from step 200 on, in every seed"),
    Claim("The value of <s> is drained.", _SOFTMAX, (_DRAIN,), lambda of: within(of, _DRAIN, -1, 0.3),
          "norm below 0.3 of the others' mean in every seed"),
    Claim("The value of <s> rises before it is drained.", _SOFTMAX, (_RISE, _FALL),
          lambda of: all_within(of, (_RISE, 1.1, math.inf), (_FALL, 0, 0.67)),
          "largest recorded norm above 1.1 times the first, and the last below two thirds of it, in every seed",
          revised=Revision("a rise alone counted as well", {
              "show": (_RISE,), "holds": lambda of: within(of, _RISE, 1.1, math.inf),
              "criterion": "largest recorded norm above 1.1 times the first in every seed"})),
    Claim("With one layer there is no residual-state peak.", _SOFTMAX, ("residual_peak_ratio",),
          lambda of: within(of, "residual_peak_ratio", 0, 2), "norm of <s> below twice the others' in every seed"),
    Claim("Logits on <s> are concentrated.", _SOFTMAX, ("sink_logit_spread", "other_logit_spread"),
          lambda of: of.sink_logit_spread < 0.5 * of.other_logit_spread,
          "standard deviation over queries below half of the mean over other keys' tokens"),
    Claim("The head is active at triggers and dormant elsewhere.", _SOFTMAX,
          ("active_at_triggers", "active_elsewhere"),
          lambda of: of.active_at_triggers > 0.9 and of.active_elsewhere < 0.3,
          "active at more than 90% of triggers and less than 30% of others; dormant is below a tenth of the largest"),
    Claim("Where no trigger comes, every query is dormant.", _SOFTMAX,
          (metric("dormant_sink/layer_0", "weight on <s>"),),
          lambda of: of["dormant_sink/layer_0"] > 0.9, "mean weight on <s> above 0.9 on sequences without triggers"),
    Claim("Weights on <s> tell triggers from other tokens.", _SOFTMAX,
          (metric("triggers_found/layer_0", "triggers found"),
           metric("others_called_triggers/layer_0", "others called so")),
          lambda of: of["triggers_found/layer_0"] > 0.99 and of["others_called_triggers/layer_0"] < 0.3,
          "all triggers, and less than 30% of the other tokens, have a weight below 0.89"),
    Claim("Attention does the backcopy only: without it the bigram is as good as before.", _SOFTMAX, _NO_ATTENTION,
          lambda of: of.mean(_NO_ATTENTION[0]) > 3 and abs(of.mean(_NO_ATTENTION[1])) < 0.02,
          "backcopy worse by more than 3 nats, bigram changed by less than 0.02"),
    Claim("The MLP has the bigram.", _SOFTMAX, _NO_MLP, lambda of: of.mean(_NO_MLP[1]) > 1,
          "without it the bigram is worse by more than 1 nat"),
    Claim("ReLU attention has no sink and drains no value.", _RELU, (_SINK, _DRAIN),
          lambda of: of[_SINK] < 0.01 and of[_DRAIN] > 0.5, "weight below 0.01, norm above half of the others'"),
    Claim("ReLU attention costs no performance, at equal rates.", ("relu", "softmax"), RISKS, _at_most,
          "both excess risks at most 1.1 times softmax's, plus 0.002"),
    Claim("ReLU attention costs no performance, each at its best rate.", _best, RISKS, _at_most,
          "both excess risks at most 1.1 times softmax's, plus 0.002, each at the rate with the smallest sum of its "
          "two; testable where no best rate is an end of the grid", _inside,
          revised=Revision("rates were chosen by trials of 200 steps, which favour those that are too high for the "
                           "whole run, the end of the grid in all of the first runs, so that it was not testable; "
                           "now every rate is run to its end")),
)  # fmt: skip


_BESIDE = (RISKS[0], "sink_attention", _GAP_TOKENS, "sink_logit_gap_q10", "sink_logit_gap_q90",
           metric(f"{_GAP}/layer_0/log_r", "r of the gap in ln t"), "sink_logit_spread", "other_logit_spread",
           *_NO_ATTENTION, *_NO_MLP, _RISE)  # fmt: skip


def _about(results: Results) -> list[str]:
    c = results["softmax"].config
    return [
        f"One block of width {c.model.d_model} with one head, {c.train.steps} steps of {c.train.batch_size} x "
        f"{c.data.sequence_length} tokens, AdamW at {c.optim.learning_rate:g}, or at the rate that a row names. Risks "
        "are above the oracle's, with the true law of the first token. The paper's numbers are of one seed, after "
        "10,000 steps at width 256."
    ]


def _at_equal_rates(result: Result) -> bool:
    return result.name in _ATTENTION


def _static_panels(results: Results) -> list[Picture]:
    """Attention and norms on a held-out sequence and on one without triggers, of the first finished seed."""
    shown = list(filter(_at_equal_rates, results.finished))
    arrays = {result.label: result.arrays("static") for result in shown}
    maps = {f"{label}, {words}": of["attention"][k, 0] for label, of in arrays.items() for k, words in enumerate(
        ("held-out", "no triggers"))}  # fmt: skip
    rows = [
        {f"{label}: {words}": of[name][:, 0] for label, of in arrays.items()}
        for name, words in {"value_norms": "||W_O v||", "residual_norms": "||x||"}.items()
    ]
    seen = "on one held-out sequence and on one without triggers"
    norms = drawing.profiles(rows, x_label="position", curves=("held-out", "no triggers"))
    return (
        [
            Picture("attention_map", f"Attention {seen}.", draw_attention(maps), "png"),
            Picture("norms", f"Norms of values and of the residual stream {seen}.", norms),
        ]
        if shown
        else []
    )


def _views(results: Results) -> Sequence[TrainingView]:
    names = {_SINK: "attention to <s>", _GAP: "logit gap", _DRAIN: "value norm, <s> over others",
             "residual_norm_first": "residual norm of <s>"}  # fmt: skip
    curves = layer_curves(1, names)
    shown = filter(_at_equal_rates, results.finished)
    return [training_view(result, open_task(result.config.data)[0], curves) for result in shown]


EXPERIMENT = Experiment(
    name="one_layer",
    title="Bigram-Backcopy, one layer: order of events, static panels, interventions, ReLU attention",
    variants=_variants,
    scales=("tiny", "small"),
    seeds=SEEDS,
    about=_about,
    paper=PUBLISHED,
    measures=(HISTORY, INTERVENTIONS, STATIC),
    tables=(
        MetricTable("At the end", [*RISKS, _SINK, "sink_attention", _GAP, _GAP_TOKENS, "sink_logit_gap_q10",
                                   "sink_logit_gap_q90", _DRAIN, "residual_norm_first", "residual_norm_rest",
                                   "null_mass", "attention_entropy_nats", "active_at_triggers", "active_elsewhere"],
                    keep=_at_equal_rates, transposed=True),
        MetricTable("Beside the published numbers", _BESIDE, keep=lambda r: r.name == "softmax",
                    transposed=True),
        MetricTable("The first recorded step at half of the last large change", _HALF, keep=_at_equal_rates),
        MetricTable("Interventions: change of excess risks", [*_NO_ATTENTION, *_NO_MLP, *(
            _change(name, words, risk) for name, words in _FORCED.items() for risk in RISKS)], _at_equal_rates, True),
        MetricTable("Learning rates", [*RISKS, _SINK, _DRAIN]),
    ),
    claims=CLAIMS,
    pictures=(
        StepCurves("risks", "Excess risks over training.", "excess risk (nats)",
                   dict(zip(RISKS, ("backcopy", "bigram"), strict=True)), "log", keep=_at_equal_rates),
        StepCurves("sink", "Attention of non-triggers to <s>.", "mean weight on <s>", {_SINK: ""},
                   keep=_at_equal_rates),
        StepCurves("gap", "How far the logit on <s> is above the others at non-triggers.", "logit gap",
                   {_GAP: "", "sink_logit_gap_q10": "10% of tokens", "sink_logit_gap_q90": "90% of tokens"},
                   keep=lambda r: r.name == "softmax"),
        StepCurves("values", "Norms of values as they are written to the residual stream.", "||W_O v||",
                   {"value_norm_first": "<s>", "value_norm_rest": "others"}, "log", keep=_at_equal_rates),
        StepCurves("residuals", "Norms of the residual stream after the block.", "||x||",
                   {"residual_norm_first": "<s>", "residual_norm_rest": "others"}, keep=_at_equal_rates),
        _static_panels,
    ),
    views=_views,
)  # fmt: skip
