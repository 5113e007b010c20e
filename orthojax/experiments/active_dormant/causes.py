"""Causes of the sink of Bigram-Backcopy: the drain of its value, and why softmax-1 keeps it.

Softmax-n adds a key of logit ln n and value 0, the null. A head that has nothing to do could attend to the null as it
attends to <s>. Both start with little weight: with T keys of equal logits <s> has 1 / (T + n) and the null n / (T + n).
But the logit of <s> grows by itself, along its own key, while the null's logit is fixed: the null's weight grows if all
other logits fall, for which the model has no direction at the start, unless keys have a bias.
"""

import itertools
from collections.abc import Iterator

from orthojax.experiments.active_dormant.runs import EARLY, SHOWN, Setting, row, short
from orthojax.experiments.claims import Claim, Metric, all_of, shares
from orthojax.experiments.study import Row, Study
from orthojax.formatting import share
from orthojax.report.pictures import ByStep

_COPY, _BIGRAM = RISKS = Metric("backcopy_risk_nats"), Metric("bigram_excess_risk_nats")
_SINK, _RATIO, _GAP = Metric("sink_attention_rest"), Metric("value_ratio"), Metric("sink_logit_gap")
_EARLY = Metric(f"attention to <s>, mean over {EARLY} steps", lambda of: of["early_sink"], share)
_EFFECT, _TOKEN_VALUE = Metric("value_effect_nats"), Metric("token_value_ratio")
_TRIGGERS, _NULL, _AT_START, _HIDDEN_NULL = shares(
    "trigger_keys", "null_mass_rest", "null_at_start", "hidden: null_mass_rest"
)
_ABOVE = Metric(
    "weight on one token above equal weights", lambda of: of["largest_token"] - of["largest_token_equal"], share
)
_LEARNED = ((_COPY["*"] < 0.05) & (_BIGRAM["*"] < 0.1)).in_every_seed()
_SETUP = (
    f"One layer of width 64, {SHOWN[-1]:,} steps of 32 x 64 tokens, Adam with rate 3e-3, b2 0.99, decay 1e-4, in "
    "float32; measured on 256 held-out sequences."
)
_FREE, _HELD, _MASKED = "free_visible", "others_visible", "free_masked"


def _reinforced(seed: int) -> Iterator[Row]:
    settings = {
        _FREE: Setting(),
        _MASKED: Setting(hidden=True),
        _HELD: Setting(value="others"),
        "others_masked": Setting(value="others", hidden=True),
        "initial_visible": Setting(value="initial"),
        "drained_visible": Setting(value="drained"),
    }
    return (row(name, setting, seed) for name, setting in settings.items())


SINK_REINFORCEMENT = Study(
    name="sink_reinforcement",
    title="Does the sink make the drain, or the drain the sink? Value held, or key hidden",
    rows=_reinforced,
    seeds=(0, 1, 2, 3, 4),
    note=f"{_SETUP} The norm of the value of <s> is free, or held at that of the others, at its initial one or "
    "drained, at a tenth of that; <s> is visible to non-triggers or hidden (masked) from them by a bias of their "
    "logits. Criteria were written after a look at one pilot of the plain model alone.",
    columns=[_SINK, _EARLY, _GAP, "value_norm_first", _RATIO, _EFFECT, *RISKS, _TRIGGERS],
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
              all_of((_TRIGGERS[of] > 0.7).in_every_seed() for of in (_MASKED, "others_masked")),
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
        yield row(name, Setting(short(**of), hidden=name == "hidden", both_views=True), seed)


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
    columns=[_SINK, _AT_START, _NULL, _RATIO, *RISKS, _TRIGGERS, _HIDDEN_NULL, _HIDDEN_BIGRAM],
    claims=[
        Claim("Softmax-1 keeps the sink and the drain.",
              ((_SINK["softmax1"] > 0.5) & (_RATIO["softmax1"] < 0.5)).in_every_seed(),
              added="known from one seed of backcopy_cure"),
        Claim("The null of softmax-1 is not used: it has no more at the end than at the start, by a fifth.",
              _NULL["softmax1"] <= 1.2 * _AT_START["softmax1"]),
        Claim("The null is not kept in reserve: with <s> hidden after training non-triggers attend to other keys.",
              (_HIDDEN_NULL["softmax1"] < 0.5).in_every_seed()),
        Claim("Hiding <s> then costs softmax-1 on the bigram.",
              _HIDDEN_BIGRAM["softmax1"] >= _BIGRAM["softmax1"] + 0.05),
        Claim("It is a race that a head start turns: the larger n, the weaker the sink.",
              all_of(_SINK[a] > _SINK[b] for a, b in itertools.pairwise(_DOSES))),
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
