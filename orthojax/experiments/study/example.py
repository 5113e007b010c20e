"""What a picture of one model needs: its attention and its hidden states on one held-out sequence."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.config import Config, ModelConfig
from orthojax.model import Taps, Transformer

PANELS: tuple[str, ...] = ("mean over layers", "first layer", "a quarter of the layers", "three quarters of the layers")


def example_maps(config: Config, params: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Attention and hidden states on one sequence, as in Figures 1 and 27 to 40 of From Attention to Activation.

    Args:
      config: Of the model.
      params: Its parameters.
      tokens: int [T + 1].

    Returns:
      `attention` [4, T, T], mean weight over heads, and `hidden` [4, T, D], |hidden state|, both of `PANELS`: the mean
      over layers, then layers 0, L / 4 and 3 L / 4 of L, rounded down; `tokens` [T].
    """
    attention, hidden = jax.device_get(_panels(config.model)(params, tokens[None, :-1]))
    return {"attention": attention, "hidden": hidden, "tokens": tokens[:-1]}


@functools.lru_cache(maxsize=32)  # variants that differ in their optimizer share a program, and so do seeds
def _panels(model: ModelConfig) -> Callable[[Any, ArrayLike], tuple[jax.Array, jax.Array]]:
    """The jitted (params, tokens [1, T]) -> attention [4, T, T], hidden [4, T, D]."""
    layers = model.num_layers

    def observe(taps: Taps) -> tuple[jax.Array, jax.Array]:
        return jnp.mean(taps.attention_weights[0], axis=0), jnp.abs(taps.residual[0])

    def panels(params: Any, tokens: ArrayLike) -> tuple[jax.Array, ...]:
        observed: Any = Transformer(model).apply({"params": params}, tokens, observe=observe)
        return tuple(jnp.stack([x.mean(0), x[0], x[layers // 4], x[3 * layers // 4]]) for x in observed[1])

    return jax.jit(panels)
