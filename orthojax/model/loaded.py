"""A model with its parameters: what measurements take, be it a run, a checkpoint or an imported model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from orthojax.config import Config

if TYPE_CHECKING:
    from orthojax.model.transformer import Transformer


class LoadedModel(NamedTuple):
    """A model that is ready to be applied.

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


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays of a tree are sharded over; None for one device, or arrays on the host."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None
    return None
