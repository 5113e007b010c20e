"""Active-Dormant Attention Heads (arXiv 2410.13835): Bigram-Backcopy, its theory, and what the paper leaves open."""

from orthojax.experiments.active_dormant import conditions
from orthojax.experiments.active_dormant.norm_toys import NORM_TOYS
from orthojax.experiments.active_dormant.phenomena import ONE_LAYER, PEAK_BLOCKS, PUBLISHED_SIZE, THREE_LAYERS
from orthojax.experiments.active_dormant.simplified import SIMPLIFIED_MODEL, SIMPLIFIED_THREE_LAYERS
from orthojax.experiments.active_dormant.sink_theory import SINK_THEORY
from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = (
    ONE_LAYER, PUBLISHED_SIZE, THREE_LAYERS, PEAK_BLOCKS, *conditions.STUDIES, SIMPLIFIED_MODEL,
    SIMPLIFIED_THREE_LAYERS, SINK_THEORY, NORM_TOYS,
)  # fmt: skip
