"""Parameters of scanned and unrolled layers, one from the other."""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def unstack_layers(params: Params) -> Params:
    """{"layers": leaves [L, ...]} -> {"layers_0": leaves [...], ...}; other entries as they are."""
    stacked = params["layers"]
    length = jax.tree.leaves(stacked)[0].shape[0]
    layers = {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(length)}
    return {name: value for name, value in params.items() if name != "layers"} | layers


def stack_layers(params: Params) -> Params:
    """The inverse of `unstack_layers`; the layers must have the same parameters."""
    names = sorted((name for name in params if name.startswith("layers_")), key=lambda name: int(name.split("_")[1]))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in names))
    return {name: value for name, value in params.items() if name not in names} | {"layers": stacked}
