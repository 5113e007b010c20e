"""softmax-1 in flax nnx: one argument of MultiHeadAttention."""

import jax
from flax import nnx

import orthojax

x = jax.random.normal(jax.random.key(0), (2, 16, 64))
softmax1 = orthojax.attention_fn("softmax1", is_causal=True)
layer = nnx.MultiHeadAttention(4, 64, attention_fn=softmax1, decode=False, rngs=nnx.Rngs(1))
print(layer(x).shape)
