"""Tests for OrthoAdam, in the manner of optax's common tests."""

from absl.testing import absltest
from absl.testing import parameterized
import _orthoadam
import jax
import jax.numpy as jnp
import numpy as np
import optax


def _params(dtype='float32'):
  rng = np.random.default_rng(0)
  shapes = {'w': (3, 4), 'stack': (2, 3, 5), 'b': (4,), 'scalar': ()}
  return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


class OrthoAdamTest(parameterized.TestCase):

  def test_is_adam_between_two_rotations(self):
    params, solver = _params(), _orthoadam.scale_by_orthoadam(eps=1e-3)
    state, adam = solver.init(params), optax.scale_by_adam(eps=1e-3)
    q = {k: v if v.size else np.eye(params[k].size) for k, v in state.basis.items()}
    turn = lambda g, k: g @ q[k].T if g.ndim > 1 else g
    inner = adam.init(params)
    for step in range(3):
      grads = jax.tree.map(lambda x, step=step: jnp.sin(x + step), params)
      got, state = solver.update(grads, state)
      wanted, inner = adam.update({k: turn(g, k) for k, g in grads.items()}, inner)
      for k, x in wanted.items():
        back = x @ q[k] if x.ndim > 1 else x
        np.testing.assert_allclose(got[k], back, rtol=1e-4, atol=1e-6)

  def test_bases_are_orthogonal_and_differ(self):
    params = {'a': jnp.ones((2, 8)), 'b': jnp.ones((2, 8))}
    basis = _orthoadam.orthoadam(0.1).init(params)[0].basis
    for q in basis.values():
      np.testing.assert_allclose(q @ q.T, np.eye(8), atol=1e-5)
    self.assertGreater(np.abs(basis['a'] - basis['b']).max(), 0.1)

  @parameterized.parameters('float32', 'bfloat16')
  def test_dtypes_and_shapes_stay(self, dtype):
    params, solver = _params(dtype), _orthoadam.orthoadam(0.1, weight_decay=0.01)
    state = solver.init(params)
    updates, new = jax.jit(solver.update)(params, state, params)
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    self.assertEqual(like(updates), like(params))
    self.assertEqual(like(new), like(state))

  @parameterized.parameters('inject', 'multi_steps', 'masked')
  def test_works_wrapped(self, how):
    make = _orthoadam.orthoadam
    solver = {
        'inject': lambda: optax.inject_hyperparams(make, static_args=('axes', 'seed'))(0.1),
        'multi_steps': lambda: optax.MultiSteps(make(0.1), 1).gradient_transformation(),
        'masked': lambda: optax.masked(make(0.1), lambda p: jax.tree.map(lambda _: True, p)),
    }[how]()
    params, plain = _params(), make(0.1)
    got, _ = solver.update(params, solver.init(params), params)
    wanted, _ = plain.update(params, plain.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, wanted)

  def test_axes_are_those_that_are_asked_for(self):
    params = {'w': jnp.ones((3, 4)), 'out': jnp.ones((3, 4))}
    basis = _orthoadam.scale_by_orthoadam(axes={'w': 0, 'out': -1}).init(params).basis
    self.assertEqual(jax.tree.map(jnp.shape, basis), {'w': (3, 3), 'out': (0, 0)})

  def test_learns(self):
    target = jnp.asarray(np.random.default_rng(1).normal(size=(6, 6)), 'float32')
    solver, params = _orthoadam.orthoadam(0.05), jnp.zeros((6, 6))
    state, loss = solver.init(params), lambda p: jnp.mean((p - target) ** 2)
    step = jax.jit(lambda p, s: solver.update(jax.grad(loss)(p), s, p))
    for _ in range(300):
      updates, state = step(params, state)
      params = optax.apply_updates(params, updates)
    self.assertLess(float(loss(params)), 1e-3)


if __name__ == '__main__':
  absltest.main()
