"""Which recipe of training survives 8 and 4 bits, and at what cost: preventions of outliers in one setting."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from orthojax import analysis, quant
from orthojax.config import Config, replace
from orthojax.experiments import claims as c
from orthojax.experiments.base import BREAKING_MODEL, cured
from orthojax.experiments.claims import Claim, Metric
from orthojax.experiments.from_attention.channels import correlation
from orthojax.experiments.measures import FOUR_BIT, FOUR_BITS, Measure, Metrics, Say
from orthojax.experiments.study import Study
from orthojax.model import LoadedModel, Transformer, fold_embedding_projection
from orthojax.report.page import Table
from orthojax.report.pictures import LOSS, Bars, ByStep, Dots
from orthojax.report.results import Missing, Result, Results
from orthojax.report.tables import Columns, Paired
from orthojax.train import Inputs, rounded_perplexities
from orthojax.train.evaluation import rotated_perplexities
from orthojax.train.step import split_tokens

BREAKS = Study(
    name="breaks",
    title="Vanilla in the setting that int8 damages most, three seeds, and the cure",
    runs=lambda scale: {"vanilla": BREAKING_MODEL, "cured": cured(BREAKING_MODEL)},
    seeds=(0, 1, 2),
    measures=(FOUR_BITS,),
    note="Repeated passages, rotary positions, swiglu, weight decay 0.5, 8,000 steps of 1,024 tokens. The setting was "
    "chosen on vanilla models of seed 100.",
    columns=["perplexity kurtosis_first kurtosis_rest first_attention_fraction first_attention_mass", c.PEAK],
    tables=[Columns("Perplexity lost to rounding", [c.lost(name) for name in (*quant.SETTINGS, *FOUR_BIT)])],
    claims=[
        Claim("Vanilla loses 20% or more at int8 coarse, in every seed.",
              (c.lost(c.COARSE)["vanilla"] >= 0.2).in_every_seed()),
        Claim("Cured loses less than 3%, in every seed.", (c.lost(c.COARSE)["cured"] < 0.03).in_every_seed(),
              c.lost(c.COARSE)["vanilla"] >= 0.05),
        Claim("At 4 bits cured loses less than half of what vanilla loses.",
              c.lost("w4a4")["cured"] < 0.5 * c.lost("w4a4")["vanilla"]),
        c.halved("The cure takes half of the dominance away, or more.", "cured", "vanilla"),
        c.cured_outliers("The cure leaves no outliers.", "cured", "vanilla"),
        c.equivalent("Perplexity is the same within 1%.", "cured", "vanilla"),
    ],
    headlines=[(metric, "vanilla", "cured") for metric in (c.lost(c.COARSE), "kurtosis_first", "perplexity")],
    pictures=[ByStep("first_attention_fraction", name="dominance"), ByStep("kurtosis_first kurtosis_rest",
              y_scale="log", name="kurtosis"), LOSS],
)  # fmt: skip


FORMATS = (c.COARSE, "int4_group128", "w4a4", "w4a4kv4", "fp8_e4m3", "mxfp4", "nvfp4")
_ROTATED = (c.COARSE, "w4a4", "mxfp4", "nvfp4")  # after training
_ROWS = 64  # for the propagated error


def _rounded(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    """Measures perplexity at each format, also after a rotation, and published predictors of it.

    A learned projection of the embeddings is folded first.
    """
    model, params = loaded.config.model, loaded.params
    if model.embedding_projection:
        params, model = fold_embedding_projection(params, model)
    config = dataclasses.replace(loaded.config, model=model)
    plain = loaded._replace(model=Transformer(model), params=params, config=config)
    found = rounded_perplexities(plain, inputs, {name: quant.setting_named(name) for name in FORMATS}, on_progress=say)
    found |= rotated_perplexities(plain, inputs, {name: quant.setting_named(name) for name in _ROTATED}, say)
    tokens = split_tokens(inputs.evaluation[:_ROWS], model)[0]
    for name in (c.COARSE, "w4a4", "nvfp4"):
        error = quant.rounding_error(plain.model, params, quant.setting_named(name), tokens)
        found[f"last_state_error_{name}"] = error.last_state
    return found | analysis.finalize(analysis.measure(plain, [tokens], analysis.observe_predictors))


ROUNDED = Measure("preventions", _rounded)

_BASE = replace(BREAKING_MODEL, {"train.steps": 4000})
_MUON: dict[str, Any] = {"optim.optimizer": "muon", "optim.momentum": 0.95}
_MUON_ORTHOADAM = _MUON | {"optim.muon_embeddings": "orthoadam"}

# Optimizer -> what it changes, and the rate that `preventions_tuning` chose: the lowest perplexity of three, each twice
# the previous one; for Muon the largest that was tried, 2% below the one before.
_OPTIMIZERS: dict[str, tuple[dict[str, Any], float]] = {
    "adam": ({}, 3e-3),
    "orthoadam": ({"optim.optimizer": "orthoadam"}, 3e-3),
    "muon": (_MUON | {"optim.muon_embeddings": "adam"}, 1.2e-2),
    "muon_orthoadam": (_MUON_ORTHOADAM, 6e-3),
}


def _with_rate(changes: Mapping[str, Any], rate: float) -> Config:
    """Returns a run at a rate, with the base's product of rate and weight decay, so that all forget equally fast."""
    optim = _BASE.optim
    decay = optim.weight_decay * optim.learning_rate / rate
    return replace(_BASE, {**changes, "optim.learning_rate": rate, "optim.weight_decay": decay})


# Recipe -> its optimizer, and its other changes: those that one would choose, then parts and variants of them.
_Recipes = Mapping[str, tuple[str, Mapping[str, Any]]]
_OSP = {"model.embedding_projection": True}
_RECIPES: _Recipes = {
    "adam": ("adam", {}),
    "cured": ("orthoadam", {"model.normalizer": "softmax1"}),
    "muon": ("muon", {}),
    "muon_orthoadam": ("muon_orthoadam", {}),
    "orthoadam": ("orthoadam", {}),
    "adam_gate": ("adam", {"model.gated_attention": "elementwise"}),
    "osp": ("muon", _OSP),
}
_PARTS: _Recipes = {
    "adam_softmax1": ("adam", {"model.normalizer": "softmax1"}),
    "orthoadam_gate": ("orthoadam", {"model.gated_attention": "elementwise"}),
    "adam_tweo": ("adam", {"train.activation_penalty": 0.01}),
    "muon_orthoadam_softmax1": ("muon_orthoadam", {"model.normalizer": "softmax1"}),
    "adam_sinks": ("adam", {"model.normalizer": "learned_sink"}),
    "osp_channel_norm": ("muon", _OSP | {"model.norm": "rmsnorm"}),
    "osp_adam": ("adam", _OSP),
    "adam_softpick": ("adam", {"model.normalizer": "softpick"}),
}


def _runs(recipes: _Recipes) -> dict[str, Config]:
    return {
        name: _with_rate({**_OPTIMIZERS[of][0], **changes}, _OPTIMIZERS[of][1])
        for name, (of, changes) in recipes.items()
    }


def recipes() -> dict[str, Config]:
    """Returns the run of every recipe that is compared, by name."""
    return _runs({**_RECIPES, **_PARTS, **_OF_SINKS})


def _correlates(metric: Metric, setting: str, least: float, **more: Any) -> Claim:
    def rho(of: Sequence[Result]) -> float:
        of = [result for result in of if result.seeds]
        if len(of) < 7:
            raise Missing("fewer than seven recipes")
        return correlation([r[metric] for r in of], [r[c.lost(setting)] for r in of], of_ranks=True)

    holds = c.check(lambda *of: rho(of) >= least, words=f"Spearman's rho with the loss over recipes at least {least:g}")
    says = f"{metric.label} orders what recipes lose at {setting}."
    return Claim(says, holds, note=lambda scope: f"rho {rho(scope.study):.2f}", **more)


def _breaks(setting: str) -> Any:
    return c.lost(setting)["adam"] >= 0.05


_ABOUT = (
    "4,000 steps of 1,024 tokens, the setting of `breaks`; all have one scale in every norm but `osp_channel_norm`, "
    "and have equal learning rate x weight decay. Rates are those that `preventions_tuning` chose for the optimizer. "
    "`osp` is Muon with Adam on embeddings and learned projections of them (arXiv 2506.19697), `muon_orthoadam` Muon "
    "with OrthoAdam on the embeddings, `gate` the elementwise gate of arXiv 2505.06708; `rotated` is a rotation after "
    "training."
)
_COLUMNS: Any = ["perplexity kurtosis_first kurtosis_rest osp_kurtosis", c.PEAK,
                 "first_attention_fraction first_attention_mass gu_sink_rate"]  # fmt: skip
_TABLES = [
    Columns("Perplexity lost at each format", [c.lost(name) for name in FORMATS]),
    Columns("The same after a rotation", [c.lost(f"{name}_rotated") for name in _ROTATED]),
    Columns("What is said to predict it", ["max_over_median gu_sink_rate_any",
            *(f"last_state_error_{name}" for name in (c.COARSE, "w4a4", "nvfp4"))]),
    Paired("Change of perplexity from Adam, paired by seed", "adam", "*", "perplexity"),
]  # fmt: skip
_PICTURES = [
    Bars("formats", "Perplexity lost at each format, in percent; linear up to 2%.", [c.lost(name) for name in FORMATS],
         y_label="%", scale=100, y_scale="symlog"),
    Dots("decision", "Perplexity after rounding to each format. Each dot is a seed, numbers are means; green is within "
         "1% of the lowest.", {"float": c.PPL} | {
             words: Metric(f"perplexity_{name}") for words, name in
             (("int8, coarse", c.COARSE), ("w4a4", "w4a4"), ("NVFP4", "nvfp4"), ("MXFP4", "mxfp4"))}),
]  # fmt: skip

_SHARED: Any = {"seeds": (1, 2, 3), "measures": (ROUNDED,), "rounding": False, "tables": _TABLES,
                "pictures": _PICTURES}  # fmt: skip

PREVENTIONS = Study(
    name="preventions",
    title="Preventions of outliers: perplexity, cost and loss at 8 and 4 bits, with equal budgets",
    runs=lambda scale: _runs(_RECIPES),
    **_SHARED,
    cost_reference=lambda name: "adam",
    note=f"{_ABOUT} Criteria were committed before any run; six recipes with seed 0 and 2,000 steps, where Adam lost "
    "3% at int8 coarse, then made it 4,000 steps and other seeds.",
    columns=[*_COLUMNS, "cost_step_ratio cost_optimizer_state_ratio"],
    claims=[
        Claim("There is something to prevent: Adam loses 5% or more at int8 coarse, and 10% or more at w4a4.",
              (c.lost(c.COARSE)["adam"] >= 0.05) & (c.lost("w4a4")["adam"] >= 0.1)),
        *(Claim(f"Softmax-1 with OrthoAdam loses at most a third of what Adam loses at {name}.",
                c.lost(name)["cured"] <= c.lost(name)["adam"] / 3, _breaks(name)) for name in _ROTATED),
        *(Claim(f"Muon with OrthoAdam on the embeddings loses at most half of what Muon loses at {name}.",
                c.lost(name)["muon_orthoadam"] <= 0.5 * c.lost(name)["muon"], c.lost(name)["muon"] >= 0.05)
          for name in _ROTATED),
        *(Claim(f"The gate alone loses at most half of what Adam loses at {name}.",
                c.lost(name)["adam_gate"] <= 0.5 * c.lost(name)["adam"], _breaks(name)) for name in (c.COARSE, "w4a4")),
        Claim("Muon alone has outliers.", c.worst("muon") > c.OUTLIERS),
        c.cured_outliers("OSP has none.", "osp", "adam"),
        c.cured_outliers("Muon with OrthoAdam on the embeddings has none.", "muon_orthoadam", "adam"),
        *(c.halved(f"The sink: {name} takes half of the dominance away, or more.", name, "adam")
          for name in ("cured", "adam_gate", "muon")),
        Claim("Small groups do not make prevention superfluous: at nvfp4 cured loses less than Adam, in every seed.",
              (c.lost("nvfp4")["cured"] < c.lost("nvfp4")["adam"]).in_every_seed()),
        *(Claim(f"Prevention is better than a rotation afterwards at {name}.",
                c.lost(name)["cured"] < c.lost(f"{name}_rotated")["adam"], _breaks(name)) for name in _ROTATED),
        Claim("A rotation afterwards does not help the cured model at w4a4.",
              c.lost("w4a4_rotated")["cured"] >= 0.9 * c.lost("w4a4")["cured"]),
        _correlates(c.WORST, "w4a4", 0.8),
        _correlates(Metric("osp_kurtosis"), "w4a4", 0.8),
        _correlates(Metric("last_state_error_w4a4"), "w4a4", 0.8),
        _correlates(Metric("last_state_error_int8_coarse"), c.COARSE, 0.8),
        _correlates(c.PEAK, c.COARSE, 0.8, added="when one seed was there"),
        _correlates(c.WORST, c.COARSE, 0.8, added="when one seed was there"),
        *(c.equivalent(f"{name} has the perplexity of Adam within 1%.", name, "adam")
          for name in ("cured", "adam_gate", "muon_orthoadam")),
        c.no_perplexity_lost("No recipe costs perplexity.", "*", "adam",
                             cases=[name for name in _RECIPES if name != "adam"]),
    ],
)  # fmt: skip

PARTS = Study(
    name="preventions_parts",
    title="Preventions of outliers, part by part and their relatives, in the setting of `preventions`",
    runs=lambda scale: _runs({**_RECIPES, **_PARTS}),
    **_SHARED,
    note=f"{_ABOUT} `tweo` is the penalty of arXiv 2511.23225, `osp_adam` OSP's projections with Adam. Criteria were "
    "committed before any run of the recipes that `preventions` does not have.",
    columns=_COLUMNS,
    claims=[
        Claim("OSP needs each of its parts: without one there are outliers.",
              c.all_of(c.outliers(name) for name in ("muon", "osp_channel_norm", "osp_adam")), c.outliers("adam")),
        c.cured_outliers("TWEO's penalty leaves none.", "adam_tweo", "adam"),
        Claim("Softmax-1, a gate, learned sinks or softpick leave the outliers of Adam.",
              c.all_of(c.FIRST[f"adam_{name}"] > c.OUTLIERS for name in ("softmax1", "gate", "sinks", "softpick")),
              c.outliers("adam")),
        *(c.halved(f"The sink: {name} takes half of the dominance away, or more.", f"adam_{name}", "adam")
          for name in ("softmax1", "sinks", "softpick")),
        c.no_perplexity_lost("No part but softpick costs perplexity.", "*", "adam",
                             cases=[name for name in _PARTS if name != "adam_softpick"]),
    ],
)  # fmt: skip

_SINKS = ("adam", "orthoadam", "muon", "muon_orthoadam")
_WITH_SINKS = {"model.normalizer": "learned_sink"}
_OF_SINKS: _Recipes = {f"{name}_sinks": (name, _WITH_SINKS) for name in _SINKS}


def _rounded_perplexity(name: str) -> Any:
    return Metric("perplexity_w4a4")[name]


SINKS = Study(
    name="preventions_sinks",
    title="Learned sinks with four optimizers, in the setting of `preventions`",
    runs=lambda scale: _runs({**{name: (name, {}) for name in _SINKS}, **_OF_SINKS}),
    **_SHARED,
    note=f"{_ABOUT} Adam with learned sinks lost least at 4 bits in `preventions_parts`, which is where the rows of "
    "Adam come from; criteria were committed before any run of the other three with sinks.",
    columns=_COLUMNS,
    claims=[
        *(Claim(f"With {name} learned sinks lose at most two thirds of what softmax loses at w4a4.",
                c.lost("w4a4")[f"{name}_sinks"] <= c.lost("w4a4")[name] * 0.667, c.lost("w4a4")[name] >= 0.1,
                added="with Adam, of which three seeds were there" if name == "adam" else "") for name in _SINKS),
        Claim("At w4a4 Muon with learned sinks has a lower perplexity than without, in every seed.",
              (_rounded_perplexity("muon_sinks") < _rounded_perplexity("muon")).in_every_seed()),
        Claim("Muon with sinks, with or without OrthoAdam, is lowest of eight.",
              c.all_of((_rounded_perplexity("muon_sinks") < _rounded_perplexity(name))
                       | (_rounded_perplexity("muon_orthoadam_sinks") < _rounded_perplexity(name))
                       for name in (*_SINKS, "adam_sinks", "orthoadam_sinks"))),
        c.cured_outliers("OrthoAdam with learned sinks has no outliers.", "orthoadam_sinks", "adam"),
        c.cured_outliers("Muon with learned sinks, OrthoAdam on the embeddings, has none.", "muon_orthoadam_sinks",
                         "adam"),
        *(c.halved(f"The sink: with {name} learned sinks take half of the dominance away, or more.", f"{name}_sinks",
                   name) for name in _SINKS[1:]),
        *(c.no_perplexity_lost(f"Learned sinks cost {name} no perplexity.", f"{name}_sinks", name)
          for name in _SINKS[1:]),
    ],
)  # fmt: skip


def _ranking(results: Results) -> Table:
    """Ranks recipes by their perplexity after rounding to w4a4."""
    rounded = Metric("perplexity_w4a4")
    ranked = sorted(results.finished, key=lambda result: result[rounded])
    ranked = Results({result.name: result for result in ranked})
    return Columns("Ranked by perplexity at w4a4", [rounded, "perplexity", c.lost("w4a4"), c.lost(c.COARSE)])(ranked)


def own_recipes(name: str, recipes: Mapping[str, Mapping[str, Any]]) -> tuple[Study, Study]:
    """Makes a study of recipes of one's own in the setting of `preventions`, and the board that ranks them.

    The board, NAME_board, is for --report, beside the results of `preventions_sinks`. `recipes` is recipe -> changes of
    the setting's config, by path, among them learning rate and weight decay.
    """
    own = lambda scale: {recipe: replace(_BASE, changes) for recipe, changes in recipes.items()}  # noqa: E731
    note = "4,000 steps of 1,024 tokens, the setting of `preventions`."
    shared = _SHARED | {"columns": _COLUMNS, "note": note, "tables": [_ranking, *_TABLES[:-1]]}
    board = Study(name=f"{name}_board", title=f"Recipes of {name} beside ours", **shared,
                  runs=lambda scale: own(scale) | dict(SINKS.runs_at(scale)))  # fmt: skip
    return Study(name=name, title=f"Recipes of {name}", runs=own, **shared), board


COSTS = Study(
    name="preventions_costs",
    title="Time of a training step of each prevention, in the setting of `preventions`; trains nothing",
    runs=lambda scale: _runs({**_RECIPES, **_OF_SINKS}),
    cost_reference=lambda name: "adam",
    trains=False,
    note="Training steps on random tokens, all variants timed in turn on two idle CPU cores; ratios are to Adam's.",
    columns=["cost_step_ratio cost_step_ratio_lower cost_step_ratio_upper cost_optimizer_state_ratio"],
    claims=[
        *(Claim(f"Learned sinks cost {name} at most 2% of a step.",
                Metric("cost_step_ratio")[f"{name}_sinks"] <= 1.02 * Metric("cost_step_ratio")[name])
          for name in _SINKS),
    ],
)  # fmt: skip

# Every optimizer's rates with learned sinks, each twice the previous one.
_SINK_RATES = {"adam": (1.5e-3, 3e-3, 6e-3), "muon": (3e-3, 6e-3, 1.2e-2, 2.4e-2),
               "muon_orthoadam": (3e-3, 6e-3, 1.2e-2, 2.4e-2)}  # fmt: skip


def _best_is_inside(name: str) -> Claim:
    slowest, *inner, fastest = (Metric("perplexity")[f"{name}_sinks_{rate:g}"] for rate in _SINK_RATES[name])
    holds = (c.smallest(*inner) < slowest) & (c.smallest(*inner) < fastest)
    return Claim(f"The best rate of {name} with learned sinks is inside of its grid.", holds)


RATES = Study(
    name="preventions_rates",
    title="Learning rates of three optimizers with learned sinks, in the setting of `preventions`",
    runs=lambda scale: {
        f"{name}_sinks_{rate:g}": _with_rate({**_OPTIMIZERS[name][0], **_WITH_SINKS}, rate)
        for name, rates in _SINK_RATES.items()
        for rate in rates
    },
    seeds=(101, 102, 103, 104),  # used in no comparison
    measures=(ROUNDED,),
    rounding=False,
    note="All 4,000 steps; rate times weight decay is the same everywhere. The lowest mean perplexity in float over "
    "the four seeds chooses an optimizer's rate; the grid grows if that is an edge. Criteria were committed before any "
    "run.",
    columns=["perplexity", Metric("perplexity_w4a4"), Metric("perplexity_nvfp4"), c.lost(c.COARSE), c.WORST],
    claims=[_best_is_inside(name) for name in _SINK_RATES],
)  # fmt: skip

# Steps of Muon with OrthoAdam and sinks in the time of Adam's 4,000 with sinks, by `preventions_costs`: 1.03 / 1.54.
_STEPS_IN_ADAMS_TIME = 2675
_A, _B = "adam_sinks", "muon_orthoadam_sinks"
_W4A4 = Metric("perplexity_w4a4")
_SECONDARY = [c.PPL, *(Metric(f"perplexity_{name}") for name in (c.COARSE, "nvfp4", "mxfp4"))]

EQUAL_TIME = Study(
    name="preventions_equal_time",
    title="Learned sinks with Adam, and with Muon and OrthoAdam, in the same time",
    runs=lambda scale: {_A: recipes()[_A], _B: replace(recipes()[_B], {"train.steps": _STEPS_IN_ADAMS_TIME})},
    seeds=tuple(range(301, 313)),  # used in no comparison
    measures=(ROUNDED,),
    rounding=False,
    note="The setting of `preventions`, whose two candidates for the first choice take the same time on two CPU cores: "
    "Adam 4,000 steps, Muon with OrthoAdam on the embeddings 2,675, its schedule shortened. Rates are those that "
    "`preventions_tuning` chose without sinks for 4,000 steps, both inside of their grids. Primary is perplexity after "
    "w4a4; at the spread of `preventions_time` twelve seeds can show that it is the same within 1.5%. Criteria were "
    "committed before any run.",
    columns=["perplexity", *(Metric(f"perplexity_{name}") for name in FORMATS), c.lost(c.COARSE), c.lost("w4a4"),
             c.WORST],
    tables=[Paired("Changes from Adam, paired by seed", _A, _B, [_W4A4, *_SECONDARY])],
    claims=[
        c.equivalent("Primary: after w4a4 both have the same perplexity, within 1.5%.", _B, _A, 0.015, metric=_W4A4),
        c.significantly_lower("Primary: Muon with OrthoAdam has the lower perplexity after w4a4.", _B, _A, _W4A4),
        c.significantly_lower("Primary: Adam has the lower perplexity after w4a4.", _A, _B, _W4A4),
        *(c.significantly_lower(f"Secondary: {who} has the lower {metric.label}.", *pair, metric, _SECONDARY)
          for metric in _SECONDARY for who, pair in (("Muon with OrthoAdam", (_B, _A)), ("Adam", (_A, _B)))),
    ],
    pictures=[
        Dots("decision", "Perplexity after rounding to each format, after equal times. Each dot is a seed, numbers are "
             "means; green is within 1% of the lowest.",
             dict(zip(("w4a4", "float", "int8, coarse", "NVFP4", "MXFP4"), (_W4A4, *_SECONDARY), strict=True))),
    ],
)  # fmt: skip

STUDIES = (BREAKS, PREVENTIONS, PARTS, SINKS, COSTS, RATES, EQUAL_TIME)
