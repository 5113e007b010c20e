"""Which blocks make the residual-state peak, and what goes with it when the first layer is knocked out.

Active-Dormant Attention Heads (arXiv 2410.13835), appendix: the five models of its bar chart.
"""

from orthojax.experiments.active_dormant.models import HISTORY, INTERVENTIONS, PEAK, RISKS, SEEDS, config
from orthojax.experiments.claims import Claim, Revision, within
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.pictures import LayerCurves, StepCurves
from orthojax.experiments.results import Quantity, Results, metric
from orthojax.experiments.tables import MetricTable

_PEAK = "residual_peak/layer_0"
# Norm of <s> less the others' after the first layer; one seed, 10,000 steps at width 256; one of them exact.
PUBLISHED = {
    "two": {_PEAK: 15.0},
    "three": {_PEAK: 115.0},
    "two_mlp": {_PEAK: 106.09},
    "mlp_one_mlp": {_PEAK: 11.0},
    "attention_one_mlp": {_PEAK: -1.0},
}


def _variants(scale: str) -> tuple[Variant, ...]:
    published = scale == "small"
    relu, none = ("relu", "relu", "relu"), ("none", "relu", "relu")
    return (
        Variant("two", "2 blocks", config(2, published=published)),
        Variant("three", "3 blocks", config(3, published=published)),
        Variant("two_mlp", "2 blocks, MLP", config(3, published=published, model__attention=(True, True, False))),
        Variant("mlp_one_mlp", "MLP, block, MLP",
                config(3, published=published, model__attention=(False, True, False))),
        Variant("attention_one_mlp", "attention, block, MLP",
                config(3, published=published, model__attention=(True, True, False), model__mlp=none)),
        Variant("two_mlps", "block, MLP, MLP", config(3, published=published, model__attention=(True, False, False),
                                                      model__mlp=relu)),
    )  # fmt: skip


_LARGE, _SMALL = ("three", "two_mlp"), ("two", "mlp_one_mlp", "attention_one_mlp")
_KNOCKED, _BEFORE = "no_layer_0: ", "none: "


def _ratio(key: str, label: str) -> Quantity:
    return Quantity(label, lambda of: of[_KNOCKED + key] / of[_BEFORE + key])


_PEAK_LEFT = Quantity(
    "largest peak after the second layer or later that is left",
    lambda of: (
        max(of[f"{_KNOCKED}residual_peak/layer_{i}"] for i in range(1, int(of.num_layers)))
        / max(of[f"{_BEFORE}residual_peak/layer_{i}"] for i in range(1, int(of.num_layers)))
    ),
)
_FIRST_PEAK_LEFT = _ratio(_PEAK, "peak after the first layer that is left")
_GAP_LEFT = _ratio("sink_logit_gap/layer_1", "logit gap of the second layer that is left")
_VALUE_RISES = _ratio("value_norm_first/layer_1", "value norm of <s> in the second layer, after over before")
_RISK = [Quantity(f"{risk.split('_')[0]} excess risk without the first layer", lambda of, r=risk: of[_KNOCKED + r])
         for risk in RISKS]  # fmt: skip


CLAIMS = (
    Claim("The large peak needs attention and MLP in the first block and something above the second.",
          (*_LARGE, *_SMALL), (metric(_PEAK, "peak after the first layer"),),
          lambda *of: min(r.mean(_PEAK) for r in of[:2]) > 2 * max(r.mean(_PEAK) for r in of[2:]),
          "the smaller of the first two peaks is above twice the largest of the other three"),
    Claim("Knocking out the first layer removes the peak.", ("two_mlp",), (_PEAK_LEFT,),
          lambda of: of.mean(_PEAK_LEFT) < 0.2, "less than a fifth is left after any later layer; published 0.7 of "
          "106, after the first", revised=Revision("after the layer that is knocked out it can hardly be there", {
              "show": (_FIRST_PEAK_LEFT,), "holds": lambda of: of.mean(_FIRST_PEAK_LEFT) < 0.2,
              "criterion": "less than a fifth is left after the first layer"})),
    Claim("It removes the sink of the next layer.", ("two_mlp",), (_GAP_LEFT,),
          lambda of: of.mean(_GAP_LEFT) < 0.2, "less than a fifth of the logit gap is left; published 1.92 of 18.93"),
    Claim("It removes the value drain there.", ("two_mlp",), (_VALUE_RISES,),
          lambda of: within(of, _VALUE_RISES, 5, 1e9),
          "the value norm of <s> rises five-fold or more, in every seed; published 0.729 to 10.62"),
    Claim("Without it the task is lost.", ("two_mlp",), _RISK,
          lambda of: of.mean(_RISK[0]) > 1 and of.mean(_RISK[1]) > 0.05,
          "backcopy above 1 nat and bigram above 0.05; published 2.44 and 0.25"),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    c = results.first.config
    return [
        f"Models of up to three blocks of width {c.model.d_model}, some without attention or MLP, after "
        f"{c.train.steps} steps. The peak is the norm of the residual stream at <s> less its mean at other tokens, "
        "after the first layer."
    ]


EXPERIMENT = Experiment(
    name="peak_blocks",
    title="Bigram-Backcopy: which blocks make the residual-state peak, and knocking out the first",
    variants=_variants,
    scales=("tiny", "small"),
    seeds=SEEDS,
    about=_about,
    paper=PUBLISHED,
    measures=(HISTORY, INTERVENTIONS),
    tables=(
        MetricTable("Peaks", [metric(_PEAK, "after the first layer"),
                              metric("residual_peak_ratio/layer_0", "ratio after the first layer"),
                              PEAK, *RISKS]),
        MetricTable("Without the first layer", [_FIRST_PEAK_LEFT, _PEAK_LEFT, _GAP_LEFT, _VALUE_RISES, *_RISK],
                    keep=lambda r: r.name in ("two", "three", "two_mlp")),
    ),
    claims=CLAIMS,
    pictures=(
        LayerCurves("peak_by_layer", "Residual norm of <s> over that of others.", "ratio", {"residual_peak_ratio": ""},
                    "log"),
        StepCurves("peak", "Norm of <s> after the first layer.", "||x|| at <s>", {"residual_norm_first/layer_0": ""},
                   x_scale="linear"),
    ),
)  # fmt: skip
