"""Fake quantisation against an independent library, float64 formulas and properties."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import qwix
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from orthojax.ops import quantize

# Compiled whole: op by op, every new shape would compile a dozen little programs.
absmax = jax.jit(quantize.absmax, static_argnums=(1, 2))
zeropoint = jax.jit(quantize.zeropoint, static_argnums=(1, 2))

SCHEMES = {"absmax": (absmax, 8), "zeropoint": (zeropoint, 4)}


def rounded(x, scheme, bits, axes):
    """Returns (whole numbers, step) in float64, from the equations."""
    if scheme == "absmax":
        step = np.abs(x).max(axis=axes, keepdims=True) / (2 ** (bits - 1) - 1)
        return np.round(x / step).astype(np.int64), step
    low, high = x.min(axis=axes, keepdims=True), x.max(axis=axes, keepdims=True)
    step = (high - low) / (2**bits - 1)
    z = np.round(low / step).astype(np.int64)
    return np.clip(np.round(x / step).astype(np.int64), z, z + 2**bits - 1), step


@pytest.mark.parametrize(("axes", "bits"), [(None, 8), (None, 4), (1, 3), ((0, 2), 8), ((-1,), 4)])
def test_match_the_formulas(axes, bits, x64):
    x = np.random.default_rng(0).normal(size=(5, 6, 7))
    for scheme, values in (("absmax", x), ("zeropoint", x), ("zeropoint", x + 20)):
        q, step = rounded(values, scheme, bits, axes)
        np.testing.assert_allclose(SCHEMES[scheme][0](values, bits, axes), q * step, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("axes", "channels"), [(None, ()), (0, (1,))])
def test_agree_with_qwix(axes, channels):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 48)), jnp.float32)
    # qwix's int8 reaches to 127.5; its bound times 127.5 / 127 makes the step max|x| / 127.
    # It pulls 0 into the range of minmax, so that agreement needs channels on both sides of 0.
    methods = {"absmax,1.003937": (jnp.int8, absmax(x, 8, axes)), "minmax": (jnp.int4, zeropoint(x, 4, axes))}
    for method, (dtype, ours) in methods.items():
        theirs = qwix.quantize(x, dtype, channelwise_axes=channels, calibration_method=method)
        close = np.isclose(ours, qwix.dequantize(theirs), rtol=1e-5, atol=0.0 if dtype == jnp.int8 else 1e-6)
        assert close.mean() > 0.999  # an element near a tie may fall on either side


def test_zeropoint_keeps_its_top_level_at_ties():
    # -6.5 and 8.5 round to -6 and 8: fifteen levels, one too few, were the largest value not the largest by definition.
    once = zeropoint(jnp.array([-6.5, 0.0, 8.5]))
    np.testing.assert_allclose(once, [-6.0, 0.0, 9.0], rtol=1e-6)
    np.testing.assert_allclose(zeropoint(once), once, rtol=1e-6)
    beside_zero = zeropoint(jnp.asarray(np.random.default_rng(2).uniform(3.0, 4.0, size=2000), jnp.float32))
    assert len(np.unique(beside_zero)) == 16  # all levels


@pytest.mark.parametrize("name", SCHEMES)
def test_degenerate_slices(name):
    function, bits = SCHEMES[name]
    x = jnp.array([[0.0, 0.0, 0.0], [2.5, 2.5, 2.5], [-1e-42, 0.0, 1e-42], [1.0, 0.0, -2.0], [jnp.inf, 1.0, 0.0]])
    y = function(x, bits, 1)
    assert jnp.isfinite(y[:4]).all()
    np.testing.assert_array_equal(y[:2], x[:2])
    assert y[3, 1] == 0.0
    assert jnp.isnan(y[4]).any()  # a broken activation must not pass for a good one
    np.testing.assert_array_equal(function(jnp.full((1, 3), jnp.inf), bits, 1), jnp.full((1, 3), jnp.nan))


@pytest.mark.parametrize("name", SCHEMES)
def test_empty_arrays_stay_empty(name):
    for shape, axes in (((3, 0), None), ((3, 0), 1), ((0,), 0)):
        x = jnp.zeros(shape)
        assert jax.eval_shape(lambda x, a=axes: SCHEMES[name][0](x, 4, a), x).shape == shape


LARGEST = float(np.finfo(np.float32).max)
LARGE = [(LARGEST, -LARGEST, 0.0, LARGEST / 3), (LARGEST, 0.0, 1.0, 2.0), (-LARGEST, 3e38, 1e38, 2.0)]


@pytest.mark.parametrize("name", SCHEMES)
def test_the_largest_numbers_change_by_half_a_step(name):
    arrays = [jnp.array(values, jnp.float32) for values in LARGE]
    arrays += [jnp.array([65504.0, -65504.0, 1000.0, 0.0], jnp.float16)]
    for x, bits in itertools.product(arrays, (2, 8)):
        y, exact = (np.asarray(a, np.float64) for a in (SCHEMES[name][0](x, bits), x))
        largest = np.abs(exact).max() / (2 ** (bits - 1) - 1)
        step = largest if name == "absmax" else (exact.max() - exact.min()) / (2**bits - 1)
        # A half-precision result is rounded once more.
        assert (np.abs(y - exact) <= step / 2 * (1 + 1e-4) + float(jnp.finfo(x.dtype).eps) * np.abs(exact)).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_half_precision_is_quantised_in_float32(name):
    function, bits = SCHEMES[name]
    x = jnp.asarray(np.random.default_rng(3).normal(size=(16, 16)), jnp.bfloat16)
    y = function(x, bits, 0)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, function(x.astype(jnp.float32), bits, 0).astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("function", [absmax, quantize.absmax])  # the compiler may turn divisions into products
def test_absmax_twice_is_absmax_once(dtype, function):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(200, 100)) * 0.037, dtype)
    for bits in (3, 8):
        once = function(x, bits, 1)
        np.testing.assert_array_equal(function(once, bits, 1), once)
        assert len(np.unique(np.abs(np.float32(function(x, bits))))) <= 2 ** (bits - 1)
        np.testing.assert_array_equal(jnp.max(jnp.abs(once), 1), jnp.max(jnp.abs(x), 1))


# One shape, so that nothing compiles twice.
VALUES = hnp.arrays(np.float32, (3, 8), elements=st.floats(-1e4, 1e4, width=32))


@given(VALUES)
def test_absmax_properties(x):
    y = np.asarray(absmax(x, 8, 1))
    step = np.abs(x).max(1, keepdims=True) / 127
    assert (np.abs(y - x) <= step / 2 * (1 + 1e-4)).all()
    np.testing.assert_array_equal(absmax(-x, 8, 1), -y)
    np.testing.assert_array_equal(absmax(y, 8, 1), y)
    assert (y[x == 0] == 0).all()


@given(VALUES)
def test_zeropoint_properties(x):
    y = np.asarray(zeropoint(x, 4, 1))
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    step, rounding = (high - low) / 15, 4e-6 * np.abs(x).max(1, keepdims=True)
    assert (np.abs(y - x) <= step / 2 + rounding).all()
    straddles = (low <= 0) & (high >= 0)
    assert (y[np.broadcast_to(straddles, x.shape) & (x == 0)] == 0).all()
    # Far from 0 compared with their range, float32 values do not resolve the step; then only closeness can be asked.
    twice = np.asarray(zeropoint(y, 4, 1))
    near = np.broadcast_to(straddles, x.shape)
    np.testing.assert_allclose(twice[near], y[near], rtol=1e-5)
    assert (np.abs(twice - y) <= step / 2 + rounding).all()
    order = np.argsort(x, axis=1)
    assert (np.diff(np.take_along_axis(y, order, 1), axis=1) >= 0).all()


# Narrow floats.

e4m3 = jax.jit(quantize.e4m3, static_argnums=(1, 2))
mxfp4 = jax.jit(quantize.mxfp4, static_argnums=1)
nvfp4 = jax.jit(quantize.nvfp4, static_argnums=(1, 2))
FLOATS = {"e4m3": lambda x: e4m3(x, 1), "e5m2": lambda x: quantize.e5m2(x, 1), "mxfp4": mxfp4,
          "nvfp4": lambda x: nvfp4(x, -1, -1)}  # fmt: skip


def stored(x, dtype):
    return np.asarray(x).astype(dtype).astype(np.float64)


def reference_e4m3(x, largest):
    return stored(x / largest * 448, ml_dtypes.float8_e4m3fn) / 448 * largest


def reference_mxfp4(x):
    """Blocks of at most 32 along the last axis."""
    parts = []
    for start in range(0, x.shape[-1], 32):
        block = x[..., start : start + 32]
        exponent = np.floor(np.log2(np.abs(block).max(-1, keepdims=True))) - 2
        scale = stored(2.0**exponent, ml_dtypes.float8_e8m0fnu)
        parts.append(stored(np.clip(block / scale, -6, 6), ml_dtypes.float4_e2m1fn) * scale)
    return np.concatenate(parts, -1)


def reference_nvfp4(x):
    tensor, parts = np.abs(x).max() / (6 * 448), []
    for start in range(0, x.shape[-1], 16):
        block = x[..., start : start + 16]
        scale = stored(np.abs(block).max(-1, keepdims=True) / 6 / tensor, ml_dtypes.float8_e4m3fn) * tensor
        parts.append(stored(np.clip(block / scale, -6, 6), ml_dtypes.float4_e2m1fn) * scale)
    return np.concatenate(parts, -1)


# 70 and 150 leave a smaller last block; factors spread the blocks over many exponents.
SPREAD = np.random.default_rng(5).normal(size=(3, 70)) * 10.0 ** np.random.default_rng(6).integers(-3, 3, (3, 70))


def test_narrow_floats_are_the_formats_of_ml_dtypes(x64):
    np.testing.assert_allclose(e4m3(SPREAD), reference_e4m3(SPREAD, np.abs(SPREAD).max()), rtol=1e-14)
    scale = 57344 / np.abs(SPREAD).max()
    np.testing.assert_allclose(quantize.e5m2(SPREAD), stored(SPREAD * scale, ml_dtypes.float8_e5m2) / scale, rtol=1e-14)
    np.testing.assert_array_equal(e4m3(SPREAD, -1, 10**9), e4m3(SPREAD, -1))  # no block is padded to its size
    largest = np.abs(SPREAD).max(1, keepdims=True)
    np.testing.assert_allclose(e4m3(SPREAD, 1), reference_e4m3(SPREAD, largest), rtol=1e-14)
    np.testing.assert_array_equal(mxfp4(SPREAD), reference_mxfp4(SPREAD))
    np.testing.assert_array_equal(mxfp4(SPREAD.T, 0), reference_mxfp4(SPREAD).T)
    np.testing.assert_array_equal(mxfp4(np.float32(SPREAD)), reference_mxfp4(np.float64(np.float32(SPREAD))))
    np.testing.assert_allclose(nvfp4(SPREAD), reference_nvfp4(SPREAD), rtol=1e-14)
    np.testing.assert_allclose(nvfp4(SPREAD.T, 0, (0, 1)), reference_nvfp4(SPREAD).T, rtol=1e-14)
    by_slice = np.stack([reference_nvfp4(row) for row in SPREAD])
    np.testing.assert_allclose(nvfp4(SPREAD, -1, -1), by_slice, rtol=1e-14)


@pytest.mark.parametrize("values", [np.arange(-448, 449) / 7, 2.0 ** np.arange(-20, 9), np.arange(65) / 16])
def test_every_element_and_every_tie_is_that_of_ml_dtypes(values):
    at_448, at_6 = np.r_[values, 448.0], np.r_[np.clip(values, -6, 6), 6.0]
    np.testing.assert_array_equal(e4m3(at_448.astype(np.float32)), stored(np.float32(at_448), ml_dtypes.float8_e4m3fn))
    blocks = at_6.astype(np.float32)[:, None] * [1, 0] + [0, 6.0]  # the scale of each block is 1
    y = mxfp4(blocks.astype(np.float32))[:, 0]
    np.testing.assert_array_equal(y, stored(np.float32(at_6), ml_dtypes.float4_e2m1fn))


def test_e4m3_blocks_are_squares_and_the_last_is_smaller(x64):
    x = np.random.default_rng(7).standard_cauchy(size=(2, 150, 130))
    expected, parts = np.empty_like(x), (slice(128), slice(128, None))
    for i, rows, columns in itertools.product(range(2), parts, parts):
        part = x[i, rows, columns]
        expected[i, rows, columns] = reference_e4m3(part, np.abs(part).max())
    np.testing.assert_allclose(e4m3(x, (-2, -1), 128), expected, rtol=1e-14)
    tiles = [reference_e4m3(x[..., part], np.abs(x[..., part]).max(-1, keepdims=True)) for part in parts]
    np.testing.assert_allclose(e4m3(x, -1, 128), np.concatenate(tiles, -1), rtol=1e-14)


def test_mxfp4_of_a_gaussian_is_that_of_gguf():
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.MXFP4
    for deviation in (0.5, 0.8, 1.2):  # the error depends on how the peaks of blocks lie between powers of two
        x = (deviation * np.random.default_rng(9).normal(size=(128, 256))).astype(np.float32)
        y = np.asarray(mxfp4(x))
        assert np.linalg.norm(y - x) / np.linalg.norm(x) == pytest.approx(0.1155, abs=3e-3)
        np.testing.assert_array_equal(y, gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind))


# Multiples of a small number: E4M3 keeps a slice of them in normal scales of nvfp4.
WHOLE = hnp.arrays(np.float32, (3, 40), elements=st.integers(-1000, 1000).map(lambda k: k * 0.37))


@pytest.mark.parametrize("name", FLOATS)
@given(WHOLE, st.integers(-30, 30))
def test_narrow_float_properties(name, x, power):
    function = FLOATS[name]
    y = np.asarray(function(x))
    largest = np.abs(x).max(1, keepdims=True)
    bound = {"e4m3": np.maximum(np.abs(x) / 16, largest / (448 * 2**10)), "mxfp4": largest / 4,
             "e5m2": np.maximum(np.abs(x) / 8, largest / (57344 * 2**17)), "nvfp4": 0.18 * largest}  # fmt: skip
    assert (np.abs(y - x) <= bound[name] * (1 + 1e-5)).all()
    np.testing.assert_array_equal(function(-x), -y)
    np.testing.assert_array_equal(function(y), y)
    np.testing.assert_array_equal(function(np.float32(x * 2.0**power)), y * 2.0**power)
    assert (y[x == 0] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axes", [None, -1])
def test_nvfp4_of_zeros_and_of_numbers_far_apart(dtype, axes):
    x = jnp.zeros((4, 40), dtype).at[1].set(1e-30).at[2, 5:30].set(-1e-30).at[2, ::20].set(3e38).at[3].set(3e38)
    y = nvfp4(x, -1, axes)
    assert y.dtype == dtype
    wanted = np.asarray(x, np.float64)
    wanted[2] = np.where(wanted[2] < 0, 0, wanted[2])
    wanted[1] *= axes is not None  # a tensor of its own
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=1e-6)
    np.testing.assert_array_equal(nvfp4(x[:1], -1, axes), 0.0)


@pytest.mark.parametrize("name", FLOATS)
def test_narrow_floats_of_special_values(name):
    function = FLOATS[name]
    x = jnp.array([[0.0, 0.0, 0.0], [jnp.inf, 1.0, 0.0], [jnp.nan, 1.0, 0.0], [LARGEST, -LARGEST, 0.0]], jnp.float32)
    y = np.asarray(function(x))
    np.testing.assert_array_equal(y[0], 0.0)
    assert np.isnan(y[1:3]).all()
    assert np.isfinite(y[3]).all()
    assert function(jnp.zeros((2, 0))).shape == (2, 0)
    assert function(jnp.ones((2, 3), jnp.bfloat16)).dtype == jnp.bfloat16
