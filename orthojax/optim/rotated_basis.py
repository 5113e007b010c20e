"""Any optax transformation in a rotated basis, and what it must not be handed there."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from orthojax.optim.axes import leaf_path
from orthojax.optim.basis import init_basis
from orthojax.optim.plan import DEFAULT_ROTATION, Rotation, plan_leaf, require_rotation
from orthojax.optim.rotation import apply_rotation


class RotatedState(NamedTuple):
    """State of `in_rotated_basis`.

    Attributes:
      basis: As in `RotationState`; () unless the kind is `haar`. `optax.tree.map_params` takes a whole dict of them
        for one field that is no parameter.
      inner: State of the inner transformation, whose parameter-like arrays are in the rotated basis.
    """

    basis: Any
    inner: optax.OptState


def _outline(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(leaf_path(keys), np.shape(leaf)) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _require_part(part: Any, whole: Any, message: str) -> None:
    """Refuses trees that share no basis: a leaf of `part` must be in `whole`, with the same path and shape."""
    known = dict(_outline(whole))
    for path, shape in _outline(part):
        if known.get(path) != shape:
            there = f"shape {known[path]}" if path in known else f"no such path among {list(known)}"
            raise ValueError(
                f"{message}: {path!r} of shape {shape} against {there}; allowed: the same paths and shapes"
            )


class _InOtherBasis(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for a function of parameters, or an array like one, that the inner transformation must not use."""

    def __init__(self, name: str):
        self._name = name

    def _refuse(self, *unused_args, **unused_kwargs):
        raise ValueError(
            f"the inner transformation uses the extra argument {self._name!r}, which lives in the basis of the "
            "parameters, not in the rotated one; allowed inside in_rotated_basis: extra arguments that know no "
            "parameters, such as a loss. Line searches and the like belong outside, after it in an optax.chain"
        )

    # Any use is one of these: a call, a conversion to an array, arithmetic, an attribute (shape, dtype, a signature).
    __call__ = __jax_array__ = __array_ufunc__ = __getattr__ = _refuse


def _guarded(extra_args: dict[str, Any], rotation: Rotation, updates: optax.Updates) -> dict[str, Any]:
    """Extra arguments, where functions and trees like the parameters may be handed through but not be used."""
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    if not any(plan_leaf(rotation, keys, leaf).turns for keys, leaf in leaves):
        return extra_args
    outline = _outline(updates)

    def guard(name: str, value: Any) -> Any:
        if callable(value):
            return _InOtherBasis(name)
        if _outline(value) == outline:
            return jax.tree.map(lambda _: _InOtherBasis(name), value)
        if isinstance(value, dict):
            return {key: guard(name, inner) for key, inner in value.items()}
        plain = type(value) in (list, tuple)
        return type(value)(guard(name, inner) for inner in value) if plain else value

    return {name: guard(name, value) for name, value in extra_args.items()}


def in_rotated_basis(
    inner: optax.GradientTransformation, rotation: Rotation = DEFAULT_ROTATION
) -> optax.GradientTransformationExtraArgs:
    r"""Runs any optax transformation in a rotated basis.

    .. math::
      g'_t = Q g_t, \quad (s'_t, z_t) = \mathrm{inner}(g'_t, z_{t-1}, Q \theta), \quad s_t = Q^T s'_t

    For an inner transformation that is equivariant under rotation (SGD, momentum, Muon's polar factor) nothing
    changes; for an elementwise one, such as Adam, RMSProp or Lion, the basis decides.

    Args:
      inner: Sees gradients and parameters in the rotated basis, at init and at update, and keeps its state there:
        what reads parameters out of the state (schedule_free_eval_params) belongs outside, around this one. Extra
        arguments of the update are passed on; one that lives in the basis of the parameters (a function, or a tree
        like the parameters, as line searches take) must not be used by it. A constraint on single parameters
        (keep_params_nonnegative) would act on rotated ones: put it outside.
      rotation: Which basis.

    Returns:
      A transformation with a `RotatedState`.

    Raises:
      TypeError: Unless `inner` is an optax transformation.
      ValueError: In the update: where the inner transformation uses such an extra argument; where updates, parameters
        and what the inner transformation returns are not of one tree (lookahead).

    Examples:
      >>> import jax.numpy as jnp
      >>> optimizer = optax.chain(in_rotated_basis(optax.scale_by_rms()), optax.scale_by_learning_rate(0.1))
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> updates, _ = optimizer.update(params, optimizer.init(params))
      >>> updates["kernel"].shape
      (4, 8)
    """
    require_rotation(rotation)
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"inner={inner!r}; allowed: an optax transformation, such as optax.scale_by_rms()")
    extended = optax.with_extra_args_support(inner)

    def init_fn(params):
        basis = init_basis(rotation, params)
        return RotatedState(basis, extended.init(apply_rotation(rotation, params, basis)))

    def update_fn(updates, state, params=None, **extra_args):
        if params is not None:
            _require_part(updates, params, "updates and parameters differ")
        rotated = apply_rotation(rotation, updates, state.basis)
        # Where the inner transformation does not read the parameters, jit removes their rotation.
        rotated_params = None if params is None else apply_rotation(rotation, params, state.basis)
        extra_args = _guarded(extra_args, rotation, updates)
        rotated, inner_state = extended.update(rotated, state.inner, rotated_params, **extra_args)
        _require_part(rotated, updates, "the inner transformation returns another tree than it was given")
        turned_back = apply_rotation(rotation, rotated, state.basis, transpose=True, like=updates)
        return turned_back, RotatedState(state.basis, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
