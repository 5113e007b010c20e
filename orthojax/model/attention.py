"""The attention of one block.

Letters inside functions: B batch, T query positions, S key positions, N query heads, K key-value heads, H head width of
queries and keys, D d_model.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from orthojax.config import ModelConfig, require
from orthojax.model.cache import CachedLayer
from orthojax.model.interventions import Interventions, force_weights, replace_heads, scale_first
from orthojax.model.layers import Norm, Part, scaled
from orthojax.ops.attention import attention_logits, dot_product_attention, relaxed_causal_mask, weighted_values
from orthojax.ops.normalizers import Normalizer, apply_normalizer
from orthojax.ops.rotary import (
    dynamic_frequencies,
    llama3_frequencies,
    rotary,
    rotary_frequencies,
    yarn_frequencies,
    yarn_mscale,
)
from orthojax.ops.statistics import at_least_float32


class Rows(NamedTuple):
    """What the tokens themselves say about which keys are visible, and where."""

    segment_ids: jax.Array | None = None  # int [B, T], of packed rows
    positions: jax.Array | None = None  # int [B, T], within each segment of packed rows


class Attention(Part):
    """Multi-head attention over the model's own mask."""

    round_kv: Callable[[jax.Array], jax.Array] | None = None
    layer: int = 0

    @nn.compact
    def __call__(
        self, x: jax.Array, given: Interventions, cached: CachedLayer | None, rows: Rows
    ) -> tuple[jax.Array, dict[str, jax.Array], tuple[jax.Array, jax.Array]]:
        """Maps [B, T, D] to [B, T, D], the taps that attention fills, and the keys and values that a cache keeps."""
        c = self.config
        B, T, _ = x.shape
        query, key, value = self.query_key_value(x)
        new = key, value
        query_positions = key_positions = jnp.arange(T) if rows.positions is None else rows.positions
        if cached is not None:
            key, value = cached.joined(key, value)
            query_positions, key_positions = cached.slots.query_positions, cached.slots.key_positions
        rotated, products = layer_scales(c, self.layer)
        if c.layer_rotates(self.layer):
            turned = {"frequencies": layer_frequencies(c, self.layer, query_positions), "scale": rotated}
            query = rotary(query, query_positions, **turned)
            key = rotary(key, key_positions, **turned)
        if self.round_kv is not None:
            # As a cache of this format would return them. Rounding by token commutes with writing to slots, so our
            # cache, which keeps keys before rotation, may hold float ones.
            key, value = self.round_kv(key), self.round_kv(value)
        if given.first_value_scale is not None:
            value = scale_first(value, given.first_value_scale[:, None])
        query, key, value = (
            replace_heads(a, given, name) for a, name in ((query, "queries"), (key, "keys"), (value, "values"))
        )
        span, cap, bias, shown = c.layer_window(self.layer), c.attention_soft_cap, given.attention_bias, None
        visible = attention_mask(c, T, rows, self.layer) if cached is None else cached.slots.within(span)
        normalizer = self._normalizer()
        masked = c.relaxed_causal_tokens > 1 or cached is not None
        # A mask holds the window; kernels know a causal one with its window by themselves.
        window = None if span is None or masked else (span - 1, 0)
        implementation = None if c.attention_implementation == "auto" else c.attention_implementation
        if cached is not None and implementation in ("cudnn", "splash"):
            implementation = None  # a kernel may refuse one query, or an odd number of them
        # Kernels cap after the bias, which must not be capped if it hides keys.
        if given.forced_share is None and (bias is None or cap is None):
            mask = visible if masked else None
            options = {"normalizer": normalizer, "scale": products, "implementation": implementation}
            options["segment_ids"] = None if masked else rows.segment_ids
            options |= {"is_causal": not masked, "local_window_size": window}
            heads = dot_product_attention(query, key, value, bias, mask, logits_soft_cap=cap, **options)
        else:
            shown = self._logits_and_weights(query, key, visible, normalizer, given)
            heads = weighted_values(shown[1], value)
        heads = self._gated(heads, x)
        if given.head_scale is not None:
            heads *= given.head_scale.reshape(1, 1, -1, 1).astype(heads.dtype)
        heads = replace_heads(heads, given, "head_outputs")
        output = self.dense("output", c.d_model, use_bias=c.has_output_bias, writes_residual=True)
        output = output(heads.reshape(B, T, -1))
        logits, weights = shown or self._logits_and_weights(query, key, visible, normalizer, given)
        taps = {"attention_logits": logits, "attention_weights": weights, "visible": visible}
        taps |= {"queries": query, "keys": key, "values": value, "head_outputs": heads}
        taps["value_norms"] = self._written_norms(jnp.repeat(value, c.num_heads // c.kv_heads, axis=2))
        taps["head_norms"] = self._written_norms(heads)
        return output, taps, new

    def _gated(self, heads: jax.Array, x: jax.Array) -> jax.Array:
        """Multiplies heads [B, T, N, d_value] by a sigmoid of the block's input, if the config says so."""
        c = self.config
        if not c.gated_attention:
            return heads
        each = c.value_dim if c.gated_attention == "elementwise" else 1
        return heads * jax.nn.sigmoid(self.dense("gate", c.num_heads * each)(x)).reshape(*heads.shape[:3], each)

    def query_key_value(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Maps [B, T, D] to queries [B, T, N, H], keys [B, T, K, H] and values [B, T, K, d_value], before positions."""
        c, bias = self.config, self.config.has_qkv_bias
        query = self.dense("query", c.num_heads * c.head_dim, use_bias=bias)(x)
        key = self.dense("key", c.kv_heads * c.head_dim, use_bias=bias)(x)
        value = self.dense("value", c.kv_heads * c.value_dim, use_bias=bias)(x)
        if c.qk_norm == "all":
            query, key = self._normed(query, key)
        query, key = (a.reshape(*x.shape[:2], -1, c.head_dim) for a in (query, key))
        value = value.reshape(*x.shape[:2], -1, c.value_dim)
        return (*self._normed(query, key), value) if c.qk_norm == "head" else (query, key, value)

    def _normed(self, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        dtype = query.dtype
        query, key = (Norm(self.config, name=f"{n}_norm")(a) for n, a in (("query", query), ("key", key)))
        return query.astype(dtype), key.astype(dtype)

    def _normalizer(self) -> Normalizer:
        c = self.config
        if c.normalizer == "softmax_n":
            return c.normalizer_n
        if c.normalizer == "learned_sink":
            return self.param("sink", nn.initializers.constant(c.sink_init), (c.num_heads,), jnp.float32)
        return c.normalizer

    def _written_norms(self, vectors: jax.Array) -> jax.Array:
        """Computes ||W_o^h x||_2, as written, of each head's vectors [B, S, N, d_value]: [B, N, S] float32."""
        # ||W^T x||^2 = x^T (W W^T) x with the small Gram matrix of each head: no [B, N, S, D] array.
        c = self.config
        kernel = self.variables["params"]["output"]["kernel"].reshape(c.num_heads, c.value_dim, c.d_model)
        kernel = at_least_float32(kernel)
        gram = jnp.einsum("NHD,NGD->NHG", kernel, kernel)
        vectors = vectors.astype(gram.dtype)
        squared = jnp.einsum("BSNH,NHG,BSNG->BNS", vectors, gram, vectors)
        positive = squared > 0  # the square root has no derivative at 0, as for a head that is scaled away
        norms = jnp.where(positive, jnp.sqrt(jnp.where(positive, squared, 1.0)), 0.0)
        return scaled(norms, c.residual_multiplier)

    def _logits_and_weights(
        self, query: jax.Array, key: jax.Array, visible: jax.Array, normalizer: Normalizer, given: Interventions
    ) -> tuple[jax.Array, jax.Array]:
        # `attention_weights` in its two parts, so that both taps share the logits, also in gradients.
        scale = layer_scales(self.config, self.layer)[1]
        logits = attention_logits(query, key, scale=scale, logits_soft_cap=self.config.attention_soft_cap)
        biased = logits if given.attention_bias is None else logits + given.attention_bias.astype(logits.dtype)
        return logits, force_weights(apply_normalizer(normalizer, biased, visible), given)


class LatentAttention(Attention):
    r"""Multi-head latent attention of DeepSeek-V2: `Attention` that makes queries, keys and values in another way.

    With the latent :math:`c = \mathrm{norm}(W_{DKV} x)` of all heads, head h has the value :math:`W_{UV}^h c` and the
    key :math:`[W_{KR} x ; W_{UK}^h c]`, whose first part, shared by all heads, is rotated. Its queries are linear in x,
    or in their own normed latent. Whole keys and values are computed, as published for training.

    Reference:
      DeepSeek-V2, `arXiv 2405.04434 <https://arxiv.org/abs/2405.04434>`_, 2024, section 2.1.
    """

    def query_key_value(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Maps [B, T, D] to queries and keys [B, T, N, H] and values [B, T, N, d_value], before positions."""
        c, of, bias = self.config, self.config.latent, self.config.has_qkv_bias
        assert of is not None
        (B, T, _), N, R = x.shape, c.num_heads, of.d_rotary
        read = x if of.d_query_latent is None else self._latent(x, "query_latent", of.d_query_latent)
        query = self.dense("query", N * c.head_dim, use_bias=bias)(read).reshape(B, T, N, c.head_dim)
        shared = self.dense("rotary_key", R, use_bias=bias)(x).reshape(B, T, 1, R)
        latent = self._latent(x, "latent", of.d_latent)
        own = self.dense("key", N * (c.head_dim - R), use_bias=bias)(latent).reshape(B, T, N, -1)
        value = self.dense("value", N * c.value_dim, use_bias=bias)(latent).reshape(B, T, N, c.value_dim)
        key = jnp.concatenate([jnp.broadcast_to(shared, (B, T, N, R)), own], axis=-1)
        return query, key, value

    def _latent(self, x: jax.Array, name: str, width: int) -> jax.Array:
        return Norm(self.config, name=f"{name}_norm")(self.dense(name, width, use_bias=self.config.has_qkv_bias)(x))


def attention_mask(config: ModelConfig, length: int, rows: Rows, layer: int) -> jax.Array:
    """Returns the mask [1, 1, T, T] of the keys that each query of a layer sees; [B, 1, T, T] if rows differ."""
    positions = length if rows.positions is None else rows.positions
    visible = relaxed_causal_mask(positions, config.relaxed_causal_tokens, config.layer_window(layer))
    ids = rows.segment_ids
    return visible if ids is None else visible & (ids[:, None, :, None] == ids[:, None, None, :])


def layer_frequencies(config: ModelConfig, layer: int, positions: jax.Array) -> jax.Array:
    """Returns the frequencies of a layer, [R/2].

    If they depend on the length of the text, the text ends with the last of these positions [T]. What a cache holds of
    earlier tokens was computed for a shorter text: past the original length, results differ from those of one pass.
    Generation reads the text once more where longrope changes them.
    """
    channels, (theta, rope) = config.rotary_channels, config.layer_rope(layer)
    plain = rotary_frequencies(channels, theta)
    if rope is None or rope.scaling == "none":
        return plain
    whole = positions.ndim == 1 or rope.scaling not in ("longrope", "dynamic")
    by_length = f"segment_ids for a model with rope.scaling={rope.scaling!r}, whose frequencies depend on the length"
    require(whole, by_length, "one sequence in a row")
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "longrope":
        both = jnp.asarray(rope.short_factors), jnp.asarray(rope.long_factors)
        return plain / jnp.where(positions[-1] >= rope.original_length, both[1], both[0])
    if rope.scaling == "dynamic":
        return dynamic_frequencies(channels, theta, rope.factor, rope.original_length, positions[-1] + 1)
    factors = (rope.factor, rope.original_length, rope.low_frequency_factor, rope.high_frequency_factor)
    if rope.scaling == "llama3":
        return llama3_frequencies(plain, *factors)
    return yarn_frequencies(channels, theta, *factors, rope.truncate)


def layer_scales(config: ModelConfig, layer: int) -> tuple[float, float]:
    """Returns the factors of rotated channels, and of the products of queries and keys."""
    (_, rope), rotated, products = config.layer_rope(layer), 1.0, (config.logits_width or config.head_dim) ** -0.5
    if rope is not None and rope.scaling == "yarn":
        everywhere = yarn_mscale(rope.factor, rope.mscale_all)
        rotated, products = yarn_mscale(rope.factor, rope.mscale) / everywhere, products * everywhere**2
    elif rope is not None and rope.scaling == "longrope":
        rotated = math.sqrt(1.0 + rope.mscale * math.log(rope.factor) / math.log(rope.original_length))
    return rotated, products
