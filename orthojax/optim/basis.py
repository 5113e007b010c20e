"""The numbers of a basis: haar matrices, which a state keeps, and signs, which are constants of the program."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.ops import orthogonal
from orthojax.optim.plan import LeafPlan, Rotation, Turn, plan_leaf


def _parts(path: str) -> list[str]:
    return path.split("/") if path else []


def _basis_shape(plan: LeafPlan, turn: Turn) -> tuple[int, ...]:
    return (*plan.stacked_shape, turn.size, turn.size)


def _draw_haar(rotation: Rotation, plan: LeafPlan, turn: Turn, dtype: Any) -> jax.Array:
    """Q of every layer. A callback of known shape: eval_shape runs no QR, jit embeds no constant of this size."""
    key, shape = zlib.crc32(turn.name.encode()), _basis_shape(plan, turn)
    words = np.dtype(dtype).itemsize // 4

    def draw() -> np.ndarray:
        seeds = [(rotation.seed, key, layer) for layer in turn.layers]
        matrices = np.stack([orthogonal.haar(seed, turn.size) for seed in seeds]).reshape(shape).astype(dtype)
        return matrices.view(np.uint32).reshape(*shape, words)

    # As words: the thread that a callback runs in does not know of a local jax.enable_x64, and would refuse float64.
    drawn = jax.pure_callback(draw, jax.ShapeDtypeStruct((*shape, words), np.uint32))
    return jax.lax.bitcast_convert_type(drawn if words > 1 else drawn[..., 0], dtype)


def init_basis(rotation: Rotation, params: optax.Params) -> Any:
    """What must be remembered of the bases of `params`; see `RotationState.basis`.

    Raises:
      ValueError: Where haar matrices would be over 8 times as large as their parameter.
    """
    if rotation.kind != "haar":
        return ()
    basis: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        plan = plan_leaf(rotation, keys, leaf)
        dtype = jnp.promote_types(jnp.result_type(leaf), jnp.float32)
        for i, turn in enumerate(plan.turns):
            node = basis
            for part in _parts(plan.path):
                node = node.setdefault(part, {})
            node[f"basis_{i}"] = _draw_haar(rotation, plan, turn, dtype)
    # An array, not an empty dict: optax.tree.map_params must see something that is no parameter.
    return basis or jnp.zeros((0,), jnp.float32)


def _stored_basis(basis: Any, plan: LeafPlan, i: int) -> jax.Array:
    node = basis
    for part in (*_parts(plan.path), f"basis_{i}"):
        if not isinstance(node, dict) or part not in node:
            raise ValueError(
                f"{plan.path!r} has no basis in the state; allowed: the tree and the kind that the state was made for"
            )
        node = node[part]
    shape = _basis_shape(plan, plan.turns[i])
    if node.shape != shape:
        raise ValueError(f"{plan.path}: the basis in the state has shape {node.shape}; allowed: {shape}")
    return node


def turn_constants(rotation: Rotation, plan: LeafPlan, basis: Any, transpose: bool) -> tuple[tuple[Any, ...], ...]:
    """What each turn needs, all layers of it: (Q [*stacked, n, n],) or (signs [*stacked, n],) and maybe an order."""
    if rotation.kind == "haar":
        return tuple((_stored_basis(basis, plan, i),) for i in range(len(plan.turns)))
    found = []
    for turn in plan.turns:
        key, shape = rotation.seed ^ zlib.crc32(turn.name.encode()), (*plan.stacked_shape, turn.size)
        # The program holds one byte for each sign.
        constants = (orthogonal.hash_signs(key, turn.layers, turn.size).reshape(shape),)
        if rotation.kind == "signed_permutation":
            # Another key: the order of the hashes is not independent of their top bits.
            order = orthogonal.hash_permutations(key ^ 0xFFFFFFFF, turn.layers, turn.size).reshape(shape)
            constants += (np.argsort(order, axis=-1) if transpose else order,)
        found.append(constants)
    return tuple(found)
