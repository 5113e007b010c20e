"""OrthoAdam layer by layer: the same numbers and state as the plain way, in the memory of one layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthojax.optim import RotatedAxes, Rotation, orthoadam, scale_by_orthoadam

LEAF = (24, 256, 1024)


def tree(seed, dtype):
    rng = np.random.default_rng(seed)
    shapes = {
        "layers": {"mlp": {"kernel": (3, 5, 12), "bias": (3, 12)}, "head": {"kernel": (2, 3, 2, 3)}},
        "gain": (),
        "trailing": {"kernel": (6, 4)},
    }
    return jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s), dtype), shapes, is_leaf=lambda s: type(s) is tuple
    )


def axes(path, leaf):
    if leaf.ndim < 2 or path.endswith("bias"):
        return None
    if path.startswith("trailing"):
        return RotatedAxes((0,), stacked=(1,))  # a stacked axis that is not the first
    return RotatedAxes(((-2, -1),) if leaf.ndim == 4 else (-2, -1), stacked=tuple(range(leaf.ndim - 2)))


def trajectory(optimizer, dtype, steps=4, gradient_dtype=None):
    params = tree(0, dtype)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, tree(i + 1, gradient_dtype or dtype))
    return params, state


def assert_same(ours, plain, tolerance):
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        # A moment in bfloat16 may round to the neighbouring number.
        rtol = max(tolerance, 0.01 if x.dtype == jnp.bfloat16 else 0.0)
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), atol=tolerance, rtol=rtol)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance", "mu_dtype"),
    [
        ("hadamard", "float64", 1e-10, None),
        pytest.param("haar", "float64", 1e-10, None, marks=pytest.mark.slow),
        ("hadamard", "float32", 1e-5, "bfloat16"),
        ("haar", "float32", 1e-5, None),
        pytest.param("dct", "float32", 1e-5, None, marks=pytest.mark.slow),
        pytest.param("signed_permutation", "float32", 1e-5, None, marks=pytest.mark.slow),
        pytest.param("hadamard", "bfloat16", 0.02, None, marks=pytest.mark.slow),
        ("hadamard", "bfloat16", 0.02, "float32"),
    ],
)
def test_the_result_is_that_of_the_plain_way(kind, dtype, tolerance, mu_dtype):
    with jax.enable_x64(dtype == "float64"):
        options = {"weight_decay": 0.1, "mu_dtype": mu_dtype, "rotation": Rotation(kind, axes)}
        plain, ours = (trajectory(orthoadam(1e-2, layer_by_layer=flag, **options), dtype) for flag in (False, True))
    assert_same(ours, plain, tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_gradients_and_hyperparameters_may_be_wider_than_the_parameters(dtype):
    plain, ours = (
        trajectory(orthoadam(1e-2, rotation=Rotation(axes=axes), layer_by_layer=flag), dtype, 1, "float32")
        for flag in (False, True)
    )
    assert jax.tree.leaves(ours[1][0].inner.mu)[0].dtype == jnp.float32  # as optax's Adam makes them of such gradients
    assert_same(ours, plain, 0.02)
    injected = (
        trajectory(
            optax.inject_hyperparams(orthoadam)(1e-2, b1=0.8, rotation=Rotation(axes=axes), layer_by_layer=flag),
            dtype,
            1,
        )
        for flag in (True, False)
    )
    assert_same(*injected, 0.02)


@pytest.mark.parametrize("rotation", [Rotation(), Rotation(axes="input"), Rotation("haar", "input")])
def test_temporaries_are_those_of_one_layer(rotation):
    gradient = {"layers": {"kernel": jax.ShapeDtypeStruct(LEAF, jnp.float32)}}
    leaves = {}
    for flag in (False, True):
        optimizer = scale_by_orthoadam(rotation=rotation, layer_by_layer=flag)
        state = jax.eval_shape(optimizer.init, gradient)
        step = jax.jit(lambda g, s, optimizer=optimizer: optimizer.update(g, s), donate_argnums=(0, 1))
        memory = step.lower(gradient, state).compile().memory_analysis()
        leaves[flag] = memory.temp_size_in_bytes / (4 * np.prod(LEAF))
    assert leaves[False] > 0.9
    assert leaves[True] < 6 / LEAF[0]  # one layer's gradient and moments, and what a rotation needs


@pytest.mark.parametrize("kind", ["hadamard", "dct", "identity", "signed_permutation"])
@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_the_state_has_the_bytes_of_adam(kind, layer_by_layer):
    params = tree(0, jnp.float32)
    ours = scale_by_orthoadam(rotation=Rotation(kind, axes), layer_by_layer=layer_by_layer).init(params)
    adam = optax.scale_by_adam().init(params)
    size = lambda state: sum(x.nbytes for x in jax.tree.leaves(state))  # noqa: E731
    assert size(ours) == size(adam)
    assert jax.tree.structure(ours.inner) == jax.tree.structure(adam)


def test_masked_parameters_and_empty_trees_are_passed_over():
    params = tree(0, jnp.float32)
    masked = optax.masked(orthoadam(0.1, layer_by_layer=True), {"layers": True, "gain": False, "trailing": False})
    updates, _ = masked.update(params, masked.init(params), params)
    plain = orthoadam(0.1)
    want, _ = plain.update({"layers": params["layers"]}, plain.init({"layers": params["layers"]}), params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), updates["layers"], want["layers"])
    nothing = orthoadam(0.1, layer_by_layer=True)
    assert nothing.update({}, nothing.init({}), {})[0] == {}
