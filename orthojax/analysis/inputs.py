"""What the arrays of the metrics must be: ranks and shapes always; values outside of jit, where they are known.

Inside jit, and under other transformations, values are not looked at: nothing is added to the program.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

_LOWEST_OF_GELU = -0.17005  # min of x Phi(x), with its rounding


def hidden_states(hidden: ArrayLike, *, at_least: int = 1) -> jax.Array:
    """Hidden states of one layer, [B, T, D], with T >= `at_least`.

    Raises:
      ValueError: For any other shape.
    """
    hidden = jnp.asarray(hidden)
    if hidden.ndim != 3 or hidden.shape[1] < at_least:
        raise ValueError(f"hidden states have shape {hidden.shape}; allowed: [B, T, D] of one layer, T >= {at_least}")
    return hidden


def value_norms(norms: ArrayLike, *, at_least: int = 1) -> jax.Array:
    """Norms of the value states of one layer, [B, N, S], with S >= `at_least`.

    Raises:
      ValueError: For any other shape, or negative numbers.
    """
    norms = jnp.asarray(norms)
    if norms.ndim != 3 or norms.shape[2] < at_least:
        raise ValueError(f"norms of values have shape {norms.shape}; allowed: [B, N, S] of one layer, S >= {at_least}")
    if _holds(_some_negative, norms):
        raise ValueError("norms of values are negative; allowed: ||W_o v||, not the values")
    return norms


def attention_weights(weights: ArrayLike) -> jax.Array:
    """Attention weights of one layer, [B, N, T, S].

    Rows may sum to anything, as normalizers differ, and GELU's weights go down to -0.17.

    Raises:
      ValueError: For another rank; numbers below -0.17 or not finite; and keys before queries: weights that are zero
        below the diagonal and not above it, or whose columns sum to 1 and whose rows do not.
    """
    weights = jnp.asarray(weights)
    if weights.ndim != 4:
        raise ValueError(f"attention weights have shape {weights.shape}; allowed: [B, N, T, S] of one layer")
    if _holds(_some_impossible, weights):
        problem = "attention weights are negative or not finite"
        raise ValueError(f"{problem}; allowed: what a normalizer gives (gelu: from -0.17 on), not logits")
    if _holds(_keys_before_queries, weights):
        raise ValueError(f"queries and keys of attention weights {weights.shape} are swapped; allowed: [B, N, T, S]")
    return weights


def triggers(is_trigger: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Whether each token is a trigger, bool [B, T].

    Raises:
      ValueError: For another shape or dtype.
    """
    is_trigger = jnp.asarray(is_trigger)
    if is_trigger.dtype != jnp.bool_ or is_trigger.shape != shape:
        raise ValueError(f"is_trigger is {is_trigger.dtype} {is_trigger.shape}; allowed: bool [B, T], here {shape}")
    return is_trigger


def predictions(log_probs: ArrayLike, oracle_probs: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of a model and probabilities of the next token, both [B, T, V].

    Raises:
      ValueError: For other shapes, or rows that are no distributions.
    """
    log_probs, oracle_probs = jnp.asarray(log_probs), jnp.asarray(oracle_probs)
    if log_probs.ndim != 3 or log_probs.shape != oracle_probs.shape:
        shapes = f"{log_probs.shape} and {oracle_probs.shape}"
        raise ValueError(f"log_probs and oracle_probs have shapes {shapes}; allowed: [B, T, V] for both")
    if _holds(_no_log_probs, log_probs):
        raise ValueError("rows of log_probs do not sum to 1 as probabilities; allowed: log_softmax of logits")
    if _holds(_no_probs, oracle_probs):
        raise ValueError("rows of oracle_probs are negative or do not sum to 1; allowed: probabilities")
    return log_probs, oracle_probs


def _holds(predicate: Callable[[jax.Array], jax.Array], x: jax.Array) -> bool:
    """Whether it holds of an array whose values this process knows; False of others."""
    if isinstance(x, Tracer) or not x.is_fully_addressable:
        return False
    with jax.ensure_compile_time_eval():
        return bool(predicate(x))


@jax.jit
def _some_negative(x: jax.Array) -> jax.Array:
    return jnp.any(x < 0)


@jax.jit
def _some_impossible(weights: jax.Array) -> jax.Array:
    return ~jnp.all((weights >= _LOWEST_OF_GELU) & (weights < jnp.inf))


@jax.jit
def _keys_before_queries(weights: jax.Array) -> jax.Array:
    column_sums, row_sums = (jnp.sum(weights, axis, dtype=jnp.float32) for axis in (-2, -1))
    swapped = _are_one(column_sums) & ~_are_one(row_sums)
    if weights.shape[-2] == weights.shape[-1]:
        query, key = jnp.arange(weights.shape[-2])[:, None], jnp.arange(weights.shape[-1])[None]
        below, above = (jnp.any((weights != 0) & hidden[None, None]) for hidden in (key < query, key > query))
        swapped |= above & ~below
    return swapped


def _are_one(sums: jax.Array) -> jax.Array:
    return jnp.all(jnp.abs(sums - 1.0) < 0.01)  # with room for half precision


@jax.jit
def _no_log_probs(log_probs: jax.Array) -> jax.Array:
    return ~jnp.all(jnp.abs(jax.nn.logsumexp(log_probs.astype(jnp.float32), -1)) < 0.1)  # as above


@jax.jit
def _no_probs(probs: jax.Array) -> jax.Array:
    return jnp.any(probs < 0) | ~_are_one(jnp.sum(probs, -1, dtype=jnp.float32))
