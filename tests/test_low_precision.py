"""Training products of 4 and 8 bits: against their equations in float64, what is random in them, and runs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_quantize import reference_mxfp4, reference_nvfp4, stored
from tiny_run import TINY, blank_state, drawn_params, inputs, lines

from orthojax import config as c
from orthojax.config import replace
from orthojax.errors import UserError
from orthojax.model import linear
from orthojax.ops import quantize
from orthojax.train import make_mesh, place_rows, train
from orthojax.train.low_precision import Recipe, gradient_to_noise, low_precision_product, training_linear
from orthojax.train.step import make_train_step

RNG = np.random.default_rng(0)
X, W, G = RNG.normal(size=(2, 32, 64)), RNG.normal(size=(64, 48)), RNG.normal(size=(2, 32, 48)) * 1e-3
X[:, :, 5] *= 50  # an outlier channel
NEAREST = {"stochastic": False, "hadamard": False, "square": False}
REFERENCES = {"nvfp4": reference_nvfp4, "mxfp4": reference_mxfp4}


def products(recipe, x=X, w=W, g=G, key=7):
    with jax.enable_x64():
        y, vjp = jax.vjp(lambda x, w: low_precision_product(recipe, key, x, w), jnp.asarray(x), jnp.asarray(w))
        return [np.asarray(a) for a in (y, *vjp(jnp.asarray(g)))]


def along(reference, x, axis):
    moved = np.moveaxis(x, axis, -1)
    return np.moveaxis(reference(moved.reshape(-1, moved.shape[-1])).reshape(moved.shape), -1, axis)


@pytest.mark.parametrize("name", REFERENCES)
def test_three_products_are_those_of_rounded_operands(name):
    q = REFERENCES[name]
    expected = [
        along(q, X, -1) @ along(q, W, 0),
        along(q, G, -1) @ along(q, W, 1).T,
        np.einsum("bti,bto->io", along(q, X, 1), along(q, G, 1)),
    ]
    for found, wanted in zip(products(Recipe(name, **NEAREST)), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12 * np.abs(wanted).max())


def squares(name, w):
    """Each tile of a matrix rounded with its own scale."""
    size, rounded = {"nvfp4": 16, "mxfp4": 32}[name], np.empty_like(w)
    for i, j in np.ndindex(-(-w.shape[0] // size), -(-w.shape[1] // size)):
        tile = np.s_[i * size : (i + 1) * size, j * size : (j + 1) * size]
        largest = np.abs(w[tile]).max()
        tensor = np.abs(w).max() / (6 * 448)
        scale = (
            stored(largest / 6 / tensor, ml_dtypes.float8_e4m3fn) * tensor
            if name == "nvfp4"
            else 2.0 ** (np.floor(np.log2(largest)) - 2)
        )
        rounded[tile] = stored(np.clip(w[tile] / scale, -6, 6), ml_dtypes.float4_e2m1fn) * scale
    return rounded


@pytest.mark.parametrize("name", REFERENCES)
def test_square_blocks_serve_forward_and_backward(name):
    recipe = Recipe(name, stochastic=False, hadamard=False)
    y, of_x, _ = products(recipe)
    np.testing.assert_allclose(y, along(REFERENCES[name], X, -1) @ squares(name, W), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(of_x, along(REFERENCES[name], G, -1) @ squares(name, W).T, rtol=1e-9, atol=1e-12)


def test_mixing_cancels_without_rounding_and_spreads_an_outlier():
    mixed = Recipe("nvfp4").mixed
    x, g = (np.asarray(mixed(jnp.asarray(a, jnp.float32)), np.float64) for a in (X, G))
    np.testing.assert_allclose(np.einsum("bti,bto->io", x, g), np.einsum("bti,bto->io", X, G), atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), np.linalg.norm(X, axis=1), rtol=1e-5)
    spike = jnp.zeros((1, 20, 1)).at[0, 3].set(8.0)  # rows of 20 tokens are padded to 32
    assert np.abs(mixed(spike)[0, :16]).tolist() == [[2.0]] * 16
    assert not mixed(spike)[0, 16:].any()


@pytest.mark.parametrize("name", REFERENCES)
def test_gradients_rounded_at_random_are_right_on_average(name):
    """Over all noises of a grid, and over keys."""
    x = jnp.asarray(G[0].T, jnp.float32)
    noises = (jnp.arange(256) + 0.5) / 256
    rounded = jax.vmap(lambda u: getattr(quantize, name)(x, noise=jnp.full_like(x, u)))(noises)
    right = np.abs(rounded.mean(0) - x) < np.abs(x).max() / 256
    assert right.all() if name == "mxfp4" else right.mean() > 0.95  # an E4M3 scale that was rounded down clips
    assert len(np.unique(rounded, axis=0)) > 50
    one, many = products(Recipe(name))[1], np.mean([products(Recipe(name), key=key)[1] for key in range(40)], 0)
    exact = G @ squares(name, W).T
    assert np.linalg.norm(many - exact) < 0.3 * np.linalg.norm(one - exact)


def test_fp8_has_a_scale_for_each_tensor_and_e5m2_for_gradients():
    y, of_x, of_w = products(Recipe("fp8"))
    x, w, g = np.asarray(quantize.e4m3(X)), np.asarray(quantize.e4m3(W)), np.asarray(quantize.e5m2(G))
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(of_x, g @ w.T, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(of_w, np.einsum("bti,bto->io", x, g), rtol=1e-3, atol=1e-4)


FP4 = replace(TINY, {"train.matmul_format": "nvfp4", "data.sequence_length": 8, "train.steps": 4})


def test_only_kernels_of_blocks_are_rounded_and_equal_runs_share_a_program():
    function, other = (training_linear(config.train) for config in (FP4, replace(FP4, {"train.seed": 1})))
    assert function is other
    assert training_linear(TINY.train) is linear
    x, w = jnp.asarray(X, jnp.float32), jnp.asarray(W, jnp.float32)
    for path in ("head", "lm/head", "layers/mlp/router", "head_input", "embedding_output"):
        np.testing.assert_array_equal(function(x, w, None, path), linear(x, w, None, path))
    y = function(x, w, jnp.ones(48), "layers/mlp/input")
    np.testing.assert_allclose(y - 1, low_precision_product(Recipe("nvfp4"), 0, x, w), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_mesh_rounds_as_one_device(name):
    config = replace(TINY, {"train.matmul_format": name, "train.batch_size": 8, "model.normalizer": "softmax1"})
    tokens, losses = np.random.default_rng(0).integers(0, 32, (8, 9)), []
    for mesh in ({}, {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}):
        on = replace(config, mesh)
        state, step, seen = blank_state(on)._replace(params=drawn_params(on.model)), make_train_step(on), []
        for _ in range(3):
            rows = place_rows(make_mesh(on), 8, lambda a, b: tokens[a:b].astype(np.int32))
            state, metrics = step(state, rows)
            seen.append(float(metrics.loss_sum_nats))
        losses.append(seen)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_run_logs_by_how_much_its_gradient_exceeds_the_noise(tmp_path):
    config = replace(FP4, {"train.probe_every_steps": 2})
    train(config, inputs(), tmp_path)
    logged = [line["gradient_to_noise"] for line in lines(tmp_path, "gradient_to_noise")]
    assert len(logged) == 2
    assert all(1 < value < 100 for value in logged)


def test_gradient_to_noise_is_a_ratio_of_norms():
    x, w = jnp.asarray(X, jnp.float32), jnp.asarray(W, jnp.float32)
    ratio = gradient_to_noise(lambda function, w: jnp.sum(function(x, w, None, "input") ** 2), FP4.train)(w)
    noisy = jax.grad(lambda w: jnp.sum(training_linear(FP4.train)(x, w, None, "input") ** 2))(w)
    exact = 2 * np.einsum("bti,bto->io", X, X @ W)
    assert float(ratio) == pytest.approx(np.linalg.norm(exact) / np.linalg.norm(noisy - exact), rel=1e-3)


@pytest.mark.parametrize("format", ["", "fp8"])
def test_parts_of_a_recipe_of_4_bits_need_one(format):
    with pytest.raises(UserError, match=r"4 bits(.|\n)*allowed: nvfp4 \| mxfp4"):
        c.TrainConfig(matmul_format=format, matmul_hadamard=False)
