"""Quantised linear layers against float64 formulas, setting by setting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax import quant
from orthojax.errors import UserError
from orthojax.model import linear as model_linear
from orthojax.quant import SETTINGS, quantized_linear

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 12)) * np.exp(RNG.normal(size=12))
KERNEL = RNG.normal(size=(12, 9)) * np.exp(RNG.normal(size=9))
BIAS = RNG.normal(size=9)


def absmax(x, axes):
    step = np.abs(x).max(axis=axes, keepdims=True) / 127
    return np.round(x / step) * step


def zeropoint(x, axes):
    low, high = x.min(axis=axes, keepdims=True), x.max(axis=axes, keepdims=True)
    step = (high - low) / 15
    shift = np.round(low / step)
    return np.clip(np.round(x / step), shift, shift + 15) * step


EXPECTED = {
    "int8_fine": lambda x, w, b: absmax(x, (0, 1)) @ absmax(w, 0) + b,
    "int8_fine_per_token": lambda x, w, b: absmax(x, 2) @ absmax(w, 0) + b,
    "int8_moderate": lambda x, w, b: absmax(x, None) @ absmax(w, None) + b,
    "int8_coarse": lambda x, w, b: absmax(absmax(x, None) @ absmax(w, None) + b, None),
    "int4_zeropoint": lambda x, w, b: x @ zeropoint(w, 0) + b,
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("biased", [True, False])
def test_every_setting_matches_its_definition(name, biased, x64):
    assert quant.SETTINGS.keys() == EXPECTED.keys()
    linear = jax.jit(quant.quantized_linear(quant.SETTINGS[name]), static_argnums=3)
    expected = EXPECTED[name](X, KERNEL, BIAS if biased else 0.0)
    y = linear(jnp.asarray(X), jnp.asarray(KERNEL), jnp.asarray(BIAS) if biased else None, "layers/mlp/input")
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
    assert not np.allclose(y, X @ KERNEL + (BIAS if biased else 0.0), rtol=1e-6)


def error(name, x, kernel=KERNEL):
    linear = jax.jit(quant.quantized_linear(quant.SETTINGS[name]), static_argnums=3)
    y = linear(jnp.asarray(x), jnp.asarray(kernel), None, "mlp")
    return np.linalg.norm(y - x @ kernel) / np.linalg.norm(x @ kernel)


def test_an_outlier_channel_hurts_per_tensor_steps_only():
    x = RNG.normal(size=(4, 64, 12))
    outliers = x * np.where(np.arange(12) == 3, 1000.0, 1.0)
    kernel = KERNEL * np.where(np.arange(12) == 3, 1e-3, 1.0)[:, None]  # its weights are small: the product is the same
    assert error("int8_fine", x) < error("int8_moderate", x) < 0.05
    assert error("int8_moderate", outliers, kernel) > 0.5
    assert error("int8_coarse", outliers, kernel) > 0.5
    assert error("int8_fine", outliers, KERNEL) < 0.05


def test_include_is_a_path_rule_that_leaves_the_head_float():
    x, kernel = jnp.asarray(X, jnp.float32), jnp.asarray(KERNEL, jnp.float32)

    def is_quantized(include, path):
        linear = quant.quantized_linear(quant.INT8_MODERATE, **include)
        return not np.array_equal(linear(x, kernel, None, path), x @ kernel)

    assert not is_quantized({}, "head")
    assert not is_quantized({}, "model/head")
    for path in ("layers/attention/query", "layers/mlp/output", "multi_head/query", "layers/heads"):
        assert is_quantized({}, path)
    assert is_quantized({"include": ""}, "head")
    assert is_quantized({"include": "mlp/"}, "layers/mlp/input")
    assert not is_quantized({"include": "mlp/"}, "layers/attention/query")
    with pytest.raises(UserError, match="not a regular expression"):
        quant.quantized_linear(quant.INT8_FINE, include="(")


@pytest.mark.parametrize("name", EXPECTED)
def test_half_precision_inputs_jit_and_dead_features(name):
    linear = jax.jit(quant.quantized_linear(quant.SETTINGS[name]), static_argnums=3)
    x = jnp.asarray(X, jnp.bfloat16).at[..., 0].set(0.0).at[0, 0].set(0.0)
    y = linear(x, jnp.asarray(KERNEL, jnp.float32), jnp.asarray(BIAS, jnp.bfloat16), "mlp")
    assert y.dtype == jnp.bfloat16
    assert y.shape == (2, 5, 9)
    assert jnp.isfinite(y).all()


def test_settings_are_values():
    assert quant.SETTINGS["int8_fine"] == quant.QuantizationSetting(8, "absmax", "output_channel", inputs="feature")
    with pytest.raises(UserError, match="2 to 16"):
        quant.QuantizationSetting(32, "absmax", "tensor")


def test_params_are_quantized_by_path_with_stacked_kernels_apart():
    stacked = np.stack([KERNEL, 100 * KERNEL[::-1]]).astype(np.float32)
    params = {"layers": {"dense": {"kernel": stacked, "bias": BIAS}}, "embed": {"embedding": KERNEL}}
    got = quant.quantize_params(params, quant.INT4_ZEROPOINT, "kernel$")
    for layer in range(2):
        np.testing.assert_allclose(
            got["layers"]["dense"]["kernel"][layer], zeropoint(stacked[layer].astype(np.float64), 0), rtol=1e-4
        )
    assert got["layers"]["dense"]["bias"] is BIAS
    assert got["embed"]["embedding"] is KERNEL
    per_tensor = quant.QuantizationSetting(8, "absmax", "tensor")
    kernels = quant.quantize_params(params, per_tensor, "kernel$")["layers"]["dense"]["kernel"]
    np.testing.assert_allclose(kernels[0], absmax(stacked[0].astype(np.float64), None), rtol=1e-5)


def test_params_refusals():
    params = {"kernel": KERNEL, "bias": BIAS}
    with pytest.raises(UserError, match="rounds activations"):
        quant.quantize_params(params, quant.INT8_FINE, "kernel")
    with pytest.raises(UserError, match="matches no parameter"):
        quant.quantize_params(params, quant.INT4_ZEROPOINT, "weight")
    with pytest.raises(UserError, match="matches bias"):
        quant.quantize_params(params, quant.INT4_ZEROPOINT, "bias")


@pytest.mark.slow
def test_a_float_head_is_the_models_own_in_half_precision():
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((3, 8), (8, 5)))
    expected = model_linear(x, kernel, None, "head")
    assert expected.dtype == jnp.float32  # logits are not rounded
    for setting in SETTINGS.values():
        np.testing.assert_array_equal(quantized_linear(setting)(x, kernel, None, "head"), expected)
        assert quantized_linear(setting, include="")(x, kernel, None, "head").dtype == jnp.float32
        assert quantized_linear(setting)(x, kernel, None, "mlp/input").dtype == jnp.bfloat16
