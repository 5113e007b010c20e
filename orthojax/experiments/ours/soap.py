"""SOAP: Adam in a basis that is learned from the gradients, for comparison with OrthoAdam, whose basis is drawn.

No release of optax has it yet. A run names it as `optim.optimizer=orthojax.experiments.ours.soap:soap`.
"""

import math
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.config import OptimConfig, RotationConfig
from orthojax.optim import RotatedAxes, leaf_path
from orthojax.train.optimizer import rotated_axes

PRECONDITION_FREQUENCY = 10

# Rounding to the 10 bits of a product's default precision on accelerators would hide the small eigenvalues.
_PRECISION = jax.lax.Precision.HIGHEST

AxesRule = Callable[[str, jax.ShapeDtypeStruct], RotatedAxes | None]
Bases = dict[str, tuple[jax.Array, ...]]  # by path, for each rotated axis [*stacked, n, n]


class SoapState(NamedTuple):
    """State of `scale_by_soap`."""

    count: jax.Array  # int32, shape=(): updates done, including the first, which is 0
    basis: Bases  # Q, whose rows are the basis
    gram: Bases  # running means of G G^T along the same axes
    mu: optax.Updates  # first moments, in the basis of the parameters
    nu: optax.Updates  # second moments, in the learned basis


def soap(config: OptimConfig) -> optax.GradientTransformation:
    """Makes the optimizer of a run: bases for both axes of kernels and for the d_model axes of embeddings."""
    return scale_by_soap(config.b1, config.b2, config.eps, axes=rotated_axes(RotationConfig(axes="both")))


def scale_by_soap(
    b1: float, b2: float, eps: float, *, axes: AxesRule, precondition_frequency: int = PRECONDITION_FREQUENCY
) -> optax.GradientTransformation:
    r"""Rescales updates by Adam in the eigenbasis of the gradients' second moments: SOAP without its learning rate.

    For a kernel [m, n] with the gradient :math:`G_t`,

    .. math::
      G'_t &= Q_L G_t Q_R^T \\
      M_t &= \beta_1 M_{t-1} + (1 - \beta_1) G_t \\
      V_t &= \beta_2 V_{t-1} + (1 - \beta_2) {G'_t}^2 \\
      S_t &= Q_L^T \frac{Q_L \hat M_t Q_R^T}{\sqrt{\hat V_t} + \varepsilon} Q_R \\
      L_t &= \beta_2 L_{t-1} + (1 - \beta_2) G_t G_t^T, \quad R_t = \beta_2 R_{t-1} + (1 - \beta_2) G_t^T G_t

    with the bias corrections of Adam under hats. The rows of :math:`Q_L` and :math:`Q_R` are eigenvectors of :math:`L`
    and :math:`R`: exact ones of the first gradient, which does nothing else (its update is 0, and moments count from
    the second), and then improved by one step of orthogonal iteration every `precondition_frequency` updates.

    `b1` and `b2` are the decays of the first moment and of the second, L and R; `eps` is added to the root. `axes` says
    which axes of a parameter have a basis, single axes behind the stacked ones; None for plain Adam. The state is a
    `SoapState`.

    References:
      SOAP: Improving and Stabilizing Shampoo using Adam, Algorithm 3,
      `arXiv 2409.11321 <https://arxiv.org/abs/2409.11321>`_, 2024
    """

    def plans(tree: Any) -> dict[str, tuple[jax.Array, list[int], int]]:
        """Returns each parameter with a basis, by path: the leaf, the axes, and the number of stacked leading axes."""
        found = {}
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
            path = leaf_path(keys)
            chosen = axes(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
            if chosen is not None:
                groups, stacked = chosen.of(path, leaf.ndim)
                found[path] = leaf, [axis for (axis,) in groups], len(stacked)
        return found

    def grams(tree: Any) -> Bases:
        return {path: tuple(_gram(leaf, axis, k) for axis in of) for path, (leaf, of, k) in plans(tree).items()}

    def rotate(tree: Any, basis: Bases, transpose: bool = False) -> Any:
        planned = plans(tree)

        def of_leaf(keys: Any, leaf: jax.Array) -> jax.Array:
            path = leaf_path(keys)
            _, of, k = planned.get(path, (leaf, (), 0))
            for axis, q in zip(of, basis.get(path, ()), strict=True):
                leaf = _along(leaf, q, axis, k, transpose)
            return leaf

        return jax.tree_util.tree_map_with_path(of_leaf, tree)

    def init_fn(params: optax.Params) -> SoapState:
        # For a tree without leaves an array, not an empty dict: optax.tree.map_params must see a non-parameter.
        gram: Any = jax.tree.map(jnp.zeros_like, grams(params)) if jax.tree.leaves(params) else jnp.zeros((1, 1))
        basis = jax.tree.map(lambda g: jnp.broadcast_to(jnp.eye(g.shape[-1], dtype=g.dtype), g.shape), gram)
        zeros = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return SoapState(jnp.zeros((), jnp.int32), basis, gram, *zeros)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, SoapState]:
        del params
        first, t = state.count == 0, jnp.maximum(state.count, 1)

        def mean(decay: float, old: Any, new: Any) -> Any:
            return jax.tree.map(lambda m, x: decay * m + (1 - decay) * x, old, new)

        def but_first(old: Any, new: Any) -> Any:
            return jax.tree.map(lambda m, x: jnp.where(first, m, x), old, new)

        squares = jax.tree.map(jnp.square, rotate(updates, state.basis))
        mu, nu = but_first((state.mu, state.nu), (mean(b1, state.mu, updates), mean(b2, state.nu, squares)))
        rotated_mu = rotate(mu, state.basis)
        scaled = jax.tree.map(lambda m, v: (m / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + eps), rotated_mu, nu)
        scaled = jax.tree.map(lambda s: jnp.where(first, 0, s), rotate(scaled, state.basis, transpose=True))
        gram = mean(b2, state.gram, grams(updates))
        due = jnp.where(first, 2, (state.count % precondition_frequency == 0).astype(jnp.int32))
        basis = jax.lax.switch(due, [lambda gram, basis: basis, _improved, _eigenvectors], gram, state.basis)
        return scaled, SoapState(state.count + 1, basis, gram, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)


def _gram(leaf: jax.Array, axis: int, stacked: int) -> jax.Array:
    """Returns G G^T along one axis, [*stacked, n, n]."""
    names = string.ascii_lowercase[: leaf.ndim]
    others = names.replace(names[axis], "Z")
    spec = f"{names},{others}->{names[:stacked]}{names[axis]}Z"
    return jnp.einsum(spec, leaf, leaf, precision=_PRECISION)


def _along(leaf: jax.Array, q: jax.Array, axis: int, stacked: int, transpose: bool) -> jax.Array:
    """Multiplies one axis by Q [*stacked, n, n], or by its transpose."""
    names = string.ascii_lowercase[: leaf.ndim]
    pair = names[axis] + "Z" if transpose else "Z" + names[axis]
    return jnp.einsum(f"{names},{names[:stacked]}{pair}->{names.replace(names[axis], 'Z')}", leaf, q)


def _eigenvectors(gram: Bases, basis: Bases) -> Bases:
    """Returns the eigenvectors of every matrix, as rows."""
    return _of_each_size(lambda gram, _: jnp.linalg.eigh(gram)[1].mT, gram, basis)


def _improved(gram: Bases, basis: Bases) -> Bases:
    """Takes one step of orthogonal iteration for every matrix, from the largest eigenvalue to the smallest.

    Each row keeps its place, so that its second moments remain its own.
    """

    def improve(gram: jax.Array, basis: jax.Array) -> jax.Array:
        quotients = jnp.sum(jnp.matmul(basis, gram, precision=_PRECISION) * basis, axis=-1)
        order = jnp.argsort(-quotients, axis=-1)[..., None]
        rows = jnp.take_along_axis(basis, order, axis=-2)
        columns, _ = jnp.linalg.qr(jnp.matmul(gram, rows.mT, precision=_PRECISION))
        return jnp.take_along_axis(columns.mT, jnp.argsort(order, axis=-2), axis=-2)

    return _of_each_size(improve, gram, basis)


def _of_each_size(fn: Callable[[jax.Array, jax.Array], jax.Array], gram: Bases, basis: Bases) -> Bases:
    """Applies `fn` to every matrix [n, n], in one loop for each size: a program for each would take long to compile.

    One by one, because on a CPU concurrent batched factorizations wait for each other's threads forever.
    """
    leaves, treedef = jax.tree.flatten(basis)
    by_size: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        by_size.setdefault(leaf.shape[-1], []).append(i)
    grams = jax.tree.leaves(gram)
    for n, places in by_size.items():
        together = tuple(jnp.concatenate([of[i].reshape(-1, n, n) for i in places]) for of in (grams, leaves))
        ends = np.cumsum([math.prod(leaves[i].shape[:-2]) for i in places])
        done = jax.lax.map(lambda pair: fn(*pair), together)
        for i, part in zip(places, jnp.split(done, ends[:-1]), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(treedef, leaves)
