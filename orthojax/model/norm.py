"""Normalisation of the residual stream."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from orthojax.config import ModelConfig


class Norm(nn.Module):
    """Normalisation over channels, in float32.

    `rmsnorm_single` is RMSNorm with one scalar gain: it commutes with every rotation of the channels, so it prefers no
    basis. `layernorm` has a bias where linear layers have one.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D] float32."""
        c = self.config
        if c.norm == "none":
            return x
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if c.norm == "layernorm":
            x -= jnp.mean(x, -1, keepdims=True)
        x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + c.norm_eps)
        shape = () if c.norm == "rmsnorm_single" else (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        x *= scale.reshape((1, 1, -1))
        if c.norm == "layernorm" and c.use_bias:
            x += self.param("bias", nn.initializers.zeros, shape, jnp.float32).reshape((1, 1, -1))
        return x
