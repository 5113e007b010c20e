"""Rotary positions and their frequencies, against float64 NumPy from the equations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.ops import llama3_frequencies, rotary, rotary_frequencies, yarn_frequencies, yarn_mscale


def plain(width, theta):
    return np.array([theta ** (-2 * i / width) for i in range(width // 2)])


@pytest.mark.parametrize(
    ("width", "theta", "factor", "length", "slow", "fast"),
    [
        (64, 10_000.0, 40.0, 4096, 1.0, 32.0),  # DeepSeek-V2
        (128, 1e6, 4.0, 32_768, 1.0, 32.0),  # Qwen 2.5
        (8, 100.0, 4.0, 64, 1.0, 4.0),
        (8, 100.0, 4.0, 2, 1.0, 32.0),  # no pair makes a whole turn: both bounds are the first pair
    ],
)
def test_yarn_lowers_frequencies_of_few_turns(width, theta, factor, length, slow, fast):
    with jax.enable_x64(True):
        got = np.asarray(yarn_frequencies(width, theta, factor, length, slow, fast))
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


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    factor, length, low, high = 8.0, 64, 1.0, 4.0
    with jax.enable_x64(True):
        got = np.asarray(llama3_frequencies(rotary_frequencies(16, 100.0), factor, length, low, high))
    expected = []
    for frequency in plain(16, 100.0):
        wavelength = 2 * math.pi / frequency
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * frequency / factor + smooth * frequency
        long, short = wavelength > length / low, wavelength < length / high
        expected.append(frequency / factor if long else frequency if short else between)
    assert len({e / f for e, f in zip(expected, plain(16, 100.0), strict=True)}) > 3  # all three cases are there
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_scale_multiplies_rotated_channels_only():
    x = np.random.default_rng(0).normal(size=(5, 2, 6))
    with jax.enable_x64(True):
        options = {"positions": jnp.arange(5), "frequencies": jnp.array([1.0, 0.1])}
        once, twice = (np.asarray(rotary(jnp.asarray(x), scale=scale, **options)) for scale in (1.0, 2.0))
    np.testing.assert_allclose(twice[..., :4], 2 * once[..., :4], rtol=1e-12)
    np.testing.assert_array_equal(twice[..., 4:], x[..., 4:])
    z = (x[..., :2] + 1j * x[..., 2:4]) * np.exp(1j * np.outer(np.arange(5), [1.0, 0.1]))[:, None]
    np.testing.assert_allclose(once[..., :4], np.concatenate([z.real, z.imag], -1), rtol=1e-12)


def test_yarn_refuses_a_base_that_gives_no_wavelengths():
    with pytest.raises(ValueError, match=r"theta=1\.0; allowed: above 1"):
        yarn_frequencies(8, 1.0, 4.0, 64)
    assert yarn_mscale(1.0, 0.707) == 1.0
