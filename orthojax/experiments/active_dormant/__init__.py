"""Active-Dormant Attention Heads (arXiv 2410.13835): Bigram-Backcopy, its theory, and what the paper leaves open."""

from orthojax.experiments.active_dormant.aligned import ALIGNED
from orthojax.experiments.active_dormant.causes import SINK_REINFORCEMENT, SOFTMAX1_SINKS
from orthojax.experiments.active_dormant.cure import BACKCOPY_CURE
from orthojax.experiments.active_dormant.one_layer import ONE_LAYER, PUBLISHED_SIZE
from orthojax.experiments.active_dormant.related_tasks import BACKCOPY_RULES, BREAK_CONDITIONS_MAP, NEEDED_HEAD
from orthojax.experiments.active_dormant.simplified_models import SIMPLIFIED_MODEL, SIMPLIFIED_THREE_LAYERS
from orthojax.experiments.active_dormant.theory import NORM_TOYS, SINK_THEORY
from orthojax.experiments.active_dormant.three_layers import PEAK_BLOCKS, THREE_LAYERS
from orthojax.experiments.study import Study

STUDIES: tuple[Study, ...] = (
    ONE_LAYER, PUBLISHED_SIZE, THREE_LAYERS, PEAK_BLOCKS, BACKCOPY_RULES, NEEDED_HEAD, BREAK_CONDITIONS_MAP,
    BACKCOPY_CURE, SOFTMAX1_SINKS, SINK_REINFORCEMENT,
    SIMPLIFIED_MODEL, SIMPLIFIED_THREE_LAYERS, SINK_THEORY, NORM_TOYS,
    ALIGNED,
)  # fmt: skip
