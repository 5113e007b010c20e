"""Sinks, drains and peaks on Bigram-Backcopy: one layer, the published size, three layers, and one definition for all.

Active-Dormant Attention Heads (arXiv 2410.13835), sections 2 and 3. The published code looks only at the output of the
first of three layers; here every layer is measured.
"""

from orthojax.config import Config, replace
from orthojax.experiments.active_dormant import measures
from orthojax.experiments.active_dormant.measures import BIGRAM, COPY, RISKS, SINK_MASS, TOP_PEAK
from orthojax.experiments.active_dormant.runs import ORTHOADAM, SCALES, SEEDS, SGD, backcopy
from orthojax.experiments.claims import Claim, Expr, Metric, all_of, check, largest, shares, smallest
from orthojax.experiments.measures import Measure, Metrics, Say
from orthojax.experiments.study import Study, grid
from orthojax.model import LoadedModel
from orthojax.report.page import Table
from orthojax.report.pictures import ByLayer, ByStep, Maps
from orthojax.report.results import Result, Results
from orthojax.report.tables import Columns, cell
from orthojax.train import Inputs, read_metrics

_RATES = {"x0.3": 0.3, "x0.5": 0.5, "": 1, "x2": 2, "x4": 4}  # of the common learning rate
_GAP, _GAP_TOKENS, _DRAIN = Metric("sink_logit_gap"), Metric("sink_logit_gap_tokens"), Metric("value_drain")
_LOW, _HIGH = Metric("sink_logit_gap_q10"), Metric("sink_logit_gap_q90")
_LOG_R = Metric("sink_logit_gap/layer_0/log_r")
_VALUE = "value_norm_first/layer_0"
_ON_BOS, _ON_OTHERS = Metric("sink_logit_spread"), Metric("other_logit_spread")
_ACTIVE, _ELSEWHERE = Metric("active_at_triggers"), Metric("active_elsewhere")
_FOUND, _CALLED, _DORMANT = shares(
    *(f"{name}/layer_0" for name in ("triggers_found", "others_called_triggers", "dormant_sink"))
)
_HALF = [Metric(f"{name}/half_step") for name in (
    BIGRAM.name, COPY.name, "sink_attention_rest/layer_0", "sink_logit_gap/layer_0", _VALUE)]  # fmt: skip
_RISE = Metric("largest over first value norm of <s>", lambda of: of[f"{_VALUE}/largest"] / of[f"{_VALUE}/start"])
_FALL = Metric("last over largest value norm of <s>", lambda of: of["value_norm_first"] / of[f"{_VALUE}/largest"])


def _change(intervention: str, risk: Metric) -> Metric:
    of = lambda numbers: numbers[f"{intervention}: {risk.name}"] - numbers[f"none: {risk.name}"]  # noqa: E731
    return Metric(f"change of {risk.label}, {intervention.replace('_', ' ')}", of)


_NO_ATTENTION, _NO_MLP = ([_change(name, risk) for risk in RISKS] for name in ("no_attention", "no_mlp"))


def _runs(scale: str) -> dict[str, Config]:
    base = backcopy(scale)
    rates = {name: {"optim.learning_rate": factor * base.optim.learning_rate} for name, factor in _RATES.items()}
    return grid(base, {"softmax": {}, "relu": {"model.normalizer": "relu"}}, rates)


def _best_rates(results: Results) -> dict[str, str]:
    """Returns for `softmax_best` and `relu_best` the variant with the smallest sum of both risks."""
    best = {}
    for normalizer in ("softmax", "relu"):
        names = [f"{normalizer}_{rate}".strip("_") for rate in _RATES]
        finished = [of for of in results.finished if of.name in names and of.values(COPY)]
        if len(finished) == len(names):
            best[f"{normalizer}_best"] = min(finished, key=lambda of: sum(of[risk] for risk in RISKS)).name
    return best


def _inside(*of: Result) -> bool:
    """No best rate is an end of the grid."""
    return not any(result.name.endswith(("_x0.3", "_x4")) for result in of)


def _costs_nothing(relu: str, softmax: str) -> Expr:
    return all_of(risk[relu] <= 1.1 * risk[softmax] + 2e-3 for risk in RISKS)


ONE_LAYER = Study(
    name="one_layer",
    title="Bigram-Backcopy, one layer: order of events, interventions, ReLU attention",
    runs=_runs,
    scales=SCALES,
    seeds=SEEDS,
    aliases=_best_rates,
    measures=(measures.HISTORY, measures.INTERVENTIONS, measures.WITHOUT_TRIGGERS),
    note="One block with one head; risks are above the oracle's, with the true law of the first token. The paper's "
    "numbers are of one seed, after 10,000 steps at width 256; its oracle at <s> allows triggers, so that its bigram "
    "risk is too high by 0.0107. A head is dormant below a tenth of its largest activity.",
    paper={
        "softmax": {
            COPY.name: 7.9e-5, "sink_attention": 0.811, _GAP_TOKENS.name: 16.8, _LOW.name: 9.5, _HIGH.name: 20.9,
            _LOG_R.name: 0.989, _ON_BOS.name: 2.1, _ON_OTHERS.name: 9.13,
            f"none: {COPY.name}": 0.0, f"none: {BIGRAM.name}": 0.0,
            f"no_attention: {COPY.name}": 7.6865, f"no_attention: {BIGRAM.name}": 0.0,
            f"no_mlp: {COPY.name}": 3.1685, f"no_mlp: {BIGRAM.name}": 1.9833,
            f"{_VALUE}/start": 5.2, f"{_VALUE}/largest": 9.14, "value_norm_first": 1.4,
        },
        "relu": {COPY.name: 3.9e-6, "sink_attention": 1e-5},
    },
    columns=[*RISKS, SINK_MASS, _GAP, _DRAIN, "residual_norm_first residual_norm_rest"],
    tables=[
        Columns("Beside the published numbers",
                [COPY, "sink_attention", _GAP_TOKENS, _LOW, _HIGH, _LOG_R, "sink_logit_gap/layer_0/log_slope", _ON_BOS,
                 _ON_OTHERS, *_NO_ATTENTION, *_NO_MLP, _RISE], rows="softmax"),
        Columns("The first recorded step at half of the last large change", _HALF, rows="softmax relu"),
    ],
    claims=[
        Claim("It learns both halves of the task.",
              ((COPY["softmax"] < 0.01) & (BIGRAM["softmax"] < 0.05)).in_every_seed()),
        Claim("The bigram is learned first, then backcopy, with the sink.",
              ((_HALF[0]["softmax"] <= _HALF[1]["softmax"]) & (_HALF[1]["softmax"] <= _HALF[2]["softmax"]))
              .in_every_seed()),
        Claim("Non-triggers attend to <s>.", (SINK_MASS["softmax"] > 0.7).in_every_seed()),
        Claim("For all kinds of tokens: the whole band of logit gaps is positive.",
              ((_GAP["softmax"] > 8) & (_LOW["softmax"] > 0)).in_every_seed()),
        Claim("The gap grows straight in ln t.", (_LOG_R["softmax"] > 0.97).in_every_seed()),
        Claim("The value of <s> is drained.", (_DRAIN["softmax"] < 0.3).in_every_seed()),
        Claim("The value of <s> rises before it is drained.",
              ((_RISE["softmax"] > 1.1) & (_FALL["softmax"] < 0.67)).in_every_seed(),
              revised=("a rise alone counted as well", Claim("", (_RISE["softmax"] > 1.1).in_every_seed()))),
        Claim("With one layer there is no residual-state peak.",
              (Metric("residual_peak_ratio")["softmax"] < 2).in_every_seed()),
        Claim("Logits on <s> are concentrated.", _ON_BOS["softmax"] < 0.5 * _ON_OTHERS["softmax"]),
        Claim("The head is active at triggers and dormant elsewhere.",
              (_ACTIVE["softmax"] > 0.9) & (_ELSEWHERE["softmax"] < 0.3)),
        Claim("If no trigger comes, every query is dormant.", _DORMANT["softmax"] > 0.9),
        Claim("Weights on <s> tell triggers from other tokens.",
              (_FOUND["softmax"] > 0.99) & (_CALLED["softmax"] < 0.3)),
        Claim("Attention does the backcopy only: without it the bigram is as good as before.",
              (_NO_ATTENTION[0]["softmax"] > 3) & (abs(_NO_ATTENTION[1]["softmax"]) < 0.02)),
        Claim("The MLP has the bigram.", _NO_MLP[1]["softmax"] > 1),
        Claim("ReLU attention has no sink and drains no value.", (SINK_MASS["relu"] < 0.01) & (_DRAIN["relu"] > 0.5)),
        Claim("ReLU attention costs no performance, at equal rates.", _costs_nothing("relu", "softmax")),
        Claim("ReLU attention costs no performance, each at its best rate.",
              _costs_nothing("relu_best", "softmax_best"), check(_inside, "relu_best", "softmax_best"),
              added="rates were chosen by trials of 200 steps, which favour those that are too high for the whole run, "
              "the end of the grid in all of the first runs, so that it was not testable; now every rate is run to its "
              "end, and the best has the smallest sum of its two risks"),
    ],
    pictures=[
        ByStep("backcopy_excess_risk_nats bigram_excess_risk_nats", "softmax relu", "log", "log", name="risks"),
        ByStep("sink_attention_rest", "softmax relu", x_scale="log", name="sink"),
        ByStep("value_norm_first value_norm_rest", "softmax relu", "log", "log", name="values"),
        Maps("softmax relu"),
    ],
)  # fmt: skip

# A tenth of the published steps, which two cores train in a little over an hour.
_STEPS = (0, 100, 200, 300, 500, 1000)
# Read off the figure of one seed, in the order of the steps; None if its data were not read off.
_PUBLISHED: dict[str, tuple[float | None, ...]] = {
    "sink_attention": (0.0225, 0.027, 0.223, 0.560, 0.648, 0.779),
    _GAP_TOKENS.name: (-0.12, -0.10, 0.89, 3.46, 5.45, 9.70),
    _LOW.name: (-0.4, -1.2, -1.9, None, 0.4, 4.2),
    _HIGH.name: (0.2, 1.1, 4.0, None, 12.0, 14.4),
    "value_norm_first": (5.20, 8.71, 8.74, 5.52, 4.85, 3.51),
    "residual_norm_first": (24.3, 31.1, 28.3, 25.4, 25.4, 27.0),
    COPY.name: (4.30, 2.62, 1.05, 0.442, 0.190, 7.5e-3),
}


def _by_step(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    lines = {line["step"]: line for line in read_metrics(loaded.source.parents[1] / "metrics.jsonl")}
    at = [(name, step) for name in _PUBLISHED for step in _STEPS if name in lines[step]]
    return {f"{name}/step_{step}": float(lines[step][name]) for name, step in at}


def _published_steps(results: Results) -> Table:
    of = results["softmax"]
    rows = [[Metric(name).label, *(cell(of, Metric(f"{name}/step_{s}")) for s in _STEPS)] for name in _PUBLISHED]
    return Table("The first 1,000 steps", ["", *(f"step {step:,}" for step in _STEPS)], rows)


def _as_published(low: float, name: str, high: float) -> Claim:
    at = Metric(f"{name}/step_{_STEPS[-1]}")["softmax"]
    says = f"After 1,000 steps: {Metric(name).label} as published, {_PUBLISHED[name][-1]:g}."
    return Claim(says, (at >= low) & (at <= high))


PUBLISHED_SIZE = Study(
    name="published_size",
    title="Bigram-Backcopy, one layer at the published size: the first 1,000 steps",
    runs=lambda scale: {"softmax": replace(backcopy("small"), {
        "train.steps": _STEPS[-1], "train.probe_steps": _STEPS, "train.checkpoint_every_steps": 50,
        "train.accumulation_steps": 8,  # 0.7 of the time on a CPU, whose caches 512 x 256 tokens do not fit
    })},
    seeds=(1,),
    measures=(Measure("published_steps", _by_step),),
    note="One seed, as in the paper. The text is another one, so that marginals and bigrams differ.",
    paper={"softmax": {f"{name}/step_{step}": value for name, values in _PUBLISHED.items()
                       for step, value in zip(_STEPS, values, strict=True) if value is not None}},
    tables=[_published_steps],
    claims=[
        _as_published(0.65, "sink_attention", 0.9),
        _as_published(7, _GAP_TOKENS.name, 13),
        _as_published(2.3, "value_norm_first", 5.3),
        _as_published(20, "residual_norm_first", 34),
        _as_published(0, COPY.name, 0.05),
    ],
)  # fmt: skip


_FIRST = "residual_norm_first/layer_0"
_GROWTH, _LINEAR = Metric(f"{_FIRST}/growth"), Metric(f"{_FIRST}/linear_r")
_SLOPE = Metric("growth of the norm in 1,000 steps", lambda of: 1000 * of[f"{_FIRST}/linear_slope"])
_CHANNEL = Metric("kurtosis of the residual stream at <s>, largest of the layers",
                  lambda of: float(of.layers("kurtosis_first").max()))  # fmt: skip
_GRADIENTS = [
    [Metric(f"gradient_final_cosine/layer_{i}"), Metric(f"gradient_decay/layer_{i}"),
     *shares(f"gradient_weak_share/layer_{i}"), Metric(f"gradient_key_cosine/layer_{i}")] for i in (0, 1)
]  # fmt: skip
_COSINE, _DECAY, _WEAK, _KEY = _GRADIENTS[0]
# The verdicts on the whole gradient are in the first reports: not another criterion, but another metric.
_OTHER_GRADIENT = (
    "the gradient was first that of the whole loss, which the prediction at <s> itself dominates; it is that of all "
    "other positions now"
)
_SGD_RATES = ("sgd", "sgd_fast")  # the published rate, and a higher one

THREE_LAYERS = Study(
    name="three_layers",
    title="Bigram-Backcopy, three layers: residual-state peaks under Adam, SGD, OrthoAdam and with ReLU attention",
    runs=lambda scale: grid(backcopy(scale), {"": {"model.num_layers": 3}}, {
        "adam": {},
        "sgd": SGD | {"optim.learning_rate": 0.03},
        "sgd_fast": SGD | {"optim.learning_rate": 0.1},
        "orthoadam": ORTHOADAM,
        "relu": {"model.normalizer": "relu"},
    }),
    scales=SCALES,
    seeds=SEEDS,
    measures=(measures.HISTORY, measures.MECHANISM, measures.OUTLIER_MEASURES),
    note="Three blocks with one head; SGD has momentum 0.9. A peak is the norm of the residual stream at <s> over its "
    "mean at other tokens. The gradient is that of the loss at other positions with respect to the residual stream at "
    "<s>, from step 200 on. The paper's numbers are of one seed, after 10,000 steps at width 256.",
    paper={
        "adam": {_GROWTH.name: 140.7 / 24.4, _LINEAR.name: 0.992, f"{_FIRST}/linear_slope": 0.0124},
        "sgd": {_GROWTH.name: 20.4 / 24.3},
        "relu": {_GROWTH.name: 24.5 / 23.4},
    },
    columns=[*RISKS, SINK_MASS, _GROWTH, _SLOPE, _LINEAR, TOP_PEAK, _CHANNEL],
    tables=[
        Columns("Residual norm of <s> over the others', by layer",
                [f"residual_peak_ratio/layer_{i}" for i in range(3)]),
        Columns("The gradient after the first and the second layer", [*_GRADIENTS[0], *_GRADIENTS[1]]),
    ],
    claims=[
        Claim("Under Adam the residual norm of <s> after the first layer grows.",
              (_GROWTH["adam"] > 3).in_every_seed()),
        Claim("It grows linearly.", (_LINEAR["adam"] > 0.97).in_every_seed()),
        Claim("It is a peak: other tokens' norm does not follow.", (TOP_PEAK["adam"] > 2).in_every_seed()),
        Claim("Under SGD the sink stays and the norm of <s> after the first layer does not grow.",
              (_GROWTH["*"] <= 1.5) & (SINK_MASS["*"] > 0.7), cases=_SGD_RATES),
        Claim("Under SGD there is no peak after any layer.", (TOP_PEAK["*"] < 2).in_every_seed(), cases=_SGD_RATES,
              added="the first layer's norm alone had decided this, with 2.37 after the second layer"),
        Claim("ReLU attention removes the peak after the first layer.", _GROWTH["relu"] <= 1.3),
        Claim("ReLU attention removes it after every layer (the published data have it above 50 after the second and "
              "third).", (TOP_PEAK["relu"] < 2).in_every_seed()),
        Claim("(Ours, predicted) OrthoAdam keeps the peak, since its updates are as constant as Adam's.",
              (_GROWTH["orthoadam"] > 3).in_every_seed()),
        Claim("(Ours, predicted) OrthoAdam removes its channel.", _CHANNEL["orthoadam"] < 0.5 * _CHANNEL["adam"]),
        Claim("The gradient at <s> keeps one direction.", _COSINE["adam"] > 0.5, added=_OTHER_GRADIENT),
        Claim("The gradient falls as the norm grows.", _DECAY["adam"] < -0.5, added=_OTHER_GRADIENT),
        Claim("The gradient lies in the null space of the value matrices above: more than half of its square in their "
              "weakest quarter of directions.", _WEAK["adam"] > 0.5, added=_OTHER_GRADIENT),
        Claim("The gradient pushes along the key of <s>.", abs(_KEY["adam"]) > 0.5, added=_OTHER_GRADIENT),
        Claim("Every optimizer learns to copy (published for SGD 0.0557 nats).", COPY["*"] < 0.1),
    ],
    pictures=[
        ByStep(" ".join(f"residual_norm_first/layer_{i}" for i in range(3)), y_scale="log", name="residual_norm"),
        ByLayer("residual_peak_ratio", y_scale="log"), ByLayer("sink_attention_rest"),
        ByLayer("value_drain", y_scale="log"),
    ],
)  # fmt: skip

_AFTER_FIRST = Metric("residual_peak/layer_0")


def _left(key: str) -> Metric:
    of = lambda numbers: numbers[f"no_layer_0: {key}"] / numbers[f"none: {key}"]  # noqa: E731
    return Metric(f"{Metric(key).label}, left without the first layer", of)


_PEAK_LEFT = Metric(
    "largest later peak, left without the first layer",
    lambda of: float(of.layers("no_layer_0: residual_peak")[1:].max() / of.layers("none: residual_peak")[1:].max()),
)
_GAP_LEFT, _VALUE_LEFT = _left("sink_logit_gap/layer_1"), _left("value_norm_first/layer_1")
_COPY_WITHOUT, _BIGRAM_WITHOUT = (Metric(f"no_layer_0: {risk.name}") for risk in RISKS)
_ATTENTION, _MLP = "model.attention", "model.mlp"

PEAK_BLOCKS = Study(
    name="peak_blocks",
    title="Bigram-Backcopy: which blocks make the residual-state peak, and knocking out the first",
    runs=lambda scale: grid(backcopy(scale), {
        "two": {"model.num_layers": 2},
        "three": {"model.num_layers": 3},
        "two_mlp": {"model.num_layers": 3, _ATTENTION: (True, True, False)},
        "mlp_one_mlp": {"model.num_layers": 3, _ATTENTION: (False, True, False)},
        "attention_one_mlp": {"model.num_layers": 3, _ATTENTION: (True, True, False), _MLP: ("none", "relu", "relu")},
        "two_mlps": {"model.num_layers": 3, _ATTENTION: (True, False, False), _MLP: ("relu", "relu", "relu")},
    }),
    scales=SCALES,
    seeds=SEEDS,
    measures=(measures.INTERVENTIONS,),
    note="Models of up to three blocks, some without attention or MLP: mlp_one_mlp is an MLP, a block and an MLP. The "
    "peak is the norm of the residual stream at <s> less its mean at other tokens. The paper's are of one seed.",
    # Read off its bar chart, except for one exact value.
    paper={name: {_AFTER_FIRST.name: peak} for name, peak in {
        "two": 15.0, "three": 115.0, "two_mlp": 106.09, "mlp_one_mlp": 11.0, "attention_one_mlp": -1.0}.items()},
    columns=[_AFTER_FIRST, "residual_peak_ratio/layer_0", TOP_PEAK, *RISKS],
    tables=[Columns("Without the first layer", [_left(_AFTER_FIRST.name), _PEAK_LEFT, _GAP_LEFT, _VALUE_LEFT,
                                                _COPY_WITHOUT, _BIGRAM_WITHOUT], rows="two three two_mlp")],
    claims=[
        Claim("The large peak needs attention and MLP in the first block and something above the second.",
              smallest(*(_AFTER_FIRST[of] for of in ("three", "two_mlp")))
              > 2 * largest(*(_AFTER_FIRST[of] for of in ("two", "mlp_one_mlp", "attention_one_mlp")))),
        Claim("Knocking out the first layer removes the peak (published 0.7 of 106, after the first).",
              _PEAK_LEFT["two_mlp"] < 0.2,
              revised=("after the layer that is knocked out it can hardly be there",
                       Claim("", _left(_AFTER_FIRST.name)["two_mlp"] < 0.2))),
        Claim("It removes the sink of the next layer (published: a logit gap of 1.92, before 18.93).",
              _GAP_LEFT["two_mlp"] < 0.2),
        Claim("It removes the value drain there (published: the value norm of <s> rises from 0.729 to 10.62).",
              (_VALUE_LEFT["two_mlp"] > 5).in_every_seed()),
        Claim("Without it the task is lost (published 2.44 and 0.25 nats).",
              (_COPY_WITHOUT["two_mlp"] > 1) & (_BIGRAM_WITHOUT["two_mlp"] > 0.05)),
    ],
    pictures=[ByLayer("residual_peak_ratio", y_scale="log"), ByStep(_FIRST, name="peak")],
)  # fmt: skip
