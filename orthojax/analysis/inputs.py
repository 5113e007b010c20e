"""Checks of ranks and shapes, which every metric makes on its arrays; a wrong one raises ValueError."""

import jax
import jax.core
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.ops.statistics import real_array

_LOWEST_WEIGHT = -0.18  # of GELU attention; of logits many are lower


def of_one_layer(array: ArrayLike, what: str, axes: str, **at_least: int) -> jax.Array:
    """Checks the number of axes of an array, such as "B, T, D", and the least sizes of some of them, such as T=2."""
    array, names = real_array(array, what), axes.split(", ")
    sizes = dict(zip(names, array.shape, strict=False))
    if array.ndim != len(names) or any(sizes[name] < least for name, least in at_least.items()):
        least = "".join(f", {name} >= {size}" for name, size in at_least.items())
        raise ValueError(f"{what} have shape {array.shape}; allowed: [{axes}] of one layer{least}")
    return array


def hidden_states(hidden: ArrayLike, *, at_least: int = 1) -> jax.Array:
    """Checks hidden states of one layer, [B, T, D] with T >= `at_least`."""
    return of_one_layer(hidden, "hidden states", "B, T, D", T=at_least)


def value_norms(norms: ArrayLike, *, at_least: int = 1) -> jax.Array:
    """Checks norms of the value states of one layer, [B, N, S] with S >= `at_least`."""
    return of_one_layer(norms, "norms of values", "B, N, S", S=at_least)


def attention_weights(weights: ArrayLike) -> jax.Array:
    """Checks attention weights of one layer, [B, N, T, S]; rows may sum to anything, as normalizers differ.

    Logits in their place are refused where the numbers are known, which is not inside of jit.
    """
    array = of_one_layer(weights, "attention weights", "B, N, T, S")
    if not isinstance(array, jax.core.Tracer) and array.size and jnp.min(array) < _LOWEST_WEIGHT:
        raise ValueError("attention weights are negative; allowed: the output of a normalizer, not logits")
    return array


def triggers(is_trigger: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Checks a mask of the tokens that are triggers, bool [B, T]."""
    is_trigger = jnp.asarray(is_trigger)
    if is_trigger.dtype != jnp.bool_ or is_trigger.shape != shape:
        raise ValueError(f"is_trigger is {is_trigger.dtype} {is_trigger.shape}; allowed: bool [B, T], here {shape}")
    return is_trigger
