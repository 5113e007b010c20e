"""First-token dominance on two cores: a text whose passages come back, and what removes the dominance.

Quotations, logs and boilerplate repeat themselves. A model that meets such text grows heads that copy, and heads that
have nothing to copy rest on the first token, as on Bigram-Backcopy.
"""

import functools
import itertools

from orthojax.analysis import chance_of_first
from orthojax.config import Config, replace
from orthojax.experiments.base_configs import REPEATED_MODEL
from orthojax.experiments.claims import (
    DOMINANCE,
    EQUAL_PERPLEXITY,
    FRACTION,
    KURTOSIS,
    MASS,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    C,
    Claim,
    O,
    S,
    V,
    dominated,
    excess_of_first_left,
    has_outliers,
    worst_kurtosis,
)
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import METHOD_LABELS
from orthojax.experiments.from_attention.paper_configs import METHODS
from orthojax.experiments.from_attention.quantization import COARSE, INT4, LOST, MODERATE, either_loses
from orthojax.experiments.page import Table
from orthojax.experiments.pictures import ModelMaps, StepCurves
from orthojax.experiments.results import LABELS, Numbers, Quantity, Result, Results, metric, penalty
from orthojax.experiments.tables import MetricTable, PairedTable
from orthojax.formatting import number

TOKENS = 1024  # of a batch
# Group -> (tokens of a sequence, <s>). The first is the setting of the main job.
GROUPS = {"64, <s>": (64, True), "64, no <s>": (64, False), "256, <s>": (256, True), "256, no <s>": (256, False)}
SHARES = (0.0, 0.1, 0.3, 1.0)
DRAINED = 0.5  # the norm of a value over the others', from which on it is called drained
# Where the share of repeated passages is varied, and where other mitigations stand beside.
_MAIN = next(iter(GROUPS))


def _config(length: int, bos: bool, share: float = 1.0) -> Config:
    changes = {
        "model.max_length": length,
        "data.sequence_length": length,
        "data.bos": bos,
        "data.repeated_share": share,
        "train.batch_size": TOKENS // length,
    }
    return replace(REPEATED_MODEL, changes)


# Mitigations that Active-Dormant Attention Heads names (section 3): variant -> (label, what differs from vanilla).
OTHERS = {
    "relu": ("ReLU + Adam", {"model.normalizer": "relu"}),
    "sgd": ("softmax + SGD", {"optim.optimizer": "sgd", "optim.momentum": 0.9, "optim.learning_rate": 0.3}),
}


def _name(method: str, length: int, bos: bool) -> str:
    return f"{method}_{length}{'_bos' if bos else ''}"


def _shared(method: str, share: float) -> str:
    return _name(method, *GROUPS[_MAIN]) if share == 1 else f"{method}_share_{100 * share:.0f}"


def _variants(scale: str) -> tuple[Variant, ...]:
    found = [
        Variant(_name(method, *of), f"{label}, {METHOD_LABELS[method]}", replace(_config(*of), METHODS[method]))
        for label, of in GROUPS.items()
        for method in METHOD_LABELS
    ]
    for share in SHARES[:-1]:
        for method in (V, C):
            config = replace(_config(*GROUPS[_MAIN], share), METHODS[method])
            found.append(Variant(_shared(method, share), f"{share:.0%} repeated, {METHOD_LABELS[method]}", config))
    for name, (label, changes) in OTHERS.items():
        found.append(Variant(name, f"{_MAIN}, {label}", replace(_config(*GROUPS[_MAIN]), changes)))
    return tuple(found)


def _groups(results: Results) -> dict[str, dict[str, str]]:
    return {label: {method: _name(method, *of) for method in METHOD_LABELS} for label, of in GROUPS.items()}


def _drain(of: Numbers) -> float:
    return of.value_norm_first / of.value_norm_rest


def _peak(of: Numbers) -> float:
    return of.residual_norm_first / of.residual_norm_rest


_DRAIN = Quantity("value norm, first token over others", _drain, "{:.2f}".format)
_PEAK = Quantity("residual norm, first token over others", _peak, "{:.2f}".format)
_DOMINATED = f"testable where vanilla has {DOMINANCE:g} times what equal logits give"
_SHARED = {"": tuple(_shared(V, share) for share in SHARES)}


def _is_drained(of: Result) -> bool:
    return _drain(of) < DRAINED


def _loses_less(setting: str, vanilla: Result, cured: Result) -> bool:
    return cured.mean(penalty(setting)) < vanilla.mean(penalty(setting))


CLAIMS = (
    Claim("The first token dominates where text repeats itself.", (V,), (FRACTION,), dominated,
          f"{DOMINANCE:g} times what equal logits give, or more, in every case"),
    Claim("The more of the text is repeated, the more it does.", _SHARED, (FRACTION,),
          lambda *of: all(a[FRACTION] < b[FRACTION] for a, b in itertools.pairwise(of)),
          "argmax rises with each share"),
    Claim("Without repetition it does not.", {"": (_shared(V, 0.0),)}, (FRACTION,),
          lambda of: not dominated(of), f"less than {DOMINANCE:g} times what equal logits give"),
    Claim("Softmax-1 alone removes the dominance.", (V, S), (FRACTION,),
          lambda v, s: excess_of_first_left(v, s) <= 0.5,
          f"at most half of what exceeds equal logits is left; {_DOMINATED}", dominated),
    Claim("OrthoAdam alone leaves it.", (V, O), (FRACTION,), lambda v, o: excess_of_first_left(v, o) >= 0.5,
          f"at least half is left; {_DOMINATED}", dominated),
    Claim("Both together remove it.", (V, C), (FRACTION,), lambda v, c: excess_of_first_left(v, c) <= 0.5,
          f"at most half is left; {_DOMINATED}", dominated),
    Claim("The values of the first token are drained under softmax.", (V,), (_DRAIN,), _is_drained,
          f"norm below {DRAINED:g} of the others', mean over layers; {_DOMINATED}", dominated),
    Claim("Softmax-1 keeps them.", (V, S), (_DRAIN,), lambda v, s: not _is_drained(s),
          f"norm of {DRAINED:g} of the others' or more; testable where vanilla's are drained",
          lambda v, s: _is_drained(v)),
    Claim("Both together leave no outliers.", (V, C), KURTOSIS, lambda v, c: worst_kurtosis(c) < NO_OUTLIERS,
          f"both below {NO_OUTLIERS:g}; testable where vanilla's is above {OUTLIERS:g}, either", has_outliers),
    Claim("They cost no perplexity.", (V, C), (PPL,), lambda v, c: c.perplexity / v.perplexity - 1 <= EQUAL_PERPLEXITY,
          f"mean at most {EQUAL_PERPLEXITY:.0%} above vanilla's"),
    *(Claim(f"They lose less at {LABELS[setting]}.", (V, C), (penalty(setting),),
            functools.partial(_loses_less, setting), f"less than vanilla; {LOST}",
            functools.partial(either_loses, setting))
      for setting in (COARSE, MODERATE, INT4)),
    Claim("ReLU attention has neither dominance nor drain.", {_MAIN: ("relu", _name(V, *GROUPS[_MAIN]))},
          (FRACTION, _DRAIN), lambda relu, v: excess_of_first_left(v, relu) <= 0.5 and not _is_drained(relu),
          f"at most half of the excess is left, and values are not drained; {_DOMINATED}",
          lambda relu, v: dominated(v)),
    Claim("SGD has no outliers.", {_MAIN: ("sgd", _name(V, *GROUPS[_MAIN]))}, KURTOSIS,
          lambda sgd, v: worst_kurtosis(sgd) < NO_OUTLIERS,
          f"both below {NO_OUTLIERS:g}; testable where vanilla is above {OUTLIERS:g}, either, and SGD has a perplexity "
          "at most 10% above it", lambda sgd, v: has_outliers(v) and sgd.perplexity < 1.1 * v.perplexity),
)  # fmt: skip


def _by_share(results: Results) -> Table:
    rows = []
    for share in SHARES:
        of = [results[_shared(method, share)] for method in (V, C)]
        rows.append([f"{share:.0%}", *(r.cell(metric(name)) for name in (FRACTION, MASS, PPL) for r in of)])
    of = [f"{words}, {method}" for words in ("argmax", "mass", "perplexity") for method in ("vanilla", "cured")]
    return Table(f"By the share of passages that are repeated, {_MAIN}", ["repeated", *of], rows)


def _about(results: Results) -> list[str]:
    first = results.first.config
    lengths = sorted({length for length, _ in GROUPS.values()})
    levels = ", ".join(f"{number(chance_of_first(length))} at {length}" for length in lengths)
    return [
        "Python's library as text, cut into passages of 40 to 110 characters, each written twice, three times with "
        f"probability 0.3. {first.train.steps:,} steps of {TOKENS:,} tokens. The setting is that of an earlier "
        "trial of vanilla and cured models, so it was not chosen on vanilla models alone; results/README.md says how. "
        "These seeds are new. Where each query prefers one of its "
        f"keys by chance, the first has most attention in {levels} tokens of the queries.",
        "Perplexities at different shares are of different texts.",
    ]


_ALL = ("perplexity", *KURTOSIS, "max_abs_first", FRACTION, MASS, "sink_rate", _DRAIN, _PEAK)
EXPERIMENT = Experiment(
    name="repeated_passages",
    title="Text with repeated passages: dominance, drains, outliers and damage; four methods, shares, ReLU, SGD",
    variants=_variants,
    seeds=(0, 1, 2, 3, 4),
    about=_about,
    groups=_groups,
    tables=(
        MetricTable("Models", _ALL),
        _by_share,
        MetricTable("Perplexity lost to quantisation", [penalty(name) for name in (MODERATE, COARSE, INT4)]),
        PairedTable("Change from softmax + Adam, paired by seed", V, ("perplexity", *KURTOSIS), (FRACTION, MASS)),
    ),
    claims=CLAIMS,
    headlines=tuple(
        (quantity, [_name(method, *GROUPS[_MAIN]) for method in (V, C)])
        for quantity in (FRACTION, "kurtosis_first", PPL)
    ),
    pictures=(
        StepCurves("dominance", "Queries that attend most to the first token, of a few held-out rows, over training.",
                   "fraction of queries", {FRACTION: ""}, x_scale="linear",
                   keep=lambda of: of.name in [_name(m, *GROUPS[_MAIN]) for m in METHOD_LABELS]),
        StepCurves("by_share", "The same by the share of repeated passages.", "fraction of queries", {FRACTION: ""},
                   x_scale="linear", keep=lambda of: of.name in _SHARED[""]),
        ModelMaps(lambda of: of.name in [_name(m, *GROUPS[_MAIN]) for m in (V, C)]),
    ),
)  # fmt: skip
