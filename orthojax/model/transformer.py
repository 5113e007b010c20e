"""One decoder-only transformer for every family; a family is a preset of `ModelConfig` (`orthojax.model.presets`).

Letters inside functions: B batch, T query positions, S key positions, N query heads, D d_model, V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from orthojax.config import ModelConfig, Remat, require
from orthojax.model.attention import Attention, LatentAttention, Rows
from orthojax.model.cache import CachedLayer, KVCache, Slots, plan, with_tokens
from orthojax.model.interventions import Interventions, Observe, Taps, intervene, replace, split_layers
from orthojax.model.layers import (
    Experts,
    Feedforward,
    Linear,
    LinearFunction,
    Norm,
    kernel_initializer,
    linear,
    scaled,
)  # fmt: skip
from orthojax.ops.attention import ATTENTION_NAME
from orthojax.ops.products import kernel_product

_MOST_UNROLLED = 48  # layers, by `unroll_layers="auto"`: compilation takes a second or two for each


class Block(nn.Module):
    """Attention, then MLP, or both at once, each added to the residual stream; with norms where `block` puts them."""

    config: ModelConfig
    linear: LinearFunction
    observe: Observe | None
    layer: int
    round_kv: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        given: Interventions,
        shared: Interventions,
        kept: tuple[jax.Array, jax.Array] | None,
        slots: Slots | None,
        rows: Rows,
    ) -> tuple[jax.Array, Any]:
        """Maps [B, T, D] to [B, T, D] and observe(Taps), or with a cache the keys and values of the T tokens."""
        c = self.config
        given = given._replace(**{name: array for name, array in shared._asdict().items() if array is not None})
        B, T, _ = x.shape
        residual_before = x
        cached = None if kept is None or slots is None else CachedLayer(*kept, slots)
        attention_output = mlp_output = jnp.zeros_like(x)
        one_norm, attends = c.block == "parallel_one_norm", c.layer_attention(self.layer)
        read = self._normed(x, "attention", "input") if attends or one_norm else x
        if attends:
            attend = (Attention if c.latent is None else LatentAttention)(
                c, self.linear, self.round_kv, self.layer, name="attention"
            )
            attention_output, taps, new = attend(read, given, cached, rows)
            attention_output = self._normed(attention_output, "attention", "output")
        else:
            taps = self._no_attention_taps(B, T)
            new = taps["keys"], taps["values"]
        attention_output = intervene(scaled(attention_output, c.residual_multiplier), given, "attention")
        post_attention = x + attention_output
        kind = c.layer_mlp(self.layer)
        if kind != "none":
            if not one_norm:
                read = self._normed(x if c.block == "parallel" else post_attention, "mlp", "input")
            if kind == "experts":
                mlp_output = Experts(c, self.linear, name="mlp")(read)
            else:
                mlp_output = Feedforward(c, self.linear, kind, name="mlp")(read, given.mlp_unit_scale)
            mlp_output = self._normed(mlp_output, "mlp", "output")
        mlp_output = intervene(scaled(mlp_output, c.residual_multiplier), given, "mlp")
        x = (post_attention + mlp_output).astype(residual_before.dtype)
        x = replace(x, given.residual, given.residual_share)
        if cached is not None:
            return x, new
        if self.observe is None:
            return x, None
        seen = Taps(
            residual_before=residual_before,
            attention_output=attention_output,
            mlp_output=mlp_output,
            post_attention=post_attention,
            residual=x,
            **taps,
        )
        return x, self.observe(seen)

    def _normed(self, x: jax.Array, part: Literal["attention", "mlp"], at: Literal["input", "output"]) -> jax.Array:
        places = {"output_norm": ["output"], "sandwich_norm": ["input", "output"]}.get(self.config.block, ["input"])
        second = len(places) > 1 and at == "output"
        return Norm(self.config, name=f"{part}_output_norm" if second else f"{part}_norm")(x) if at in places else x

    def _no_attention_taps(self, B: int, T: int) -> dict[str, jax.Array]:
        c = self.config
        by_pair, by_query = jnp.zeros((B, c.num_heads, T, T)), jnp.zeros((B, c.num_heads, T))
        return {
            **dict.fromkeys(("attention_logits", "attention_weights"), by_pair),
            "visible": jnp.zeros((1, 1, T, T), bool),
            "queries": jnp.zeros((B, T, c.num_heads, c.head_dim)),
            "keys": jnp.zeros((B, T, c.kv_heads, c.head_dim)),
            "values": jnp.zeros((B, T, c.kv_heads, c.value_dim)),
            "head_outputs": jnp.zeros((B, T, c.num_heads, c.value_dim)),
            **dict.fromkeys(("value_norms", "head_norms"), by_query),
        }


def _remat_policy(remat: Remat) -> Callable[..., Any] | None:
    """Chooses what a block saves for the backward pass; None saves nothing."""
    policies = jax.checkpoint_policies
    attention = policies.save_only_these_names(ATTENTION_NAME)  # so that a fused kernel runs once
    if remat == "dots":
        return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attention)
    return None if remat == "full" else attention


class Transformer(nn.Module):
    """Decoder-only transformer with every switch of `ModelConfig`.

    Attributes:
      config: What to build.
      linear: The function of linear layers; `orthojax.quant` has others.
      linear_head: Whether `linear` also computes the logits of tied embeddings, from the transposed token table under
        the path `head`; those of an untied head always pass through it.
      round_kv: Function that attention applies to keys and to values [B, S, K, H], normed and rotated, before it reads
        them: the rounding of a cache (`orthojax.quant.rounded_model`).
    """

    config: ModelConfig
    linear: LinearFunction = linear
    linear_head: bool = False
    round_kv: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        *,
        interventions: Interventions | None = None,
        observe: Observe | None = None,
        head: bool = True,
        cache: KVCache | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Computes next-token logits, and what `observe` returns for every layer, or the cache with these tokens in it.

        Args:
          tokens: int [B, T].
          interventions: What to change, as arrays by layer and head.
          observe: Called once in every block; its leaves come back stacked along a leading layer axis.
          head: False leaves out the last product, so that the caller can compute it in chunks.
          cache: Cache of the tokens before these, from `init_cache`: logits are then those of the longer sequence,
            except that the first `relaxed_causal_tokens` must all be in the first call, since they see each other. A
            call that would need more slots than are left takes one token.
          segment_ids: int [B, T], for rows of several sequences, one after the other: a token sees only those of its
            segment, and positions begin anew in each, so that logits are those of separate rows. Interventions at
            positions still count these in the whole row.

        Returns:
          Logits [B, T, V] float32, and the observations (None without `observe`), or the new cache if one is given.
          Without the head, its input: the final hidden states [B, T, D] in `config.dtype`.

        Raises:
          ValueError: For sequences longer than `max_length` if positions are learned, interventions whose shapes do not
            fit, a cache that does not fit (see `orthojax.model.cache.plan`), a cache with `observe`, or segments of
            another shape, with a cache, or for a model whose `rope` depends on the length.
        """
        c = self.config
        if cache is not None and observe is not None:
            raise ValueError("observations with a cache; allowed: one of them, measurements take whole sequences")
        if tokens.ndim != 2:
            raise ValueError(f"tokens of shape {tokens.shape}; allowed: [B, T]")
        rows = self._rows(tokens, segment_ids, cache)
        slots = None if cache is None else plan(cache, c, tokens.shape, interventions)
        dtype = jnp.dtype(c.dtype)
        init = nn.initializers.normal(c.embedding_init_std)
        embed = nn.Embed(c.vocab_size, c.d_model, embedding_init=init, name="token_embedding")
        x = embed(tokens)
        x = scaled(x * c.d_model**0.5 if c.scale_embeddings else x, c.embedding_multiplier)
        x = self._projected(x, "embedding_output") if c.embedding_projection else x
        x = x.astype(jnp.promote_types(x.dtype, dtype))  # parameters may be narrower than what blocks return
        if c.position == "learned":
            if tokens.shape[1] > c.max_length:
                raise ValueError(f"{tokens.shape[1]} tokens are more than the model's max_length={c.max_length}")
            positions = nn.Embed(c.max_length, c.d_model, embedding_init=init, name="position_embedding")
            at = jnp.arange(tokens.shape[1]) if slots is None else slots.query_positions
            x += positions(at[None] if rows.positions is None else rows.positions).astype(x.dtype)
        x = x if c.residual_dtype == "float32" else x.astype(c.residual_dtype)
        x, observed = self._blocks(x, interventions, observe, cache, slots, rows)
        if cache is not None and slots is not None:
            observed = with_tokens(cache, slots, *observed)
        x = Norm(c, name="final_norm")(x).astype(dtype)
        x = self._projected(x, "head_input") if c.embedding_projection else x
        if not head:
            return x, observed
        if c.tie_embeddings:
            kernel = embed.embedding.astype(dtype)
            if self.linear_head:
                logits = self.linear(x, kernel.T, None, "head").astype(jnp.float32)
            else:
                logits = kernel_product(x, kernel, contract=1, preferred_element_type=jnp.float32)
        else:
            logits = Linear(c.vocab_size, False, kernel_initializer(c), dtype, self.linear, name="head")(x)
            logits = logits.astype(jnp.float32)
        logits, cap = scaled(logits, c.logits_multiplier), c.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap), observed

    def _rows(self, tokens: jax.Array, segment_ids: jax.Array | None, cache: KVCache | None) -> Rows:
        if segment_ids is None:
            return Rows()
        fits = segment_ids.shape == tokens.shape and jnp.issubdtype(segment_ids.dtype, jnp.integer)
        found = f"segment_ids are {segment_ids.dtype} of shape {segment_ids.shape}"
        require(fits, found, f"integers of the shape of the tokens, {tokens.shape}")
        require(cache is None, "segment_ids with a cache", "one sequence in a row")
        return Rows(segment_ids=segment_ids, positions=segment_positions(segment_ids))

    def _projected(self, x: jax.Array, name: str) -> jax.Array:
        c, orthogonal = self.config, nn.initializers.orthogonal()
        return Linear(c.d_model, False, orthogonal, jnp.dtype(c.dtype), self.linear, name=name)(x)

    def head_kernel(self, params: Any) -> tuple[jax.Array, int] | None:
        """Returns the kernel that maps final hidden states to logits, and the axis of the vocabulary in it.

        That is (token table [V, D], 0) or (head [D, V], 1), float32; None if the logits are not a plain product:
        another `linear` may quantise the head, by statistics of all positions, and logits may be scaled or capped.
        """
        if self.config.final_soft_cap is not None or self.config.logits_multiplier != 1.0:
            return None
        if self.config.tie_embeddings:
            return None if self.linear_head else (params["token_embedding"]["embedding"], 0)
        return (params["head"]["kernel"], 1) if getattr(self.linear, "is_plain_product", False) else None

    def _blocks(
        self,
        x: jax.Array,
        interventions: Interventions | None,
        observe: Observe | None,
        cache: KVCache | None,
        slots: Slots | None,
        rows: Rows,
    ) -> tuple[jax.Array, Any]:
        c = self.config
        kept = None if cache is None else (cache.keys, cache.values)
        by_layer, shared = split_layers(interventions, c, *x.shape[:2])
        block, unroll = Block, c.unroll_layers
        if unroll == "auto":
            in_training = observe is None and cache is None and not self.is_initializing()
            unroll = in_training and jax.default_backend() == "gpu" and c.num_layers <= _MOST_UNROLLED
        if c.remat:
            # Inside a scan the loop itself keeps XLA from merging recomputation and original.
            block = nn.remat(Block, prevent_cse=unroll or not c.scan_layers, policy=_remat_policy(c.remat))
        if c.scan_layers:
            body = nn.scan(
                lambda module, carry, *inputs: module(carry, *inputs),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast, 0, nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
                length=c.num_layers,
                unroll=c.num_layers if unroll else 1,
            )
            scanned = block(c, self.linear, observe, 0, self.round_kv, name="layers")
            return body(scanned, x, by_layer, shared, kept, slots, rows)
        observed = []
        for layer in range(c.num_layers):
            given, old = jax.tree.map(lambda leaf, layer=layer: leaf[layer], (by_layer, kept))
            of_layer = block(c, self.linear, observe, layer, self.round_kv, name=f"layers_{layer}")
            x, seen = of_layer(x, given, shared, old, slots, rows)
            observed.append(seen)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *observed)


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """Counts positions from the start of each segment of packed rows: int [B, T].

    >>> segment_positions(jnp.array([[1, 1, 2, 2, 2, 0]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    t = jnp.arange(segment_ids.shape[1])[None]
    starts = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    return t - jax.lax.cummax(jnp.where(starts, t, 0), axis=1)


@functools.cache
def parameter_shapes(config: ModelConfig) -> Any:
    """Returns the parameters that a model has, as jax.ShapeDtypeStruct; nothing is computed, and the tree is shared."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]


def parameter_count(config: ModelConfig) -> int:
    """Counts the parameters of a model.

    >>> from orthojax.model import bigram_backcopy, gpt2
    >>> parameter_count(gpt2("130m")), [parameter_count(bigram_backcopy(layers)) for layers in (1, 2, 3)]
    (124439808, [887808, 1675264, 2462720])
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameter_shapes(config)))


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Counts the floating-point operations of one training step for each token, forward and backward.

    At sequence length T, that is 6 for each parameter of a matrix product (the token table once, as the head; the
    position table, norm scales and biases never), plus 6 T times the widths of the keys and values of all heads, for
    the products with them, in every layer with attention; causality does not count as a saving. All experts count, as
    all are computed.
    """
    c = config
    leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(c))
    matrices = sum(math.prod(leaf.shape) for path, leaf in leaves if path[-1].key == "kernel")
    matrices += c.vocab_size * c.d_model if c.tie_embeddings else 0
    attending = sum(c.layer_attention(layer) for layer in range(c.num_layers))
    return 6 * matrices + 6 * attending * sequence_length * c.num_heads * (c.head_dim + c.value_dim)
