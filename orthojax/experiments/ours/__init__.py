"""Comparisons beyond the papers; the main job is the first."""

from orthojax.experiments.ours import preventions
from orthojax.experiments.ours.dominance import ORDINARY_TEXT, REPEATED_LONGER, REPEATED_PASSAGES
from orthojax.experiments.ours.few_bits import FEW_BITS
from orthojax.experiments.ours.fp4_training import FP4_TRAINING
from orthojax.experiments.ours.long_pair import LONG_PAIR
from orthojax.experiments.ours.quick import QUICK
from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = (
    QUICK, LONG_PAIR, REPEATED_PASSAGES, REPEATED_LONGER, ORDINARY_TEXT, *preventions.STUDIES,
    FEW_BITS, FP4_TRAINING,
)  # fmt: skip
