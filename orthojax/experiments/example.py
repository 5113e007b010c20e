"""What a picture of one model needs: its attention and its hidden states on one held-out sequence."""

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import Config
from orthojax.model import Taps, Transformer
from orthojax.train import Inputs


def example_maps(config: Config, params: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Attention and hidden states on one sequence, as in Figure 1 of From Attention to Activation.

    Args:
      config: Of the model.
      params: Its parameters.
      tokens: int [T + 1].

    Returns:
      `attention` [T, T], mean weight over heads and layers; `hidden` [T, D], mean |hidden state| over layers;
      `tokens` [T].
    """

    def observe(taps: Taps) -> tuple[jax.Array, jax.Array]:
        return jnp.mean(taps.attention_weights[0], axis=0), jnp.abs(taps.residual[0])

    model = Transformer(config.model)
    _, (attention, hidden) = jax.jit(lambda p, t: model.apply({"params": p}, t, observe=observe))(
        params, tokens[None, :-1]
    )
    return {
        "attention": np.asarray(attention.mean(0)),
        "hidden": np.asarray(hidden.mean(0)),
        "tokens": tokens[:-1],
    }


def save_example(config: Config, params: Any, inputs: Inputs, path: Path) -> None:
    """Writes `example_maps` of the first evaluation sequence as an .npz."""
    maps = example_maps(config, params, inputs.evaluation[0])
    temporary = path.with_suffix(".tmp.npz")
    np.savez_compressed(temporary, **cast(Any, maps))
    temporary.replace(path)
