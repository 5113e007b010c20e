"""SOAP: Adam in a basis that is learned from the gradients, where OrthoAdam's is drawn."""

import dataclasses
import math
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from orthojax.errors import UserError
from orthojax.ops.statistics import at_least_float32
from orthojax.ops.varying import varying_alike
from orthojax.optim.basis import basis_shape, matrices_by_path, stored_matrices
from orthojax.optim.layout import known_sharding, place
from orthojax.optim.rotation import (
    MAX_HAAR_RATIO,
    Group,
    Plan,
    Rotation,
    leaf_path,
    plan_leaf,
    plan_names,
    require_rotation,
)
from orthojax.optim.transform import rotate_with

PRECONDITION_FREQUENCY = 10
BOTH_AXES = Rotation(axes="both")

# Rounding to the 10 bits of a product's default precision on accelerators would hide the small eigenvalues.
_PRECISION = jax.lax.Precision.HIGHEST


class SoapState(NamedTuple):
    """State of `scale_by_soap`; arrays are in at least float32.

    Attributes:
      count: int32, shape=(): updates done, including the first, which is 0.
      basis: Q, whose rows are the basis: a nested dict by path with the leaves basis_0, basis_1 [*stacked, n, n], or
        one 0, shape=(), where no parameter has a basis.
      gram: Running means of G G^T along the same axes, like `basis`.
      mu: First moments, in the basis of the parameters.
      nu: Second moments, in the learned basis.
    """

    count: jax.Array
    basis: Any
    gram: Any
    mu: optax.Updates
    nu: optax.Updates


def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    shampoo_beta: float | None = None,
    precondition_frequency: int = PRECONDITION_FREQUENCY,
    max_precond_dim: int = 10_000,
    rotation: Rotation = BOTH_AXES,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates by Adam in the eigenbasis of the gradients' second moments: SOAP without its learning rate.

    For a kernel [m, n] with the gradient :math:`G_t`,

    .. math::
      G'_t &= Q_L G_t Q_R^T \\
      M_t &= \beta_1 M_{t-1} + (1 - \beta_1) G_t \\
      V_t &= \beta_2 V_{t-1} + (1 - \beta_2) {G'_t}^2 \\
      S_t &= Q_L^T \frac{Q_L \hat M_t Q_R^T}{\sqrt{\hat V_t} + \varepsilon} Q_R \\
      L_t &= \beta L_{t-1} + (1 - \beta) G_t G_t^T, \quad R_t = \beta R_{t-1} + (1 - \beta) G_t^T G_t

    where hats are the bias corrections of Adam. The rows of :math:`Q_L` and :math:`Q_R` are eigenvectors of :math:`L`
    and :math:`R`: exact ones of the first gradient, which does nothing else (its update is 0, and moments count from
    the second), and then improved by one step of orthogonal iteration every `precondition_frequency` updates. It is
    here to be compared with OrthoAdam. In no release of optax yet; the one on its main branch has no stacked layers.

    Args:
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to the root of the second moment.
      shampoo_beta: Decay of L and R; None is `b2`.
      precondition_frequency: Updates between two improvements of the basis. Like the next, one of the `static_args` of
        optax.inject_hyperparams.
      max_precond_dim: Longer axes have no basis, nor have those over 16,384 unless the rotation's `axes` is a function.
      rotation: Its `axes`, `kernel_layout` and `embeddings` say which axes have a basis, its `layout` where moments are
        on a mesh; kind, seed and scope are not read. By default both axes of a kernel and the last of an embedding
        table have one. Other parameters are Adam's. Of three or more axes all but the last two count as stacked
        layers: convolutions and flax's attention need a rule, such as RotatedAxes((0, (1, 2))) for its query.

    Returns:
      A transformation with a `SoapState`.

    Raises:
      ValueError: For a frequency below 1, or complex parameters. UserError where matrices take more than 8 times a
        parameter of three or more axes whose stacked ones are a guess.

    Memory and cost:
      State: beside Adam's moments 2 n**2 values for every axis of length n and every layer. Arithmetic, per step and
      element of a parameter: 8 n FLOP for each of its axes, and per improvement a QR decomposition for every axis and
      layer, one after another (the first step has eigendecompositions).

    References:
      SOAP: Improving and Stabilizing Shampoo using Adam, Algorithm 3,
      `arXiv 2409.11321 <https://arxiv.org/abs/2409.11321>`_, 2024

    Examples:
      >>> optimizer = optax.chain(scale_by_soap(), optax.scale_by_learning_rate(3e-3))
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> state = optimizer.init(params)
      >>> print(jax.tree.map(jnp.shape, state[0].basis))
      {'kernel': {'basis_0': (4, 4), 'basis_1': (8, 8)}}
    """
    require_rotation(rotation)
    if precondition_frequency < 1:
        raise ValueError(f"precondition_frequency={precondition_frequency}; allowed: 1 or more")
    beta = b2 if shampoo_beta is None else shampoo_beta
    learned = _LearnedBases(rotation, max_precond_dim)

    def init_fn(params):
        wide = jax.tree.map(at_least_float32, params)
        learned.require_small(wide)

        def moments():
            return learned.placed(jax.tree.map(jnp.zeros_like, wide))

        return SoapState(
            count=jnp.zeros((), jnp.int32),
            basis=learned.matrices(wide, _identity),
            gram=learned.matrices(wide, _zeros),
            mu=moments(),
            nu=moments(),
        )

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        first, t = state.count == 0, jnp.maximum(state.count, 1)

        def mean(decay: Any, old: Any, new: Any) -> Any:
            return jax.tree.map(lambda m, x: decay * m + (1 - decay) * x, old, new)

        def but_first(old: Any, new: Any) -> Any:
            return jax.tree.map(lambda m, x: jnp.where(first, m, x), old, new)

        grads = learned.placed(jax.tree.map(lambda g, m: at_least_float32(g).astype(m.dtype), updates, state.mu))
        squares = jax.tree.map(jnp.square, learned.rotate(grads, state.basis))
        mu, nu = but_first((state.mu, state.nu), (mean(b1, state.mu, grads), mean(b2, state.nu, squares)))
        rotated_mu = learned.rotate(mu, state.basis)
        scaled = jax.tree.map(lambda m, v: (m / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + eps), rotated_mu, nu)
        scaled = learned.rotate(scaled, state.basis, transpose=True, like=updates)
        scaled = jax.tree.map(lambda s, g: jnp.where(first, 0, s).astype(jnp.result_type(g)), scaled, updates)

        gram = mean(beta, state.gram, learned.matrices(grads, _gram))
        gram, bases = varying_alike((gram, state.basis))  # in a shard_map of the caller
        due = jnp.where(first, 2, (state.count % precondition_frequency == 0).astype(jnp.int32))
        basis = jax.lax.switch(due, [lambda gram, basis: basis, _improved, _eigenvectors], gram, bases)
        return scaled, SoapState(jnp.asarray(optax.safe_increment(state.count)), basis, gram, mu, nu)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _LearnedBases(NamedTuple):
    """Which axes of which parameter have a basis, and how it is applied."""

    rotation: Rotation
    max_precond_dim: int

    def _planned(self) -> Rotation:
        return dataclasses.replace(self.rotation, kind="hadamard", scope="layer")  # without limits of drawn matrices

    def _shortened(self, plan: Plan) -> Plan:
        return plan._replace(groups=tuple(group for group in plan.groups if group.size <= self.max_precond_dim))

    def matrices(self, tree: Any, matrices_of: Callable[[Any, Plan, Group], jax.Array]) -> Any:
        """`matrices_by_path` of a tree like the parameters."""
        plans = plan_names(self._planned(), tree).values()
        return matrices_by_path([(leaf, self._shortened(plan)) for leaf, plan in plans], matrices_of)

    def require_small(self, tree: Any) -> None:
        """Refuses axes that are hardly stacked layers, by how much their matrices would take."""
        for leaf, whole in plan_names(self._planned(), tree).values():
            plan = self._shortened(whole)
            elements = sum(len(group.layers) * group.size**2 for group in plan.groups)
            if plan.stacked and plan.mark == "unsure" and elements > MAX_HAAR_RATIO * leaf.size:
                raise UserError(
                    f"{plan.path} {leaf.shape}: with stacked axes {plan.stacked} its bases have {elements} elements, "
                    f"over {MAX_HAAR_RATIO} times its {leaf.size}",
                    allowed="a Rotation whose axes is a function that names the axes of a kernel, or a smaller "
                    "max_precond_dim",
                )

    def placed(self, tree: Any) -> Any:
        """A tree like the parameters, sharded as the layout says."""
        of = self.rotation.layout
        if of is None:
            return tree
        return jax.tree_util.tree_map_with_path(lambda keys, x: place(x, of(leaf_path(keys))), tree)

    def rotate(self, tree: Any, basis: Any, *, transpose: bool = False, like: Any = None) -> Any:
        """Q, or Q^T, on every leaf; where the result is on a mesh, as the same leaf of `like`."""
        planned, applied = self._planned(), dataclasses.replace(self.rotation, kind="haar")  # by dense matrices

        def of(keys: tuple[Any, ...], leaf: Any, wanted: Any = None) -> Any:
            plan = self._shortened(plan_leaf(planned, keys, leaf))
            return rotate_with(stored_matrices(basis, plan), applied, plan, leaf, transpose=transpose, like=wanted)

        return jax.tree_util.tree_map_with_path(of, tree, *(() if like is None else (like,)))


def _zeros(leaf: Any, plan: Plan, group: Group) -> jax.Array:
    return jnp.zeros(basis_shape(plan, group), at_least_float32(leaf).dtype)


def _identity(leaf: Any, plan: Plan, group: Group) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(group.size, dtype=at_least_float32(leaf).dtype), basis_shape(plan, group))


def _gram(grad: jax.Array, plan: Plan, group: Group) -> jax.Array:
    """G G^T [*stacked, n, n] along the axes of a group, n long together; whole on every device."""
    names = dict(enumerate(string.ascii_lowercase[: grad.ndim]))
    others = {axis: name.upper() if axis in group.axes else name for axis, name in names.items()}
    kept = [*(names[axis] for axis in (*plan.stacked, *group.axes)), *(others[axis] for axis in group.axes)]
    spec = f"{''.join(names.values())},{''.join(others.values())}->{''.join(kept)}"
    sharding, whole = known_sharding(grad), None
    if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types:
        whole = NamedSharding(sharding.mesh, PartitionSpec())
    found = jnp.einsum(spec, grad, grad, precision=_PRECISION, out_sharding=whole)
    return found.reshape(basis_shape(plan, group))


def _eigenvectors(gram: Any, basis: Any) -> Any:
    """Of every matrix, as rows."""
    return _of_each_size(lambda gram, _: jnp.linalg.eigh(gram)[1].mT, gram, basis)


def _improved(gram: Any, basis: Any) -> Any:
    """One step of orthogonal iteration for every matrix, from the largest eigenvalue to the smallest.

    Each row keeps its place, so that its second moments remain its own.
    """

    def improve(gram: jax.Array, basis: jax.Array) -> jax.Array:
        quotients = jnp.sum(jnp.matmul(basis, gram, precision=_PRECISION) * basis, axis=-1)
        order = jnp.argsort(-quotients, axis=-1)[..., None]
        rows = jnp.take_along_axis(basis, order, axis=-2)
        columns, _ = jnp.linalg.qr(jnp.matmul(gram, rows.mT, precision=_PRECISION))
        return jnp.take_along_axis(columns.mT, jnp.argsort(order, axis=-2), axis=-2)

    return _of_each_size(improve, gram, basis)


def _of_each_size(fn: Callable[[jax.Array, jax.Array], jax.Array], gram: Any, basis: Any) -> Any:
    """`fn` on every matrix [n, n], in one loop for each size: a program for each parameter takes long to compile.

    One by one: on a CPU, batched factorizations that run at the same time wait for each other's threads, forever.
    """
    leaves, treedef = jax.tree.flatten(basis)
    by_size: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        by_size.setdefault((leaf.shape[-2:], leaf.dtype), []).append(i)
    grams = jax.tree.leaves(gram)
    for (square, _), places in by_size.items():
        if not square:  # nothing has a basis
            continue
        together = [jnp.concatenate([of[i].reshape(-1, *square) for i in places]) for of in (grams, leaves)]
        ends = np.cumsum([math.prod(leaves[i].shape[:-2]) for i in places])
        done = jax.lax.map(lambda pair: fn(*pair), tuple(together))
        for i, part in zip(places, jnp.split(done, ends[:-1]), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(treedef, leaves)
