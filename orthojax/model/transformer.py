"""One decoder-only transformer for every family; a family is a preset of `ModelConfig` (`orthojax.model.presets`).

Letters inside functions: B batch, T query positions, S key positions, N query heads, K key-value heads, H head width,
D d_model, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from orthojax.config import Mlp, ModelConfig
from orthojax.model.fixed_rotation import from_residual, to_residual
from orthojax.ops.attention import ATTENTION_NAME, attention_logits, dot_product_attention, relaxed_causal_mask
from orthojax.ops.normalizers import ClippedSoftmax, Normalizer, apply_normalizer
from orthojax.ops.rotary import rotary


class Taps(NamedTuple):
    """What one block shows of its inside. An `observe` function reduces it; what it does not read is never computed."""

    attention_logits: jax.Array  # [B, N, T, S] float32, scaled, before the mask
    attention_weights: jax.Array  # [B, N, T, S] float32
    visible: jax.Array  # [1, 1, T, S] bool: which keys each query sees
    values: jax.Array  # [B, S, K, H]
    value_norms: jax.Array  # [B, N, S] float32: ||W_o^h v_j||_2, the value as head h writes it to the residual stream
    attention_output: jax.Array  # [B, T, D]
    mlp_output: jax.Array  # [B, T, D]
    post_attention: jax.Array  # [B, T, D] residual stream after attention
    residual: jax.Array  # [B, T, D] residual stream after the block: the paper's hidden state


Observe = Callable[[Taps], Any]

TOKEN_TABLE = "token_embedding/embedding:0"


class LinearFunction(Protocol):
    """What a linear layer computes; `quant` puts a quantised one in its place."""

    def __call__(self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        """Maps x [..., in], kernel [in, out], bias [out] to [..., out]; `path` is the layer's, as layers/mlp/input."""
        ...


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
    """The product x @ kernel + bias; logits (`head`) stay float32, rounded to bfloat16 they make a noisy loss."""
    y = jnp.matmul(x, kernel, preferred_element_type=jnp.float32 if path == "head" else None)
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


class Linear(nn.Module):
    """The one linear layer: every kernel of the model but the embeddings passes through `function`."""

    features: int
    use_bias: bool
    init_std: float
    dtype: Any
    function: LinearFunction

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., features] in `dtype`."""
        kernel = self.param("kernel", nn.initializers.normal(self.init_std), (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32) if self.use_bias else None
        bias = None if bias is None else bias.astype(self.dtype)
        return self.function(x.astype(self.dtype), kernel.astype(self.dtype), bias, "/".join(self.path))


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


class _Part(nn.Module):
    """What attention and MLP share: a config and the way to make a linear layer from it."""

    config: ModelConfig
    linear: LinearFunction

    def dense(self, name: str, features: int, *, writes_residual: bool = False) -> Linear:
        c = self.config
        # GPT-2's rule: 2 num_layers terms add up in the residual stream, so each starts that much smaller.
        std = c.init_std / (2 * c.num_layers) ** 0.5 if writes_residual else c.init_std
        return Linear(features, c.use_bias, std, jnp.dtype(c.dtype), self.linear, name=name)


class Attention(_Part):
    """Multi-head attention over the model's own mask."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[B, T, D] -> ([B, T, D], the taps that attention fills)."""
        c = self.config
        B, T, _ = x.shape
        query = self.dense("query", c.num_heads * c.head_dim)(x).reshape(B, T, c.num_heads, c.head_dim)
        key = self.dense("key", c.kv_heads * c.head_dim)(x).reshape(B, T, c.kv_heads, c.head_dim)
        value = self.dense("value", c.kv_heads * c.head_dim)(x).reshape(B, T, c.kv_heads, c.head_dim)
        if c.position == "rotary":
            query, key = (rotary(a, jnp.arange(T), c.rope_theta) for a in (query, key))
        visible = relaxed_causal_mask(T, c.relaxed_causal_tokens)
        normalizer, relaxed = self._normalizer(), c.relaxed_causal_tokens > 1
        implementation = None if c.attention_implementation == "auto" else c.attention_implementation
        attend = partial(dot_product_attention, normalizer=normalizer, implementation=implementation)
        heads = attend(query, key, value, mask=visible if relaxed else None, is_causal=not relaxed)
        if c.gated_attention:
            heads *= jax.nn.sigmoid(self.dense("gate", c.num_heads)(x))[..., None]
        output = self.dense("output", c.d_model, writes_residual=True)(heads.reshape(B, T, -1))
        logits = attention_logits(query, key)
        taps = {
            "attention_logits": logits,
            "attention_weights": apply_normalizer(normalizer, logits, visible),
            "visible": visible,
            "values": value,
            "value_norms": self._value_norms(value),
        }
        return output, taps

    def _normalizer(self) -> Normalizer:
        c = self.config
        if c.normalizer == "softmax_n":
            return c.normalizer_n
        if c.normalizer == "clipped_softmax":
            return ClippedSoftmax(c.normalizer_gamma, c.normalizer_zeta)
        if c.normalizer == "learned_sink":
            return self.param("sink", nn.initializers.zeros, (c.num_heads,), jnp.float32)
        return c.normalizer

    def _value_norms(self, value: jax.Array) -> jax.Array:
        # ||W^T v||^2 = v^T (W W^T) v with the H x H Gram matrix of each head: no [B, N, S, D] array.
        c = self.config
        kernel = self.variables["params"]["output"]["kernel"].reshape(c.num_heads, c.head_dim, c.d_model)
        gram = jnp.einsum("NHD,NGD->NHG", kernel, kernel)
        value = jnp.repeat(value.astype(gram.dtype), c.num_heads // c.kv_heads, axis=2)
        return jnp.sqrt(jnp.maximum(jnp.einsum("BSNH,NHG,BSNG->BNS", value, gram, value), 0.0))


class Feedforward(_Part):
    """The MLP of one block."""

    kind: Mlp

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        c = self.config
        if self.kind != "linear":
            hidden = self.dense("input", c.d_mlp)(x)
            if self.kind == "swiglu":
                hidden = jax.nn.silu(self.dense("gate", c.d_mlp)(x)) * hidden
            else:
                hidden = {"gelu": jax.nn.gelu, "relu": jax.nn.relu}[self.kind](hidden)
            x = hidden
        return self.dense("output", c.d_model, writes_residual=True)(x)


class Block(nn.Module):
    """Pre-norm block: attention, then MLP, each added to the residual stream."""

    config: ModelConfig
    linear: LinearFunction
    observe: Observe | None
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """[B, T, D] -> ([B, T, D], observe(Taps))."""
        c = self.config
        B, T, _ = x.shape
        zero = jnp.zeros_like(x)
        if c.layer_attention(self.layer):
            attention_output, taps = Attention(c, self.linear, name="attention")(Norm(c, name="attention_norm")(x))
            attention_output = self._to_residual(attention_output, "attention")
        else:
            attention_output, taps = zero, self._no_attention_taps(B, T)
        x = post_attention = x + attention_output
        kind = c.layer_mlp(self.layer)
        if kind == "none":
            mlp_output = zero
        else:
            mlp_output = Feedforward(c, self.linear, kind, name="mlp")(Norm(c, name="mlp_norm")(x))
            mlp_output = self._to_residual(mlp_output, "mlp")
        x = x + mlp_output
        if self.observe is None:
            return x, None
        seen = Taps(
            attention_output=attention_output,
            mlp_output=mlp_output,
            post_attention=post_attention,
            residual=x,
            **taps,
        )
        return x, self.observe(seen)

    def _to_residual(self, x: jax.Array, part: str) -> jax.Array:
        return to_residual(x, f"layers/{part}/output/kernel/*:0", self.layer) if self.config.fixed_rotation else x

    def _no_attention_taps(self, B: int, T: int) -> dict[str, jax.Array]:
        c = self.config
        return {
            "attention_logits": jnp.zeros((B, c.num_heads, T, T)),
            "attention_weights": jnp.zeros((B, c.num_heads, T, T)),
            "visible": relaxed_causal_mask(T, c.relaxed_causal_tokens),
            "values": jnp.zeros((B, T, c.kv_heads, c.head_dim)),
            "value_norms": jnp.zeros((B, c.num_heads, T)),
        }


class Transformer(nn.Module):
    """Decoder-only transformer with every switch of `ModelConfig`.

    Attributes:
      config: What to build.
      linear: What a linear layer computes; `orthojax.quant` makes others.
    """

    config: ModelConfig
    linear: LinearFunction = linear

    @nn.compact
    def __call__(self, tokens: jax.Array, *, observe: Observe | None = None) -> tuple[jax.Array, Any]:
        """Next-token logits, and what `observe` returns for every layer.

        Args:
          tokens: int [B, T].
          observe: Called once in every block; its leaves come back stacked along a leading layer axis.

        Returns:
          Logits [B, T, V] float32, and the observations (None without `observe`).

        Raises:
          ValueError: For sequences longer than `max_length` where positions are learned.
        """
        c = self.config
        dtype = jnp.dtype(c.dtype)
        init = nn.initializers.normal(c.embedding_init_std)
        embed = nn.Embed(c.vocab_size, c.d_model, embedding_init=init, name="token_embedding")
        x = embed(tokens)
        x = to_residual(x, TOKEN_TABLE) if c.fixed_rotation else x
        if c.position == "learned":
            if tokens.shape[1] > c.max_length:
                raise ValueError(f"{tokens.shape[1]} tokens are more than the model's max_length={c.max_length}")
            positions = nn.Embed(c.max_length, c.d_model, embedding_init=init, name="position_embedding")
            added = positions(jnp.arange(tokens.shape[1]))[None]
            x += to_residual(added, "position_embedding/embedding:0") if c.fixed_rotation else added
        x, observed = self._blocks(x, observe)
        x = Norm(c, name="final_norm")(x).astype(dtype)
        if c.tie_embeddings:
            x = from_residual(x, TOKEN_TABLE) if c.fixed_rotation else x
            kernel = embed.embedding.astype(dtype)
            return jnp.einsum("BTD,VD->BTV", x, kernel, preferred_element_type=jnp.float32), observed
        head = Linear(c.vocab_size, False, c.init_std, dtype, self.linear, name="head")
        return head(x).astype(jnp.float32), observed

    def _blocks(self, x: jax.Array, observe: Observe | None) -> tuple[jax.Array, Any]:
        c = self.config
        block = Block
        if c.remat:
            # Inside a scan the loop itself keeps XLA from merging recomputation and original. A fused kernel runs once.
            keep = jax.checkpoint_policies.save_only_these_names(ATTENTION_NAME)
            block = nn.remat(Block, prevent_cse=not c.scan_layers, policy=keep)
        if c.scan_layers:
            body = nn.scan(
                lambda module, carry, _: module(carry),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=c.num_layers,
            )
            return body(block(c, self.linear, observe, 0, name="layers"), x, None)
        observed = []
        for layer in range(c.num_layers):
            x, seen = block(c, self.linear, observe, layer, name=f"layers_{layer}")(x)
            observed.append(seen)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *observed)
