"""One decoder-only transformer for every family; a family is a preset of `ModelConfig` (`orthojax.model.presets`).

Letters inside functions: B batch, T query positions, S key positions, N query heads, D d_model, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from orthojax.config import ModelConfig, Remat
from orthojax.model.attention import Attention
from orthojax.model.dense import Linear, LinearFunction, is_plain_product, linear
from orthojax.model.fixed_rotation import from_residual, to_residual
from orthojax.model.mlp import Feedforward
from orthojax.model.norm import Norm
from orthojax.ops.attention import ATTENTION_NAME, relaxed_causal_mask

TOKEN_TABLE = "token_embedding/embedding:0"


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


def _kept(remat: Remat) -> Callable[..., Any] | None:
    """The policy that says what of a block is kept for the backward pass; None keeps nothing."""
    policies = jax.checkpoint_policies
    attention = policies.save_only_these_names(ATTENTION_NAME)  # so that a fused kernel runs once
    if remat == "dots":
        return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attention)
    return None if remat == "full" else attention


class Transformer(nn.Module):
    """Decoder-only transformer with every switch of `ModelConfig`.

    Attributes:
      config: What to build.
      linear: What a linear layer computes; `orthojax.quant` makes others.
    """

    config: ModelConfig
    linear: LinearFunction = linear

    @nn.compact
    def __call__(
        self, tokens: jax.Array, *, observe: Observe | None = None, head: bool = True
    ) -> tuple[jax.Array, Any]:
        """Next-token logits, and what `observe` returns for every layer.

        Args:
          tokens: int [B, T].
          observe: Called once in every block; its leaves come back stacked along a leading layer axis.
          head: False leaves out the last product, so that whoever calls can make it piece by piece.

        Returns:
          Logits [B, T, V] float32, and the observations (None without `observe`). Without the head, what it is applied
          to instead of logits: the final hidden states [B, T, D] in `config.dtype`, for which see `head_kernel`.

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
        if not head:
            return x, observed
        if c.tie_embeddings:
            kernel = embed.embedding.astype(dtype)
            return jnp.einsum("BTD,VD->BTV", x, kernel, preferred_element_type=jnp.float32), observed
        logits = Linear(c.vocab_size, False, c.init_std, dtype, self.linear, name="head")(x)
        return logits.astype(jnp.float32), observed

    def head_kernel(self, params: Any) -> tuple[jax.Array, int] | None:
        """The kernel that maps final hidden states to logits, and which of its axes is the vocabulary.

        Args:
          params: The parameters, as `init` returns them under "params".

        Returns:
          (token table [V, D], 0) or (head [D, V], 1), float32; None where the logits are no plain product: a `linear`
          of another kind may quantise the head, by statistics of all positions.
        """
        if self.config.tie_embeddings:
            return params["token_embedding"]["embedding"], 0
        return (params["head"]["kernel"], 1) if is_plain_product(self.linear) else None

    def _blocks(self, x: jax.Array, observe: Observe | None) -> tuple[jax.Array, Any]:
        c = self.config
        block = Block
        if c.remat:
            # Inside a scan the loop itself keeps XLA from merging recomputation and original.
            block = nn.remat(Block, prevent_cse=not c.scan_layers, policy=_kept(c.remat))
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
