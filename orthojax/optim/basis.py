"""The numbers of a basis: matrices are kept in the state, signs are constants of the program."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.ops import orthogonal
from orthojax.ops.statistics import wide_dtype
from orthojax.optim.rotation import Group, Plan, Rotation, name_key, plan_tree, warn_of_plans


def _basis_path(path: str, i: int) -> list[str]:
    return [*(path.split("/") if path else []), f"basis_{i}"]


def basis_shape(plan: Plan, group: Group) -> tuple[int, ...]:
    """[*stacked, n, n]."""
    return (*plan.stacked_shape, group.size, group.size)


def _draw_haar(rotation: Rotation, plan: Plan, group: Group, dtype: Any) -> jax.Array:
    """Q of every layer. A callback of known shape: eval_shape runs no QR, jit embeds no constant of this size."""
    key, shape = name_key(group), basis_shape(plan, group)
    words = np.dtype(dtype).itemsize // 4

    def draw() -> np.ndarray:
        seeds = [(rotation.seed, key, layer) for layer in group.layers]
        matrices = np.stack([orthogonal.haar(seed, group.size) for seed in seeds]).reshape(shape).astype(dtype)
        return matrices.view(np.uint32).reshape(*shape, words)

    # Jitted: a callback by itself is no program of a mesh with Explicit axes.
    @jax.jit
    def drawn() -> jax.Array:
        # As words: the callback's thread does not know of a local jax.enable_x64, and would refuse float64.
        bits = jax.pure_callback(draw, jax.ShapeDtypeStruct((*shape, words), np.uint32))
        return jax.lax.bitcast_convert_type(bits if words > 1 else bits[..., 0], dtype)

    return drawn()


def init_basis(rotation: Rotation, params: optax.Params) -> Any:
    """What the state keeps of the bases of `params`; see `RotationState.basis`."""
    plans = plan_tree(rotation, params)
    warn_of_plans(rotation, plans)
    if rotation.kind != "haar":
        return ()
    return matrices_by_path(plans, lambda leaf, plan, group: _draw_haar(rotation, plan, group, wide_dtype(leaf)))


def matrices_by_path(
    plans: Iterable[tuple[Any, Plan]], matrices_of: Callable[[Any, Plan, Group], jax.Array]
) -> dict[str, Any] | jax.Array:
    """A nested dict by path with the leaves basis_0, basis_1, one for each rotated group of axes of a parameter.

    Args:
      plans: (leaf, plan) of every parameter.
      matrices_of: (leaf, plan, group) -> [*stacked, n, n].

    Returns:
      The dict, or one 0, shape=(), where nothing is rotated.
    """
    found: dict[str, Any] = {}
    for leaf, plan in plans:
        for i, group in enumerate(plan.groups):
            *parents, name = _basis_path(plan.path, i)
            node = functools.reduce(lambda node, part: node.setdefault(part, {}), parents, found)
            node[name] = matrices_of(leaf, plan, group)
    # An array, not an empty dict: optax.tree.map_params must see a non-parameter. Orbax saves none of size 0.
    return found or jnp.zeros((), jnp.float32)


def _stored_basis(basis: Any, plan: Plan, i: int) -> jax.Array:
    for part in _basis_path(plan.path, i):
        if not isinstance(basis, dict) or part not in basis:
            raise ValueError(
                f"{plan.path!r} has no basis in the state; allowed: the tree and the kind that the state was made for"
            )
        basis = basis[part]
    if basis.shape != (shape := basis_shape(plan, plan.groups[i])):
        raise ValueError(f"{plan.path}: the basis in the state has shape {basis.shape}; allowed: {shape}")
    return basis


def stored_matrices(basis: Any, plan: Plan) -> tuple[tuple[jax.Array], ...]:
    """Of `matrices_by_path`: for each group of a parameter, (Q [*stacked, n, n],)."""
    return tuple((_stored_basis(basis, plan, i),) for i in range(len(plan.groups)))


def basis_constants(rotation: Rotation, plan: Plan, basis: Any, transpose: bool) -> tuple[tuple[Any, ...], ...]:
    """For each group, all layers: (Q [*stacked, n, n],), or (signs [*stacked, n],) and maybe an order."""
    if rotation.kind == "haar":
        return stored_matrices(basis, plan)
    found = []
    for group in plan.groups:
        key, shape = rotation.seed ^ name_key(group), (*plan.stacked_shape, group.size)
        # The program holds one byte for each sign.
        constants = (orthogonal.hash_signs(key, group.layers, group.size).reshape(shape),)
        if rotation.kind == "signed_permutation":
            # Another key: the order of the hashes is not independent of their top bits.
            order = orthogonal.hash_permutations(key ^ 0xFFFFFFFF, group.layers, group.size).reshape(shape)
            constants += (np.argsort(order, axis=-1) if transpose else order,)
        found.append(constants)
    return tuple(found)
