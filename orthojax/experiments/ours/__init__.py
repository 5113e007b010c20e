"""Comparisons beyond the papers; the main job is the first."""

from orthojax.experiments.ours.dominance import ORDINARY_TEXT, REPEATED_LONGER, REPEATED_PASSAGES, REPEATED_SETTINGS
from orthojax.experiments.ours.long_pair import LONG_PAIR
from orthojax.experiments.ours.outliers import ADAM_BETAS, HAAR, PARITY, REMAINING_OUTLIERS,
    QUANTISED, STREAMED, CURED, ROTATION_ABLATION, TUNING
from orthojax.experiments.ours.quick import QUICK
from orthojax.experiments.ours.rounding import DAMAGE
from orthojax.experiments.ours.smollm2 import CURED, QUANTISED, STREAMED
from orthojax.experiments.ours.streaming import STREAMING
from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = (
    QUICK, LONG_PAIR, REPEATED_PASSAGES, REPEATED_LONGER, REPEATED_SETTINGS, ORDINARY_TEXT, DAMAGE, STREAMING,
    ROTATION_ABLATION, HAAR, ADAM_BETAS, TUNING, PARITY, REMAINING_OUTLIERS,
    QUANTISED, STREAMED, CURED,
)  # fmt: skip
