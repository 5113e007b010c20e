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
    RISKS,
    SEEDS,
    SGD,
    config,
    layer_curves,
)
from orthojax.experiments.active_dormant.models import training_view as view_of
from orthojax.experiments.claims import Claim, within
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.pictures import LayerCurves, StepCurves
from orthojax.experiments.results import Numbers, Quantity, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.experiments.training_view import TrainingView

_FIRST = "residual_norm_first/layer_0"
GROWTH = metric(f"{_FIRST}/growth", "residual norm of <s> after the first layer, last over first step")
SLOPE = Quantity("its growth in 1,000 steps", lambda of: 1000 * of[f"{_FIRST}/linear_slope"])
_RATIO = "residual_peak_ratio"
# End over start of one seed each, 10,000 steps at width 256.
PUBLISHED = {
    "adam": {f"{_FIRST}/growth": 140.7 / 24.4, f"{_FIRST}/linear_r": 0.992, f"{_FIRST}/linear_slope": 0.0124},
    "sgd": {f"{_FIRST}/growth": 20.4 / 24.3},
    "relu": {f"{_FIRST}/growth": 24.5 / 23.4},
}


def _variants(scale: str) -> tuple[Variant, ...]:
    small = scale == "small"
    run = lambda **changes: config(3, small=small, **changes)  # noqa: E731
    variants = [
        Variant("adam", "Adam", run()),
        Variant("sgd", "SGD", run(**SGD, optim__learning_rate=0.03)),
        Variant("sgd_fast", "SGD, higher rate", run(**SGD, optim__learning_rate=0.1)),
        Variant("orthoadam", "OrthoAdam", run(**ORTHOADAM)),
        Variant("relu", "Adam, ReLU attention", run(model__normalizer="relu")),
    ]
    return tuple(variants)


def worst_layer(key: str) -> Quantity:
    """The largest value over layers."""

    def largest(of: Numbers) -> float:
        layers, i = [], 0
        while f"{key}/layer_{i}" in of:
            layers.append(of[f"{key}/layer_{i}"])
            i += 1
        return max(layers) if layers else of[key]

    return Quantity(f"{key}, largest of the layers", largest)


_LARGEST_RATIO = worst_layer(_RATIO)

_COSINES, _DECAYS, _WEAK, _KEYS = (
    [metric(f"gradient_{name}/layer_{i}", f"{words}, layer {i + 1}") for i in range(2)]
    for name, words in (("final_cosine", "cosine with the last gradient"), ("decay", "slope against the norm"),
                        ("weak_share", "share in weak value directions"), ("key_cosine", "cosine with the key"))
)  # fmt: skip


CLAIMS = (
    Claim("Under Adam the residual norm of <s> after the first layer grows.", ("adam",), (GROWTH, SLOPE),
          lambda of: within(of, GROWTH, 3, 1e9), "to at least 3 times its start in every seed"),
    Claim("It grows linearly.", ("adam",), (f"{_FIRST}/linear_r", f"{_FIRST}/log_r"),
          lambda of: within(of, metric(f"{_FIRST}/linear_r"), 0.97, 2), "r of a line above 0.97 from step 500 on, in "
          "every seed"),
    Claim("It is a peak: other tokens' norm does not follow.", ("adam",), (f"{_RATIO}/layer_0", _LARGEST_RATIO),
          lambda of: within(of, _LARGEST_RATIO, 2, 1e9), "above 2 times theirs after some layer, in every seed"),
    Claim("Under SGD the sink stays and the peak does not come.", ("sgd",),
          (GROWTH, _LARGEST_RATIO, "sink_attention_rest"),
          lambda of: of.mean(GROWTH) <= 1.5 and of.sink_attention_rest > 0.7,
          "first layer's norm at most 1.5 times its start, a sink above 0.7 in some layer"),
    Claim("At a higher rate, too.", ("sgd_fast",), (GROWTH, _LARGEST_RATIO, "sink_attention_rest"),
          lambda of: of.mean(GROWTH) <= 1.5 and of.sink_attention_rest > 0.7,
          "first layer's norm at most 1.5 times its start, a sink above 0.7 in some layer"),
    Claim("ReLU attention removes the peak after the first layer.", ("relu",), (GROWTH,),
          lambda of: of.mean(GROWTH) <= 1.3, "at most 1.3 times its start"),
    Claim("ReLU attention removes it after every layer.", ("relu",), (_LARGEST_RATIO,),
          lambda of: within(of, _LARGEST_RATIO, 0, 2), "below 2 times the other tokens' norm after every layer, in "
          "every seed; the published data have it above 50 after the second and third"),
    Claim("OrthoAdam keeps the peak, since its updates are as constant as Adam's.", ("orthoadam",),
          (GROWTH, _LARGEST_RATIO), lambda of: within(of, GROWTH, 3, 1e9),
          "first layer's norm at least 3 times its start in every seed; a prediction of ours, made before"),
    Claim("The gradient at <s> keeps one direction.", ("adam",), _COSINES,
          lambda of: of.mean(_COSINES[0]) > 0.5, "mean cosine with the last one above 0.5, after the first layer"),
    Claim("It falls as the norm grows.", ("adam",), _DECAYS,
          lambda of: of.mean(_DECAYS[0]) < -0.5, "slope of its logarithm against that of the norm below -0.5"),
    Claim("It lies in the null space of the value matrices above.", ("adam",), _WEAK,
          lambda of: of.mean(_WEAK[0]) > 0.5, "more than half of its square in their weakest quarter of directions"),
    Claim("Or it pushes along the key of <s>.", ("adam",), _KEYS,
          lambda of: abs(of.mean(_KEYS[0])) > 0.5, "cosine with the key's direction above 0.5, of either sign"),
    Claim("Every optimizer learns the task.", lambda results: {r.label: (r.name,) for r in results}, RISKS,
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
EXPERIMENT = Experiment(
    name="three_layers",
    title="Bigram-Backcopy, three layers: residual-state peaks under Adam, SGD, OrthoAdam and with ReLU attention",
    variants=_variants,
    scales=("tiny", "small"),
    seeds=SEEDS,
    about=_about,
    paper=PUBLISHED,
    measures=(HISTORY, INTERVENTIONS, MECHANISM),
    tables=(
        MetricTable("At the end", [*RISKS, "sink_attention_rest", GROWTH, SLOPE, f"{_FIRST}/linear_r", _LARGEST_RATIO]),
        MetricTable("Residual norm of <s> over the others', by layer",
                    [metric(f"{_RATIO}/{layer}", words) for layer, words in _LAYERS.items()]),
        MetricTable("The gradient of the loss with respect to the residual stream at <s>, from step 200 on",
                    [*_COSINES, *_DECAYS, *_WEAK, *_KEYS]),
        MetricTable("Attention of non-triggers to <s>, by layer",
                    [metric(f"sink_attention_rest/{layer}", words) for layer, words in _LAYERS.items()]),
        MetricTable("Value norm of <s> over the others', by layer",
                    [metric(f"value_drain/{layer}", words) for layer, words in _LAYERS.items()]),
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
