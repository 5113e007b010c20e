import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.ops import rotary


def _oracle(x, positions, theta):
    """Complex numbers in float64: pair (i, i + H/2) is one number that turns."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    for t, position in enumerate(positions):
        for i in range(half):
            z[..., t, :, i] *= np.exp(1j * position * theta ** (-2.0 * i / x.shape[-1]))
    return np.concatenate([z.real, z.imag], -1)


def _x(shape=(2, 6, 3, 8), dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("theta", [10_000.0, 500.0])
@pytest.mark.parametrize("shape", [(2, 6, 3, 8), (6, 1, 2), (2, 2, 6, 3, 4)])
def test_rotary_turns_complex_pairs_in_float64(shape, theta):
    x, positions = _x(shape, jnp.float64), np.array([0, 1, 5, 2, 1000, 7])
    y = rotary(x, jnp.asarray(positions), theta)
    assert y.dtype == jnp.float64
    np.testing.assert_allclose(y, _oracle(x, positions, theta), rtol=1e-10, atol=1e-12)


def test_float32_agrees_with_float64_at_the_positions_of_training():
    positions = np.arange(2042, 2048)
    np.testing.assert_allclose(rotary(_x(), jnp.asarray(positions)), _oracle(_x(), positions, 1e4), atol=1e-3)


@pytest.mark.usefixtures("x64")
def test_products_depend_on_relative_positions_only():
    q, k = _x(dtype=jnp.float64), _x(dtype=jnp.float64)[::-1]

    def products(shift):
        turned = (rotary(a, jnp.arange(6) + shift) for a in (q, k))
        return jnp.einsum("BTNH,BSNH->BNTS", *turned)

    np.testing.assert_allclose(products(0), products(37), rtol=1e-9, atol=1e-11)
    assert np.abs(products(0) - jnp.einsum("BTNH,BSNH->BNTS", q, k)).max() > 0.1


def test_norm_is_preserved_and_position_zero_does_not_turn():
    x = _x()
    y = rotary(x, jnp.arange(6))
    np.testing.assert_allclose(jnp.linalg.norm(y, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_array_equal(y[:, 0], x[:, 0])
    assert (np.abs(y[:, 1:] - x[:, 1:]).max((0, 2, 3)) > 0.1).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x, positions = _x(dtype=dtype), jnp.arange(1000, 1006)
    y = rotary(x, positions)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, rotary(x.astype(jnp.float32), positions).astype(dtype))


def test_odd_width_is_refused():
    with pytest.raises(ValueError, match="even head width, got 5"):
        rotary(jnp.zeros((1, 2, 1, 5)), jnp.arange(2))


def test_gradient_turns_back():
    x, positions = _x(), jnp.arange(6)
    y, pullback = jax.vjp(lambda x: rotary(x, positions), x)
    np.testing.assert_allclose(pullback(y)[0], x, rtol=1e-5, atol=1e-6)
