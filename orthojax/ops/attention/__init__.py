"""Dot-product attention with any normalizer, by plain XLA or by the vendors' kernels.

Letters inside functions: B batch, T query positions, S key positions, N query heads, K key-value heads, G = N / K,
H head width. `dot_product.py` is the entry, `choice.py` picks the implementation; every implementation is a file with

- `unsupported(inputs) -> str`: why it cannot do this, naming what is allowed, or "";
- `attend(inputs) -> [B, T, N, H]`;
- `unavailable() -> str` for a vendor's kernel: why it cannot run in this process, or "".
"""

from orthojax.ops.attention.adapter import attention_fn
from orthojax.ops.attention.choice import Implementation, forbid_fallback
from orthojax.ops.attention.dot_product import dot_product_attention
from orthojax.ops.attention.inputs import ATTENTION_NAME, AttentionInputs
from orthojax.ops.attention.visibility import relaxed_causal_mask, visible_keys
from orthojax.ops.attention.xla import attention_logits

__all__ = [
    "ATTENTION_NAME",
    "AttentionInputs",
    "Implementation",
    "attention_fn",
    "attention_logits",
    "dot_product_attention",
    "forbid_fallback",
    "relaxed_causal_mask",
    "visible_keys",
]
