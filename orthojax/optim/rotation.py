"""Turning trees into the basis of the optimizer and back, as functions and as optax transformations."""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.ops import orthogonal
from orthojax.optim import layout
from orthojax.optim.plan import DEFAULT_ROTATION, Kind, LeafPlan, Rotation, Turn, plan_leaf, require_rotation


class RotationState(NamedTuple):
    """State of `rotate` and `unrotate`.

    Attributes:
      basis: `haar`: a nested dict by path with the leaves basis_0, basis_1 [*stacked, n, n], or one empty array if no
        parameter is rotated. Other kinds: (), no array at all.
    """

    basis: Any


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
            raise ValueError(f"{plan.path!r} has no basis in the state; allowed: the tree that the state was made for")
        node = node[part]
    shape = _basis_shape(plan, plan.turns[i])
    if node.shape != shape:
        raise ValueError(f"{plan.path}: the basis in the state has shape {node.shape}; allowed: {shape}")
    return node


def _along(values: Any, axes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Reshapes a constant [*lengths of axes] such that it broadcasts along `axes` of an array of `shape`."""
    values = values.transpose(np.argsort(axes))
    return values.reshape([length if axis in axes else 1 for axis, length in enumerate(shape)])


def _constants(rotation: Rotation, plan: LeafPlan, basis: Any, transpose: bool) -> tuple[tuple[Any, ...], ...]:
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


def _turn_axis(
    x: jax.Array, axis: int, stacked: tuple[int, ...], kind: Kind, constants: tuple[Any, ...], transpose: bool
) -> jax.Array:
    """Q, or Q^T, along one axis of x, with its own Q for every slice along `stacked`."""
    if kind == "haar":
        return orthogonal.apply_matrix(x, constants[0], axis, batch_axes=stacked, transpose=transpose)
    signs, *order = (jnp.asarray(_along(constant, (*stacked, axis), x.shape)) for constant in constants)
    signs = signs.astype(x.dtype)
    if kind == "signed_permutation":
        if transpose:
            return signs * jnp.take_along_axis(x, order[0], axis)
        return jnp.take_along_axis(signs * x, order[0], axis)
    fixed = "dct" if kind == "dct" else "hadamard"
    if transpose:
        return signs * orthogonal.fixed_transform(x, axis, kind=fixed, transpose=True)
    return orthogonal.fixed_transform(signs * x, axis, kind=fixed)


def _turn_group(
    x: jax.Array, plan: LeafPlan, turn: Turn, kind: Kind, constants: tuple[Any, ...], transpose: bool
) -> jax.Array:
    """As `_turn_axis` for a group of axes, which are flattened meanwhile."""
    width, rest = len(turn.axes), [axis for axis in range(x.ndim) if axis not in turn.axes]
    adjacent = turn.axes == tuple(range(turn.axes[0], turn.axes[0] + width))
    first = turn.axes[0] if adjacent else len(rest)
    there = tuple(range(first, first + width))
    y = x if adjacent else jnp.moveaxis(x, turn.axes, there)
    flat = y.reshape(*y.shape[:first], turn.size, *y.shape[first + width :])
    stacked = tuple(rest.index(axis) + (rest.index(axis) >= first) for axis in plan.stacked)
    flat = _turn_axis(flat, first, stacked, kind, constants, transpose)
    y = flat.reshape(y.shape)
    return y if adjacent else jnp.moveaxis(y, there, turn.axes)


# Jitted, so that outside of jit too the shards are turned by one program, compiled once for each shape.
@functools.partial(jax.jit, static_argnames=("plan", "kind", "sharding", "transpose"), inline=True)
def _turn_sharded(
    x: jax.Array, constants: Any, plan: LeafPlan, kind: Kind, sharding: jax.sharding.NamedSharding, transpose: bool
) -> jax.Array:
    """Every turn of a parameter that is split as `sharding` says; the result is split in the same way."""

    def local_fn(shard, constants, names):
        for turn, whole in zip(plan.turns, constants, strict=True):
            moved, over, back = layout.gather_axes(shard, turn.axes, plan.stacked, names)
            lengths = [moved.shape[axis] for axis in plan.stacked]
            mine = tuple(layout.local_slice(c, [over[axis] for axis in plan.stacked], lengths) for c in whole)
            shard = back(_turn_group(moved, plan, turn, kind, mine, transpose))
        return shard

    return layout.over_shards(local_fn, x, constants, sharding)


def apply_rotation(rotation: Rotation, tree: Any, basis: Any, *, transpose: bool = False, like: Any = None) -> Any:
    """Q, or Q^T, on every rotated array of a tree.

    Args:
      rotation: Which basis.
      tree: Parameters, or gradients or updates of them; None and masked nodes are passed over.
      basis: From `init_basis` of the same tree.
      transpose: Turn back.
      like: A tree of the same structure. Where it is known how one of its arrays is split over a mesh (outside of jit,
        or by Explicit axes), the result is split in the same way; elsewhere as `rotation.layout` says.

    Returns:
      A tree of the same shapes and dtypes. Computed in at least float32.

    Raises:
      ValueError: Where `basis` was made for another tree.
    """

    def leaf_fn(keys: tuple[Any, ...], leaf: Any, wanted: Any = None) -> Any:
        plan = plan_leaf(rotation, keys, leaf)
        x = turn_whole(rotation, plan, leaf, basis, transpose=transpose)
        given = None if rotation.layout is None else rotation.layout(plan.path)
        after = None if given is None else layout.known_sharding(wanted)
        return x if after is None else layout.place(x, after)

    return jax.tree_util.tree_map_with_path(leaf_fn, tree, *(() if like is None else (like,)))


def _turn_leaf(
    rotation: Rotation, plan: LeafPlan, x: jax.Array, sharding: Any, basis: Any, transpose: bool
) -> jax.Array:
    constants = _constants(rotation, plan, basis, transpose)
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if isinstance(sharding, jax.sharding.NamedSharding) and any(sharding.spec):
        y = _turn_sharded(y, constants, plan, rotation.kind, sharding, transpose)
    else:
        for turn, mine in zip(plan.turns, constants, strict=True):
            y = _turn_group(y, plan, turn, rotation.kind, mine, transpose)
    return y.astype(x.dtype)


def turn_whole(rotation: Rotation, plan: LeafPlan, leaf: Any, basis: Any, *, transpose: bool = False) -> Any:
    """Q, or Q^T, on one parameter, as `apply_rotation` does it."""
    given = None if rotation.layout is None else rotation.layout(plan.path)
    if not plan.turns and given is None:
        return leaf
    x = jnp.asarray(leaf)
    x = x if given is None else layout.place(x, given)
    return _turn_leaf(rotation, plan, x, given or layout.known_sharding(x), basis, transpose) if plan.turns else x


def turn_one_layer(
    rotation: Rotation, plan: LeafPlan, x: jax.Array, basis: Any, layer: Any, *, transpose: bool = False
) -> jax.Array:
    """Q, or Q^T, on one layer x of a parameter whose first axes are stacked; `layer`, row-major, may be traced."""
    k = len(plan.stacked)
    alone = plan._replace(stacked=(), stacked_shape=())
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for turn, constants in zip(plan.turns, _constants(rotation, plan, basis, transpose), strict=True):
        mine = tuple(jnp.asarray(c).reshape(-1, *c.shape[k:])[layer] for c in constants)
        moved = turn._replace(axes=tuple(axis - k for axis in turn.axes))
        y = _turn_group(y, alone, moved, rotation.kind, mine, transpose)
    return y.astype(x.dtype)


def _transformation(rotation: Rotation, transpose: bool) -> optax.GradientTransformation:
    require_rotation(rotation)

    def init_fn(params):
        return RotationState(init_basis(rotation, params))

    def update_fn(updates, state, params=None):
        like = params if transpose else None
        return apply_rotation(rotation, updates, state.basis, transpose=transpose, like=like), state

    return optax.GradientTransformation(init_fn, update_fn)


def rotate(rotation: Rotation = DEFAULT_ROTATION) -> optax.GradientTransformation:
    """Turns gradients into the basis of the optimizer: g' = Q g along each rotated axis.

    `optax.chain(rotate(r), optax.scale_by_adam(), unrotate(r))` is OrthoAdam (Algorithm 1 of From Attention to
    Activation, `arXiv 2410.17174 <https://arxiv.org/abs/2410.17174>`_). What stands between the two sees rotated
    gradients and plain parameters; `in_rotated_basis` hands it rotated ones, and keeps a `haar` basis once instead of
    twice.

    Args:
      rotation: Which basis.

    Returns:
      A transformation with a `RotationState`.
    """
    return _transformation(rotation, transpose=False)


def unrotate(rotation: Rotation = DEFAULT_ROTATION) -> optax.GradientTransformation:
    """Turns updates back into the basis of the parameters: s = Q^T s' along each rotated axis; the inverse of `rotate`.

    Args:
      rotation: The same as in `rotate`.

    Returns:
      A transformation with a `RotationState`.
    """
    return _transformation(rotation, transpose=True)


def describe(rotation: Rotation, params: optax.Params) -> dict[str, str]:
    """What is rotated and how, and what is left alone and why, by path.

    Args:
      rotation: Which basis.
      params: Arrays, or the jax.ShapeDtypeStruct of `jax.eval_shape`.

    Raises:
      ValueError: As the init of the optimizer would.

    >>> params = {"kernel": jnp.zeros((2, 8, 768)), "bias": jnp.zeros(8)}
    >>> for path, what in describe(Rotation(), params).items():
    ...     print(f"{path}: {what}")
    bias: left alone: 1 axes, fewer than 2
    kernel: axes (2,): hadamard 768 = 24 x 32, 2 layers
    >>> describe(Rotation(), {"kernel": jnp.zeros((8, 1000))})
    {'kernel': 'axes (1,): hadamard 1000 = 25 (cosine) x 40'}
    """
    report = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        plan = plan_leaf(rotation, keys, leaf)
        parts = []
        for turn in plan.turns:
            text = f"axes {turn.axes}: {rotation.kind} {turn.size}"
            sizes = orthogonal.factor_sizes(turn.size, "dct" if rotation.kind == "dct" else "hadamard")
            if rotation.kind == "hadamard":
                names = [f"{n}" if orthogonal.hadamard_matrix(n) is not None else f"{n} (cosine)" for n in sizes]
                if names != [str(turn.size)]:
                    text += " = " + " x ".join(names) if names else " (cosine)"
            parts.append(text + (f", {len(turn.layers)} layers" if plan.stacked else ""))
        report[plan.path] = "; ".join([*parts, *(f"left alone: {reason}" for reason in plan.left_alone)])
    return report
