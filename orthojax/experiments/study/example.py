"""What a picture of one model needs: its attention and its hidden states on one held-out sequence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import Config
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

    def observe(taps: Taps) -> tuple[jax.Array, jax.Array]:
        return jnp.mean(taps.attention_weights[0], axis=0), jnp.abs(taps.residual[0])

    model, layers = Transformer(config.model), config.model.num_layers

    @jax.jit
    def panels(params: Any, tokens: jax.Array) -> tuple[jax.Array, ...]:
        observed: Any = model.apply({"params": params}, tokens, observe=observe)
        return tuple(jnp.stack([x.mean(0), x[0], x[layers // 4], x[3 * layers // 4]]) for x in observed[1])

    attention, hidden = jax.device_get(panels(params, tokens[None, :-1]))
    return {"attention": attention, "hidden": hidden, "tokens": tokens[:-1]}
