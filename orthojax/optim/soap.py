"""SOAP: Adam in a basis that is learned from the gradients, where OrthoAdam's is drawn."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.ops.statistics import wide_dtype
from orthojax.optim.rotation import Group, Plan, Rotation, plan_tree, require_rotation
from orthojax.optim.transform import basis_shape, matrices_by_path, rotate_tree

BOTH_AXES = Rotation("haar", axes="both")


class SoapState(NamedTuple):
    """State of `scale_by_soap`.

    Attributes:
      count: int32, shape=(): updates done, the first included, which is 0.
      basis: Q, a nested dict by path with the leaves basis_0, basis_1 [*stacked, n, n], whose rows are the basis.
      gram: Running means of G G^T along the same axes, a dict like `basis`.
      mu: First moments, like the parameters and in their basis.
      nu: Second moments in the learned basis, shapes of the parameters.
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
    precondition_frequency: int = 10,
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

    with the bias corrections of Adam, marked by hats. The rows of :math:`Q_L` and :math:`Q_R` are eigenvectors of
    :math:`L` and :math:`R`: exact ones of the first gradient, whose update is 0, and then improved by one step of
    orthogonal iteration every `precondition_frequency` updates. It is here to be compared with OrthoAdam; optax has one
    on its main branch, which takes this one's place when it is released.

    Args:
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to the root of the second moment.
      shampoo_beta: Decay of the gradients' second moments L and R; None is `b2`.
      precondition_frequency: Updates between two improvements of the basis.
      rotation: Whose `axes`, `kernel_layout` and `embeddings` say which axes have a basis, and whose `layout` where
        moments are on a mesh. By default both of a kernel and the last of an embedding table; axes over 4,096 have
        none. Other parameters are Adam's.

    Returns:
      A transformation with a `SoapState`: beside Adam's moments 2 n**2 values for every axis of length n and layer.

    Raises:
      ValueError: Unless `rotation` is of kind haar, whose bases are matrices of the state, and of scope layer.

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
    if (rotation.kind, rotation.scope) != ("haar", "layer"):
        raise ValueError(f"SOAP with a rotation of {rotation.kind=}, {rotation.scope=}; allowed: haar, layer")
    if precondition_frequency < 1:
        raise ValueError(f"precondition_frequency={precondition_frequency}; allowed: 1 or more")
    beta = b2 if shampoo_beta is None else shampoo_beta

    def init_fn(params):
        plans = plan_tree(rotation, params)

        def moments():
            return jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), wide_dtype(p)), params)

        return SoapState(
            count=jnp.zeros((), jnp.int32),
            basis=matrices_by_path(plans, _identity),
            gram=matrices_by_path(plans, _zeros),
            mu=moments(),
            nu=moments(),
        )

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        # The first gradient makes the basis and nothing else: it would be diagonal in it.
        first = state.count == 0
        live, t = jnp.where(first, 0.0, 1.0), jnp.maximum(state.count, 1)

        def mean(decay: float, old: Any, new: Any, weight: Any = 1.0) -> Any:
            return jax.tree.map(lambda m, x: decay * m + (1 - decay) * weight * x, old, new)

        grads = jax.tree.map(lambda g: jnp.asarray(g, wide_dtype(g)), updates)
        rotated = rotate_tree(rotation, grads, state.basis)
        mu = mean(b1, state.mu, grads, live)
        nu = mean(b2, state.nu, jax.tree.map(jnp.square, rotated), live)
        rotated_mu = rotate_tree(rotation, mu, state.basis)
        scaled = jax.tree.map(lambda m, v: live * (m / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + eps), rotated_mu, nu)
        scaled = rotate_tree(rotation, scaled, state.basis, transpose=True, like=updates)
        scaled = jax.tree.map(lambda s, g: s.astype(jnp.result_type(g)), scaled, updates)

        gram = mean(beta, state.gram, matrices_by_path(plan_tree(rotation, grads), _gram))
        due = jnp.where(first, 2, (state.count % precondition_frequency == 0).astype(jnp.int32))
        basis = jax.lax.switch(due, [lambda gram, basis: basis, _improved, _eigenvectors], gram, state.basis)
        return scaled, SoapState(jnp.asarray(optax.safe_increment(state.count)), basis, gram, mu, nu)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _zeros(leaf: Any, plan: Plan, group: Group) -> jax.Array:
    return jnp.zeros(basis_shape(plan, group), wide_dtype(leaf))


def _identity(leaf: Any, plan: Plan, group: Group) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(group.size, dtype=wide_dtype(leaf)), basis_shape(plan, group))


def _gram(grad: jax.Array, plan: Plan, group: Group) -> jax.Array:
    """G G^T [*stacked, n, n] along the axes of a group, n long together."""
    front = (*plan.stacked, *group.axes)
    rows = jnp.moveaxis(grad, front, range(len(front))).reshape(*plan.stacked_shape, group.size, -1)
    return rows @ rows.mT


def _eigenvectors(gram: Any, basis: Any) -> Any:
    """Of every matrix, as rows."""
    return _of_each_size(lambda gram, _: jnp.linalg.eigh(gram)[1].mT, gram, basis)


def _improved(gram: Any, basis: Any) -> Any:
    """One step of orthogonal iteration for every matrix, from the largest eigenvalue to the smallest.

    Each row keeps its place, so that its second moments remain its own.
    """

    def improve(gram: jax.Array, basis: jax.Array) -> jax.Array:
        quotients = jnp.sum((basis @ gram) * basis, axis=-1)
        order = jnp.argsort(-quotients, axis=-1)[..., None]
        columns, _ = jnp.linalg.qr(gram @ jnp.take_along_axis(basis, order, axis=-2).mT)
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
