"""What the rest of the project sees of a model, its parameters and its blocks; without flax.

Legend: B batch, T query positions, S key positions, N query heads, K key-value heads, H head width, D d_model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from orthojax.config import Config

if TYPE_CHECKING:
    from orthojax.model.transformer import Transformer

Params = dict[str, Any]


class Taps(NamedTuple):
    """The intermediates of one block. An `observe` function reduces them; what it does not read is never computed."""

    attention_logits: jax.Array  # [B, N, T, S] float32, scaled, before bias and mask
    attention_weights: jax.Array  # [B, N, T, S] float32
    visible: jax.Array  # [1, 1, T, S] bool: which keys each query sees; none in a layer without attention
    keys: jax.Array  # [B, S, K, H], rotated where positions are
    values: jax.Array  # [B, S, K, d_value]
    value_norms: jax.Array  # [B, N, S] float32: ||W_o^h v_j||_2, the value as head h writes it to the residual stream
    head_norms: jax.Array  # [B, N, T] float32: ||W_o^h sum_j A_ij v_j||_2, what head h writes, before `attention_scale`
    residual_before: jax.Array  # [B, T, D] residual stream that the block gets
    attention_output: jax.Array  # [B, T, D]
    mlp_output: jax.Array  # [B, T, D]
    post_attention: jax.Array  # [B, T, D] residual stream after attention
    residual: jax.Array  # [B, T, D] residual stream after the block: the paper's hidden state


Observe = Callable[[Taps], Any]


class LoadedModel(NamedTuple):
    """A model that is ready to be applied: what measurements take, be it a run, a checkpoint or an imported model.

    Attributes:
      model: `Transformer(config.model)`; `_replace` it for one with quantised linear layers.
      params: Its parameters, as `init` returns them under "params".
      config: Of the run that trained it.
      tokenizer: What its token ids mean; None where nothing is known of it.
      source: Folder of the checkpoint's step.
    """

    model: "Transformer"
    params: Any
    config: Config
    tokenizer: Any | None
    source: Path


def unstack_layers(params: Params) -> Params:
    """{"layers": leaves [L, ...]} -> {"layers_0": leaves [...], ...}, from scanned to unrolled; the rest as it is."""
    stacked = params["layers"]
    length = jax.tree.leaves(stacked)[0].shape[0]
    layers = {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(length)}
    return {name: value for name, value in params.items() if name != "layers"} | layers


def stack_layers(params: Params) -> Params:
    """The inverse of `unstack_layers`; all layers must have the same parameters."""
    names = sorted((name for name in params if name.startswith("layers_")), key=lambda name: int(name.split("_")[1]))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in names))
    return {name: value for name, value in params.items() if name not in names} | {"layers": stacked}


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays of a tree are sharded over; None for one device, or arrays on the host."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None
    return None
