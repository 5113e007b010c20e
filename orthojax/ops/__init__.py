"""Pure functions on arrays: nothing here depends on flax, optax or any state."""

from orthojax.ops.attention import (
    ATTENTION_NAME,
    attention_fn,
    attention_logits,
    attention_weights,
    dot_product_attention,
    visible_keys,
    weighted_values,
)
from orthojax.ops.cross_entropy import chunked_cross_entropy_sum_nats, cross_entropy_nats, positions_at_once
from orthojax.ops.normalizers import (
    ClippedSoftmax,
    Normalizer,
    apply_normalizer,
    clipped_softmax,
    gelu,
    relu,
    sigmoid,
    softmax,
    softmax1,
    softmax_n,
    softmax_with_sink,
)
from orthojax.ops.rotary import llama3_frequencies, rotary, rotary_frequencies, yarn_frequencies, yarn_mscale
from orthojax.ops.statistics import kurtosis, norm_ratio

__all__ = [
    "ATTENTION_NAME",
    "ClippedSoftmax",
    "Normalizer",
    "apply_normalizer",
    "attention_fn",
    "attention_logits",
    "attention_weights",
    "chunked_cross_entropy_sum_nats",
    "clipped_softmax",
    "cross_entropy_nats",
    "dot_product_attention",
    "gelu",
    "kurtosis",
    "llama3_frequencies",
    "norm_ratio",
    "positions_at_once",
    "relu",
    "rotary",
    "rotary_frequencies",
    "sigmoid",
    "softmax",
    "softmax1",
    "softmax_n",
    "softmax_with_sink",
    "visible_keys",
    "weighted_values",
    "yarn_frequencies",
    "yarn_mscale",
]
