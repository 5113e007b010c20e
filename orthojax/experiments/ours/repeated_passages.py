"""First-token dominance on two cores: a text whose passages come back, and what removes the dominance.

Quotations, logs and boilerplate repeat themselves. A model that meets such text grows heads that copy, and heads that
have nothing to copy rest on the first token, as on Bigram-Backcopy.
"""

import dataclasses
import itertools

from orthojax.analysis import chance_of_first
from orthojax.config import replace
from orthojax.experiments.base_configs import REPEATED_MODEL
from orthojax.experiments.claims import (
    DOMINANCE,
    DOMINANCE_TESTABLE,
    FRACTION,
    KURTOSIS,
    MASS,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    C,
    Claim,
    V,
    dominated,
    excess_of_first_left,
    has_outliers,
    worst_kurtosis,
)
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import METHOD_LABELS
from orthojax.experiments.from_attention.paper_configs import METHODS
from orthojax.experiments.ours.repeated_claims import BY_METHOD, DOMINATES, DRAIN, MEASURED, is_drained
from orthojax.experiments.page import Table
from orthojax.experiments.pictures import DOMINANCE_BY_STEP, ModelMaps
from orthojax.experiments.quantization import COARSE, INT4, MODERATE
from orthojax.experiments.results import Results, metric, penalty
from orthojax.experiments.tables import MetricTable, PairedTable
from orthojax.formatting import number

# The setting of the main job, `REPEATED_MODEL`: tokens of a sequence, and that it begins with <s>.
MAIN = "64, <s>"
SHARES = (0.0, 0.1, 0.3, 1.0)

# Mitigations that Active-Dormant Attention Heads names (section 3): variant -> (label, what differs from vanilla).
OTHERS = {
    "relu": ("ReLU + Adam", {"model.normalizer": "relu"}),
    "sgd": ("softmax + SGD", {"optim.optimizer": "sgd", "optim.momentum": 0.9, "optim.learning_rate": 0.3}),
}


def _name(method: str) -> str:
    return f"{method}_64_bos"


def _shared(method: str, share: float) -> str:
    return _name(method) if share == 1 else f"{method}_share_{100 * share:.0f}"


def _variants(scale: str) -> tuple[Variant, ...]:
    found = [
        Variant(_name(method), f"{MAIN}, {label}", replace(REPEATED_MODEL, METHODS[method]))
        for method, label in METHOD_LABELS.items()
    ]
    for share in SHARES[:-1]:
        for method in (V, C):
            config = replace(REPEATED_MODEL, METHODS[method] | {"data.repeated_share": share})
            found.append(Variant(_shared(method, share), f"{share:.0%} repeated, {METHOD_LABELS[method]}", config))
    for name, (label, changes) in OTHERS.items():
        found.append(Variant(name, f"{MAIN}, {label}", replace(REPEATED_MODEL, changes)))
    return tuple(found)


def _groups(results: Results) -> dict[str, dict[str, str]]:
    return {MAIN: {method: _name(method) for method in METHOD_LABELS}}


_SHARED = {"": tuple(_shared(V, share) for share in SHARES)}


CLAIMS = (
    DOMINATES,
    Claim("The more of the text is repeated, the more it does.", _SHARED, (FRACTION,),
          lambda *of: all(a[FRACTION] < b[FRACTION] for a, b in itertools.pairwise(of)),
          "argmax rises with each share"),
    Claim("Without repetition it does not.", {"": (_shared(V, 0.0),)}, (FRACTION,),
          lambda of: not dominated(of), f"less than {DOMINANCE:g} times what equal logits give"),
    *BY_METHOD,
    Claim("ReLU attention has neither dominance nor drain.", {MAIN: ("relu", _name(V))},
          (FRACTION, DRAIN), lambda relu, v: excess_of_first_left(v, relu) <= 0.5 and not is_drained(relu),
          f"at most half of the excess is left, and values are not drained; {DOMINANCE_TESTABLE}",
          lambda relu, v: dominated(v)),
    Claim("SGD has no outliers.", {MAIN: ("sgd", _name(V))}, KURTOSIS,
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
    return Table(f"By the share of passages that are repeated, {MAIN}", ["repeated", *of], rows)


def _about(results: Results) -> list[str]:
    config = results.first.config
    length = config.data.sequence_length
    return [
        "Python's library as text, cut into passages of 40 to 110 characters, each written twice, three times with "
        f"probability 0.3. {config.train.steps:,} steps of {config.train.batch_size} x {length} tokens. The setting is "
        "that of an earlier trial of vanilla and cured models, so it was not chosen on vanilla models alone; "
        "results/README.md says how. OrthoAdam rotates the d_model axis of every kernel. Criteria were committed "
        "before any run with these axes or of these seeds. Where each query prefers one of its keys by chance, the "
        f"first has most attention in {number(chance_of_first(length))} of the queries.",
        "Perplexities at different shares are of different texts.",
    ]


EXPERIMENT = Experiment(
    name="repeated_passages",
    title="Text with repeated passages: dominance, drains, outliers and damage; four methods, shares, ReLU, SGD",
    variants=_variants,
    seeds=(5, 6, 7, 8, 9),
    about=_about,
    groups=_groups,
    tables=(
        MetricTable("Models", MEASURED, transposed=True),
        _by_share,
        MetricTable("Perplexity lost to quantisation", [penalty(name) for name in (MODERATE, COARSE, INT4)]),
        PairedTable("Change from softmax + Adam, paired by seed", V, ("perplexity", *KURTOSIS), (FRACTION, MASS)),
    ),
    claims=CLAIMS,
    headlines=tuple(
        (quantity, [_name(method) for method in (V, C)])
        for quantity in (FRACTION, "kurtosis_first", PPL)
    ),
    pictures=(
        dataclasses.replace(DOMINANCE_BY_STEP, keep=lambda of: of.name in [_name(m) for m in METHOD_LABELS]),
        dataclasses.replace(DOMINANCE_BY_STEP, name="by_share", caption="The same by the share of repeated passages.",
                            keep=lambda of: of.name in _SHARED[""]),
        ModelMaps(lambda of: of.name in [_name(m) for m in (V, C)]),
    ),
)  # fmt: skip
