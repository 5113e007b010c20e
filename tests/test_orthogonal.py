"""The orthogonal maps, each against the dense matrix or the property that defines it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import quick_and_slow

from orthojax.ops import orthogonal


def dense(n):
    with jax.enable_x64(True):
        return np.asarray(jax.jit(lambda x: orthogonal.fixed_transform(x, 0))(np.eye(n)))


@settings(max_examples=12)  # every size compiles anew
@given(st.integers(2, 600))
def test_any_size_is_orthogonal_in_float64(n):
    both = jax.jit(lambda x: [orthogonal.fixed_transform(x, 0, transpose=transpose) for transpose in (False, True)])
    with jax.enable_x64(True):
        matrix, transposed = map(np.asarray, both(np.eye(n)))
    np.testing.assert_allclose(matrix.T @ matrix, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(transposed, matrix.T, atol=1e-12)


@pytest.mark.parametrize("n", quick_and_slow([3, 100, 768, 4099, 1152, 1600, 3072], [1152, 1600, 3072]))
def test_float32_round_trip_and_length(n):
    x = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)
    transform = functools.partial(orthogonal.fixed_transform, axis=1)
    there, back = jax.jit(lambda x: (y := transform(x), transform(y, transpose=True)))(x)
    assert there.dtype == jnp.float32
    scale = np.abs(x).max()
    np.testing.assert_allclose(back, x, atol=1e-6 * scale)
    norm = np.linalg.norm(x.astype(np.float64), axis=1)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(there, np.float64), axis=1), norm, rtol=1e-6)


@pytest.mark.parametrize("n", quick_and_slow([2, 12, 20, 28, 160, 768, 1024, 1536], [1024, 1536]))
def test_hadamard_factors_give_entries_of_one_magnitude(n):
    np.testing.assert_allclose(np.abs(dense(n)), 1 / np.sqrt(n), rtol=1e-14)


def test_hadamard_matrices_have_orthogonal_rows_of_signs():
    found = []
    for n in range(1, 129):
        matrix = orthogonal.hadamard_matrix(n)
        if matrix is not None:
            found.append(n)
            assert set(np.unique(matrix)) <= {-1, 1}
            np.testing.assert_array_equal(matrix.astype(int) @ matrix.T.astype(int), n * np.eye(n, dtype=int))
    assert {1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 64, 80, 96, 128} <= set(found)
    assert not {3, 6, 10, 18, 100} & set(found)


@pytest.mark.parametrize("n", [3, 60, 128, 131, 512, 4099])
def test_dct_is_the_orthonormal_dct_two_of_scipy(n, x64):
    x = np.random.default_rng(n).standard_normal((2, n))
    ours = orthogonal.fixed_transform(jnp.asarray(x), 1, kind="dct")
    np.testing.assert_allclose(ours, scipy.fft.dct(x, norm="ortho", axis=1), atol=1e-11)


@pytest.mark.parametrize("n", [6, 24, 131, 144])
def test_every_axis_is_transformed_in_place(n, x64):
    matrix = dense(n)
    for axis, shape in enumerate([(n, 2, 3), (2, n, 3), (2, 3, n)]):
        x = np.random.default_rng(0).standard_normal(shape)
        transform = functools.partial(orthogonal.fixed_transform, axis=axis)
        both = jax.jit(lambda x, f=transform: (f(x), f(x, transpose=True)))
        for got, q in zip(both(x), (matrix, matrix.T), strict=True):
            want = np.moveaxis(np.tensordot(q, x, (1, axis)), 0, axis)
            np.testing.assert_allclose(got, want, atol=1e-12)


def test_apply_matrix_is_an_einsum(x64):
    rng = np.random.default_rng(0)
    x, matrices = rng.standard_normal((2, 5, 3, 4)), rng.standard_normal((4, 2, 5, 5))
    for transpose, spec in ((False, "jiyz,izkj->iykj"), (True, "jizy,izkj->iykj")):
        got = orthogonal.apply_matrix(jnp.asarray(x), jnp.asarray(matrices), 1, batch_axes=(3, 0), transpose=transpose)
        np.testing.assert_allclose(got, np.einsum(spec, matrices, x), atol=1e-13)


@pytest.mark.parametrize("n", [2, 7, 100])
def test_haar_is_an_orthogonal_function_of_its_seed(n):
    q = orthogonal.haar((0, 1, 2), n)
    assert np.abs(q.T @ q - np.eye(n)).max() < 1e-12
    np.testing.assert_array_equal(q, orthogonal.haar((0, 1, 2), n))
    assert np.abs(q - orthogonal.haar((0, 1, 3), n)).max() > 0.1


def test_haar_has_the_moments_of_the_uniform_distribution():
    """Expects E[q_00] = 0 (QR without the choice of signs has less), E[tr Q] = 0 and E[(tr Q)^2] = 1."""
    draws = np.stack([orthogonal.haar((0, i), 4) for i in range(4000)])
    traces = np.trace(draws, axis1=1, axis2=2)
    assert abs(draws[:, 0, 0].mean()) < 0.04  # the standard error is 0.5 / sqrt(4000) = 0.008
    assert abs(traces.mean()) < 0.08
    assert abs((traces**2).mean() - 1) < 0.12


def reference_hash(key, counter):
    """Mixes in Python integers."""

    def mix(x):
        x = (x ^ (x >> 16)) * 0x21F0AAAD % 2**32
        x = (x ^ (x >> 15)) * 0x735A2D97 % 2**32
        return x ^ (x >> 15)

    outer = mix(key)
    return mix((mix(counter ^ outer) + mix(outer ^ 0x9E3779B9)) % 2**32)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(1, 70))
def test_hash_bits_are_those_of_python_integers(key, layer, n):
    bits = orthogonal.hash_bits(key, [layer], n)
    assert bits.dtype == np.uint32
    assert bits[0].tolist() == [reference_hash(key, (layer * n + i) % 2**32) for i in range(n)]


@given(st.integers(0, 2**32 - 1), st.integers(1, 200))
def test_permutations_are_permutations(key, n):
    rows = orthogonal.hash_permutations(key, [0, 3], n)
    np.testing.assert_array_equal(np.sort(rows, axis=-1), np.tile(np.arange(n), (2, 1)))


def test_multiples_of_twelve_and_twenty_have_factors():
    for n in (m * 2**k for m, powers in ((1, range(1, 15)), (12, range(11)), (20, range(10))) for k in powers):
        sizes = orthogonal.factor_sizes(n)
        assert np.prod(sizes) == n
        assert max(sizes) <= 128
        assert all(orthogonal.hadamard_matrix(size) is not None for size in sizes)


def test_signs_are_balanced_and_independent():
    signs = np.concatenate([orthogonal.hash_signs(key, range(8), 512) for key in range(40)])
    assert signs.dtype == np.int8
    signs = signs.astype(float)
    assert abs(signs.mean()) < 0.01  # the standard error is 0.0025
    correlations = signs @ signs.T / 512 - np.eye(len(signs))
    assert np.abs(correlations).max() < 6 / np.sqrt(512)
    assert abs((signs[:, 1:] * signs[:, :-1]).mean()) < 0.01
