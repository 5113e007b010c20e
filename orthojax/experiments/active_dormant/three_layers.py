"""Three layers on Bigram-Backcopy: residual-state peaks under Adam, SGD, OrthoAdam and ReLU, and what makes them.

Active-Dormant Attention Heads (arXiv 2410.13835), section 3.2 and its appendix. The published code looks at the first
layer's output alone; here is every layer.
"""

from collections.abc import Sequence

from orthojax.data import open_task
from orthojax.experiments.active_dormant.models import (
    HISTORY,
    INTERVENTIONS,
    MECHANISM,
    ORTHOADAM,
    OUTLIERS,
    PEAK,
    RISKS,
    SEEDS,
    SGD,
    config,
    layer_curves,
)
from orthojax.experiments.active_dormant.views import training_view as view_of
from orthojax.experiments.claims import Claim, Revision, within
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.pictures import LayerCurves, StepCurves
from orthojax.experiments.results import Quantity, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.experiments.training_view import TrainingView

_FIRST = "residual_norm_first/layer_0"
GROWTH = metric(f"{_FIRST}/growth", "residual norm of <s> after the first layer, last over first step")
LINEAR, LOG = (metric(f"{_FIRST}/{kind}_r", f"r of a line over {words}") for kind, words in
               {"linear": "t", "log": "ln t"}.items())  # fmt: skip
SLOPE = Quantity("its growth in 1,000 steps", lambda of: 1000 * of[f"{_FIRST}/linear_slope"])
_RATIO = "residual_peak_ratio"
# End over start of one seed each, 10,000 steps at width 256.
PUBLISHED = {
    "adam": {f"{_FIRST}/growth": 140.7 / 24.4, f"{_FIRST}/linear_r": 0.992, f"{_FIRST}/linear_slope": 0.0124},
    "sgd": {f"{_FIRST}/growth": 20.4 / 24.3},
    "relu": {f"{_FIRST}/growth": 24.5 / 23.4},
}


def _variants(scale: str) -> tuple[Variant, ...]:
    published = scale == "small"
    run = lambda **changes: config(3, published=published, **changes)  # noqa: E731
    variants = [
        Variant("adam", "Adam", run()),
        Variant("sgd", "SGD", run(**SGD, optim__learning_rate=0.03)),
        Variant("sgd_fast", "SGD, higher rate", run(**SGD, optim__learning_rate=0.1)),
        Variant("orthoadam", "OrthoAdam", run(**ORTHOADAM)),
        Variant("relu", "Adam, ReLU attention", run(model__normalizer="relu")),
    ]
    return tuple(variants)


_COSINES, _DECAYS, _WEAK, _KEYS = (
    [metric(f"gradient_{name}/layer_{i}", f"{words}, after layer {i + 1}") for i in range(2)]
    for name, words in (("final_cosine", "cosine with the last gradient"), ("decay", "slope against the norm"),
                        ("weak_share", "share in weak value directions"), ("key_cosine", "cosine with the key"))
)  # fmt: skip


# The verdicts on the whole gradient are in the first reports: not a field of the claim, but another metric.
_OWN = Revision("the gradient was that of the whole loss, which the prediction at <s> itself dominates, after the "
                "second layer almost alone; it is that of all other positions now")  # fmt: skip
_CHANNEL = Quantity("kurtosis of the residual stream at <s>, largest of the layers",
                    lambda of: max(of[f"kurtosis_first/layer_{i}"] for i in range(3)))  # fmt: skip


CLAIMS = (
    Claim("Under Adam the residual norm of <s> after the first layer grows.", ("adam",), (GROWTH, SLOPE),
          lambda of: within(of, GROWTH, 3, 1e9), "to at least 3 times its start in every seed"),
    Claim("It grows linearly.", ("adam",), (LINEAR, LOG),
          lambda of: within(of, LINEAR, 0.97, 2), "r of a line above 0.97 from step 500 on, in "
          "every seed"),
    Claim("It is a peak: other tokens' norm does not follow.", ("adam",), (f"{_RATIO}/layer_0", PEAK),
          lambda of: within(of, PEAK, 2, 1e9), "above 2 times theirs after some layer, in every seed"),
    Claim("Under SGD the sink stays and the norm of <s> after the first layer does not grow.",
          {"published rate": ("sgd",), "higher rate": ("sgd_fast",)}, (GROWTH, "sink_attention_rest"),
          lambda of: of.mean(GROWTH) <= 1.5 and of.sink_attention_rest > 0.7,
          "first layer's norm at most 1.5 times its start, a sink above 0.7 in some layer"),
    Claim("Under SGD there is no peak after any layer.",
          {"published rate": ("sgd",), "higher rate": ("sgd_fast",)}, (PEAK,), lambda of: within(of, PEAK, 0, 2),
          "below 2 times the other tokens' norm after every layer, in every seed",
          revised=Revision("the first layer's norm alone had decided this, with 2.37 after the second layer")),
    Claim("ReLU attention removes the peak after the first layer.", ("relu",), (GROWTH,),
          lambda of: of.mean(GROWTH) <= 1.3, "at most 1.3 times its start"),
    Claim("ReLU attention removes it after every layer.", ("relu",), (PEAK,),
          lambda of: within(of, PEAK, 0, 2), "below 2 times the other tokens' norm after every layer, in "
          "every seed; the published data have it above 50 after the second and third"),
    Claim("OrthoAdam keeps the peak, since its updates are as constant as Adam's.", ("orthoadam",),
          (GROWTH, PEAK), lambda of: within(of, GROWTH, 3, 1e9),
          "first layer's norm at least 3 times its start in every seed; a prediction of ours, made before"),
    Claim("OrthoAdam removes its channel.", ("adam", "orthoadam"), (_CHANNEL,),
          lambda adam, ortho: ortho.mean(_CHANNEL) < 0.5 * adam.mean(_CHANNEL),
          "kurtosis at <s> after some layer below half of Adam's; a prediction of ours, made before"),
    Claim("The gradient at <s> keeps one direction.", ("adam",), _COSINES,
          lambda of: of.mean(_COSINES[0]) > 0.5, "mean cosine with the last one above 0.5, after the first layer",
          revised=_OWN),
    Claim("The gradient falls as the norm grows.", ("adam",), _DECAYS,
          lambda of: of.mean(_DECAYS[0]) < -0.5, "slope of its logarithm against that of the norm below -0.5",
          revised=_OWN),
    Claim("The gradient lies in the null space of the value matrices above.", ("adam",), _WEAK,
          lambda of: of.mean(_WEAK[0]) > 0.5, "more than half of its square in their weakest quarter of directions",
          revised=_OWN),
    Claim("The gradient pushes along the key of <s>.", ("adam",), _KEYS,
          lambda of: abs(of.mean(_KEYS[0])) > 0.5, "cosine with the key's direction above 0.5, of either sign",
          revised=_OWN),
    Claim("Every optimizer learns to copy.", lambda results: {r.label: (r.name,) for r in results}, RISKS[:1],
          lambda of: of.backcopy_excess_risk_nats < 0.1,
          "backcopy excess risk below 0.1 nats; published for SGD 0.0557"),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    c = results.first.config
    return [
        f"Three blocks of width {c.model.d_model} with one head, {c.train.steps} steps of {c.train.batch_size} x "
        f"{c.data.sequence_length} tokens; Adam and OrthoAdam (Haar) at {c.optim.learning_rate:g} with weight decay, "
        "SGD with momentum 0.9. A peak is the norm of the residual stream at <s> over its mean at other tokens."
    ]


def _views(results: Results) -> Sequence[TrainingView]:
    names = {"sink_attention_rest": "attention to <s>", "value_drain": "value norm, <s> over others",
             _RATIO: "residual norm, <s> over others"}  # fmt: skip
    curves = layer_curves(3, names)
    return [view_of(result, open_task(result.config.data)[0], curves) for result in results.finished]


_LAYERS = {f"layer_{i}": f"after layer {i + 1}" for i in range(3)}
_IN_LAYERS = {f"layer_{i}": f"layer {i + 1}" for i in range(3)}
_OWN_SHARES = [metric(f"gradient_own_share/layer_{i}", f"share of its own loss, after layer {i + 1}") for i in range(2)]
_GROWN = [
    metric(f"growth_from/{part}/layer_0", words)
    for part, words in {
        "token": "token embedding", "position": "position embedding", "layers_0/attention_norm": "first norm",
        "layers_0/attention": "attention", "layers_0/mlp_norm": "second norm", "layers_0/mlp": "MLP",
    }.items()
]  # fmt: skip
_CHANGES = {
    "none": "none", "no_value_of_bos": "values of <s> zeroed", "no_layer_0": "first layer zeroed",
    "no_layer_0_at_bos": "first layer zeroed at <s>", **{f"no_attention_{i}": f"attention {i + 1} zeroed" for i in
    range(3)}, **{f"no_mlp_{i}": f"MLP {i + 1} zeroed" for i in range(3)},
}  # fmt: skip
_CHANGED = {RISKS[0]: "backcopy excess risk (nats)", RISKS[1]: "bigram excess risk (nats)",
            "sink_attention_rest": "attention to <s>, largest of the layers",
            f"{_RATIO}/layer_1": "residual norm of <s> / others', after layer 2"}  # fmt: skip
EXPERIMENT = Experiment(
    name="three_layers",
    title="Bigram-Backcopy, three layers: residual-state peaks under Adam, SGD, OrthoAdam and with ReLU attention",
    variants=_variants,
    scales=("tiny", "small"),
    seeds=SEEDS,
    about=_about,
    paper=PUBLISHED,
    measures=(HISTORY, INTERVENTIONS, MECHANISM, OUTLIERS),
    tables=(
        MetricTable("At the end", [*RISKS, "sink_attention_rest", GROWTH, SLOPE, LINEAR, PEAK]),
        MetricTable("Residual norm of <s> over the others', by layer",
                    [metric(f"{_RATIO}/{layer}", words) for layer, words in _LAYERS.items()]),
        MetricTable("The gradient of the loss at other positions with respect to the residual stream at <s>, from step "
                    "200 on", [*_COSINES, *_DECAYS, *_WEAK, *_KEYS, *_OWN_SHARES]),
        MetricTable("What let the norm of <s> after the first layer grow: shares of the whole growth", _GROWN),
        *(MetricTable(f"Interventions: {words}", [metric(f"{name}: {key}", label) for name, label in _CHANGES.items()])
          for key, words in _CHANGED.items()),
        MetricTable("Attention of non-triggers to <s>, by layer",
                    [metric(f"sink_attention_rest/{layer}", words) for layer, words in _IN_LAYERS.items()]),
        MetricTable("Value norm of <s> over the others', by layer",
                    [metric(f"value_drain/{layer}", words) for layer, words in _IN_LAYERS.items()]),
        MetricTable("Outliers", [_CHANNEL, "kurtosis_first", "kurtosis_rest", "max_abs_first", "max_abs_rest"]),
    ),
    claims=CLAIMS,
    pictures=(
        *(StepCurves(f"residual_norm_{layer}", f"Residual norm of <s> {words}.", "||x|| at <s>",
                     {f"residual_norm_first/{layer}": ""}, "log", "linear") for layer, words in _LAYERS.items()),
        LayerCurves("peak_by_layer", "Residual norm of <s> over that of others.", "ratio", {_RATIO: ""}, "log"),
        LayerCurves("sink_by_layer", "Attention of non-triggers to <s>.", "mean weight", {"sink_attention_rest": ""}),
        LayerCurves("drain_by_layer", "Value norm of <s> over that of others.", "ratio", {"value_drain": ""}, "log"),
    ),
    views=_views,
)  # fmt: skip
