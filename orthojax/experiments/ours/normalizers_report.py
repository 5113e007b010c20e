"""How `normalizers` is told."""

import dataclasses
from collections.abc import Callable

import numpy as np

from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.criteria import DOMINANCE, NO_OUTLIERS, OUTLIERS, chance_of_first
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.study.study import Study
from orthojax.formatting import mean_and_range, number
from orthojax.model import parameter_count

# Name -> label.
NORMALIZERS = {
    "softmax": "softmax",
    "softmax1": "softmax-1",
    "learned_sink": "learned sinks",
    "clipped_softmax": "clipped softmax",
    "relu": "ReLU",
    "sigmoid": "sigmoid",
    "gated": "softmax, gated",
}
OPTIMIZERS = {"adam": "Adam", "orthoadam": "OrthoAdam", "sgd": "SGD with momentum"}

_METRICS = {
    "perplexity": "perplexity",
    "kurtosis_first": "kurtosis, first token",
    "kurtosis_rest": "kurtosis, others",
    "first_attention_fraction": "first token most attended, fraction",
    "first_attention_share": "weight on it, share of a row's",
    "first_attention_mass": "weight on it",
}
_VANILLA = "softmax_adam"


def variant_name(normalizer: str, optimizer: str) -> str:
    """The name of a variant."""
    return f"{normalizer}_{optimizer}"


def _worse(study: Study, name: str) -> float:
    """The larger kurtosis of the two, first token and others."""
    return max(study.mean(name, "kurtosis_first"), study.mean(name, "kurtosis_rest"))


def _dominance(study: Study, name: str) -> float:
    return study.mean(name, "first_attention_fraction")


def _chance(study: Study) -> float:
    return chance_of_first(study.variants[0].config.data.sequence_length)


def _dominates(study: Study, name: str) -> bool:
    """Whether the first token does, in a variant with softmax."""
    return _dominance(study, name) >= DOMINANCE * _chance(study)


def _is_removed(study: Study, name: str) -> bool:
    """Whether at most half is left of what exceeds chance in softmax with Adam."""
    return 2 * (_dominance(study, name) - _chance(study)) <= _dominance(study, _VANILLA) - _chance(study)


def _told(study: Study, optimizer: str, show: Callable[[str], str]) -> str:
    """Something of every normalizer with one optimizer."""
    return ", ".join(f"{label} {show(variant_name(name, optimizer))}" for name, label in NORMALIZERS.items())


def _what_is_removed(study: Study) -> Table:
    dominant, outliers = _dominates(study, _VANILLA), _worse(study, _VANILLA) > OUTLIERS

    def cell(name: str) -> str:
        if not study.values(name, "perplexity"):
            return "failed"
        removed = {
            "dominance": dominant and _is_removed(study, name),
            "outliers": outliers and _worse(study, name) < NO_OUTLIERS,
        }
        words = "both" if all(removed.values()) else next((w for w, gone in removed.items() if gone), "neither")
        return f"{words}, {mean_and_range(study.values(name, 'perplexity'))}"

    missing = [word for word, shows in (("dominance", dominant), ("outliers", outliers)) if not shows]
    caption = "What is gone that softmax with Adam has, and the perplexity"
    caption += f"; it has no {' and no '.join(missing)} at this scale" if missing else ""
    rows = [[label, *(cell(variant_name(n, o)) for o in OPTIMIZERS)] for n, label in NORMALIZERS.items()]
    return Table(caption, ["", *OPTIMIZERS.values()], rows)


def _claims(study: Study) -> list[Claim]:
    return [_dominance_claim(study), *_adaptive_claims(study), *_sgd_claims(study)]


def _dominance_claim(study: Study) -> Claim:
    removed = [label for name, label in NORMALIZERS.items() if _is_removed(study, variant_name(name, "adam"))]
    return Claim(
        verdict(len(removed) == len(NORMALIZERS) - 1, visible=_dominates(study, _VANILLA)),
        f"Whatever lets a head attend to nothing removes the first token's dominance. With Adam it is the most "
        f"attended one: {_told(study, 'adam', lambda name: f'{_dominance(study, name):.1%}')}; by chance "
        f"{_chance(study):.1%}; removed with: {', '.join(removed) or 'none'}. The paper, GPT2 60M: softmax 48.9%, "
        f"softmax-1 2.1% (criterion: with every other one at most half of what exceeds chance is left; visible where "
        f"softmax has {DOMINANCE:g} times chance or more).",
    )


def _adaptive_claims(study: Study) -> list[Claim]:
    def rest(name: str) -> str:
        return number(study.mean(name, "kurtosis_rest"))

    def all_rest(optimizer: str) -> list[float]:
        return [study.mean(variant_name(name, optimizer), "kurtosis_rest") for name in NORMALIZERS]

    visible = study.mean(_VANILLA, "kurtosis_rest") > OUTLIERS
    first = {n: study.mean(variant_name(n, "orthoadam"), "kurtosis_first") for n in ("softmax", "softmax1")}
    softmax = variant_name("softmax", "orthoadam")
    return [
        Claim(
            verdict(min(all_rest("adam")) >= NO_OUTLIERS, visible=visible),
            f"No normalizer alone removes the outliers of tokens after the first. Their kurtosis with Adam: "
            f"{_told(study, 'adam', rest)}. The paper: softmax 77.9, softmax-1 81.4 (criterion: {NO_OUTLIERS} or more "
            f"with every one; visible where softmax has more than {OUTLIERS:g}).",
        ),
        Claim(
            verdict(max(all_rest("orthoadam")) < NO_OUTLIERS, visible=visible),
            f"OrthoAdam removes them whatever the normalizer. Their kurtosis: {_told(study, 'orthoadam', rest)}. The "
            f"paper: softmax 10.6, softmax-1 7.0 (criterion: below {NO_OUTLIERS} with every one; visible where softmax "
            f"with Adam has more than {OUTLIERS:g}).",
        ),
        Claim(
            verdict(first["softmax1"] < NO_OUTLIERS <= first["softmax"], visible=_dominates(study, softmax)),
            f"With OrthoAdam the outliers of the first token stay as long as softmax lets it dominate. Its kurtosis: "
            f"{_told(study, 'orthoadam', lambda name: number(study.mean(name, 'kurtosis_first')))}. The paper: softmax "
            f"260.8, softmax-1 7.6 (criterion: below {NO_OUTLIERS} with softmax-1, not with softmax; visible where "
            f"with softmax and OrthoAdam the first token is most attended by {DOMINANCE:g} times the "
            f"{_chance(study):.1%} that chance gives, or more: here by {_dominance(study, softmax):.1%}).",
        ),
    ]


def _sgd_claims(study: Study) -> list[Claim]:
    kurtosis = [_worse(study, variant_name(name, "sgd")) for name in NORMALIZERS]
    perplexity = {
        name: [study.mean(variant_name(name, optimizer), "perplexity") for optimizer in ("sgd", "adam")]
        for name in NORMALIZERS
    }
    gaps = ", ".join(f"{NORMALIZERS[name]} {sgd / adam - 1:+.1%}" for name, (sgd, adam) in perplexity.items())
    return [
        Claim(
            verdict(max(kurtosis) <= OUTLIERS, visible=_worse(study, _VANILLA) > OUTLIERS),
            f"SGD makes no outliers whatever the normalizer. Kurtosis, the larger of first token and others: "
            f"{_told(study, 'sgd', lambda name: number(_worse(study, name)))}. The paper, 130M with softmax-1: 5.0 "
            f"(criterion: at most {OUTLIERS:g} with every one; visible where softmax with Adam has more).",
        ),
        Claim(
            verdict(all(sgd > adam for sgd, adam in perplexity.values())),
            f"SGD costs perplexity. Against Adam with the same normalizer: {gaps}. The paper, with eight times the "
            f"steps: 25.3 against 26.6 (criterion: higher with every one).",
        ),
    ]


def _pictures(study: Study) -> list[Picture]:
    variants = {v.name: v for v in study.variants}
    groups = {
        label: [
            (dataclasses.replace(variants[variant_name(n, o)], label=words), _worse(study, variant_name(n, o)))
            for n, words in NORMALIZERS.items()
        ]
        for o, label in OPTIMIZERS.items()
    }
    fractions = drawing.bars(
        [label.replace(", ", ",\n").replace(" s", "\ns") for label in NORMALIZERS.values()],
        {
            label: np.array([study.values(variant_name(n, o), "first_attention_fraction") for n in NORMALIZERS]).T
            for o, label in OPTIMIZERS.items()
        },
        y_label="first token most attended, fraction",
    )
    return [
        summaries.perplexity_and_kurtosis(study, groups),
        Picture("first_attention", "Share of (query, head) pairs that attend most to the first token.", fractions),
    ]


def report(study: Study) -> Report:
    """Tables by normalizer and optimizer, claims about each, and both phenomena drawn."""
    config = study.variants[0].config
    sgd_steps = max(v.config.train.steps for v in study.variants)
    finished = not study.failures()
    return summaries.study_report(
        study,
        "Normalizers and optimizers: who removes dominance, who removes outliers",
        [
            f"One language model ({parameter_count(config.model):,} parameters, RMSNormSingle, no biases) with "
            f"{len(NORMALIZERS)} kinds of attention and {len(OPTIMIZERS)} optimizers, {config.train.steps} steps of "
            f"{config.train.batch_size} x {config.data.sequence_length} tokens; SGD has {sgd_steps} steps and the "
            f"paper's learning rate of 0.2, the others have Adam's.",
            "The weights of ReLU and sigmoid are not normalised, so the weight on the first token is no share of the "
            "attention: across normalizers compare the fraction of (query, head) pairs that attend most to it, and its "
            "share of a row's whole weight. Gated attention has the weights of softmax and multiplies what a head "
            "writes by a gate, so a head can do nothing while its weights rest on the first token.",
        ],
        claims=_claims(study) if finished else [],
        tables=[
            _what_is_removed(study),
            summaries.metric_table(study, "Perplexity, outliers, attention", study.variants, _METRICS, rows="variants"),
        ],
        pictures=_pictures(study) if finished else [],
    )
