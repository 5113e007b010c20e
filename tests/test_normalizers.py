"""Every normalizer against its definition in float64; its masks, derivatives and extremes."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import NORMALIZERS, weights
from jax.test_util import check_grads

from orthojax.config.model import NormalizerName
from orthojax.ops import normalizers
from orthojax.ops.normalizers import apply_normalizer, softmax1, softmax_n, softmax_with_sink, softpick

SINK = 0.75  # the same number in every dtype
WITH_SINK = lambda x, axis=-1, where=None: softmax_with_sink(x, jnp.asarray(SINK, x.dtype), axis, where)  # noqa: E731
HALF = lambda x, axis=-1, where=None: softmax_n(x, 0.5, axis, where)  # noqa: E731
ALL = {name: getattr(normalizers, name) for name in get_args(normalizers.Name)}
ALL |= {"softmax_n": HALF, "sink": WITH_SINK}
MASKED_ROWS_ARE_ZERO = [name for name in ALL if name != "softmax"]


def oracle(name, x, where=None):
    x = np.asarray(x, np.float64)
    where = np.broadcast_to(True if where is None else np.asarray(where), x.shape)
    return weights(x, where, np.exp(SINK) if name == "sink" else NORMALIZERS[name])


def _example(shape=(3, 4, 7), seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(size=shape) * scale


def _mask(shape=(3, 4, 7)):
    where = np.random.default_rng(1).random(shape) < 0.6
    where[1, 2] = False  # one row that keeps nothing
    where[0, 0] = True
    return where


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("masked", [False, True])
def test_values_are_the_definition_on_every_axis(name, masked, x64):
    x, where = _example(), _mask() if masked else None
    expected = oracle(name, x, where)
    axes = (-1, 0, -2)

    @jax.jit
    def values(x, where):
        """Returns values along each axis, and mapped ones."""
        moved = [(jnp.moveaxis(x, -1, a), None if where is None else jnp.moveaxis(where, -1, a)) for a in axes]
        found = [ALL[name](x, axis=axis, where=where) for axis, (x, where) in zip(axes, moved, strict=True)]
        return found, jax.vmap(jax.vmap(lambda x, where: ALL[name](x, where=where)))(x, where)

    found, mapped = values(x, where)
    for axis, y in zip(axes, found, strict=True):
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(np.moveaxis(y, axis, -1), expected, rtol=1e-13, atol=1e-300)
    np.testing.assert_allclose(mapped, expected, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(ALL[name](jnp.asarray(x), where=where), expected, rtol=1e-13, atol=1e-300)  # eagerly


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_half_precision_is_the_float32_result_rounded_once(name, dtype):
    x, where = jnp.asarray(_example(), dtype), jnp.asarray(_mask())
    y, expected = ALL[name](x, where=where), ALL[name](x.astype(jnp.float32), where=where)
    assert (y.dtype, expected.dtype) == (dtype, jnp.float32)
    np.testing.assert_array_equal(y, expected.astype(dtype))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("garbage", [0.0, 1e4, np.inf, np.nan])
def test_masked_entries_have_no_weight_or_gradient(name, garbage):
    where = _mask()
    x = jnp.asarray(np.where(where, _example(), garbage), jnp.float32)
    f = lambda x: ALL[name](x, where=jnp.asarray(where))  # noqa: E731
    y = np.asarray(f(x))
    np.testing.assert_array_equal(y, f(jnp.where(where, x, 0.0)))
    assert name == "softmax" or (y[~where] == 0.0).all()
    if not np.isnan(garbage):
        gradient = np.asarray(jax.grad(lambda x: jnp.sum(jnp.sin(3.0 * f(x))))(x))
        assert np.isfinite(gradient).all()
        assert (gradient[~where] == 0.0).all()
        assert (gradient[where] != 0.0).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rows_of_minus_infinity_are_zero(dtype):
    @jax.jit
    def values_and_gradients(x):
        pairs = {name: jax.vjp(ALL[name], x) for name in MASKED_ROWS_ARE_ZERO}
        return {name: (y, pullback(jnp.ones_like(y))[0]) for name, (y, pullback) in pairs.items()}

    for name, (y, gradient) in values_and_gradients(jnp.full((2, 5), -jnp.inf, dtype)).items():
        np.testing.assert_array_equal(y, np.zeros((2, 5)), err_msg=name)
        np.testing.assert_array_equal(gradient, np.zeros((2, 5)), err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [-1e30, 1e30])
def test_softmax1_is_right_for_extreme_logits(dtype, size):
    size = float(np.clip(size, float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)))
    y = softmax1(jnp.array([size, size, -size, 0.0], dtype))
    expected = [0.5, 0.5, 0.0, 0.0] if size > 0 else [0.0, 0.0, 1.0, 0.0]
    np.testing.assert_array_equal(y, np.asarray(expected, y.dtype))


@pytest.mark.parametrize("n", [0.0, 1e-300, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("size", [-1e4, -100.0, 100.0, 1e4])
def test_large_logits_are_right_for_every_sink(n, size):
    # exp(100) overflows float32: a shift by the row max alone would give 0 for a tiny n, and 0 * inf for n = 0.
    sink = -np.inf if n == 0.0 else np.log(n)
    expected = np.full(4, 1.0 / (4.0 + np.exp(min(sink - size, 700.0))))
    np.testing.assert_allclose(softmax_n(jnp.full(4, size), n), expected, rtol=1e-4, atol=1e-30)
    by_sink = softmax_with_sink(jnp.full(4, size), jnp.full(1, sink))
    np.testing.assert_allclose(by_sink, expected, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_softpick_is_right_for_extreme_logits(dtype):
    rows = [[1e4, 1e4, -1e4, 0.0], [-1e4, -1e4, -1e4, -1e4], [1e4, -1e4, 50.0, -50.0], [1e-4, -1e-4, 0.0, 0.0]]
    expected = [[0.5, 0.5, 0.0, 0.0], [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]]
    x = jnp.asarray(rows, dtype)
    np.testing.assert_allclose(softpick(x).astype(jnp.float32), expected, rtol=1e-3)
    gradient = jax.grad(lambda x: jnp.sum(softpick(x)[:, 0]))(x)
    assert jnp.isfinite(gradient).all()
    np.testing.assert_array_equal(softpick(jnp.zeros((2, 3), dtype)), 0.0)


@pytest.mark.parametrize("name", ALL)
def test_first_and_second_derivatives_match_finite_differences(name, x64):
    x, v, c = (_example((2, 5), seed, scale=1.5) for seed in range(3))
    where = np.array([[True, False, True, True, True], [False] * 5])
    f = lambda x: ALL[name](x, where=where)  # noqa: E731
    slope = lambda x: jax.jvp(f, (x,), (v,))[1]  # noqa: E731
    gradient = jax.grad(lambda x: jnp.vdot(c, f(x)))

    @jax.jit
    def derivatives(x):
        """Differentiates along v: the second ones forward of both first ones, and backward of the gradient."""
        second = [jax.jvp(first, (x,), (v,))[1] for first in (slope, gradient)]
        return f(x), slope(x), gradient(x), *second, jax.grad(lambda x: jnp.vdot(v, gradient(x)))(x)

    here, up, down = (derivatives(x + step * v) for step in (0.0, 1e-5, -1e-5))
    of_value, of_slope, of_gradient = ((a - b) / 2e-5 for a, b in zip(up[:3], down[:3], strict=True))
    expected = (of_value, of_slope, of_gradient, of_gradient)
    for found, difference in zip((here[1], *here[3:]), expected, strict=True):
        np.testing.assert_allclose(found, difference, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jnp.vdot(v, here[2]), jnp.vdot(c, of_value), rtol=1e-6, atol=1e-6)


def test_sink_gradient_is_of_an_appended_logit(x64):
    x, c = jnp.asarray(_example((2, 3, 4, 5))), jnp.asarray(_example((2, 3, 4, 5), seed=4))
    where = jnp.asarray(_mask((2, 3, 4, 5)))
    sink = jnp.asarray(_example((3,), seed=5))

    def appended(x, sink):
        column = jnp.broadcast_to(sink[None, :, None, None], (2, 3, 4, 1))
        x = jnp.concatenate([jnp.where(where, x, -jnp.inf), column], -1)
        return jnp.sum(jnp.sin(c * jax.nn.softmax(x)[..., :-1]))

    def ours(x, sink):
        return jnp.sum(jnp.sin(c * apply_normalizer(sink, x, where)))

    for a, b in zip(*(jax.jit(jax.grad(f, (0, 1)))(x, sink) for f in (ours, appended)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-15)
    check_grads(jax.jit(ours), (x, sink), order=2, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_empty_axes_are_taken(name):
    for shape, axis in (((3, 0), -1), ((3, 0), 0), ((2, 0, 3), (0, 1))):
        for where in (None, np.zeros(shape, bool)):
            assert jax.eval_shape(lambda x, a=axis, w=where: ALL[name](x, a, w), jnp.zeros(shape)).shape == shape


@pytest.mark.parametrize("name", ALL)
def test_several_axes_are_one_long_axis(name):
    x, where = _example().astype(np.float32), _mask()[:1]
    expected = oracle(name, x.reshape(3, -1), np.broadcast_to(where, x.shape).reshape(3, -1))
    found = ALL[name](jnp.asarray(x), (-2, -1), where).reshape(3, -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    expected = oracle(name, x.ravel()).reshape(x.shape)
    np.testing.assert_allclose(ALL[name](jnp.asarray(x), None), expected, rtol=1e-5, atol=1e-7)


def test_every_name_can_be_set_in_the_config():
    assert set(get_args(normalizers.Name)) <= set(get_args(NormalizerName))  # `test_model` applies all of the config's
