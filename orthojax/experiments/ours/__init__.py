"""Comparisons beyond the papers; the main job is the first."""

from orthojax.experiments.ours.quick import QUICK
from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = (QUICK,)
