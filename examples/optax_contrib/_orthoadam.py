"""OrthoAdam.

An implementation of the optimizer of `From Attention to Activation: Unravelling
the Enigmas of Large Language Models <https://arxiv.org/abs/2410.17174>`_, as
one file for ``optax.contrib``.
"""

from typing import Any, Callable, NamedTuple, Optional, Union
import zlib

import jax
import jax.numpy as jnp
import optax

Axes = Union[optax.Params, Callable[[optax.Params], optax.Params]]


class ScaleByOrthoAdamState(NamedTuple):
  """State for the OrthoAdam algorithm; moments are in the rotated basis."""

  count: jax.typing.ArrayLike  # shape=(), dtype=jnp.int32
  mu: optax.Updates
  nu: optax.Updates
  basis: Any  # Q [n, n] of every rotated parameter, shape [0] of the others


def last_axis(params: optax.Params) -> optax.Params:
  """Chooses the last axis of every array with two axes or more, and -1 else.

  This is the output axis of a kernel [in, out], as in the paper. Axes of the
  residual stream, on both sides of it, keep outliers away for longer.
  """
  return jax.tree.map(lambda x: x.ndim - 1 if x.ndim > 1 else -1, params)


def _random_orthogonal(path: Any, n: int, dtype: Any, seed: int) -> jax.Array:
  """Draws Q from the Haar measure, by the seed and the parameter's path."""
  name = zlib.crc32(jax.tree_util.keystr(path).encode())
  key = jax.random.fold_in(jax.random.key(seed), name)
  q, r = jnp.linalg.qr(jax.random.normal(key, (n, n), dtype))
  return q * jnp.sign(jnp.diagonal(r))


def _along(q: jax.Array, x: jax.Array, axis: int) -> jax.Array:
  """Multiplies by Q along one axis; an empty Q changes nothing."""
  if not q.size:
    return x
  return jnp.moveaxis(jnp.tensordot(q.astype(x.dtype), x, (1, axis)), 0, axis)


def scale_by_orthoadam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Optional[jax.typing.DTypeLike] = None,
    *,
    axes: Axes = last_axis,
    seed: int = 0,
) -> optax.GradientTransformation:
  r"""Rescales updates by Adam in a fixed random basis for every parameter.

  .. math::
    g'_t = Q g_t, \quad s'_t = \mathrm{Adam}(g'_t), \quad s_t = Q^\top s'_t

  Adam's second moment is a diagonal in a basis; in the basis of the model it
  lets single channels of the hidden states grow without bound, in a random one
  no channel is special. Memory: Q, n x n, of every rotated axis of length n.

  Args:
    b1: Decay rate for the exponentially weighted average of gradients.
    b2: Decay rate for the exponentially weighted average of their squares.
    eps: Term added to the denominator to improve numerical stability.
    eps_root: Term added to the denominator inside the square root.
    mu_dtype: Data type of the first moment.
    axes: For every parameter the axis that is rotated, or -1 for none; a tree
      or a function of the parameters.
    seed: Of the bases; a resumed run needs the same one only at `init`.

  Returns:
    A :class:`optax.GradientTransformation` object.

  References:
    Algorithm 1 of arXiv 2410.17174, 2024
  """
  adam = optax.scale_by_adam(b1, b2, eps, eps_root, mu_dtype)

  def chosen(tree):
    return axes(tree) if callable(axes) else axes

  def init_fn(params):
    def basis(path, x, axis):
      n = x.shape[axis] if axis >= 0 else 0
      return _random_orthogonal(path, n, jnp.promote_types(x.dtype, 'float32'), seed)

    state = adam.init(params)
    bases = jax.tree_util.tree_map_with_path(basis, params, chosen(params))
    return ScaleByOrthoAdamState(state.count, state.mu, state.nu, bases)

  def update_fn(updates, state, params=None):
    del params
    at = chosen(updates)
    rotated = jax.tree.map(_along, state.basis, updates, at)
    inner = optax.ScaleByAdamState(state.count, state.mu, state.nu)
    rotated, inner = adam.update(rotated, inner)
    updates = jax.tree.map(lambda q, x, axis: _along(q.T if q.size else q, x, axis), state.basis, rotated, at)
    return updates, ScaleByOrthoAdamState(*inner, state.basis)

  return optax.GradientTransformation(init_fn, update_fn)


def orthoadam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Optional[jax.typing.DTypeLike] = None,
    weight_decay: jax.typing.ArrayLike = 0.0,
    mask: Optional[Any] = None,
    *,
    axes: Axes = last_axis,
    seed: int = 0,
) -> optax.GradientTransformation:
  """The OrthoAdam optimizer, with decoupled weight decay.

  Args:
    learning_rate: A global scaling factor, fixed or a schedule.
    b1: As for :func:`scale_by_orthoadam`.
    b2: As for :func:`scale_by_orthoadam`.
    eps: As for :func:`scale_by_orthoadam`.
    eps_root: As for :func:`scale_by_orthoadam`.
    mu_dtype: As for :func:`scale_by_orthoadam`.
    weight_decay: Strength of the weight decay regularization.
    mask: A tree or a function of the parameters: what decays.
    axes: As for :func:`scale_by_orthoadam`.
    seed: As for :func:`scale_by_orthoadam`.

  Returns:
    The corresponding :class:`optax.GradientTransformation`.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> solver = orthoadam(learning_rate=0.1)
    >>> params = {'w': jnp.ones((2, 3))}
    >>> state = solver.init(params)
    >>> updates, state = solver.update(params, state, params)
    >>> updates['w'].shape
    (2, 3)
  """
  return optax.chain(
      scale_by_orthoadam(b1, b2, eps, eps_root, mu_dtype, axes=axes, seed=seed),
      optax.add_decayed_weights(weight_decay, mask),
      optax.scale_by_learning_rate(learning_rate),
  )
