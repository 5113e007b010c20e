"""Bigram-Backcopy in JAX: batches drawn inside a compiled program, and the oracle. See `BigramBackcopy`.

Every random number is a function of (seed, stream, step) and of its place in the batch, and every draw is integer
arithmetic, so a batch has the same bits on every device, mesh and precision.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from orthojax.config import TriggerRule
from orthojax.data.bigram_backcopy import BigramBackcopy

_ONE = 2**31  # probabilities as integers, compared with 31 random bits


def _as_integers(probability: float | np.ndarray) -> np.ndarray:
    return np.round(np.asarray(probability) * _ONE).astype(np.uint32)


def _cumulative(task: BigramBackcopy) -> tuple[jax.Array, int]:
    """Cumulative rows of `transition`, then that of `first`, flat, and their length, a power of 2.

    A token of probability 0 has the entry of the one before it, so it is never drawn.
    """
    law = np.vstack([task.transition, task.first])
    width = 1 << (task.vocab_size - 1).bit_length()
    rows = np.full((len(law), width), _ONE, np.uint32)
    rows[:, : task.vocab_size] = _as_integers(np.cumsum(law, axis=1))
    return jnp.asarray(rows.reshape(-1)), width


def _slots(task: BigramBackcopy) -> np.ndarray:
    """Id, or V for the state before the first token -> which trigger it is, or -1: int32 [V + 1]."""
    slots = np.full(task.vocab_size + 1, -1, np.int32)
    slots[task.triggers] = np.arange(len(task.triggers))
    return slots


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def batch(
    task: BigramBackcopy, step: ArrayLike, batch_size: int, sequence_length: int, seed: ArrayLike, stream: ArrayLike
) -> jax.Array:
    """As `BigramBackcopy.batch`."""
    B, n, V, k = batch_size, sequence_length + 1 - task.bos_count, task.vocab_size, len(task.triggers)
    (rule, _), *other = task.rules.items()
    # The key of the seed stream * 2**32 + seed; the random numbers of later positions come last.
    key = jax.random.wrap_key_data(jnp.stack([jnp.uint32(stream), jnp.uint32(seed)]), impl="threefry2x32")
    bits = jax.random.bits(jax.random.fold_in(key, step), (k + n * (1 + len(other)), B), jnp.uint32)
    outputs = jnp.asarray(task.plain.astype(np.int32))[bits[:k].T % len(task.plain)]
    bits = bits[k:].reshape(n, 1 + len(other), B) >> 1
    slots = jnp.asarray(_slots(task))
    cumulative, width = _cumulative(task)

    def drawn_from(row: jax.Array, uniform: jax.Array) -> jax.Array:
        token, half = jnp.zeros_like(row), width // 2  # binary search: how many entries are at most `uniform`
        while half:
            entry = cumulative.at[row * width + token + half - 1].get(mode="promise_in_bounds")
            token, half = token + jnp.where(entry <= uniform, half, 0), half // 2
        return token

    def by_rule(rule: TriggerRule, before: jax.Array, current: jax.Array, uniform: jax.Array) -> jax.Array:
        if rule == "backcopy":
            return before
        if rule == "in_context_bigram":
            return jnp.take_along_axis(outputs, slots[current][:, None], axis=1)[:, 0]
        return drawn_from(current if rule == "markov" else before, uniform)

    def following(carry: tuple[jax.Array, jax.Array], xs: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (before, current), (position, (uniform, *bits)) = carry, xs
        answer = by_rule(rule, before, current, uniform)
        for (name, probability), bit in zip(other, bits, strict=True):
            answer = jnp.where(bit < _as_integers(probability), by_rule(name, before, current, uniform), answer)
        within = position - 1 < task.rule_positions
        acts = (slots[current] >= 0) & within
        row = jnp.where(within, before, current) if task.skips else current
        token = jnp.where(acts, answer, drawn_from(row, uniform))
        if task.delimiter_id is not None:
            token = jnp.where(position == task.delimiter_position, task.delimiter_id, token)
        return (current, token), token

    start = jnp.full(B, V, jnp.int32)
    positions = jnp.arange(task.bos_count, task.bos_count + n)
    _, tokens = jax.lax.scan(following, (start, start), (positions, bits))
    bos = jnp.broadcast_to(jnp.asarray(task.bos_ids, jnp.int32), (B, task.bos_count))
    return jnp.concatenate([bos, tokens.T], axis=1)


def is_trigger(task: BigramBackcopy, tokens: ArrayLike) -> jax.Array:
    """As `BigramBackcopy.is_trigger`."""
    tokens = jnp.asarray(tokens)
    is_one = jnp.asarray(_slots(task) >= 0)[tokens]
    return is_one & jnp.broadcast_to(jnp.arange(tokens.shape[-1]) < task.rule_positions, tokens.shape)


def oracle(task: BigramBackcopy, tokens: ArrayLike) -> jax.Array:
    """As `BigramBackcopy.oracle`."""
    if not isinstance(tokens, Tracer) and np.isin(np.asarray(tokens)[:, 0], task.triggers).any():
        raise ValueError("a sequence starts with a trigger: the oracle needs the token before it")
    return _oracle(task, jnp.asarray(tokens))


@functools.partial(jax.jit, static_argnums=0)
def _oracle(task: BigramBackcopy, tokens: jax.Array) -> jax.Array:
    V, dtype = task.vocab_size, jnp.result_type(float)
    transition = jnp.asarray(task.transition, dtype)
    before, acts = jnp.roll(tokens, 1, axis=1), is_trigger(task, tokens)
    laws = {
        "backcopy": lambda: jax.nn.one_hot(before, V, dtype=dtype),
        "bigram_backward": lambda: transition[before],
        "skip_bigram": lambda: transition[before],
        "markov": lambda: transition[tokens],
    }
    rules = dict(task.rules)
    in_context = rules.pop("in_context_bigram", 0.0)
    mixture = sum((p * laws[rule]() for rule, p in rules.items()), jnp.zeros((*tokens.shape, V), dtype))
    if in_context:
        mixture += in_context * _posterior(task, tokens, acts, in_context, mixture)
    law = jnp.where(acts[..., None], mixture, _elsewhere(task, tokens, transition))
    if task.delimiter_id is None or task.delimiter_position is None:
        return law
    certain = jax.nn.one_hot(task.delimiter_id, V, dtype=dtype)
    is_before = jnp.arange(tokens.shape[1]) == task.delimiter_position - 1
    return jnp.where(is_before[None, :, None], certain[None, None], law)


def _elsewhere(task: BigramBackcopy, tokens: jax.Array, transition: jax.Array) -> jax.Array:
    """The law where no trigger acts, [B, T, V]."""
    if not task.skips:
        return transition[tokens]
    B, V = len(tokens), len(transition)
    first = jnp.broadcast_to(jnp.asarray(task.first, transition.dtype), (B, 1, V))
    before = jnp.concatenate([first, transition[tokens[:, :-1]]], axis=1)
    position = jnp.arange(tokens.shape[1])
    own = (position < task.bos_count) | (position >= task.rule_positions)
    return jnp.where(own[None, :, None], transition[tokens], before)


def _posterior(
    task: BigramBackcopy, tokens: jax.Array, acts: jax.Array, probability: float, others: jax.Array
) -> jax.Array:
    """What `in_context_bigram` predicts at a trigger: the distribution of its output o, given what came before.

    Bayes: each earlier occurrence, followed by y, multiplies that of o by p [o = y] + q(y).

    Args:
      task: The task.
      tokens: int [B, T].
      acts: Where the rule acts, bool [B, T].
      probability: p, that of this rule.
      others: q, the other rules' law times their probability, [B, T, V].

    Returns:
      [B, T, V]; without meaning where no rule acts.
    """
    V, k = task.vocab_size, len(task.triggers)
    slot = jax.nn.one_hot(jnp.asarray(_slots(task))[tokens], k, dtype=bool) & acts[..., None]
    uniform = np.zeros(V)
    uniform[task.plain] = 1.0 / len(task.plain)
    following = jnp.roll(tokens, -1, axis=1)  # what follows the last one is not read

    def update(known: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:
        slot, following, others = xs  # [B, k], [B], [B, V]
        now = jnp.einsum("bk,bkv->bv", slot.astype(known.dtype), known, precision="highest")
        seen = probability * jax.nn.one_hot(following, V, dtype=known.dtype)
        after = now * (seen + jnp.take_along_axis(others, following[:, None], axis=1))
        total = jnp.sum(after, axis=1, keepdims=True)
        after = jnp.where(total > 0, after / jnp.where(total > 0, total, 1.0), now)
        return jnp.where(slot[..., None], after[:, None], known), now

    known = jnp.broadcast_to(jnp.asarray(uniform, others.dtype), (tokens.shape[0], k, V))
    _, predicted = jax.lax.scan(update, known, (slot.swapaxes(0, 1), following.T, others.swapaxes(0, 1)))
    return predicted.swapaxes(0, 1)
