"""Repeated passages in other settings than the main job's: no <s>, as in the paper's GPT-2, longer rows, more steps."""

from typing import NamedTuple

from orthojax.analysis import chance_of_first
from orthojax.config import Config, replace
from orthojax.experiments.base_configs import REPEATED_MODEL
from orthojax.experiments.claims import FRACTION, KURTOSIS, MASS, PPL, C, Claim, V, excess_of_first_left
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import METHOD_LABELS
from orthojax.experiments.from_attention.paper_configs import METHODS
from orthojax.experiments.from_attention.quantization import COARSE, INT4, MODERATE
from orthojax.experiments.ours.damage import FOUR_BITS, MORE
from orthojax.experiments.ours.repeated_passages import BY_METHOD, DOMINATES, MEASURED, loses_less
from orthojax.experiments.pictures import ModelMaps, StepCurves
from orthojax.experiments.results import Results, penalty
from orthojax.experiments.tables import MetricTable, PairedTable
from orthojax.formatting import number

FOUR = tuple(f"perplexity_{name}" for name in MORE)


class Setting(NamedTuple):
    """What differs from the main job: tokens of a sequence, whether it begins with <s>, steps, and who is compared."""

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
        }
        return replace(REPEATED_MODEL, changes)

    @property
    def label(self) -> str:
        """Names the setting in tables."""
        return f"{self.length}, {'<s>' if self.bos else 'no <s>'}, {self.steps:,} steps"

    def variant(self, method: str) -> str:
        """The name of a method in this setting."""
        return f"{method}_{self.length}{'_bos' if self.bos else ''}_{self.steps}"


MAIN = Setting(methods=(V, C))  # the main job
LONGER = Setting(steps=6_000, methods=(V, C))
SETTINGS = (MAIN, LONGER, Setting(bos=False), Setting(length=256), Setting(length=256, bos=False))


def _variants(scale: str) -> tuple[Variant, ...]:
    return tuple(
        Variant(of.variant(method), f"{of.label}, {METHOD_LABELS[method]}", replace(of.config(), METHODS[method]))
        for of in SETTINGS
        for method in of.methods
    )


def _groups(results: Results) -> dict[str, dict[str, str]]:
    return {of.label: {method: of.variant(method) for method in of.methods} for of in SETTINGS}


CLAIMS = (
    DOMINATES,
    Claim("It dominates more after three times the steps.", {"": (MAIN.variant(V), LONGER.variant(V))}, (FRACTION,),
          lambda short, long: long[FRACTION] > short[FRACTION], "argmax rises"),
    Claim("The cure leaves less of it after three times the steps.",
          {"": tuple(of.variant(method) for of in (MAIN, LONGER) for method in (V, C))}, (FRACTION,),
          lambda v, c, longer_v, longer_c: excess_of_first_left(longer_v, longer_c) < excess_of_first_left(v, c),
          "what is left of the excess over equal logits falls"),
    *BY_METHOD,
    *map(loses_less, FOUR),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    lengths = sorted({of.length for of in SETTINGS})
    levels = ", ".join(f"{number(chance_of_first(length))} at {length}" for length in lengths)
    return [
        "The text of repeated_passages, all of whose passages are repeated. The vanilla and cured models of the main "
        "job stand first; the others differ in the number of steps, in <s>, and in the length of a row, where a batch "
        "has as many tokens. Where each query prefers one of its keys by chance, the first has most attention in "
        f"{levels} tokens of the queries.",
        "The setting is that of an earlier trial of vanilla and cured models, one seed, in which dominance grew over "
        "8,000 steps and the cure removed it. Criteria were committed before the seeds; of seeds 1 and 2 those two "
        "models of the main job had been seen, all else is new.",
    ]


_DRAWN = [LONGER.variant(method) for method in LONGER.methods]
EXPERIMENT = Experiment(
    name="repeated_settings",
    title="Repeated passages in other settings: no <s>, 256 tokens, three times the steps; four methods",
    variants=_variants,
    seeds=(1, 2, 3),
    about=_about,
    groups=_groups,
    measures=(FOUR_BITS,),
    tables=(
        MetricTable("Models", MEASURED),
        MetricTable("Perplexity lost to rounding", [penalty(name) for name in (MODERATE, COARSE, INT4, *FOUR)]),
        PairedTable("Change from softmax + Adam, paired by seed", V, (PPL, *KURTOSIS), (FRACTION, MASS)),
    ),
    claims=CLAIMS,
    headlines=tuple(
        (quantity, [LONGER.variant(method) for method in (V, C)]) for quantity in (FRACTION, "kurtosis_first", PPL)
    ),
    pictures=(
        StepCurves("dominance", "Queries that attend most to the first token, of a few held-out rows, over training.",
                   "fraction of queries", {FRACTION: ""}, x_scale="linear", keep=lambda of: of.name in _DRAWN),
        StepCurves("kurtosis", "Kurtosis of the first token's hidden states over training.", "kurtosis",
                   {"kurtosis_first": ""}, y_scale="log", x_scale="linear", keep=lambda of: of.name in _DRAWN),
        ModelMaps(lambda of: of.name in [LONGER.variant(method) for method in (V, C)]),
    ),
)  # fmt: skip
