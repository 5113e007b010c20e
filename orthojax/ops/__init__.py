"""Pure functions on arrays: nothing here knows of flax, optax or any state."""

from orthojax.ops.attention import (
    ATTENTION_NAME,
    attention_fn,
    attention_logits,
    dot_product_attention,
    forbid_fallback,
    visible_keys,
)
from orthojax.ops.chunked_cross_entropy import chunked_cross_entropy_sum_nats, positions_at_once
from orthojax.ops.losses import cross_entropy_nats
from orthojax.ops.normalizers import (
    ClippedSoftmax,
    Normalizer,
    apply_normalizer,
    clipped_softmax,
    relu,
    sigmoid,
    softmax,
    softmax1,
    softmax_n,
    softmax_with_sink,
)
from orthojax.ops.statistics import kurtosis, norm_ratio

__all__ = [
    "ATTENTION_NAME",
    "ClippedSoftmax",
    "Normalizer",
    "apply_normalizer",
    "attention_fn",
    "attention_logits",
    "chunked_cross_entropy_sum_nats",
    "clipped_softmax",
    "cross_entropy_nats",
    "dot_product_attention",
    "forbid_fallback",
    "kurtosis",
    "norm_ratio",
    "positions_at_once",
    "relu",
    "sigmoid",
    "softmax",
    "softmax1",
    "softmax_n",
    "softmax_with_sink",
    "visible_keys",
]
