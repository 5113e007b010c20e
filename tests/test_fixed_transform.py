"""Every form of the fixed transforms is one and the same matrix, and a program holds the form of its platform only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orthojax.ops import orthogonal
from orthojax.ops.orthogonal import dct_matrix, hadamard_matrix

FORMS = {"cpu": orthogonal._on_cpu, "accelerator": orthogonal._on_accelerator}


def reference(n):
    """The Kronecker product of the factors, in float64."""
    factors = []
    for size in orthogonal.factor_sizes(n):
        hadamard = hadamard_matrix(size)
        factors.append(dct_matrix(size) if hadamard is None else hadamard / np.sqrt(size))
    return functools.reduce(np.kron, factors)


def check(form, n, axis, transpose, dtype, tolerance):
    shape = [2, 3, 2]
    shape[axis] = n
    x = np.random.default_rng(n).standard_normal(shape).astype(dtype)
    factors, scale = orthogonal._kronecker_factors(n, "hadamard")
    got = jax.jit(lambda x: FORMS[form](x, factors, axis, transpose) * scale)(x)
    assert got.dtype == dtype
    matrix = reference(n).T if transpose else reference(n)
    want = np.moveaxis(np.tensordot(matrix, x.astype(np.float64), (1, axis)), 0, axis)
    np.testing.assert_allclose(got, want, atol=tolerance * np.abs(x).max())


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15)  # every size compiles anew
@given(
    st.integers(2, 300).filter(lambda n: orthogonal.factor_sizes(n)), st.integers(0, 2), st.booleans(), st.booleans()
)
def test_every_form_is_the_kronecker_product(form, n, axis, transpose, single):
    with jax.enable_x64(True):
        check(form, n, axis, transpose, *((np.float32, 1e-5) if single else (np.float64, 1e-12)))


QUICK_SIZES = (768, 1000, 2304)  # each with another odd factor
SLOW_SIZES = (512, 640, 1024, 2048, 3072, 4096)


@pytest.mark.parametrize("n", [*QUICK_SIZES, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_SIZES)])
def test_every_form_at_the_sizes_of_models(n):
    with jax.enable_x64(True):
        for i, form in enumerate(FORMS):
            for axis in (0, 2):
                check(form, n, axis, bool((axis + i) % 4), np.float64, 1e-12)
        check("cpu", n, 2, False, np.float32, 1e-5)
        check("accelerator", n, 1, True, np.float32, 1e-5)


@pytest.mark.parametrize(
    ("n", "products"), [(768, {"cpu": 2, "cuda": 1, "tpu": 1}), (3072, {"cpu": 3, "cuda": 2, "tpu": 2})]
)
def test_a_program_holds_the_form_of_its_platform_only(n, products):
    x = jax.ShapeDtypeStruct((4, n), jnp.float32)
    for platform, count in products.items():
        traced = jax.jit(lambda x: orthogonal.fixed_transform(x, 1)).trace(x)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.dot_general") == count, platform
        assert len(text) < 100_000  # no matrix of n x n as a constant


def test_leaves_of_equal_shape_are_lowered_once():
    def transform(xs):
        return [orthogonal.fixed_transform(x, 1) for x in xs]

    texts = [jax.jit(transform).lower([jnp.zeros((4, 768))] * count).as_text() for count in (1, 12)]
    assert texts[0].count("stablehlo.dot_general") == texts[1].count("stablehlo.dot_general") == 2


def test_transformations_of_jax(x64):
    """Under vmap, scan, eval_shape, and a derivative: a linear map is its own derivative, its transpose the adjoint."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 24, 2)))
    matrix = reference(24)
    want = np.einsum("ab,ibc->iac", matrix, x)
    transform = functools.partial(orthogonal.fixed_transform, axis=0)
    np.testing.assert_allclose(jax.vmap(transform)(x), want, atol=1e-12)
    np.testing.assert_allclose(jax.lax.map(transform, x), want, atol=1e-12)
    np.testing.assert_allclose(jax.grad(lambda y: jnp.vdot(x[1], transform(y)))(x[0]), matrix.T @ x[1], atol=1e-12)
    shape = jax.eval_shape(transform, jax.ShapeDtypeStruct((50304, 8), jnp.float32))
    assert (shape.shape, shape.dtype) == ((50304, 8), jnp.float32)
