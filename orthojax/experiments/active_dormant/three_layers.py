"""Three layers on Bigram-Backcopy: residual-state peaks by optimizer and attention, and which blocks make them.

Active-Dormant Attention Heads (arXiv 2410.13835), section 3.2 and its appendix. The published code looks at the first
layer's output alone; here is every layer.
"""

from orthojax.experiments.active_dormant.model_measures import INTERVENTIONS, OUTLIERS, intervention_table
from orthojax.experiments.active_dormant.recorded_steps import HISTORY, MECHANISM
from orthojax.experiments.active_dormant.runs import (
    BIGRAM,
    COPY,
    ORTHOADAM,
    PEAK,
    RISKS,
    SCALES,
    SEEDS,
    SGD,
    SINK,
    backcopy,
)
from orthojax.experiments.claims import Claim, Metric, largest, smallest
from orthojax.experiments.pictures import ByLayer, ByStep
from orthojax.experiments.results import Numbers
from orthojax.experiments.study import Study, grid
from orthojax.experiments.tables import Columns

_FIRST = "residual_norm_first/layer_0"
_GROWTH, _LINEAR, _LOG = (Metric(f"{_FIRST}/{name}") for name in ("growth", "linear_r", "log_r"))
_SLOPE = Metric("growth of the norm in 1,000 steps", lambda of: 1000 * of[f"{_FIRST}/linear_slope"])
_CHANNEL = Metric("kurtosis of the residual stream at <s>, largest of the layers",
                  lambda of: float(of.layers("kurtosis_first").max()))  # fmt: skip
_COSINE, _DECAY, _WEAK, _KEY = _GRADIENT = [
    Metric(f"gradient_{name}/layer_0") for name in ("final_cosine", "decay", "weak_share", "key_cosine")
]
_PARTS = ("token", "position", "layers_0/attention_norm", "layers_0/attention", "layers_0/mlp_norm", "layers_0/mlp")
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
    measures=(HISTORY, INTERVENTIONS, MECHANISM, OUTLIERS),
    note="Three blocks with one head; SGD has momentum 0.9. A peak is the norm of the residual stream at <s> over its "
    "mean at other tokens. The gradient is that of the loss at other positions with respect to the residual stream at "
    "<s>, from step 200 on. The paper's numbers are of one seed, after 10,000 steps at width 256.",
    paper={
        "adam": {_GROWTH.name: 140.7 / 24.4, _LINEAR.name: 0.992, f"{_FIRST}/linear_slope": 0.0124},
        "sgd": {_GROWTH.name: 20.4 / 24.3},
        "relu": {_GROWTH.name: 24.5 / 23.4},
    },
    columns=[*RISKS, SINK, _GROWTH, _SLOPE, _LINEAR, PEAK, _CHANNEL],
    tables=[
        Columns("Residual norm of <s> over the others', by layer",
                [f"residual_peak_ratio/layer_{i}" for i in range(3)]),
        Columns("The gradient after the first and the second layer",
                [*_GRADIENT, *(of.name.replace("layer_0", "layer_1") for of in _GRADIENT),
                 "gradient_own_share/layer_0 gradient_own_share/layer_1"]),
        Columns("What let the norm of <s> after the first layer grow: shares of the whole growth",
                [f"growth_from/{part}/layer_0" for part in _PARTS]),
        intervention_table("adam", [COPY.name, BIGRAM.name, SINK.name, "residual_peak_ratio/layer_1"]),
    ],
    claims=[
        Claim("Under Adam the residual norm of <s> after the first layer grows.",
              (_GROWTH["adam"] > 3).in_every_seed()),
        Claim("It grows linearly.", (_LINEAR["adam"] > 0.97).in_every_seed()),
        Claim("It is a peak: other tokens' norm does not follow.", (PEAK["adam"] > 2).in_every_seed()),
        Claim("Under SGD the sink stays and the norm of <s> after the first layer does not grow.",
              (_GROWTH["*"] <= 1.5) & (SINK["*"] > 0.7), cases=_SGD_RATES),
        Claim("Under SGD there is no peak after any layer.", (PEAK["*"] < 2).in_every_seed(), cases=_SGD_RATES,
              added="the first layer's norm alone had decided this, with 2.37 after the second layer"),
        Claim("ReLU attention removes the peak after the first layer.", _GROWTH["relu"] <= 1.3),
        Claim("ReLU attention removes it after every layer (the published data have it above 50 after the second and "
              "third).", (PEAK["relu"] < 2).in_every_seed()),
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
    return Metric(f"{Metric(key).label}, without the first layer over with it", of)


def _largest_later(of: Numbers, intervention: str) -> float:
    return float(of.layers(f"{intervention}: residual_peak")[1:].max())


_PEAK_LEFT = Metric(
    "largest later peak, without the first layer over with it",
    lambda of: _largest_later(of, "no_layer_0") / _largest_later(of, "none"),
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
    measures=(INTERVENTIONS,),
    note="Models of up to three blocks, some without attention or MLP: mlp_one_mlp is an MLP, a block and an MLP. The "
    "peak is the norm of the residual stream at <s> less its mean at other tokens. The paper's are of one seed.",
    # Read off its bar chart, but for one that is exact.
    paper={name: {_AFTER_FIRST.name: peak} for name, peak in {
        "two": 15.0, "three": 115.0, "two_mlp": 106.09, "mlp_one_mlp": 11.0, "attention_one_mlp": -1.0}.items()},
    columns=[_AFTER_FIRST, "residual_peak_ratio/layer_0", PEAK, *RISKS],
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
