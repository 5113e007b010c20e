"""OrthoAdam against NumPy, the literal chain and optax's own Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthojax.optim import RotatedAxes, Rotation, orthoadam, rotate, scale_by_orthoadam, unrotate, warmup_cosine

slow = pytest.mark.slow


OUTPUT = Rotation(axes="output", embeddings="")


def random_tree(seed, dtype, **shapes):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def tree(seed=0, dtype=jnp.float32):
    """Draws kernels of sizes with and without a Hadamard matrix, stacks of layers, a bias and a scalar."""
    stacks = {"layers/kernel": (3, 5, 12), "heads": (2, 3, 2, 3), "trailing": (6, 4), "layers/bias": (3, 12)}
    return random_tree(seed, dtype, kernel=(6, 8), gain=(), **stacks)


def axes(path, leaf):
    if leaf.ndim < 2 or path.endswith("bias"):
        return None
    if path == "trailing":
        return RotatedAxes((0,), stacked=(1,))  # a stacked axis that is not the first
    return RotatedAxes(((-2, -1),) if leaf.ndim == 4 else (-2, -1), stacked=tuple(range(leaf.ndim - 2)))


def run(optimizer, gradients, steps=10):
    """(params, state) after some steps with random gradients; Adam would amplify rounding noise of exact zeros."""
    params = gradients(0)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, gradients(i + 1))
    return params, state


def assert_close(got, want, tolerance=0.0):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        # A moment in bfloat16 may round to the neighbouring number.
        rtol = max(tolerance, 0.01 if tolerance and x.dtype == jnp.bfloat16 else 0.0)
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), atol=tolerance, rtol=rtol)


def distance(a, b):
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def numpy_orthoadam(w, gradients, q, *, lr, b1, b2, eps):
    """Follows Algorithm 1 line by line, with Q on the last axis: MatMul(Q, g) for every row g."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        g_bar = g @ np.swapaxes(q, -1, -2)
        m = b1 * m + (1 - b1) * g_bar
        v = b2 * v + (1 - b2) * g_bar**2
        s_bar = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - lr * (s_bar @ q)
    return w


@pytest.mark.parametrize(("kind", "shape", "dtype", "tolerance"), [
    ("haar", (5, 9), np.float64, 1e-10),
    ("haar", (3, 4, 6), np.float64, 1e-10),
    ("haar", (3, 4, 6), np.float32, 1e-5),
    ("hadamard", (3, 4, 12), np.float64, 1e-10),
    ("hadamard", (3, 4, 12), np.float32, 1e-5),
    ("dct", (5, 6), np.float64, 1e-10),
])  # fmt: skip
def test_algorithm_1_in_numpy(kind, shape, dtype, tolerance, x64):
    rotation, n = Rotation(kind, axes="output"), shape[-1]
    eyes = {"w": jnp.asarray(np.broadcast_to(np.eye(n), (*shape[:-2], n, n)))}  # rotating it shows Q
    q = np.swapaxes(rotate(rotation).update(eyes, rotate(rotation).init(eyes))[0]["w"], -1, -2)
    w, *gradients = np.random.default_rng(0).standard_normal((61, *shape))
    hyperparams = {"b1": 0.8, "b2": 0.95, "eps": 1e-6}
    optimizer = orthoadam(1e-2, **hyperparams, rotation=rotation)
    got, _ = run(optimizer, lambda i: {"w": jnp.asarray((w, *gradients)[i], dtype)}, 60)
    assert got["w"].dtype == dtype
    want = numpy_orthoadam(w, gradients, q, lr=1e-2, **hyperparams)
    np.testing.assert_allclose(got["w"], want, atol=tolerance)
    assert np.abs(want - w).max() > 0.05


def test_controls_are_adam_and_true_rotations_are_not():
    adam, _ = run(optax.adam(1e-2), tree)
    for kind in ("identity", "signed_permutation"):
        assert_close(run(orthoadam(1e-2, rotation=Rotation(kind, "both")), tree)[0], adam)
    half = lambda i: tree(i, jnp.bfloat16)  # noqa: E731
    assert_close(run(orthoadam(1e-2, rotation=Rotation("identity")), half)[0], run(optax.adam(1e-2), half)[0])
    permutation = rotate(Rotation("signed_permutation", axes="both"))
    assert distance(permutation.update(tree(), permutation.init(tree()))[0], tree()) > 0.1  # it does permute
    for kind in ("haar", "hadamard"):
        assert distance(run(orthoadam(1e-2, rotation=Rotation(kind, axes="output")), tree)[0], adam) > 1e-3


@pytest.mark.parametrize("kind", ["hadamard", *(pytest.param(k, marks=slow) for k in ("haar", "signed_permutation"))])
def test_scanned_and_unrolled_layers_have_equal_trajectories(kind):
    values = np.random.default_rng(0).standard_normal((12, 4, 5, 8)).astype(np.float32)
    rule = lambda path, leaf: RotatedAxes((-1, -2), stacked=tuple(range(leaf.ndim - 2)))  # noqa: E731
    optimizer = orthoadam(1e-2, rotation=Rotation(kind, rule))
    layer = lambda i, l: {"query": {"kernel": jnp.asarray(values[i, l])}}  # noqa: E731
    stack, _ = run(optimizer, lambda i: {"params": {"layers": layer(i, slice(None))}}, 8)
    by_name, _ = run(optimizer, lambda i: {"params": {f"layers_{l}": layer(i, l) for l in range(4)}}, 8)
    by_index, _ = run(optimizer, lambda i: {"layers": [layer(i, l) for l in range(4)]}, 8)
    for l in range(4):
        want = stack["params"]["layers"]["query"]["kernel"][l]
        np.testing.assert_allclose(by_name["params"][f"layers_{l}"]["query"]["kernel"], want, atol=1e-5)
        np.testing.assert_allclose(by_index["layers"][l]["query"]["kernel"], want, atol=1e-5)


@pytest.mark.parametrize("mu_dtype", [None, jnp.float32])
def test_second_moments_of_bfloat16_parameters_may_be_float32(mu_dtype):
    """b2 = 0.999 moves a bfloat16 number, of 8 bits, hardly; against float64 NumPy."""
    rng, b1, b2 = np.random.default_rng(0), 0.9, 0.999
    params = {"kernel": jnp.zeros((4, 8), jnp.bfloat16)}
    transform = scale_by_orthoadam(b1, b2, mu_dtype=mu_dtype, nu_dtype=jnp.float32, rotation=Rotation("identity"))
    state, nu = transform.init(params), np.zeros((4, 8))
    update, structure = jax.jit(transform.update), jax.tree.map(jnp.shape, transform.init(params))
    for _ in range(50):
        grads = {"kernel": jnp.asarray(rng.standard_normal((4, 8)), jnp.bfloat16)}
        nu = b2 * nu + (1 - b2) * np.asarray(grads["kernel"], np.float64) ** 2
        updates, state = update(grads, state)
    assert jax.tree.map(jnp.shape, state) == structure
    assert state.inner.mu["kernel"].dtype == (mu_dtype or jnp.bfloat16)
    np.testing.assert_allclose(state.inner.nu["kernel"], nu, rtol=1e-5)
    corrected = np.asarray(state.inner.mu["kernel"], np.float64) / (1 - b1**50)
    want = corrected / (np.sqrt(nu / (1 - b2**50)) + 1e-8)
    assert updates["kernel"].dtype == jnp.bfloat16  # as other transformations and equinox want it
    np.testing.assert_allclose(updates["kernel"].astype(float), want, rtol=2e-2, atol=1e-2)  # mu is rounded afterwards
    guarded = optax.apply_if_finite(transform, 2)
    assert guarded.update(grads, guarded.init(params))[0]["kernel"].dtype == jnp.bfloat16


def test_weight_decay_is_that_of_adamw():
    params, grads = tree(), tree(1)
    mask = {name: name in ("kernel", "layers/kernel") for name in params}
    ours = run(orthoadam(1e-2, weight_decay=0.3, mask=mask, rotation=Rotation("identity")), tree, 5)[0]
    assert_close(ours, run(optax.adamw(1e-2, weight_decay=0.3, mask=mask), tree, 5)[0])
    decayed, plain = orthoadam(1e-2, weight_decay=0.3, rotation=OUTPUT), orthoadam(1e-2, rotation=OUTPUT)
    difference = optax.tree.sub(
        decayed.update(grads, decayed.init(params), params)[0], plain.update(grads, plain.init(params))[0]
    )
    assert_close(difference, optax.tree.scale(-1e-2 * 0.3, params), 1e-6)
    assert jax.tree.structure(plain.init(params)) == jax.tree.structure(decayed.init(params))


def test_the_schedule_warms_up_and_is_a_cosine():
    schedule = warmup_cosine(2.0, 4, 12, 0.25)
    t = np.arange(20)
    decay = 2.0 * (0.25 + 0.75 * (1 + np.cos(np.pi * (np.clip(t, 4, 12) - 4) / 8)) / 2)
    np.testing.assert_allclose([schedule(i) for i in t], np.where(t < 4, t / 2, decay), atol=1e-6)
    assert float(warmup_cosine(2.0, 0, 12)(0)) == 2.0


@pytest.mark.parametrize("n", [576, 768, 1024, 3072])
def test_any_length_takes_as_few_temporaries(n):
    gradient = {"kernel": jax.ShapeDtypeStruct((1024, n), jnp.float32)}
    optimizer = scale_by_orthoadam(rotation=OUTPUT)
    state = jax.eval_shape(optimizer.init, gradient)
    step = jax.jit(optimizer.update, donate_argnums=(0, 1))
    memory = step.lower(gradient, state).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2.05 * 4 * 1024 * n  # gradient and update in the other basis


@pytest.mark.parametrize("kind", ["haar", pytest.param("hadamard", marks=slow)])
def test_scale_by_orthoadam_is_the_chain(kind):
    rotation = Rotation(kind, axes="both", seed=3)
    chain = optax.chain(rotate(rotation), optax.scale_by_adam(0.8, 0.99), unrotate(rotation))
    fused = scale_by_orthoadam(0.8, 0.99, rotation=rotation)
    assert_close(run(chain, tree)[0], run(fused, tree)[0], 1e-6)
