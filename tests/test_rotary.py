"""Rotary positions and their frequencies, against float64 NumPy from the equations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax import ops


def plain(width, theta):
    return np.array([theta ** (-2 * i / width) for i in range(width // 2)])


def test_dynamic_frequencies_grow_with_the_length():
    with jax.enable_x64(True):
        for length, base in ((1, 100.0), (16, 100.0), (24, 100.0 * 3.0 ** (8 / 6)), (64, 100.0 * 13.0 ** (8 / 6))):
            np.testing.assert_allclose(ops.dynamic_frequencies(8, 100.0, 4.0, 16, length), plain(8, base), rtol=1e-12)


@pytest.mark.parametrize(("width", "theta", "factor", "length", "slow", "fast"), [
    (64, 10_000.0, 40.0, 4096, 1.0, 32.0),  # DeepSeek-V2
    (128, 1e6, 4.0, 32_768, 1.0, 32.0),  # Qwen 2.5
    (8, 100.0, 4.0, 64, 1.0, 4.0),
    (8, 100.0, 4.0, 2, 1.0, 32.0),  # no pair makes a whole turn: both bounds are the first pair
])  # fmt: skip
def test_yarn_lowers_frequencies_of_few_turns(width, theta, factor, length, slow, fast):
    with jax.enable_x64(True):
        got = np.asarray(ops.yarn_frequencies(width, theta, factor, length, slow, fast))
    frequencies = plain(width, theta)
    turns = length * frequencies / (2 * math.pi)
    # The last pair of at least `fast` turns, the first of at most `slow`, by search instead of by logarithms.
    many, few = np.flatnonzero(turns >= fast), np.flatnonzero(turns <= slow)
    first = many[-1] if len(many) else 0
    last = few[0] if len(few) else None
    for i, (frequency, lowered) in enumerate(zip(frequencies, got, strict=True)):
        if i <= first and len(many):
            np.testing.assert_allclose(lowered, frequency, rtol=1e-12)
        elif last is not None and i >= max(last, 1):
            np.testing.assert_allclose(lowered, frequency / factor, rtol=1e-12)
        elif last is not None and last > first:
            share = (i - first) / (last - first)
            np.testing.assert_allclose(lowered, frequency * (1 - share + share / factor), rtol=1e-12)


def test_yarn_may_leave_its_bounds_between_pairs():
    width, theta, factor, length, slow, fast = 64, 150_000.0, 32.0, 4096, 1.0, 32.0  # gpt-oss
    with jax.enable_x64(True):
        got = np.asarray(ops.yarn_frequencies(width, theta, factor, length, slow, fast, truncate=False))
    frequencies = plain(width, theta)
    # Pair i makes length theta^(-2i / width) / 2 pi turns, so bounds in turns are bounds in i by interpolation in log.
    turns = np.log(length * frequencies / (2 * math.pi))
    first, last = (np.interp(-math.log(n), -turns, np.arange(width // 2)) for n in (fast, slow))
    share = np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)
    np.testing.assert_allclose(got, frequencies * (1 - share + share / factor), rtol=1e-12)
    assert abs(first - round(first)) > 0.01
    assert ops.yarn_mscale(1.0, 0.707) == 1.0  # what is not stretched is not scaled


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    factor, length, low, high = 8.0, 64, 1.0, 4.0
    with jax.enable_x64(True):
        got = np.asarray(ops.llama3_frequencies(ops.rotary_frequencies(16, 100.0), factor, length, low, high))
    expected = []
    for frequency in plain(16, 100.0):
        wavelength = 2 * math.pi / frequency
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * frequency / factor + smooth * frequency
        long, short = wavelength > length / low, wavelength < length / high
        expected.append(frequency / factor if long else frequency if short else between)
    assert len({e / f for e, f in zip(expected, plain(16, 100.0), strict=True)}) > 3  # all three cases are there
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def turned(x, positions, frequencies):
    """Rotates pairs (i, i + H/2) of the first channels as complex numbers, in float64."""
    x, half = np.asarray(x, np.float64), len(frequencies)
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * np.outer(positions, frequencies))[:, None]
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("theta", [10_000.0, 500.0])
@pytest.mark.parametrize("shape", [(2, 6, 3, 8), (2, 2, 6, 3, 4)])
def test_pairs_of_channels_rotate(shape, theta, x64):
    x, positions = np.random.default_rng(0).normal(size=shape), np.array([0, 1, 5, 2, 1000, 7])
    expected = turned(x, positions, plain(shape[-1], theta))
    found = ops.rotary(jnp.asarray(x), jnp.asarray(positions), theta)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_a_scale_multiplies_rotated_channels_only(x64):
    x, frequencies = np.random.default_rng(0).normal(size=(5, 2, 6)), np.array([1.0, 0.1])
    got = ops.rotary(jnp.asarray(x), jnp.arange(5), frequencies=jnp.asarray(frequencies), scale=2.0)
    expected = turned(x, np.arange(5), frequencies) * np.array([2, 2, 2, 2, 1, 1])
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_half_precision_is_rotated_in_float32():
    x, positions = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 3, 8)), jnp.bfloat16), jnp.arange(1000, 1006)
    expected = ops.rotary(x.astype(jnp.float32), positions).astype(jnp.bfloat16)
    np.testing.assert_array_equal(ops.rotary(x, positions), expected)
