"""Kurtosis and norm ratio against SciPy in float64, their definitions and bounds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from orthojax.ops import statistics

# Compiled whole: op by op, every new shape would compile a dozen little programs.
kurtosis = jax.jit(statistics.kurtosis, static_argnums=1)
norm_ratio = jax.jit(statistics.norm_ratio, static_argnums=1)
reference_kurtosis = partial(scipy.stats.kurtosis, axis=-1, fisher=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_match_the_equations_on_every_axis(dtype):
    x, tolerance = np.random.default_rng(0).standard_t(3, (5, 4, 7)), 1e-5 if dtype == np.float32 else 1e-12
    with jax.enable_x64(dtype == np.float64):
        for axis in (0, -1):
            found, ratio = kurtosis(x, axis), norm_ratio(x, axis)
            assert found.dtype == ratio.dtype == dtype
            np.testing.assert_allclose(found, reference_kurtosis(x, axis=axis), rtol=tolerance)
            np.testing.assert_allclose(ratio, np.abs(x).max(axis) / np.sqrt((x**2).sum(axis)), rtol=tolerance)


def test_degenerate_vectors_get_zero():
    for value in (0.0, 0.1, -3e4, 1e-42):
        assert kurtosis(np.full((2, 8), value, np.float32)).tolist() == [0.0, 0.0]
    assert norm_ratio(np.zeros((2, 8))).tolist() == [0.0, 0.0]
    x = jnp.stack([jnp.full(8, 0.1), jnp.arange(8.0)])  # a dead row does not disturb its neighbour
    np.testing.assert_allclose(kurtosis(x), [0.0, reference_kurtosis(np.arange(8))], rtol=1e-6)
    assert jnp.isnan(kurtosis(jnp.array([1.0, jnp.nan])))
    assert jnp.isnan(norm_ratio(jnp.array([1.0, jnp.nan])))


def test_large_values_are_measured_as_small_ones():
    @jax.jit
    def all_of(x):
        def one(function):
            return function(x), jax.grad(lambda x: jnp.sum(function(x)))(x)

        return [one(function) for function in (statistics.kurtosis, statistics.norm_ratio, statistics.norm)]

    noise = np.random.default_rng(4).uniform(0.5, 1.0, (3, 300))
    noise[1] *= np.resize([1, -1, -1], 300)
    noise[2] = np.eye(300)[7]
    noise /= np.abs(noise).max(-1, keepdims=True)
    for peak in (1.0, 1e19, 2.0**64, 9e37, float(np.finfo(np.float32).max)):
        x = np.float32(noise * peak)
        (kappa, d_kappa), (ratio, d_ratio), (norm, d_norm) = all_of(x)
        exact = np.float64(x) / peak
        norms = np.linalg.norm(exact, axis=-1)
        np.testing.assert_allclose(kappa, reference_kurtosis(exact), rtol=1e-5)
        np.testing.assert_allclose(ratio, np.abs(exact).max(-1) / norms, rtol=1e-6)
        fits = norms * peak <= np.finfo(np.float32).max
        assert fits[2]
        np.testing.assert_allclose(norm[fits], (norms * peak)[fits], rtol=1e-6)
        np.testing.assert_allclose(d_norm[fits], (exact / norms[:, None])[fits], rtol=1e-5, atol=1e-6)
        assert np.isfinite(d_kappa).all()
        assert np.isfinite(d_ratio).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_measured_in_float32(dtype):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 256)) * 100, dtype)
    assert kurtosis(x).dtype == norm_ratio(x).dtype == jnp.float32
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(kurtosis(x), reference_kurtosis(exact), rtol=1e-5)
    assert kurtosis(jnp.array([1, 2, 4])).dtype == jnp.float32


def test_gradients_are_right_and_finite(x64):
    x = np.random.default_rng(5).normal(size=12)
    gradient = jax.jit(jax.grad(kurtosis))(x)
    for i in range(len(x)):
        step = np.eye(len(x))[i] * 1e-6
        slope = (reference_kurtosis(x + step) - reference_kurtosis(x - step)) / 2e-6
        np.testing.assert_allclose(gradient[i], slope, rtol=1e-5, atol=1e-7)
    for function in (kurtosis, norm_ratio):
        assert np.isfinite(jax.jit(jax.grad(function))(jnp.zeros(12))).all()


@given(hnp.arrays(np.float32, (3, 7), elements=st.floats(-1e3, 1e3, width=32)))
@example(np.finfo(np.float32).tiny * np.eye(3, 7, dtype=np.float32))  # the mean underflows
def test_bounds_hold(x):
    for kappa, ratio in zip(kurtosis(x).tolist(), norm_ratio(x).tolist(), strict=True):
        assert kappa == 0.0 or 1.0 - 1e-5 <= kappa <= (5 + 1 / 6) * (1 + 1e-5)
        assert ratio == 0.0 or (1 - 1e-6) / 7**0.5 <= ratio <= 1.0 + 1e-6
