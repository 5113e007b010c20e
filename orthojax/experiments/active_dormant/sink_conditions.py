"""When no sink forms on <s>, or another: heads that every query needs, no causal mask, no BOS, other norms.

Three experiments on the models of `short`. All criteria were written before any of these runs; pilots were of
the plain model with one and three layers (seed 100).
"""

from collections.abc import Callable, Mapping

import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.active_dormant.key_mass import KEY_MASS
from orthojax.experiments.active_dormant.models import PEAK, RATE, short
from orthojax.experiments.chance import chance_of_late
from orthojax.experiments.claims import Claim, Revision, within
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.page import Picture
from orthojax.experiments.pictures import LayerCurves
from orthojax.experiments.results import Quantity, Results
from orthojax.experiments.tables import LayerTable, MetricTable


def in_layer(name: str, label: str, of_layers: Callable[[np.ndarray], float] = np.max) -> Quantity:
    """A metric by layer as a quantity, that of the layer with the largest one unless said otherwise."""
    return Quantity(label, lambda of: float(of_layers(of.by_layer(name))))


def ratio(name: str, layer: int, label: str) -> Quantity:
    """A norm of the first token over that of the others in one layer."""
    return Quantity(label, lambda of: of[f"{name}_first/layer_{layer}"] / of[f"{name}_rest/layer_{layer}"])


def _bars(name: str, caption: str, quantities: Mapping[str, Quantity]) -> Callable[[Results], list[Picture]]:
    def draw(results: Results) -> list[Picture]:
        shown = results.finished
        values = {
            label: np.array([[quantity.value(of.seeds[s]) for s in results.seeds] for of in shown]).T
            for label, quantity in quantities.items()
        }
        equal = {"equal logits, one key": [chance_of_late(of.sequence_length) for of in shown]}
        figure = drawing.bars([of.label for of in shown], values, y_label="mean attention weight", references=equal)
        return [Picture(name, caption, figure)]

    return draw


FIRST = in_layer("first_key", "weight on key 0, late non-triggers")
ON_TRIGGERS = in_layer("trigger_keys", "weight on triggers, late non-triggers")
TRIGGERS_ON_TRIGGERS = in_layer("active_trigger_keys", "weight on triggers, late triggers")
TRIGGERS_FIRST = in_layer("active_first_key", "weight on key 0, late triggers")
POSITION = in_layer("largest_position", "largest weight on a position")
FIRST_TEN = in_layer("first_ten", "weight on the first ten keys")
ABOVE = Quantity(
    "weight on one token above equal weights",
    lambda of: float(np.max(of.by_layer("largest_token") - of.by_layer("largest_token_equal"))),
)
VALUE_RATIO = ratio("value_norm", 0, "value norm of <s> / others', first layer")
_SETTING = (
    f"Width 64, one head, MLPs of 256, 32 x 64 tokens a step, Adam with rate {RATE:g}, b2 0.99, decay 1e-4. Late "
    "queries are those of the second half of a sequence, and positions those of the first, which all of them see; "
    "equal weights would put 0.021 on each."
)

# A head that every query needs.

RULES: dict[str, tuple[str, dict[str, object]]] = {
    "backcopy": ("backcopy: only triggers need the head", {}),
    "skip": ("skip-bigram: every query needs it", {"data__rule": "skip_bigram"}),
    "reverse": (
        "skip-bigram except after triggers: these alone do not",
        {"data__rule": "skip_bigram", "data__other_rule": "markov", "data__other_rule_probability": 1.0},
    ),
}
_EXCESS = Quantity(
    "largest excess risk (nats)", lambda of: max(of.bigram_excess_risk_nats, of.backcopy_excess_risk_nats)
)
_PARKED = Quantity(
    "weight on triggers and <s>, late triggers",
    lambda of: of["active_trigger_keys/layer_0"] + of["active_first_key/layer_0"],
)
NEEDED = Experiment(
    name="needed_head",
    title="Active-dormant: no sink where every query needs the head, and one at triggers where only these do not",
    variants=lambda scale: tuple(Variant(name, label, short(1, **changes)) for name, (label, changes) in RULES.items()),
    seeds=(0, 1, 2),
    about=lambda results: [
        "The prediction: a sink is where queries park that do not need the head. Where the next token always depends "
        "on the token before the current one there are none, and no sink. Where it depends on that except after "
        "triggers, the sink is theirs.",
        f"One layer, {results.first.config.train.steps:,} steps. {_SETTING}",
    ],
    tables=(
        MetricTable("At the end", (FIRST, TRIGGERS_FIRST, ON_TRIGGERS, TRIGGERS_ON_TRIGGERS, POSITION, VALUE_RATIO,
                                   "sink_logit_gap", "bigram_excess_risk_nats", "backcopy_excess_risk_nats")),
    ),
    claims=(
        Claim("Each task is learned.", {label: (name,) for name, (label, _) in RULES.items()}, (_EXCESS,),
              lambda of: within(of, _EXCESS, -1, 0.15), "both excess risks below 0.15 nats, in every seed"),
        Claim("Where non-triggers do not need the head they attend to <s>, and its value is drained.", ("backcopy",),
              (FIRST, VALUE_RATIO), lambda of: within(of, FIRST, 0.5, 2) and within(of, VALUE_RATIO, -1, 0.5),
              "weight above 0.5 and value norm below half of the others', in every seed"),
        Claim("Where all queries need it there is no sink.", ("skip",), (FIRST, TRIGGERS_FIRST),
              lambda of: within(of, FIRST, -1, 0.1) and within(of, TRIGGERS_FIRST, -1, 0.1),
              "weight below 0.1 at non-triggers and at triggers, in every seed"),
        Claim("Where all queries need it there is no drain.", ("skip",), (VALUE_RATIO,),
              lambda of: within(of, VALUE_RATIO, 0.5, 100), "value norm above half of the others', in every seed"),
        Claim("Where triggers alone do not need it, they alone attend to <s>.", ("reverse",), (TRIGGERS_FIRST, FIRST),
              lambda of: within(of, TRIGGERS_FIRST, 0.5, 2) and within(of, FIRST, -1, 0.1),
              "weight above 0.5 at triggers and below 0.1 at non-triggers, in every seed"),
        Claim("They have a sink, but it is they themselves with <s>: the keys of all triggers together.", ("reverse",),
              (_PARKED, TRIGGERS_ON_TRIGGERS, TRIGGERS_FIRST), lambda of: within(of, _PARKED, 0.9, 2),
              "weight above 0.9 on <s> and triggers at triggers, in every seed, where equal weights give about 0.3",
              revised=Revision("seen in the attention of these runs")),
    ),
    pictures=(_bars("weights_on_first", "Weight on <s> by task.",
                    {"non-triggers": FIRST, "triggers": TRIGGERS_FIRST}),),
    measures=(KEY_MASS,),
)  # fmt: skip

# The causal mask, and BOS.


def _masks(scale: str) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            f"{mask}_{bos}_{layers}",
            f"{mask}, {'BOS' if bos == 'bos' else 'no BOS'}, {layers} layer{'s' if layers > 1 else ''}",
            short(layers, model__relaxed_causal_tokens=relaxed, data__bos_tokens=int(bos == "bos")),
        )
        for layers in (1, 3)
        for bos in ("bos", "nobos")
        for mask, relaxed in {"causal": 0, "relaxed": 10}.items()
    )


_BY_DEPTH = {f"{layers} layer{'s' if layers > 1 else ''}": layers for layers in (1, 3)}


def _pairs(bos: str, *masks: str) -> dict[str, tuple[str, ...]]:
    return {label: tuple(f"{mask}_{bos}_{layers}" for mask in masks) for label, layers in _BY_DEPTH.items()}


MASK = Experiment(
    name="causal_mask",
    title="Active-dormant: is it the causal mask that makes <s> the sink? Relaxed mask, with and without BOS",
    variants=_masks,
    seeds=(0, 1),
    about=lambda results: [
        "The paper assumes that the causal mask makes <s> the extreme token. Here the first ten tokens see each other, "
        "so that the mask favours none of them, with <s> as the first token or none; positions are learned, so "
        "position 0 can be told from others whatever the mask.",
        f"One and three layers, {results.first.config.train.steps:,} steps; of several layers the one with the largest "
        f"number. {_SETTING}",
    ],
    tables=(
        MetricTable("Where late non-triggers attend", (
            FIRST, FIRST_TEN, POSITION, in_layer("at_position", "that position, first layer", lambda layers: layers[0]),
            ABOVE, in_layer("token_value_ratio", "value norm of that token / all, smallest layer", np.min), ON_TRIGGERS,
            VALUE_RATIO, "sink_logit_gap")),
        LayerTable("Weight on key 0, and the largest on a position, by layer",
                   {"first_key": "key 0", "largest_position": "largest position"}),
    ),
    claims=(
        Claim("With BOS and a causal mask key 0 is the sink.", _pairs("bos", "causal"), (FIRST,),
              lambda of: within(of, FIRST, 0.5, 2), "weight above 0.5 in some layer, in every seed"),
        Claim("The paper's assumption: without the mask's favour <s> is no sink.", _pairs("bos", "relaxed", "causal"),
              (FIRST,), lambda relaxed, causal: relaxed.mean(FIRST) <= 0.5 * causal.mean(FIRST),
              "weight on key 0 at most half of that with a causal mask"),
        Claim("Ours: the token is enough.", _pairs("bos", "relaxed"), (FIRST,),
              lambda of: within(of, FIRST, 0.5, 2), "weight on key 0 above 0.5 in some layer, in every seed"),
        Claim("Without BOS one layer cannot make the first position a sink, whose values depend on its token.",
              {"causal": ("causal_nobos_1",), "relaxed": ("relaxed_nobos_1",)}, (FIRST,),
              lambda of: within(of, FIRST, -1, 0.2), "weight on key 0 below 0.2, in every seed"),
        Claim("Without BOS a token takes the place of <s>.",
              {"causal": ("causal_nobos_1",), "relaxed": ("relaxed_nobos_1",)},
              (ABOVE,), lambda of: within(of, ABOVE, 0.3, 2),
              "0.3 more on the keys of one token than equal weights, in every seed"),
        Claim("The triggers do, together.", {"causal": ("causal_nobos_1",), "relaxed": ("relaxed_nobos_1",)},
              (ON_TRIGGERS,), lambda of: within(of, ON_TRIGGERS, 0.7, 2),
              "weight above 0.7 on the keys of the three triggers, in every seed, where equal weights give about 0.26",
              revised=Revision("seen in the first seed of these runs, and in sink_reinforcement")),
        Claim("Three layers can: without BOS and with a causal mask the first position is the sink.",
              ("causal_nobos_3",), (FIRST, POSITION), lambda of: within(of, FIRST, 0.3, 2),
              "weight on key 0 above 0.3 in some layer, in every seed"),
        Claim("The relaxed mask, which no longer favours the first position, takes that sink away.",
              ("relaxed_nobos_3", "causal_nobos_3"), (FIRST, POSITION),
              lambda relaxed, causal: relaxed.mean(FIRST) <= 0.5 * causal.mean(FIRST),
              "weight on key 0 at most half of that with a causal mask; testable where that is above 0.3",
              lambda relaxed, causal: causal.mean(FIRST) > 0.3),
    ),
    pictures=(_bars("keys", "Weights of late non-triggers, of the layer with the largest.",
                    {"key 0": FIRST, "largest position": POSITION, "triggers together": ON_TRIGGERS}),),
    measures=(KEY_MASS,),
)  # fmt: skip

# Norms.

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "rmsnorm_single": "RMSNormSingle", "none": "no norm"}
SINK = in_layer("sink_attention_rest", "attention to <s> at non-triggers")
NORM = Experiment(
    name="sink_norms",
    title="Active-dormant: sinks, drains and residual peaks with LayerNorm, RMSNorm, RMSNormSingle and no norm",
    variants=lambda scale: tuple(Variant(n, label, short(3, model__norm=n)) for n, label in NORMS.items()),
    seeds=(0, 1),
    about=lambda results: [
        "The paper explains the growth of the residual norm of <s> by LayerNorm, which makes its gradient decay, and "
        "Adam, which makes constant updates of it.",
        f"Three layers, {results.first.config.train.steps:,} steps. {_SETTING}",
    ],
    tables=(
        MetricTable("At the end", (SINK, PEAK, "sink_logit_gap", "backcopy_risk_nats", "bigram_excess_risk_nats")),
        LayerTable("By layer", {
            "sink_attention_rest": "attention to <s>", "value_norm_first": "value norm of <s>",
            "value_norm_rest": "value norm of others", "residual_norm_first": "residual norm of <s>",
            "residual_norm_rest": "residual norm of others"}),
    ),
    claims=(
        Claim("The task is learned with every norm.", {label: (name,) for name, label in NORMS.items()},
              ("backcopy_risk_nats", "bigram_excess_risk_nats"),
              lambda of: within(of, "backcopy_risk_nats", -1, 0.05) and within(of, "bigram_excess_risk_nats", -1, 0.1),
              "backcopy risk below 0.05 and bigram excess below 0.1 nats, in every seed"),
        Claim("A sink forms with every norm, and without.", {label: (name,) for name, label in NORMS.items()}, (SINK,),
              lambda of: within(of, SINK, 0.5, 2), "attention above 0.5 in some layer, in every seed"),
        Claim("With a norm the residual norm of <s> has a peak.", {label: (name,) for name, label in NORMS.items()
                                                                  if name != "none"}, (PEAK,),
              lambda of: within(of, PEAK, 1.5, 1e9), "1.5 times that of others after some layer, in every seed"),
        Claim("Without a norm it has none.", ("none", "layernorm"), (PEAK,),
              lambda none, layernorm: none.mean(PEAK) < 1.5,
              "below 1.5 times after every layer; testable where LayerNorm has more",
              lambda none, layernorm: layernorm.mean(PEAK) > 1.5),
    ),
    pictures=(
        LayerCurves("residual_norms", "Residual norms after each layer, of <s> and of others.", "residual norm",
                    {"residual_norm_first": "<s>", "residual_norm_rest": "others"}, y_scale="log"),
        LayerCurves("sinks", "Attention to <s> at non-triggers, by layer.", "mean attention weight",
                    {"sink_attention_rest": ""}),
    ),
    measures=(KEY_MASS,),
)  # fmt: skip
EXPERIMENTS = (NEEDED, MASK, NORM)
