"""Repeated passages beyond the main job: three times the steps; no <s>, as in the paper's GPT-2; rows of 256 tokens."""

import dataclasses
import functools
from typing import NamedTuple

from orthojax.analysis import chance_of_first
from orthojax.config import Config, replace
from orthojax.experiments.base_configs import OUTPUT_AXIS, REPEATED_MODEL
from orthojax.experiments.claims import FRACTION, KURTOSIS, MASS, PPL, C, Claim, V, excess_of_first_left
from orthojax.experiments.cure_claims import dominance_halved, no_outliers_left, no_perplexity_lost
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import METHOD_LABELS
from orthojax.experiments.from_attention.paper_configs import METHODS
from orthojax.experiments.ours.damage import FOUR_BIT, FOUR_BITS
from orthojax.experiments.ours.parity import RESIDUAL, RESIDUAL_LABEL
from orthojax.experiments.ours.repeated_claims import BY_METHOD, DOMINATES, MEASURED, they_lose_less
from orthojax.experiments.pictures import DOMINANCE_BY_STEP, KURTOSIS_BY_STEP, ModelMaps
from orthojax.experiments.quantization import COARSE, INT4, MODERATE
from orthojax.experiments.results import Results, penalty
from orthojax.experiments.tables import MetricTable, PairedTable
from orthojax.formatting import number

FOUR_BIT_METRICS = tuple(f"perplexity_{name}" for name in FOUR_BIT)
ROUNDED = (MODERATE, COARSE, INT4, *FOUR_BIT_METRICS)
# The methods of the paper, and the cure with the d_model axis of every kernel rotated.
_LABELS = {**METHOD_LABELS, RESIDUAL: f"{METHOD_LABELS[C]}, {RESIDUAL_LABEL}"}
_CHANGES = {**METHODS, RESIDUAL: {**METHODS[C], "optim.rotation.axes": "residual"}}


class Setting(NamedTuple):
    """What differs from the main job besides the rotated axes: tokens of a row, <s>, steps; who is compared."""

    label: str
    length: int = 64
    bos: bool = True
    steps: int = 2_000
    methods: tuple[str, ...] = tuple(METHOD_LABELS)

    def config(self) -> Config:
        """Of softmax and Adam; a batch has as many tokens in each setting."""
        tokens = REPEATED_MODEL.train.batch_size * REPEATED_MODEL.data.sequence_length
        changes = {
            "model.max_length": self.length,
            "data.sequence_length": self.length,
            "data.bos": self.bos,
            "train.batch_size": tokens // self.length,
            "train.steps": self.steps,
            "optim.rotation.axes": OUTPUT_AXIS.axes,
        }
        return replace(REPEATED_MODEL, changes)

    def variant(self, method: str) -> str:
        """The name of a method in this setting."""
        return f"{method}_{self.length}{'_bos' if self.bos else ''}_{self.steps}"


SHORTER = Setting("2,000 steps", methods=(V, C))
LONGER = Setting("6,000 steps", steps=6_000, methods=tuple(_LABELS))
LONG_ROWS = Setting("256, <s>", length=256)
OTHERS = (
    Setting("64, no <s>", bos=False),
    Setting("64, no <s>, 6,000 steps", bos=False, steps=LONGER.steps, methods=(V, C)),
    LONG_ROWS,
    Setting("256, no <s>", length=256, bos=False),
)


def _variants(settings: tuple[Setting, ...], scale: str) -> tuple[Variant, ...]:
    return tuple(
        Variant(of.variant(method), f"{of.label}, {_LABELS[method]}", replace(of.config(), _CHANGES[method]))
        for of in settings
        for method in of.methods
    )


def _groups(settings: tuple[Setting, ...], results: Results) -> dict[str, dict[str, str]]:
    return {of.label: {method: of.variant(method) for method in of.methods} for of in settings}


def _about(settings: tuple[Setting, ...], words: str, results: Results) -> list[str]:
    lengths = sorted({of.length for of in settings})
    levels = ", ".join(f"{number(chance_of_first(length))} at {length}" for length in lengths)
    return [
        "Model, learning rate and text of repeated_passages, every passage repeated, with batches of as many tokens. "
        f"{words} Where each query prefers one of its keys by chance, the first has most attention in a fraction of "
        f"{levels} tokens.",
        "This text and rate are those of an earlier trial of vanilla and cured models, one seed, in which dominance "
        "grew over 8,000 steps and the cure removed it: they were not chosen on vanilla models alone.",
    ]


_MORE_STEPS = (
    Claim("It dominates more after three times the steps.", {"": (SHORTER.variant(V), LONGER.variant(V))}, (FRACTION,),
          lambda short, long: long[FRACTION] > short[FRACTION], "argmax rises"),
    Claim("The cure leaves less of it after three times the steps.",
          {"": tuple(of.variant(method) for of in (SHORTER, LONGER) for method in (V, C))}, (FRACTION,),
          lambda v, c, longer_v, longer_c: excess_of_first_left(longer_v, longer_c) < excess_of_first_left(v, c),
          "what is left of the excess over equal logits falls"),
)  # fmt: skip
_WITH_D_MODEL_AXES = (
    dominance_halved(
        "Both together take away half of the dominance with the d_model axes rotated, too.", (V, RESIDUAL)
    ),
    no_outliers_left("With the d_model axes rotated they leave no outliers.", (V, RESIDUAL)),
    no_perplexity_lost("With the d_model axes rotated they cost no perplexity.", (V, RESIDUAL)),
)


def _experiment(
    name: str,
    title: str,
    words: str,
    settings: tuple[Setting, ...],
    shown: Setting,
    more: tuple[Claim, ...] = (),
) -> Experiment:
    """Methods in some settings, of which one is on top of the page and in the figures."""
    drawn = [shown.variant(method) for method in shown.methods]
    pair = [shown.variant(method) for method in (V, C)]
    return Experiment(
        name=name,
        title=title,
        variants=functools.partial(_variants, settings),
        seeds=(1, 2, 3, 4, 5),
        about=functools.partial(_about, settings, words),
        groups=functools.partial(_groups, settings),
        measures=(FOUR_BITS,),
        tables=(
            MetricTable("Models", MEASURED),
            MetricTable("Perplexity lost to rounding", [penalty(metric) for metric in ROUNDED]),
            PairedTable("Change from softmax + Adam, paired by seed", V, (PPL, *KURTOSIS), (FRACTION, MASS)),
        ),
        claims=(
            DOMINATES,
            *more,
            *BY_METHOD,
            *map(they_lose_less, FOUR_BIT_METRICS),
            *(_WITH_D_MODEL_AXES if RESIDUAL in shown.methods else ()),
        ),
        headlines=[(quantity, pair) for quantity in (FRACTION, "kurtosis_first", PPL)],
        pictures=(
            dataclasses.replace(DOMINANCE_BY_STEP, keep=lambda of: of.name in drawn),
            dataclasses.replace(KURTOSIS_BY_STEP, keep=lambda of: of.name in drawn),
            ModelMaps(lambda of: of.name in pair),
        ),
    )  # fmt: skip


EXPERIMENTS = (
    _experiment(
        "repeated_longer",
        "Repeated passages, three times the steps: dominance, drains, outliers, damage; which part removes what",
        f"{LONGER.label}; a pair of {SHORTER.label} stands first. OrthoAdam rotates the output axis of each kernel "
        "where a row does not name others. Criteria were committed before any of these runs but seeds 1 and 2 of "
        f"{SHORTER.label}; each part alone joined the comparison when seed 1 of vanilla and cured had run, the d_model "
        "axes when all others had.",
        (SHORTER, LONGER),
        LONGER,
        _MORE_STEPS,
    ),
    _experiment(
        "repeated_settings",
        "Repeated passages without <s>, and with rows of 256 tokens: dominance, drains, outliers; four methods",
        "What differs from the main job is <s>, the length of a row, or both, of one pair the number of steps; and "
        "that OrthoAdam rotates the output axis of each kernel. Criteria were committed before these runs.",
        OTHERS,
        LONG_ROWS,
    ),
)
