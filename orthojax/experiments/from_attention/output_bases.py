"""What writes to the residual stream: the output projections of a model, and the bases that its optimizer has there."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.optim import RotatedAxes, rotate
from orthojax.train import make_rotation

# Name -> where the kernel [I, D] is in a layer; I are its input features, D is d_model.
PARTS = {"mlp_output": "mlp/output", "attention_output": "attention/output"}


def output_kernels(tree: Any, part: str) -> np.ndarray:
    """The kernels of one output projection of all layers, scanned or not.

    Args:
      tree: Parameters, or a tree like them, as Adam's second moments are.
      part: One of `PARTS`.

    Returns:
      [layers, I, D].
    """

    def kernel(layer: Any) -> np.ndarray:
        for name in (*PARTS[part].split("/"), "kernel"):
            layer = layer[name]
        return np.asarray(layer)

    if "layers" in tree:
        return kernel(tree["layers"])
    count = sum(name.startswith("layers_") for name in tree)
    return np.stack([kernel(tree[f"layers_{layer}"]) for layer in range(count)])


def _group(config: Config, path: str) -> int | None:
    """Which of the rotated groups of axes is the output axis of a kernel [I, D]."""
    rule: Any = make_rotation(config.optim.rotation).axes
    axes = rule(path, jax.ShapeDtypeStruct((config.model.d_mlp, config.model.d_model), jnp.float32))
    if not config.optim.is_rotated or config.optim.rotation.kind == "identity" or axes is None:
        return None
    return axes.groups.index((1,)) if (1,) in axes.groups else None


def turns_output(config: Config, part: str) -> bool:
    """Whether the optimizer of a run turns the output channels of a projection."""
    return _group(config, f"layers_0/{PARTS[part]}/kernel") is not None


def output_bases(config: Config, part: str) -> np.ndarray:
    """The orthogonal matrices by which the optimizer turns the output channels of a projection.

    A gradient row g [D] becomes Q g, so that a kernel W [I, D] of the model is W Q^T in the optimizer's basis, and
    activations X [T, D] that the kernel writes are X Q^T there.

    Args:
      config: The run.
      part: One of `PARTS`.

    Returns:
      Q, [layers, D, D] float32.

    Raises:
      UserError: Where the optimizer does not turn these channels.
    """
    if not turns_output(config, part):
        optim = config.optim
        axes = f" with rotation.axes={optim.rotation.axes!r}, kind {optim.rotation.kind!r}" if optim.is_rotated else ""
        raise UserError(
            f"optimizer {optim.optimizer!r}{axes} has no d_model x d_model basis for {PARTS[part]}",
            allowed="orthoadam with rotation.axes output, both, residual or writers, and a kind that rotates",
        )
    return np.stack([_basis(config, part, layer) for layer in range(config.model.num_layers)])


def _basis(config: Config, part: str, layer: int) -> np.ndarray:
    path, D = f"layers_{layer}/{PARTS[part]}/kernel", config.model.d_model
    group = _group(config, path)
    assert group is not None
    # The name of a basis has the number of its group. An input axis of length 1 takes the first number where the
    # kernel's own does, and is not turned.
    axes = RotatedAxes(((1,), (2,))[1 - group :])
    turn = rotate(dataclasses.replace(make_rotation(config.optim.rotation), axes=lambda path, leaf: axes))
    tree: Any = jnp.eye(D)[:, None]
    for name in reversed(path.split("/")):
        tree = {name: tree}
    turned = jax.tree.leaves(turn.update(tree, turn.init(tree))[0])[0]
    return np.asarray(turned[:, 0]).T  # its rows were the images of the unit vectors
