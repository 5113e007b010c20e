"""Comparisons beyond the papers; the main job is the first."""

from orthojax.experiments.ours import smollm2
from orthojax.experiments.ours.bidirectional import BIDIRECTIONAL
from orthojax.experiments.ours.breaking import BREAKS, WHAT_BREAKS
from orthojax.experiments.ours.dominance import ORDINARY_TEXT, REPEATED_LONGER, REPEATED_PASSAGES, REPEATED_SETTINGS
from orthojax.experiments.ours.long_pair import LONG_PAIR
from orthojax.experiments.ours.outliers import ADAM_BETAS, HAAR, PARITY, REMAINING_OUTLIERS, ROTATION_ABLATION, TUNING
from orthojax.experiments.ours.preventions import COSTS, EQUAL_TIME, KV_CACHE, PARTS, PREVENTIONS, RATES, SINKS
from orthojax.experiments.ours.preventions import TUNING as PREVENTIONS_TUNING
from orthojax.experiments.ours.quick import QUICK
from orthojax.experiments.ours.rounding import DAMAGE
from orthojax.experiments.ours.streaming import STREAMING
from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = (
    QUICK, LONG_PAIR, REPEATED_PASSAGES, REPEATED_LONGER, REPEATED_SETTINGS, ORDINARY_TEXT, DAMAGE, STREAMING,
    WHAT_BREAKS, BREAKS, PREVENTIONS_TUNING, PREVENTIONS, PARTS, SINKS, COSTS, RATES, EQUAL_TIME, KV_CACHE,
    BIDIRECTIONAL, ROTATION_ABLATION, HAAR, ADAM_BETAS, TUNING, PARITY, REMAINING_OUTLIERS,
    smollm2.QUANTISED, smollm2.STREAMED, smollm2.SAFE,
)  # fmt: skip
