"""Checks of ranks and shapes, which every metric makes of its arrays; a wrong one is a ValueError."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def hidden_states(hidden: ArrayLike, *, at_least: int = 1) -> jax.Array:
    """Checks hidden states of one layer, [B, T, D] with T >= `at_least`."""
    hidden = jnp.asarray(hidden)
    if hidden.ndim != 3 or hidden.shape[1] < at_least:
        raise ValueError(f"hidden states have shape {hidden.shape}; allowed: [B, T, D] of one layer, T >= {at_least}")
    return hidden


def value_norms(norms: ArrayLike, *, at_least: int = 1) -> jax.Array:
    """Checks norms of the value states of one layer, [B, N, S] with S >= `at_least`."""
    norms = jnp.asarray(norms)
    if norms.ndim != 3 or norms.shape[2] < at_least:
        raise ValueError(f"norms of values have shape {norms.shape}; allowed: [B, N, S] of one layer, S >= {at_least}")
    return norms


def attention_weights(weights: ArrayLike) -> jax.Array:
    """Checks attention weights of one layer, [B, N, T, S]; rows may sum to anything, as normalizers differ."""
    weights = jnp.asarray(weights)
    if weights.ndim != 4:
        raise ValueError(f"attention weights have shape {weights.shape}; allowed: [B, N, T, S] of one layer")
    return weights


def triggers(is_trigger: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Checks a mask of the tokens that are triggers, bool [B, T]."""
    is_trigger = jnp.asarray(is_trigger)
    if is_trigger.dtype != jnp.bool_ or is_trigger.shape != shape:
        raise ValueError(f"is_trigger is {is_trigger.dtype} {is_trigger.shape}; allowed: bool [B, T], here {shape}")
    return is_trigger


def predictions(log_probs: ArrayLike, oracle_probs: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Checks log-probabilities of a model and probabilities of the next token, both [B, T, V]."""
    log_probs, oracle_probs = jnp.asarray(log_probs), jnp.asarray(oracle_probs)
    if log_probs.ndim != 3 or log_probs.shape != oracle_probs.shape:
        shapes = f"{log_probs.shape} and {oracle_probs.shape}"
        raise ValueError(f"log_probs and oracle_probs have shapes {shapes}; allowed: [B, T, V] for both")
    return log_probs, oracle_probs
