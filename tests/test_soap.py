"""SOAP against its equations in float64 NumPy, and as an optax transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthojax.optim import RotatedAxes, Rotation, scale_by_soap

B1, B2, BETA, EPS, FREQUENCY = 0.8, 0.9, 0.95, 1e-6, 3
# Square kernels: of the first gradient of others one factor has a null space, where any basis is as good.
SHAPES = {"mlp": {"kernel": (6, 6), "bias": (6,)}, "wte": (9, 6), "scanned": (2, 4, 4)}


def gradients(steps, seed=0, shapes=None):
    """Of very different size by direction, with a mean."""
    rng = np.random.default_rng(seed)
    shapes = SHAPES if shapes is None else shapes

    def draw(shape):
        mean, mix = rng.standard_normal(shape), rng.standard_normal((shape[-1], shape[-1]))
        return [0.3 * mean + rng.standard_normal(shape) @ mix for _ in range(steps)]

    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return [jax.tree.unflatten(treedef, of) for of in zip(*map(draw, leaves), strict=True)]


def updates_of(optimizer, grads):
    """Updates of every step, and the last state."""
    state, update, found = optimizer.init(grads[0]), jax.jit(optimizer.update), []
    for grad in grads:
        updates, state = update(grad, state)
        found.append(jax.tree.map(np.asarray, updates))
    return found, state


def by_equations(grads, rotated_axes):
    """Algorithm 3 of the paper for one matrix, with the eigenvectors as columns that are sorted by size."""
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
            factors[axis] = BETA * factors[axis] + (1 - BETA) * rows @ rows.T
            if t == 0:
                columns[axis] = np.linalg.eigh(factors[axis])[1]
            elif t % FREQUENCY == 0:
                order = np.argsort(-np.diag(columns[axis].T @ factors[axis] @ columns[axis]))
                nu = np.take(nu, order, axis)
                columns[axis] = np.linalg.qr(factors[axis] @ columns[axis][:, order])[0]
    return found


def test_updates_are_those_of_the_equations(x64):
    grads = gradients(14)
    got, _ = updates_of(scale_by_soap(B1, B2, EPS, shampoo_beta=BETA, precondition_frequency=FREQUENCY), grads)
    want = {
        "kernel": by_equations([of["mlp"]["kernel"] for of in grads], (0, 1)),
        "bias": by_equations([of["mlp"]["bias"] for of in grads], ()),
        "wte": by_equations([of["wte"] for of in grads], (1,)),
        "layer_0": by_equations([of["scanned"][0] for of in grads], (0, 1)),
        "layer_1": by_equations([of["scanned"][1] for of in grads], (0, 1)),
    }
    for t, of in enumerate(got):
        layers = {f"layer_{i}": of["scanned"][i] for i in range(2)}
        for name, updates in {**of["mlp"], "wte": of["wte"], **layers}.items():
            np.testing.assert_allclose(updates, want[name][t], atol=1e-9, err_msg=f"{name}, step {t}")


def test_without_bases_it_is_adam_one_step_later(x64):
    grads = gradients(5)
    soap = scale_by_soap(B1, B2, EPS, rotation=Rotation("haar", lambda path, leaf: None))
    (first, *later), _ = updates_of(soap, grads)
    want, _ = updates_of(optax.scale_by_adam(B1, B2, EPS), grads[1:])
    assert not any(np.any(x) for x in jax.tree.leaves(first))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), later, want)


def test_no_frame_of_the_parameters_is_preferred(x64):
    """Unlike Adam: gradients in another frame give the same updates in that frame."""
    grads = [of["mlp"]["kernel"] for of in gradients(9)]
    left, right = (np.linalg.qr(np.random.default_rng(seed).standard_normal((6, 6)))[0] for seed in (1, 2))
    soap = scale_by_soap(B1, B2, EPS, precondition_frequency=2)
    got, _ = updates_of(soap, [{"kernel": left @ of @ right} for of in grads])
    want, _ = updates_of(soap, [{"kernel": of} for of in grads])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a["kernel"], left @ b["kernel"] @ right, atol=1e-9)


def test_the_basis_becomes_that_of_the_gradients(x64):
    grads = [{"kernel": of["mlp"]["kernel"]} for of in gradients(300)]
    _, state = updates_of(scale_by_soap(shampoo_beta=0.99, precondition_frequency=1), grads)
    for of in jax.tree.leaves(state.basis):
        np.testing.assert_allclose(of @ of.T, np.eye(6), atol=1e-12)
    # From the right, where directions differ in size.
    basis, gram = (np.asarray(of["kernel"]["basis_1"]) for of in (state.basis, state.gram))
    seen = basis @ gram @ basis.T
    assert np.abs(seen - np.diag(np.diag(seen))).max() < 0.02 * np.diag(seen).max()


def test_a_group_of_axes_has_one_basis(x64):
    """flax's query [d_model, heads, head_dim], as the matrix it stands for."""
    grads = gradients(5, shapes={"kernel": (6, 6)})
    soap = scale_by_soap(B1, B2, EPS, precondition_frequency=2)
    rotation = Rotation("haar", lambda path, leaf: RotatedAxes((0, (1, 2))))
    split = scale_by_soap(B1, B2, EPS, precondition_frequency=2, rotation=rotation)
    got, _ = updates_of(split, [{"kernel": of["kernel"].reshape(6, 2, 3)} for of in grads])
    want, _ = updates_of(soap, grads)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a["kernel"].reshape(6, 6), b["kernel"], atol=1e-9)


def test_dtypes_and_empty_leaves_pass():
    params = {"kernel": jnp.ones((4, 6), jnp.bfloat16), "empty": jnp.zeros((0, 4)), "none": None}
    optimizer = scale_by_soap()
    updates, state = optimizer.update(params, optimizer.init(params))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert {x.dtype for x in jax.tree.leaves((state.mu, state.nu, state.basis, state.gram))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rotation": Rotation("hadamard")}, "kind='hadamard'"),
        ({"rotation": Rotation("haar", scope="tree")}, "scope='tree'"),
        ({"precondition_frequency": 0}, "precondition_frequency=0"),
    ],
)
def test_what_it_cannot_do_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        scale_by_soap(**given)
