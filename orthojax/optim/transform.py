"""Rotating trees into the basis of the optimizer and back, as functions and as optax transformations."""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.errors import UserError
from orthojax.ops import orthogonal
from orthojax.ops.statistics import wide_dtype
from orthojax.optim import layout
from orthojax.optim.rotation import (
    DEFAULT_ROTATION,
    Group,
    Plan,
    Rotation,
    TreePlan,
    basis_constants,
    init_basis,
    is_of_plan,
    leaf_paths,
    plan_tree,
    require_plan,
    require_rotation,
)

# Applying a basis to one parameter: whole, sharded over a mesh, or one layer of it.


def _rotate_axis(
    x: jax.Array, axis: int, stacked: tuple[int, ...], kind: str, constants: tuple[Any, ...], transpose: bool
) -> jax.Array:
    """Applies Q, or Q^T, along one axis of x, with its own Q for every slice along `stacked`."""
    if kind == "haar":
        return orthogonal.apply_matrix(x, constants[0], axis, batch_axes=stacked, transpose=transpose)

    def along(constant: Any) -> jax.Array:  # broadcasts along (*stacked, axis)
        ordered = constant.transpose(np.argsort((*stacked, axis)))
        return jnp.asarray(ordered.reshape([n if d in (*stacked, axis) else 1 for d, n in enumerate(x.shape)]))

    signs, *order = map(along, constants)
    if kind != "signed_permutation":
        fixed = "dct" if kind == "dct" else "hadamard"
        return orthogonal.fixed_transform(x, axis, kind=fixed, transpose=transpose, signs=signs)
    signs = signs.astype(x.dtype)
    if transpose:
        return signs * jnp.take_along_axis(x, order[0], axis)
    return jnp.take_along_axis(signs * x, order[0], axis)


def _rotate_group(
    x: jax.Array, plan: Plan, group: Group, kind: str, constants: tuple[Any, ...], transpose: bool
) -> jax.Array:
    """Applies `_rotate_axis` to a group of axes, which are flattened for it."""
    width, rest = len(group.axes), [axis for axis in range(x.ndim) if axis not in group.axes]
    adjacent = group.axes == tuple(range(group.axes[0], group.axes[0] + width))
    first = group.axes[0] if adjacent else len(rest)
    there = tuple(range(first, first + width))
    y = x if adjacent else jnp.moveaxis(x, group.axes, there)
    flat = y.reshape(*y.shape[:first], group.size, *y.shape[first + width :])
    stacked = tuple(rest.index(axis) + (rest.index(axis) >= first) for axis in plan.stacked)
    y = _rotate_axis(flat, first, stacked, kind, constants, transpose).reshape(y.shape)
    return y if adjacent else jnp.moveaxis(y, there, group.axes)


def _rotate_shard(
    x: jax.Array, plan: Plan, kind: str, constants: Any, names: layout.Names, transpose: bool = False
) -> jax.Array:
    """Applies Q, or Q^T, to a shard inside `layout.over_shards`, or to a parameter outside; in at least float32.

    `plan` and `constants` are those of the whole parameter, but matrices those of the layers in the shard; `names` are
    the mesh axes of each dimension.
    """
    y = x.astype(wide_dtype(x))
    for group, held in zip(plan.groups, constants, strict=True):
        moved, over, back = layout.gather_axes(y, group.axes, plan.stacked, names)
        if kind == "haar":
            over = [after[len(before) :] for after, before in zip(over, names, strict=True)]
        mine = tuple(layout.local_slice(c, plan.stacked, moved.shape, over) for c in held)
        y = back(_rotate_group(moved, plan, group, kind, mine, transpose))
    return y.astype(x.dtype)


# Jitted, so that also outside jit the shards are rotated by one program, compiled once for each shape.
@functools.partial(jax.jit, static_argnames=("plan", "kind", "sharding", "transpose"), inline=True)
def _rotate_sharded(
    x: jax.Array, constants: Any, plan: Plan, kind: str, sharding: jax.sharding.NamedSharding, transpose: bool
) -> jax.Array:
    def local(shard: jax.Array, constants: Any, names: layout.Names) -> jax.Array:
        return _rotate_shard(shard, plan, kind, constants, names, transpose)

    return layout.over_shards(local, x, constants, sharding, plan.stacked if kind == "haar" else ())


def _rotate_leaf(rotation: Rotation, plan: Plan, leaf: Any, basis: Any, *, transpose: bool, like: Any) -> Any:
    """Applies Q, or Q^T, to one parameter; `like` as in `_Bases.apply`."""
    given = None if rotation.layout is None else rotation.layout(plan.path)
    if isinstance(leaf, jax.ShapeDtypeStruct) or (not plan.groups and given is None):
        return leaf
    constants = basis_constants(rotation, plan, basis, transpose) if plan.groups else ()
    x = jnp.asarray(leaf)
    sharding = layout.split_sharding(plan.path, x, given)
    x = layout.place(x, given)
    if plan.groups and sharding is None:
        x = _rotate_shard(x, plan, rotation.kind, constants, [()] * x.ndim, transpose)
    elif plan.groups:
        x = _rotate_sharded(x, constants, plan, rotation.kind, sharding, transpose)
    return x if given is None else layout.place(x, layout.known_sharding(like))


class _Bases(NamedTuple):
    """The bases of a tree of parameters: the plan of each, and what the state holds of the bases.

    If `valid`, a bool [], is false, everything rotated becomes NaN.
    """

    rotation: Rotation
    plan: TreePlan
    basis: Any
    valid: jax.Array | None = None

    def apply(self, tree: Any, *, transpose: bool = False, like: Any = None) -> Any:
        """Applies Q, or Q^T, to every rotated array of a part of the tree; None and masked nodes are skipped.

        With a layout, results are sharded by it, or like the corresponding array of `like` if its sharding is known
        (outside jit, or by Explicit axes).
        """
        plans = {plan.path: plan for plan in self.plan.parameters}
        leaves, treedef = jax.tree.flatten(tree)
        wanted = [None] * len(leaves) if like is None else treedef.flatten_up_to(like)
        found = []
        for path, leaf, other in zip(leaf_paths(tree), leaves, wanted, strict=True):
            plan = plans.get(path, Plan(path))
            x = _rotate_leaf(self.rotation, plan, leaf, self.basis, transpose=transpose, like=other)
            # A product with NaN or 1 could be merged into others, which rounds differently.
            found.append(x if self.valid is None or not plan.groups else jnp.where(self.valid, x, jnp.nan))
        return treedef.unflatten(found)


def _bases_of(rotation: Rotation, state: Any, updates: Any, params: Any) -> _Bases:
    """Returns the bases of a state. Updates may lack parameters that it has, and parameters may include frozen ones."""
    held = getattr(state, "plan", None)
    if params is not None:
        _require_part(updates, params, "updates and parameters differ")
        with contextlib.suppress(UserError):  # in doubt of d_model
            if is_of_plan(held, plan := plan_tree(rotation, updates)):
                return _Bases(rotation, plan, state.basis, require_plan(rotation, plan, held))
    plan = plan_tree(rotation, updates if params is None else params)
    valid = require_plan(rotation, plan, held)
    return _Bases(rotation, plan, state.basis, valid)


class RotationState(NamedTuple):
    """State of `rotate` and `unrotate`.

    Attributes:
      basis: `haar`: a nested dict by path with the leaves basis_0, basis_1 [*stacked, n, n], or a single 0, shape=(),
        if no parameter is rotated. Other kinds: (), no arrays.
      plan: A dict from one name, which identifies the bases and axes, to its checksum, uint32 []: an update with
        another rotation, or a restore into its state, is refused.
    """

    basis: Any
    plan: Any = ()


def _transformation(rotation: Rotation, transpose: bool) -> optax.GradientTransformation:
    require_rotation(rotation)

    def init_fn(params):
        return RotationState(*init_basis(rotation, params))

    def update_fn(updates, state, params=None):
        like = params if transpose and rotation.layout is not None else None
        bases = _bases_of(rotation, state, updates, params)
        return bases.apply(updates, transpose=transpose, like=like), state

    return optax.GradientTransformation(init_fn, update_fn)


def rotate(rotation: Rotation = DEFAULT_ROTATION) -> optax.GradientTransformation:
    """Rotates gradients into the basis of the optimizer: g' = Q g along each rotated axis.

    `optax.chain(rotate(r), optax.scale_by_adam(), unrotate(r))` is OrthoAdam (Algorithm 1 of
    `arXiv 2410.17174 <https://arxiv.org/abs/2410.17174>`_). In between, gradients are rotated and parameters are not;
    `in_rotated_basis` rotates both, and keeps a `haar` basis once instead of twice.

    The state is a `RotationState`; the update raises ValueError for the state of a different tree or rotation. It
    computes in at least float32; shapes and dtypes do not change. One nan in a gradient spreads along its rotated axis:
    put `optax.zero_nans` before it.
    """
    return _transformation(rotation, transpose=False)


def unrotate(rotation: Rotation = DEFAULT_ROTATION) -> optax.GradientTransformation:
    """Rotates updates back into the basis of the parameters: s = Q^T s' along each axis; the inverse of `rotate`."""
    return _transformation(rotation, transpose=True)


class RotatedState(NamedTuple):
    """State of `in_rotated_basis`.

    Attributes:
      basis: As in `RotationState`; to `optax.tree.map_params` the whole dict is one non-parameter field.
      inner: State of the inner transformation, whose parameter-like arrays are in the rotated basis.
      plan: As in `RotationState`.
    """

    basis: Any
    inner: optax.OptState
    plan: Any = ()


def in_rotated_basis(
    inner: optax.GradientTransformation, rotation: Rotation = DEFAULT_ROTATION
) -> optax.GradientTransformationExtraArgs:
    r"""Runs any optax transformation in a rotated basis.

    .. math::
      g'_t = Q g_t, \quad (s'_t, z_t) = \mathrm{inner}(g'_t, z_{t-1}, Q \theta), \quad s_t = Q^T s'_t

    For an inner transformation that is equivariant under rotation (SGD, momentum, Muon's polar factor) nothing
    changes; for an elementwise one, such as Adam, RMSProp or Lion, the basis decides. The state is a `RotatedState`.

    Args:
      inner: Sees gradients and parameters in the rotated basis and keeps its state there. Anything that reads
        parameters from the state (schedule_free_eval_params) or constrains single ones (keep_params_nonnegative)
        belongs outside. Extra arguments of the update are passed on; `inner` must not use any that are in the basis of
        the parameters (a function, or a tree like the parameters, as line searches take).
      rotation: The basis.

    Raises:
      ValueError: In the update, if `inner` uses such an extra argument, or if updates, parameters and what `inner`
        returns do not have one tree (lookahead).

    Examples:
      >>> optimizer = optax.chain(in_rotated_basis(optax.scale_by_rms()), optax.scale_by_learning_rate(0.1))
      >>> params = {"embedding": jnp.ones((16, 4)), "kernel": jnp.ones((4, 8))}
      >>> updates, _ = optimizer.update(params, optimizer.init(params))
      >>> updates["kernel"].shape
      (4, 8)
    """
    require_rotation(rotation)
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"inner={inner!r}; allowed: an optax transformation, such as optax.scale_by_rms()")
    extended = optax.with_extra_args_support(inner)

    def init_fn(params):
        basis, plan = init_basis(rotation, params)
        rotated = _Bases(rotation, plan_tree(rotation, params), basis).apply(params)
        return RotatedState(basis, extended.init(rotated), plan)

    def update_fn(updates, state, params=None, **extra_args):
        bases = _bases_of(rotation, state, updates, params)
        unchecked = bases._replace(valid=None)
        rotated = unchecked.apply(updates)
        # If the inner transformation does not read the parameters, jit removes their rotation.
        rotated_params = None if params is None else unchecked.apply(params)
        extra_args = _guarded(extra_args, bases.plan)
        try:
            rotated, inner_state = extended.update(rotated, state.inner, rotated_params, **extra_args)
        except Exception as error:
            if rotation.layout is None or type(error).__name__ != "ShardingTypeError":  # of jax's, and private
                raise
            problem = f"the optimizer's state is not sharded by the layout of its rotation: {error}"
            raise UserError(
                problem, allowed="a state placed by `state_shardings`; docs/optimizer.md shows how"
            ) from error
        _require_part(rotated, updates, "the inner transformation returns a different tree than it was given")
        updates = bases.apply(rotated, transpose=True, like=updates)
        return updates, state._replace(inner=inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _require_part(part: Any, whole: Any, message: str) -> None:
    """Refuses trees that share no basis: a leaf of `part` must be in `whole`, with the same path and shape."""
    found, known = (
        dict(zip(leaf_paths(tree), map(np.shape, jax.tree.leaves(tree)), strict=True)) for tree in (part, whole)
    )
    for path, shape in found.items():
        if known.get(path) != shape:
            there = f"shape {known[path]}" if path in known else f"no such path among {list(known)}"
            raise ValueError(f"{message}: {path!r} of shape {shape} against {there}; allowed: equal ones")


class _InOtherBasis(np.lib.mixins.NDArrayOperatorsMixin):
    """Stand-in for a function of parameters, or an array like one, that the inner transformation must not use."""

    def __init__(self, name: str):
        self._name = name

    def _refuse(self, *unused_args, **unused_kwargs):
        raise ValueError(
            f"the inner transformation uses the extra argument {self._name!r}, which lives in the basis of the "
            "parameters; allowed: others. Line searches and the like belong after in_rotated_basis in an optax.chain"
        )

    # Any use is one of these: a call, a conversion to an array, arithmetic, an attribute (shape, dtype, a signature).
    __call__ = __jax_array__ = __array_ufunc__ = __getattr__ = _refuse


def _guarded(extra_args: dict[str, Any], tree_plan: TreePlan) -> dict[str, Any]:
    """Guards extra arguments: functions, and arrays of a rotated parameter's shape, may be passed on but not used."""
    rotated = {plan.shape for plan in tree_plan.parameters if plan.groups}
    if not rotated:
        return extra_args

    def guard(name: str, leaf: Any) -> Any:
        return _InOtherBasis(name) if callable(leaf) or np.shape(leaf) in rotated else leaf

    guards = {name: functools.partial(guard, name) for name in extra_args}
    return {name: jax.tree.map(guards[name], value, is_leaf=callable) for name, value in extra_args.items()}
