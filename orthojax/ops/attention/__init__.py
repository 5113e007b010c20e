"""Dot-product attention with any normalizer, by plain XLA or by a vendor's kernel.

Letters inside functions: B batch, T query positions, S key positions, N query heads, K key-value heads, G = N / K,
H head width. The module of a vendor's kernel has

- `unsupported(inputs) -> str`: why it does not support the arguments, naming what is allowed, or "";
- `unavailable() -> str`: why it cannot run in this process, or "";
- `attend(inputs) -> [B, T, N, H]`.
"""

from orthojax.ops.attention.dot_product import attention_fn as attention_fn
from orthojax.ops.attention.dot_product import dot_product_attention as dot_product_attention
from orthojax.ops.attention.inputs import ATTENTION_NAME as ATTENTION_NAME
from orthojax.ops.attention.merging import merge as merge
from orthojax.ops.attention.xla import attention_logits as attention_logits
from orthojax.ops.attention.xla import attention_weights as attention_weights
from orthojax.ops.attention.xla import relaxed_causal_mask as relaxed_causal_mask
from orthojax.ops.attention.xla import visible_keys as visible_keys
from orthojax.ops.attention.xla import weighted_values as weighted_values
