"""OrthoAdam against independent references: NumPy, a reparametrised model, and optax's own Adam."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthojax.optim import (
    RotatedAxes,
    Rotation,
    in_rotated_basis,
    orthoadam,
    rotate,
    scale_by_orthoadam,
    unrotate,
    warmup_cosine,
)


def tree(dtype=jnp.float32, seed=0):
    """Kernels of sizes with and without a Hadamard matrix, a stack of three layers, a bias and a scalar."""
    rng = np.random.default_rng(seed)
    shapes = {"a": {"kernel": (6, 8), "bias": (8,)}, "layers": {"mlp": {"kernel": (3, 5, 12)}}, "gain": ()}
    return jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s), dtype), shapes, is_leaf=lambda s: type(s) is tuple
    )


def run(optimizer, params, steps, gradients=tree, dtype=jnp.float32):
    """Parameters after `steps` updates with random gradients (Adam would amplify rounding noise of exact zeros)."""

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for i in range(steps):
        params, state = step(params, state, gradients(dtype, i + 1))
    return params


def assert_close(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def distance(a, b):
    return max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max())
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def q_of(rotation, shape, path="w"):
    """Q [n, n] (or [layers, n, n]) of the last axis, by turning the identity; one row for each basis vector."""
    n = shape[-1]
    x = np.broadcast_to(np.eye(n), (*shape[:-2], n, n))
    transform = rotate(rotation)
    turned, _ = transform.update({path: jnp.asarray(x)}, transform.init({path: jnp.asarray(x)}))
    return np.swapaxes(np.asarray(turned[path]), -1, -2)


def numpy_orthoadam(w, gradients, q, *, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8):
    """Algorithm 1, line by line, with Q on the last axis: MatMul(Q, g) for every row g."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        g_bar = g @ np.swapaxes(q, -1, -2)
        m = b1 * m + (1 - b1) * g_bar
        v = b2 * v + (1 - b2) * g_bar**2
        s_bar = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - lr * (s_bar @ q)
    return w


@pytest.mark.parametrize(
    ("kind", "shape"), [("haar", (5, 9)), ("haar", (3, 4, 6)), ("hadamard", (3, 4, 12)), ("dct", (5, 6))]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-10), (np.float32, 1e-5)])
def test_algorithm_1_in_numpy(kind, shape, dtype, tolerance):
    with jax.enable_x64(True):
        rotation = Rotation(kind)
        q = q_of(rotation, shape)
        rng = np.random.default_rng(0)
        w, gradients = rng.standard_normal(shape), rng.standard_normal((60, *shape))
        optimizer = orthoadam(1e-2, b1=0.8, b2=0.95, eps=1e-6, rotation=rotation)
        got = run(
            optimizer, {"w": jnp.asarray(w, dtype)}, 60, lambda d, i: {"w": jnp.asarray(gradients[i - 1], d)}, dtype
        )
        assert got["w"].dtype == dtype
    want = numpy_orthoadam(w, gradients, q, lr=1e-2, b1=0.8, b2=0.95, eps=1e-6)
    np.testing.assert_allclose(got["w"], want, atol=tolerance)
    assert np.abs(want - w).max() > 0.05


@pytest.mark.parametrize("kind", ["haar", pytest.param("hadamard", marks=pytest.mark.slow)])
def test_equals_adam_on_the_reparametrised_model(kind, x64):
    """OrthoAdam on W is Q^T Adam on W' = Q W: the same loss, seen through W = Q^T W'."""
    rotation = Rotation(kind)
    rng = np.random.default_rng(0)
    x, y, w = (jnp.asarray(rng.standard_normal(shape)) for shape in ((32, 6), (32, 20), (6, 20)))
    q = jnp.asarray(q_of(rotation, (6, 20)))
    ours, adam = orthoadam(0.05, rotation=rotation), optax.adam(0.05)

    def loss(w):
        return jnp.mean(jnp.abs(x @ w - y) ** 1.5)

    params, rotated = {"w": w}, w @ q.T
    state, rotated_state = ours.init(params), adam.init(rotated)
    for _ in range(40):
        updates, state = ours.update({"w": jax.grad(loss)(params["w"])}, state)
        params = optax.apply_updates(params, updates)
        step, rotated_state = adam.update(jax.grad(lambda r: loss(r @ q))(rotated), rotated_state)
        rotated = optax.apply_updates(rotated, step)
    np.testing.assert_allclose(params["w"], rotated @ q, atol=1e-10)
    assert loss(params["w"]) < 0.8 * loss(w)


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_scale_by_orthoadam_is_the_chain(kind):
    rotation = Rotation(kind, axes="both", seed=3)
    chain = optax.chain(rotate(rotation), optax.scale_by_adam(0.8, 0.99), unrotate(rotation))
    fused = scale_by_orthoadam(0.8, 0.99, rotation=rotation)
    assert_close(run(chain, tree(), 10), run(fused, tree(), 10), rtol=1e-6, atol=1e-6)


def test_identity_is_adam_bit_for_bit():
    for dtype in (jnp.float32, jnp.bfloat16):
        ours = run(orthoadam(1e-2, rotation=Rotation("identity")), tree(dtype), 10, dtype=dtype)
        adam = run(optax.adam(1e-2), tree(dtype), 10, dtype=dtype)
        jax.tree.map(np.testing.assert_array_equal, ours, adam)


def test_signed_permutation_is_adam_and_true_rotations_are_not():
    adam = run(optax.adam(1e-2), tree(), 10)
    permuted = run(orthoadam(1e-2, rotation=Rotation("signed_permutation", axes="both")), tree(), 10)
    jax.tree.map(np.testing.assert_array_equal, permuted, adam)
    rotation = rotate(Rotation("signed_permutation", axes="both"))
    turned, _ = rotation.update(tree(), rotation.init(tree()))
    assert distance(turned, tree()) > 0.1  # it does permute
    for kind in ("haar", "hadamard", "dct"):
        assert distance(run(orthoadam(1e-2, rotation=Rotation(kind)), tree(), 10), adam) > 1e-3


def test_the_inner_transformation_sees_rotated_parameters():
    def inner_init(params):
        return params

    def inner_update(updates, state, params=None):
        return params, state

    rotation = Rotation()
    optimizer = in_rotated_basis(optax.GradientTransformation(inner_init, inner_update), rotation)
    params = tree()
    turned, _ = rotate(rotation).update(params, rotate(rotation).init(params))
    state = optimizer.init(params)
    assert_close(state.inner, turned, atol=1e-6)
    updates, _ = optimizer.update(tree(seed=1), state, params)
    assert_close(updates, params, atol=1e-6)


@pytest.mark.parametrize(
    "kind", ["hadamard", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("haar", "signed_permutation"))]
)
def test_scanned_and_unrolled_layers_have_equal_trajectories(kind):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((12, 4, 5, 8)).astype(np.float32)
    axes = lambda path, leaf: RotatedAxes((-1, -2), stacked=tuple(range(leaf.ndim - 2)))  # noqa: E731
    rotation = Rotation(kind, axes)
    optimizer = orthoadam(1e-2, rotation=rotation)

    def scanned(_, i):
        return {"params": {"layers": {"query": {"kernel": jnp.asarray(values[i])}}}}

    def unrolled(_, i):
        return {"params": {f"layers_{l}": {"query": {"kernel": jnp.asarray(values[i, l])}} for l in range(4)}}

    def listed(_, i):
        return {"layers": [{"query": {"kernel": jnp.asarray(values[i, l])}} for l in range(4)]}

    stack = run(optimizer, scanned(None, 0), 8, scanned)["params"]["layers"]["query"]["kernel"]
    by_name = run(optimizer, unrolled(None, 0), 8, unrolled)["params"]
    by_index = run(optimizer, listed(None, 0), 8, listed)["layers"]
    for l in range(4):
        np.testing.assert_allclose(by_name[f"layers_{l}"]["query"]["kernel"], stack[l], atol=1e-5)
        np.testing.assert_allclose(by_index[l]["query"]["kernel"], stack[l], atol=1e-5)


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_dtypes_are_stable_in_half_precision(kind):
    params = tree(jnp.bfloat16)
    optimizer = orthoadam(1e-2, weight_decay=0.1, rotation=Rotation(kind))
    state = optimizer.init(params)

    @jax.jit
    def maybe_step(params, state, grads):
        def step(_):
            updates, new = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), new

        return jax.lax.cond(jnp.sum(grads["gain"]) > -9.0, step, lambda _: (params, state), None)

    new, new_state = maybe_step(params, state, tree(jnp.bfloat16, 1))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (new, new_state)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), (params, state)
    )
    assert distance(new, params) > 0


def test_half_precision_leaves_are_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 64)), jnp.bfloat16)
    for kind in ("hadamard", "haar"):
        turned = [
            rotate(Rotation(kind)).update({"w": y}, rotate(Rotation(kind)).init({"w": y}))[0]["w"]
            for y in (x, x.astype(jnp.float32))
        ]
        assert turned[0].dtype == jnp.bfloat16
        np.testing.assert_array_equal(turned[0], turned[1].astype(jnp.bfloat16))


def test_weight_decay():
    params, grads = tree(), tree(seed=1)
    mask = {"a": {"kernel": True, "bias": False}, "layers": True, "gain": False}
    ours = run(orthoadam(1e-2, weight_decay=0.3, mask=mask, rotation=Rotation("identity")), params, 5)
    assert_close(ours, run(optax.adamw(1e-2, weight_decay=0.3, mask=mask), params, 5), atol=0)
    decayed = orthoadam(1e-2, weight_decay=0.3)
    plain = orthoadam(1e-2)
    difference = optax.tree.sub(
        decayed.update(grads, decayed.init(params), params)[0], plain.update(grads, plain.init(params))[0]
    )
    assert_close(difference, optax.tree.scale(-1e-2 * 0.3, params), atol=1e-6)
    assert jax.tree.structure(plain.init(params)) == jax.tree.structure(decayed.init(params))


def test_the_schedule():
    schedule = warmup_cosine(2.0, 4, 12, 0.25)
    t = np.arange(20)
    decay = 2.0 * (0.25 + 0.75 * (1 + np.cos(np.pi * (np.clip(t, 4, 12) - 4) / 8)) / 2)
    np.testing.assert_allclose([schedule(i) for i in t], np.where(t < 4, t / 2, decay), atol=1e-6)
    assert float(warmup_cosine(2.0, 0, 12)(0)) == 2.0
    assert float(warmup_cosine(2.0, 12, 12)(12)) == 2.0
    for bad in ((1.0, 5, 4, 0.0), (1.0, -1, 4, 0.0), (1.0, 0, 0, 0.0), (1.0, 0, 4, 1.5)):
        with pytest.raises(ValueError, match="allowed"):
            warmup_cosine(*bad)


def test_imports_without_flax():
    code = """
        import sys
        for name in ("flax", "orbax", "tensorflow_datasets"):
            sys.modules[name] = None
        import orthojax.optim, jax.numpy as jnp
        print(orthojax.optim.orthoadam(1e-3).init({"w": jnp.ones((4, 4))})[0].inner.mu["w"].shape)
        assert not [name for name in sys.modules if name.startswith(("orthojax.model", "orthojax.config"))]
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(4, 4)", done.stderr


def test_a_rotation_is_not_given_by_its_name():
    for make in (lambda: orthoadam(0.1, rotation="haar"), lambda: rotate("haar"), lambda: unrotate(None)):  # pyright: ignore
        with pytest.raises(TypeError, match="Rotation"):
            make()
