"""SOAP against its equations in float64 NumPy."""

import jax
import numpy as np

from orthojax.experiments.ours.soap import scale_by_soap
from orthojax.optim import RotatedAxes

B1, B2, EPS, FREQUENCY = 0.8, 0.9, 1e-6, 3
# Square kernels: of the first gradient of others one factor has a null space, where any basis is as good.
SHAPES = {"mlp": {"kernel": (6, 6), "bias": (6,)}, "wte": (9, 6), "scanned": (2, 4, 4)}


def gradients(steps):
    """Draws gradients of very different size by direction, with a mean."""
    rng = np.random.default_rng(0)

    def draw(shape):
        mean, mix = rng.standard_normal(shape), rng.standard_normal((shape[-1], shape[-1]))
        return [0.3 * mean + rng.standard_normal(shape) @ mix for _ in range(steps)]

    leaves, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    return [jax.tree.unflatten(treedef, of) for of in zip(*map(draw, leaves), strict=True)]


def by_equations(grads, rotated_axes):
    """Follows Algorithm 3 of the paper for one matrix, with the eigenvectors as columns that are sorted by size."""
    factors = {axis: np.zeros((grads[0].shape[axis],) * 2) for axis in rotated_axes}
    columns = {axis: np.eye(len(of)) for axis, of in factors.items()}
    mu, nu, found = np.zeros(grads[0].shape), np.zeros(grads[0].shape), []

    def along(x, matrices):
        for axis, matrix in matrices.items():
            x = np.moveaxis(np.tensordot(matrix, x, (1, axis)), 0, axis)
        return x

    for t, grad in enumerate(grads):
        if t == 0:
            found.append(np.zeros(grad.shape))
        else:
            into = {axis: of.T for axis, of in columns.items()}
            mu = B1 * mu + (1 - B1) * grad
            nu = B2 * nu + (1 - B2) * along(grad, into) ** 2
            scaled = along(mu, into) / (1 - B1**t) / (np.sqrt(nu / (1 - B2**t)) + EPS)
            found.append(along(scaled, columns))
        for axis in rotated_axes:
            rows = np.moveaxis(grad, axis, 0).reshape(grad.shape[axis], -1)
            factors[axis] = B2 * factors[axis] + (1 - B2) * rows @ rows.T
            if t == 0:
                columns[axis] = np.linalg.eigh(factors[axis])[1]
            elif t % FREQUENCY == 0:
                order = np.argsort(-np.diag(columns[axis].T @ factors[axis] @ columns[axis]))
                nu = np.take(nu, order, axis)
                columns[axis] = np.linalg.qr(factors[axis] @ columns[axis][:, order])[0]
    return found


def axes(path, leaf):
    """Rotates both axes of kernels, the last one of the table."""
    if path == "wte":
        return RotatedAxes((-1,))
    return None if leaf.ndim < 2 else RotatedAxes((-2, -1), stacked=tuple(range(leaf.ndim - 2)))


def test_updates_are_those_of_the_equations(x64):
    grads = gradients(14)
    optimizer = scale_by_soap(B1, B2, EPS, axes=axes, precondition_frequency=FREQUENCY)
    state, update = optimizer.init(grads[0]), jax.jit(optimizer.update)
    want = {
        "kernel": by_equations([of["mlp"]["kernel"] for of in grads], (0, 1)),
        "bias": by_equations([of["mlp"]["bias"] for of in grads], ()),
        "wte": by_equations([of["wte"] for of in grads], (1,)),
        "layer_0": by_equations([of["scanned"][0] for of in grads], (0, 1)),
        "layer_1": by_equations([of["scanned"][1] for of in grads], (0, 1)),
    }
    for t, grad in enumerate(grads):
        of, state = update(grad, state)
        layers = {f"layer_{i}": of["scanned"][i] for i in range(2)}
        for name, updates in {**of["mlp"], "wte": of["wte"], **layers}.items():
            np.testing.assert_allclose(updates, want[name][t], atol=1e-9, err_msg=f"{name}, step {t}")
