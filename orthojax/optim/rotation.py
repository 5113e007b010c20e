"""Turning trees into the basis of the optimizer and back, as functions and as optax transformations."""

from typing import Any, NamedTuple

import jax
import optax

from orthojax.ops import orthogonal
from orthojax.optim.basis import init_basis
from orthojax.optim.plan import DEFAULT_ROTATION, Rotation, plan_leaf, require_rotation
from orthojax.optim.turn import turn_whole


class RotationState(NamedTuple):
    """State of `rotate` and `unrotate`.

    Attributes:
      basis: `haar`: a nested dict by path with the leaves basis_0, basis_1 [*stacked, n, n], or one empty array if no
        parameter is rotated. Other kinds: (), no array at all.
    """

    basis: Any


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
      ValueError: Where `basis` was made for another tree or kind.
    """
    if rotation.kind != "haar" and jax.tree.leaves(basis):
        raise ValueError(
            f"the state has a haar basis, the rotation is of kind {rotation.kind!r}; allowed: the same kind"
        )

    def leaf_fn(keys: tuple[Any, ...], leaf: Any, wanted: Any = None) -> Any:
        plan = plan_leaf(rotation, keys, leaf)
        return turn_whole(rotation, plan, leaf, basis, transpose=transpose, like=wanted)

    return jax.tree_util.tree_map_with_path(leaf_fn, tree, *(() if like is None else (like,)))


def _transformation(rotation: Rotation, transpose: bool) -> optax.GradientTransformation:
    require_rotation(rotation)

    def init_fn(params):
        return RotationState(init_basis(rotation, params))

    def update_fn(updates, state, params=None):
        like = params if transpose and rotation.layout is not None else None
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

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.zeros((2, 8, 768)), "bias": jnp.zeros(8)}
    >>> for path, what in describe(Rotation(), params).items():
    ...     print(f"{path}: {what}")
    bias: left alone: 1 axes, fewer than 2
    kernel: axes (2,): hadamard 768 = 24 x 32, 2 layers
    >>> describe(Rotation(), {"kernel": jnp.zeros((8, 1000))})
    {'kernel': 'axes (1,): hadamard 1000 = 25 (cosine) x 40'}
    """
    require_rotation(rotation)
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
