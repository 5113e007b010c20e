"""softmax-1 in flax linen: one argument of MultiHeadAttention."""

import flax.linen as nn
import jax

import orthojax

x = jax.random.normal(jax.random.key(0), (2, 16, 64))
layer = nn.MultiHeadAttention(num_heads=4, attention_fn=orthojax.attention_fn("softmax1", is_causal=True))
y, params = layer.init_with_output(jax.random.key(1), x)
print(y.shape)
