"""Figures 4 and 5: do large weights of the output projections go with small second moments of their gradients?"""

import functools

from orthojax.experiments.from_attention.figure4_report import report
from orthojax.experiments.from_attention.models import grid
from orthojax.experiments.from_attention.output_weights import MEASURE
from orthojax.experiments.study.study import Experiment

# The paper has 130M alone; where models are cheap, a smaller and a larger one stand beside it.
_MODELS = {
    "tiny": ("gpt2_60m", "gpt2_130m", "gpt2_350m"),
    "small": ("gpt2_60m", "gpt2_130m", "gpt2_350m"),
    "paper": ("gpt2_130m",),
}

EXPERIMENT = Experiment(
    name="figure4",
    title="norms of the output projections by channel beside their summed second moments",
    also=("figure5",),
    scales={
        scale: functools.partial(grid, scale, models, ("vanilla", "cured")) for scale, models in _MODELS.items()
    },
    report=report,
    measures=(MEASURE,),
)  # fmt: skip
