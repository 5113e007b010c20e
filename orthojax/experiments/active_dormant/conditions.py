"""Sinks under other conditions: tasks around Bigram-Backcopy, attention, optimizers and depths, and a cure.

Tasks: the appendix of Active-Dormant Attention Heads (arXiv 2410.13835); `needed_head` is a prediction that follows
from the paper. `backcopy_cure` is the cure of From Attention to Activation (arXiv 2410.17174), on a task that is not in
that paper. Softmax-n with n = T, whose null starts with half of the weight or more, was added after one seed of the
others: `softmax1_sinks` says why it should do what softmax-1 does not.
"""

import itertools
from collections.abc import Iterator

from orthojax import quant
from orthojax.config import Config, replace
from orthojax.experiments import claims as c
from orthojax.experiments.active_dormant import measures, runs
from orthojax.experiments.active_dormant.measures import BIGRAM, COPY, RISKS, SINK_MASS, TOP_DRAIN, TOP_PEAK
from orthojax.experiments.claims import Claim, Expr, Metric
from orthojax.experiments.study import Row, Study, grid
from orthojax.formatting import share
from orthojax.report.pictures import Bars, ByLayer, ByStep
from orthojax.report.tables import Columns

_DRAIN = Metric("value_drain")
_TOKEN, _EQUAL, _FIRST, _DELIMITER, _AT_TRIGGERS, _TRIGGERS = c.shares(
    "largest_token", "largest_token_equal", "first_key", "delimiter_key", "delimiter_key_triggers", "trigger_keys"
)
_TOKEN_VALUE = Metric("token_value_ratio")


def _in_later_layers(name: str) -> list[Expr]:
    return [Metric(f"{name}/layer_{i}")["in_context"] for i in (1, 2)]


BACKCOPY_RULES = Study(
    name="backcopy_rules",
    title="Tasks around Bigram-Backcopy: no BOS and two, a delimiter, in-context and backward bigrams, Markov",
    runs=lambda scale: grid(runs.backcopy(scale), {
        "bos": {},
        "two_bos": {"data.bos_tokens": 2},
        # Without <s> the first token differs between sequences, and there is no single residual state to follow.
        "no_bos": {"data.bos_tokens": 0, "train.probe": ""},
        "delimiter": {"data.delimiter": True},
        "backward": {"data.rule": "bigram_backward"},
        "markov": {"data.rule": "markov"},
        "half": {"data.other_rule_probability": 0.5},
        "in_context": {"data.rule": "in_context_bigram", "model.num_layers": 3},
    }),
    scales=runs.SCALES,
    seeds=runs.SEEDS,
    measures=(measures.KEY_MASS,),
    note="One layer, three for the in-context bigram; excess risks are above the exact oracle of each task; with half "
    "the probability of a copy is 1/2. The most attended token is that with most weight above what equal weights would "
    "give, at non-trigger queries of the second half. The paper's numbers are read off figures of one seed.",
    paper={"no_bos": {COPY.name: 8.56e-5}, "backward": {_DRAIN.name: 5.5 / 22}},
    columns=[*RISKS, SINK_MASS, _DRAIN, "active_at_triggers active_elsewhere"],
    tables=[Columns("Late queries, those after the delimiter",
                    [_FIRST, _DELIMITER, _AT_TRIGGERS, _TOKEN, _EQUAL, _TOKEN_VALUE, _TRIGGERS])],
    claims=[
        Claim("With two <s> the sink is on them, together.", (SINK_MASS["two_bos"] > 0.7).in_every_seed()),
        Claim("They share it.", ((_FIRST["two_bos"] > 0.1) & (_FIRST["two_bos"] < 0.9)).in_every_seed(),
              added="seen in these runs"),
        Claim("Without <s> the sink moves to other tokens.",
              (_TOKEN["no_bos"] > 2 * _EQUAL["no_bos"]) & (SINK_MASS["no_bos"] < 0.5)),
        Claim("That token's value is drained.", _TOKEN_VALUE["no_bos"] < 0.5),
        Claim("Without <s> the task is still learned.", COPY["no_bos"] < 0.02),
        Claim("After a delimiter, where no query needs the head, the sink is on <s> or on the delimiter.",
              (_FIRST["delimiter"] > 0.5) | (_DELIMITER["delimiter"] > 0.5),
              revised=("any most attended token counted, at all positions",
                       Claim("", (SINK_MASS["delimiter"] > 0.5) | (_TOKEN["delimiter"] > 0.5)))),
        Claim("The delimiter is the sink of trigger characters, which have nothing to copy after it.",
              (_AT_TRIGGERS["delimiter"] > 0.9).in_every_seed(), added="seen in these runs"),
        Claim("The in-context bigram has a sink in some layer above the first.",
              c.largest(*_in_later_layers(SINK_MASS.name)) > 0.5),
        Claim("In the in-context bigram the value of <s> is drained there.",
              c.smallest(*_in_later_layers(_DRAIN.name)) < 0.5),
        Claim("Bigram-backward has a weaker sink and drain than Bigram-Backcopy.",
              (SINK_MASS["backward"] < SINK_MASS["bos"]) & (_DRAIN["backward"] > _DRAIN["bos"])),
        Claim("(Ours, predicted) Without anything to copy there is no sink: no head is needed, so none learns to be "
              "idle.", SINK_MASS["markov"] < 0.3),
        Claim("(Ours, predicted) Copying half of the time is enough.", SINK_MASS["half"] > 0.5),
    ],
    pictures=[ByStep("sink_attention_rest", x_scale="log", name="sink")],
)  # fmt: skip

_ON_FIRST, _ON_TRIGGERS, _TRIGGERS_ON_FIRST, _TRIGGERS_ON_TRIGGERS = c.shares(
    *(f"{name}/layer_0" for name in ("first_key", "trigger_keys", "active_first_key", "active_trigger_keys"))
)
_VALUE_RATIO = Metric("value norm, <s> over others, layer 0",
                      lambda of: of["value_norm_first/layer_0"] / of["value_norm_rest/layer_0"])  # fmt: skip
_EXCESS = Metric("largest excess risk (nats)", lambda of: max(risk(of) for risk in RISKS))
_PARKED = Metric("weight on triggers and <s>, late triggers",
                 lambda of: _TRIGGERS_ON_TRIGGERS(of) + _TRIGGERS_ON_FIRST(of), share)  # fmt: skip
_SKIP = {"data.rule": "skip_bigram"}

NEEDED_HEAD = Study(
    name="needed_head",
    title="No sink if every query needs the head, and one at triggers if only these do not",
    runs=lambda scale: grid(runs.short(), {
        "backcopy": {},
        "skip": _SKIP,
        "reverse": _SKIP | {"data.other_rule": "markov", "data.other_rule_probability": 1.0},
    }),
    seeds=(0, 1, 2),
    measures=(measures.KEY_MASS,),
    note="The prediction: queries that do not need the head park on a sink. On Bigram-Backcopy only triggers need "
    "it. In a skip-bigram the next token always depends on the one before the current one: every query needs it. In "
    "reverse it does except after triggers, which alone do not need it. Weights are those of the second half of a "
    "sequence, active_* at triggers; equal weights would put 0.021 on a key. Criteria are older than the runs.",
    columns=[_ON_FIRST, _TRIGGERS_ON_FIRST, _ON_TRIGGERS, _TRIGGERS_ON_TRIGGERS, _VALUE_RATIO,
             "sink_logit_gap", *RISKS],
    claims=[
        Claim("Each task is learned.", (_EXCESS["*"] < 0.15).in_every_seed()),
        Claim("If non-triggers do not need the head they attend to <s>, and its value is drained.",
              ((_ON_FIRST["backcopy"] > 0.5) & (_VALUE_RATIO["backcopy"] < 0.5)).in_every_seed()),
        Claim("If all queries need it there is no sink.",
              ((_ON_FIRST["skip"] < 0.1) & (_TRIGGERS_ON_FIRST["skip"] < 0.1)).in_every_seed()),
        Claim("If all queries need it there is no drain.", (_VALUE_RATIO["skip"] > 0.5).in_every_seed()),
        Claim("If triggers alone do not need it, they alone attend to <s>.",
              ((_TRIGGERS_ON_FIRST["reverse"] > 0.5) & (_ON_FIRST["reverse"] < 0.1)).in_every_seed()),
        Claim("They have a sink, but it is they themselves with <s>: the keys of all triggers together, which equal "
              "weights would give about 0.3.", (_PARKED["reverse"] > 0.9).in_every_seed(),
              added="seen in the attention of these runs"),
    ],
    pictures=[Bars("weights_on_first", "Weight on <s> of late queries, by task.", [_ON_FIRST, _TRIGGERS_ON_FIRST])],
)  # fmt: skip

_ATTENTION = {
    "softmax": {},
    "softmax1": {"model.normalizer": "softmax1"},
    "relu": {"model.normalizer": "relu"},
    "gelu": {"model.normalizer": "gelu"},
    "sigmoid": {"model.normalizer": "sigmoid"},
    "gated": {"model.gated_attention": True},
}
_OPTIMIZERS = {
    "adam": {"optim.weight_decay": 0.0},
    "adamw": {"optim.weight_decay": 0.01},
    "sgd": runs.SGD | {"optim.learning_rate": 0.1, "optim.weight_decay": 0.0},
    "orthoadam": runs.ORTHOADAM | {"optim.weight_decay": 0.0},
}

BREAK_CONDITIONS_MAP = Study(
    name="break_conditions_map",
    title="Bigram-Backcopy: sinks, drains and peaks by depth, optimizer and attention; one seed, 1,000 steps",
    runs=lambda scale: grid(
        # Scanned, so that six layers compile as fast as one.
        replace(runs.backcopy(), {"model.scan_layers": True, "train.steps": 1000, "train.probe_steps": (),
                             "train.probe": ""}),
        _ATTENTION, _OPTIMIZERS, {str(depth): {"model.num_layers": depth} for depth in range(1, 7)}),
    seeds=(1,),
    columns=[SINK_MASS, TOP_DRAIN, TOP_PEAK, *RISKS],
    pictures=[
        ByLayer("sink_attention_rest residual_peak_ratio", "*_adam_6", y_scale="log", name="by_attention"),
        ByLayer("sink_attention_rest residual_peak_ratio", "softmax_*_6", y_scale="log", name="by_optimizer"),
    ],
)  # fmt: skip


_METHODS, _V = ("softmax1", "orthoadam", "cured", "softmaxn", "curedn"), "vanilla_*"
_WORST = Metric("worst quantised perplexity over float32's",
                lambda of: max(of[f"perplexity_{name}"] for name in quant.SETTINGS) / of["perplexity"])  # fmt: skip
_ADDED = "when one seed was there"


def _runs(scale: str) -> dict[str, Config]:
    base = runs.backcopy(scale)
    softmax1 = {"model.normalizer": "softmax1"}
    softmax_n = {"model.normalizer": "softmax_n", "model.normalizer_n": float(base.data.sequence_length)}
    return grid(
        base,
        {"": {}},
        {"vanilla": {}, "softmax1": softmax1, "orthoadam": runs.ORTHOADAM, "cured": softmax1 | runs.ORTHOADAM,
         "softmaxn": softmax_n, "curedn": softmax_n | runs.ORTHOADAM},
        {str(depth): {"model.num_layers": depth} for depth in (1, 2, 3)},
        {"layernorm": {}, "rmsnorm_single": {"model.norm": "rmsnorm_single"}},
    )  # fmt: skip


def _removes(method: str) -> list[Claim]:
    of = f"{method}_*"
    removed = {
        "sink": (SINK_MASS[of] < 0.2, SINK_MASS[_V] >= 0.2),
        "value drain": (TOP_DRAIN[of] > 0.5, TOP_DRAIN[_V] <= 0.5),
        "residual-state peak": (TOP_PEAK[of] < 2, TOP_PEAK[_V] >= 2),
    }
    return [Claim(f"{method} removes the {what}.", gone.in_every_seed(), there.in_every_seed())
            for what, (gone, there) in removed.items()]  # fmt: skip


BACKCOPY_CURE = Study(
    name="backcopy_cure",
    title="Bigram-Backcopy under the cure: softmax-1 and OrthoAdam against sinks, drains and peaks, by depth and norm",
    runs=_runs,
    scales=runs.SCALES,
    seeds=runs.SEEDS,
    measures=(measures.OUTLIER_MEASURES,),
    note="cured is softmax-1 with OrthoAdam, whose Haar bases differ by seed; softmaxn and curedn have softmax-n, n "
    "the length of a sequence. Names give method, layers and norm.",
    columns=[SINK_MASS, "null_mass", TOP_DRAIN, TOP_PEAK, *RISKS, "perplexity"],
    tables=[
        Columns("The measures of From Attention to Activation", c.OUTCOME),
        Columns("Perplexity lost to quantisation", [c.lost(name) for name in quant.SETTINGS]),
    ],
    claims=[
        *(claim for method in _METHODS for claim in _removes(method)),
        *(Claim(f"{method} still copies.", COPY[f"{method}_*"] < 0.01, COPY[_V] < 0.01) for method in _METHODS),
        *(Claim(f"{method} costs nothing on the bigram.", BIGRAM[f"{method}_*"] <= BIGRAM[_V] + 0.005)
          for method in _METHODS),
        *(Claim(f"{method} leaves no outlier channels at {words}.",
                (kurtosis[f"{method}_*"] < c.NO_OUTLIERS).in_every_seed(),
                (kurtosis[_V] > c.NO_OUTLIERS).in_every_seed(), added=_ADDED)
          for words, kurtosis in {"other tokens": c.REST, "<s>": c.FIRST}.items()
          for method in ("orthoadam", "cured", "curedn")),
        *(Claim(f"{method} lowers how often the first token gets most attention, to less than half.",
                c.FRACTION[f"{method}_*"] < 0.5 * c.FRACTION[_V], added=_ADDED)
          for method in ("softmax1", "cured", "softmaxn", "curedn")),
        Claim("No quantisation setting costs softmax + Adam 1% of perplexity.", (_WORST[_V] < 1.01).in_every_seed(),
              added=_ADDED),
    ],
    pictures=[
        ByStep("sink_attention_rest", "*_3_layernorm", x_scale="log", name="sink"),
        ByStep("residual_peak_ratio/layer_0", "*_3_layernorm", "log", "log", name="peak"),
    ],
)  # fmt: skip


# Causes of the sink: the drain of its value, and why softmax-1 keeps it. Softmax-n adds a key of logit ln n, value 0,
# the null. A head that has nothing to do could attend to the null as it attends to <s>. Both start with little weight:
# with T keys of equal logits <s> has 1 / (T + n) and the null n / (T + n). But the logit of <s> grows by itself, along
# its own key, while the null's is fixed: its weight grows if all other logits fall, for which the model has no
# direction at the start, unless keys have a bias.
_COPY = Metric("backcopy_risk_nats")
_SINK, _RATIO, _GAP = Metric("sink_attention_rest"), Metric("value_ratio"), Metric("sink_logit_gap")
_EARLY = Metric(f"attention to <s>, mean over {runs.EARLY} steps", lambda of: of["early_sink"], share)
_EFFECT = Metric("value_effect_nats")
_NULL, _AT_START, _HIDDEN_NULL = c.shares("null_mass_rest", "null_at_start", "hidden: null_mass_rest")
_ABOVE = Metric(
    "weight on one token above equal weights", lambda of: of["largest_token"] - of["largest_token_equal"], share
)
_LEARNED = ((_COPY["*"] < 0.05) & (BIGRAM["*"] < 0.1)).in_every_seed()
_SETUP = (
    f"One layer of width 64, {runs.SHOWN[-1]:,} steps of 32 x 64 tokens, Adam with rate 3e-3, b2 0.99, decay 1e-4, in "
    "float32; measured on 256 held-out sequences."
)
_FREE, _HELD, _MASKED = "free_visible", "others_visible", "free_masked"


def _reinforced(seed: int) -> Iterator[Row]:
    settings = {
        _FREE: runs.Setting(),
        _MASKED: runs.Setting(hidden=True),
        _HELD: runs.Setting(value="others"),
        "others_masked": runs.Setting(value="others", hidden=True),
        "initial_visible": runs.Setting(value="initial"),
        "drained_visible": runs.Setting(value="drained"),
    }
    return (runs.row(name, setting, seed) for name, setting in settings.items())


SINK_REINFORCEMENT = Study(
    name="sink_reinforcement",
    title="Does the sink make the drain, or the drain the sink? Value held, or key hidden",
    rows=_reinforced,
    seeds=(0, 1, 2, 3, 4),
    note=f"{_SETUP} The norm of the value of <s> is free, or held at that of the others, at its initial one or "
    "drained, at a tenth of that; <s> is visible to non-triggers or hidden (masked) from them by a bias of their "
    "logits. Criteria were written after a look at one pilot of the plain model alone.",
    columns=[_SINK, _EARLY, _GAP, "value_norm_first", _RATIO, _EFFECT, _COPY, BIGRAM, _TRIGGERS],
    claims=[
        Claim("Free and visible: the sink forms, and the value of <s> is drained.",
              ((_SINK[_FREE] > 0.7) & (_RATIO[_FREE] < 0.5)).in_every_seed()),
        Claim("Both halves of the task are learned in every setting.", _LEARNED),
        Claim("The paper's break condition: a value that cannot shrink makes no sink.",
              _SINK[_HELD] <= 0.5 * _SINK[_FREE]),
        Claim("A value that cannot shrink makes no growing logits.", _GAP[_HELD] <= 0.5 * _GAP[_FREE]),
        Claim("The other reading: it makes one all the same, since not the norm counts but the effect of the value, "
              "and a vector that all non-triggers read alike can be made to do nothing.",
              ((_SINK[_HELD] > 0.5) & (_EFFECT[_HELD] < 0.1)).in_every_seed()),
        Claim("Without attention there is no drain: if non-triggers do not see <s>, its value is not drained.",
              (_RATIO[_MASKED] > 0.5).in_every_seed() & (_RATIO[_MASKED] >= 2 * _RATIO[_FREE])),
        Claim("A value that is drained from the start makes the sink form earlier.",
              _EARLY["drained_visible"] >= 1.1 * _EARLY[_FREE]),
        Claim("With a value that keeps its initial norm the sink forms all the same.",
              (_SINK["initial_visible"] > 0.7).in_every_seed()),
        Claim("If <s> is hidden, another token becomes the sink.", (_ABOVE[_MASKED] > 0.3).in_every_seed()),
        Claim("The value of that token is drained.", (_TOKEN_VALUE[_MASKED] < 0.5).in_every_seed(),
              (_ABOVE[_MASKED] > 0.3).in_every_seed()),
        Claim("If <s> is hidden, the triggers become the sink, together, its value held or not.",
              c.all_of((_TRIGGERS[of] > 0.7).in_every_seed() for of in (_MASKED, "others_masked")),
              added="the weight on triggers had been recorded, but not predicted"),
    ],
    pictures=[ByStep("sink_attention_rest"), ByStep("value_ratio")],
)  # fmt: skip

_HIDDEN_BIGRAM = Metric("hidden: bigram_excess_risk_nats")
_DOSES = ("softmax1", "n8", "n64", "n512")


def _nulls(seed: int) -> Iterator[Row]:
    softmax1 = {"model.normalizer": "softmax1"}
    changes = {
        "softmax": {},
        "softmax1": softmax1,
        **{f"n{n}": {"model.normalizer": "softmax_n", "model.normalizer_n": float(n)} for n in (8, 64, 512)},
        "learned": {"model.normalizer": "learned_sink"},
        "biases": softmax1 | {"model.use_bias": True},
        "hidden": softmax1,
        "no_bos": softmax1 | {"data.bos_tokens": 0},
    }
    for name, of in changes.items():
        yield runs.row(name, runs.Setting(runs.short(**of), hidden=name == "hidden", both_views=True), seed)


def _triggers_instead(variant: str, says: str) -> Claim:
    return Claim(says, ((_TRIGGERS[variant] > 0.5) & (_NULL[variant] < 0.3)).in_every_seed())


SOFTMAX1_SINKS = Study(
    name="softmax1_sinks",
    title="Why softmax-1 keeps the sink of Bigram-Backcopy",
    rows=_nulls,
    seeds=(1, 2, 3, 4, 5),
    note=f"{_SETUP} Softmax-n gives every query one more key, the null, of logit ln n and value 0; n is 0 (softmax) "
    "to 512, or learned from 1; softmax-1 also has biases, no <s> (whose metrics are then those of the first token), "
    "or <s> hidden from non-triggers in training. `hidden: NAME` is of the trained model with <s> hidden. Criteria "
    "were written when it was known that softmax-1 keeps the sink, and before any of these runs.",
    columns=[_SINK, _AT_START, _NULL, _RATIO, _COPY, BIGRAM, _TRIGGERS, _HIDDEN_NULL, _HIDDEN_BIGRAM],
    claims=[
        Claim("Softmax-1 keeps the sink and the drain.",
              ((_SINK["softmax1"] > 0.5) & (_RATIO["softmax1"] < 0.5)).in_every_seed(),
              added="known from one seed of backcopy_cure"),
        Claim("The null of softmax-1 is not used: it has no more at the end than at the start, by a fifth.",
              _NULL["softmax1"] <= 1.2 * _AT_START["softmax1"]),
        Claim("The null is not kept in reserve: with <s> hidden after training non-triggers attend to other keys.",
              (_HIDDEN_NULL["softmax1"] < 0.5).in_every_seed()),
        Claim("Hiding <s> then costs softmax-1 on the bigram.",
              _HIDDEN_BIGRAM["softmax1"] >= BIGRAM["softmax1"] + 0.05),
        Claim("It is a race that a head start turns: the larger n, the weaker the sink.",
              c.all_of(_SINK[a] > _SINK[b] for a, b in itertools.pairwise(_DOSES))),
        Claim("With n = 512 there is no sink.", ((_SINK["n512"] < 0.2) & (_NULL["n512"] > 0.5)).in_every_seed()),
        Claim("With n = 512 there is no value drain.", (_RATIO["n512"] > 0.5).in_every_seed()),
        Claim("Every n learns the task.", _LEARNED, cases=_DOSES),
        Claim("Biases, which give the null a direction of its own, are too slow to change that.",
              (_SINK["biases"] > 0.5).in_every_seed()),
        Claim("A learned n is too slow as well.", (_SINK["learned"] > 0.5).in_every_seed()),
        _triggers_instead("hidden", "Hidden in training, <s> is replaced by triggers, not by the null."),
        _triggers_instead("no_bos", "Without <s> triggers are the sink, not the null."),
    ],
    pictures=[ByStep("sink_attention_rest"), ByStep([_NULL])],
)  # fmt: skip

STUDIES = (BACKCOPY_RULES, NEEDED_HEAD, BREAK_CONDITIONS_MAP, BACKCOPY_CURE, SOFTMAX1_SINKS, SINK_REINFORCEMENT)
