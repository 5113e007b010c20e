"""Multi-head latent attention: queries, keys and values through latents of a few hundred channels.

Letters inside functions: B batch, T positions, N heads, H head width of queries and keys, D d_model.
"""

import jax
import jax.numpy as jnp

from orthojax.model.attention import Attention
from orthojax.model.layers import Norm


class LatentAttention(Attention):
    r"""Multi-head latent attention of DeepSeek-V2; all but the making of queries, keys and values is that of Attention.

    With the latent :math:`c = \mathrm{norm}(W_{DKV} x)` of all heads, head h has the value :math:`W_{UV}^h c` and the
    key :math:`[W_{KR} x ; W_{UK}^h c]`, of which the first part, that of all heads, is rotated. Its queries are linear
    in x, or in a normed latent of their own. There the rotated channels are the last ones, here the first, as
    everywhere: the order of channels within a head changes no product.

    Whole keys and values are computed, as published for training: nothing is absorbed into other kernels.

    Reference:
      DeepSeek-V2, `arXiv 2405.04434 <https://arxiv.org/abs/2405.04434>`_, 2024, section 2.1.
    """

    def query_key_value(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, T, D] -> queries and keys [B, T, N, H] and values [B, T, N, d_value], before positions."""
        c, bias = self.config, self.config.has_qkv_bias
        (B, T, _), N, R = x.shape, c.num_heads, c.rotary_channels
        read = x
        if c.d_query_latent is not None:
            read = self._latent(x, "query_latent", c.d_query_latent)
        query = self.dense("query", N * c.head_dim, use_bias=bias)(read).reshape(B, T, N, c.head_dim)
        shared = self.dense("rotary_key", R, use_bias=bias)(x).reshape(B, T, 1, R)
        latent = self._latent(x, "latent", c.d_latent or 0)
        own = self.dense("key", N * (c.head_dim - R), use_bias=bias)(latent).reshape(B, T, N, -1)
        value = self.dense("value", N * c.value_dim, use_bias=bias)(latent).reshape(B, T, N, c.value_dim)
        key = jnp.concatenate([jnp.broadcast_to(shared, (B, T, N, R)), own], axis=-1)
        return query, key, value

    def _latent(self, x: jax.Array, name: str, width: int) -> jax.Array:
        return Norm(self.config, name=f"{name}_norm")(self.dense(name, width, use_bias=self.config.has_qkv_bias)(x))
