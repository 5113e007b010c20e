"""The keys and values of earlier tokens: a plain tree of arrays, an argument and a result of `Transformer`.

A cache is a ring: when it is full, a new token takes the place of the oldest, except that the first `sinks` tokens stay
(Efficient Streaming Language Models with Attention Sinks, `arXiv 2309.17453 <https://arxiv.org/abs/2309.17453>`_).
Rotary positions then count tokens of the cache, not of the text, so the position of a key changes with every token.
Hence keys are always stored before rotation, and rotated when they are read: one form for all caches, whose angles stay
small however long the text is. This costs a rotation of S keys in each call, as little as their products. Learned
positions are part of what a block reads, so a key keeps the position at which its token was read.

Letters: L layers, B batch, T tokens of a call, S slots, K key-value heads, H head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from orthojax.config import ModelConfig
from orthojax.errors import UserError
from orthojax.model.interventions import Interventions
from orthojax.ops.attention import relaxed_causal_mask

# Interventions without an axis of positions.
_BY_HEAD_AND_LAYER = {"head_scale", "attention_scale", "mlp_scale", "mlp_unit_scale"}


class KVCache(NamedTuple):
    """Keys and values of the tokens that a model has read.

    `cache._replace(length=n)` forgets the tokens from the n-th on, as long as none has overwritten another.
    """

    keys: jax.Array  # [L, B, S, K, H], before rotary positions
    values: jax.Array  # [L, B, S, K, H], H being the width of values if that differs
    length: jax.Array  # int32 []: how many tokens were read, including those that have left the cache
    sinks: jax.Array  # int32 []: how many first tokens stay when the cache is full, fewer than S

    @property
    def size(self) -> int:
        """S, the number of slots."""
        return self.keys.shape[2]


class Slots(NamedTuple):
    """The slots and positions of one call, the same in all layers."""

    write: jax.Array  # int32 [T]: the slot of each token
    query_positions: jax.Array  # int32 [T]
    key_positions: jax.Array  # int32 [S]
    visible: jax.Array  # bool [1, 1, T, S], without windows, which may differ between layers

    def within(self, window: int | None) -> jax.Array:
        """Returns what queries see in a layer with this window."""
        if window is None:
            return self.visible
        distance = self.query_positions[:, None] - self.key_positions[None]
        return self.visible & (distance < window)[None, None]


class CachedLayer(NamedTuple):
    """The part of a cache that one layer reads."""

    keys: jax.Array  # [B, S, K, H]
    values: jax.Array  # [B, S, K, H]
    slots: Slots

    def joined(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [B, S, K, H] of all slots, with those [B, T, K, H] of this call written to theirs."""
        pairs = ((self.keys, key), (self.values, value))
        key, value = (old.at[:, self.slots.write].set(new.astype(old.dtype)) for old, new in pairs)
        return key, value


def init_cache(config: ModelConfig, batch: int, size: int, *, sinks: int = 0) -> KVCache:
    """Makes an empty cache of `size` slots, the most keys that a query sees, for a batch of B rows.

    It has the dtype of the config; the first `sinks` tokens stay when the cache is full. Raises ValueError for
    no slots, sinks that leave no slot for other tokens, or more slots than learned
    positions.
    """
    if size < 1:
        raise UserError(f"a cache of {size} tokens", allowed="at least 1")
    if not 0 <= sinks < size:
        raise UserError(f"sinks={sinks} of a cache of {size} tokens", allowed=f"0 to {size - 1}")
    if config.position == "learned" and size > config.max_length:
        allowed = f"at most the model's max_length={config.max_length}, since its positions are learned"
        raise UserError(f"a cache of {size} tokens", allowed=allowed)
    keys, values = (jnp.zeros(shape, config.dtype) for shape in _shapes(config, batch, size))
    return KVCache(keys, values, jnp.int32(0), jnp.int32(sinks))


def _shapes(config: ModelConfig, batch: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    common = (config.num_layers, batch, size, config.kv_heads)
    return (*common, config.head_dim), (*common, config.value_dim)


def plan(cache: KVCache, config: ModelConfig, shape: tuple[int, ...], given: Interventions | None) -> Slots:
    """Assigns slots to (B, T) tokens that follow those of a cache, and computes what they then see.

    Slot j < sinks holds token j; the others, a ring of R = S - sinks slots, hold token p in slot sinks + (p - sinks)
    mod R. Positions count only the tokens that are left. Masks compare positions, so the model's own window also counts
    tokens of the cache. Raises ValueError for a cache of another model or batch, more tokens than slots, several tokens
    if they would overwrite those that they see (outside jit, where the length is known), or interventions by position.
    """
    batch, length = shape
    expected = _shapes(config, batch, cache.size)
    if (cache.keys.shape, cache.values.shape) != expected:
        found = f"a cache has keys {cache.keys.shape} and values {cache.values.shape}"
        raise UserError(found, allowed="{} and {}".format(*expected))
    if length > cache.size:
        raise UserError(f"{length} tokens for a cache of {cache.size}", allowed=f"at most {cache.size} in one call")
    if length > 1 and not isinstance(cache.length, Tracer) and int(cache.length) + length > cache.size:
        held = f"{length} tokens for a cache of {cache.size} that holds {int(cache.length)}"
        raise UserError(held, allowed="one token at a time once the cache is full")
    fields = {} if given is None else given._asdict()
    by_position = [name for name in fields if fields[name] is not None and name not in _BY_HEAD_AND_LAYER]
    if by_position:
        allowed = ", ".join(sorted(_BY_HEAD_AND_LAYER))
        raise UserError(f"interventions.{by_position[0]} with a cache", allowed=allowed)
    size, sinks, total = cache.size, cache.sinks, cache.length + length
    ring, slot = size - sinks, jnp.arange(size, dtype=jnp.int32)
    new = cache.length + jnp.arange(length, dtype=jnp.int32)
    write = jnp.where(new < sinks, new, sinks + (new - sinks) % ring)
    # The last token of those that have the slot; before the sinks if none has.
    newest = total - 1 - (total - 1 - slot) % ring
    token = jnp.where(slot < sinks, slot, newest)
    filled = (token < total) & ((slot < sinks) | (token >= sinks))
    gone = jnp.maximum(total - size, 0)
    query_positions, key_positions = new - gone, jnp.where(slot < sinks, slot, token - gone)
    visible = relaxed_causal_mask(query_positions, config.relaxed_causal_tokens, keys=key_positions)
    return Slots(write, query_positions, key_positions, visible & filled[None, None, None])


def with_tokens(cache: KVCache, slots: Slots, keys: jax.Array, values: jax.Array) -> KVCache:
    """Adds keys and values [L, B, T, K, H] of further tokens to a cache; in place if it is donated."""
    # After the loop over layers: as its output, the whole cache would be copied in every call.
    pairs = ((cache.keys, keys), (cache.values, values))
    keys, values = (old.at[:, :, slots.write].set(new.astype(old.dtype)) for old, new in pairs)
    return KVCache(keys, values, cache.length + slots.write.size, cache.sinks)
