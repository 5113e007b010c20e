"""Pure functions on arrays: nothing here knows of flax, optax or any state."""

from orthojax.ops.attention import attention_fn, attention_logits, dot_product_attention, visible_keys
from orthojax.ops.losses import cross_entropy_nats
from orthojax.ops.normalizers import (
    Normalizer,
    apply_normalizer,
    relu,
    sigmoid,
    softmax,
    softmax1,
    softmax_n,
    softmax_with_sink,
)
from orthojax.ops.statistics import kurtosis, norm_ratio

__all__ = [
    "Normalizer",
    "apply_normalizer",
    "attention_fn",
    "attention_logits",
    "cross_entropy_nats",
    "dot_product_attention",
    "kurtosis",
    "norm_ratio",
    "relu",
    "sigmoid",
    "softmax",
    "softmax1",
    "softmax_n",
    "softmax_with_sink",
    "visible_keys",
]
