"""A model with its parameters, and trees of parameters with stacked or separate layers; without flax."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from orthojax.config import Config, ModelConfig
from orthojax.errors import UserError

if TYPE_CHECKING:
    from orthojax.model.transformer import Transformer

Params = dict[str, Any]


class LoadedModel(NamedTuple):
    """A model that is ready to be applied and measured: from a run, a checkpoint or an import."""

    model: "Transformer"  # of `config.model`; `_replace` it for one with quantised linear layers
    params: Any  # as `init` returns them under "params"
    config: Config  # of the run that trained it
    tokenizer: Any  # the meaning of its token ids; None if that is not known
    source: Path  # the folder of the checkpoint's step, or the file or folder of a published model


def unstack_layers(params: Params) -> Params:
    """Turns {"layers": leaves [L, ...]} into {"layers_0": leaves [...], ...}, from scanned to unrolled."""
    stacked = params["layers"]
    length = jax.tree.leaves(stacked)[0].shape[0]
    layers = {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(length)}
    return {name: value for name, value in params.items() if name != "layers"} | layers


def stack_layers(params: Params) -> Params:
    """Inverts `unstack_layers`; all layers must have the same parameters."""
    names = sorted((name for name in params if name.startswith("layers_")), key=lambda name: int(name.split("_")[1]))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in names))
    return {name: value for name, value in params.items() if name not in names} | {"layers": stacked}


def fold_embedding_projection(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Multiplies the matrices of `ModelConfig.embedding_projection` into the token table and the head.

    The logits do not change. Tied embeddings become untied, since the two matrices differ. Returns the parameters of
    the plain model, and its config. Raises UserError for a model without these matrices.
    """
    if not config.embedding_projection:
        raise UserError("model.embedding_projection=False: nothing to fold", allowed="a model that has it")
    names = ("embedding_output", "head_input")
    before, after = (params[name]["kernel"] for name in names)
    table = params["token_embedding"]["embedding"]
    head = table.T if config.tie_embeddings else params["head"]["kernel"]
    folded = {"token_embedding": {"embedding": table @ before}, "head": {"kernel": after @ head}}
    rest = {name: value for name, value in params.items() if name not in names}
    return rest | folded, dataclasses.replace(config, embedding_projection=False, tie_embeddings=False)


def mesh_of(tree: Any) -> Mesh | None:
    """Finds the mesh that the arrays of a tree are sharded over; None for one device, or arrays on the host."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None
    return None
