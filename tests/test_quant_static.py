"""Static scales of activations: what is calibrated, and what is rounded and cut, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import drawn_params

from orthojax import quant
from orthojax.errors import UserError
from orthojax.model import Transformer, llama2

CONFIG = llama2("tiny", num_layers=2, d_model=16, num_heads=2, d_mlp=24, vocab_size=32, max_length=8,
                scan_layers=False)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 32, (3, 8))


@pytest.fixture(scope="module")
def params():
    return drawn_params(CONFIG)


def test_the_largest_values_of_every_layer_are_kept(params):
    seen = {}

    def linear(x, kernel, bias, path):
        seen[path] = np.asarray(x), np.asarray(x) @ np.asarray(kernel)
        return jnp.asarray(seen[path][1])

    Transformer(CONFIG, linear=linear, linear_head=True).apply({"params": params}, TOKENS)  # not traced
    found = quant.calibrate(Transformer(CONFIG), params, TOKENS)
    assert found.inputs.keys() == found.outputs.keys() == seen.keys()
    assert "layers_1/mlp/gate" in seen
    assert "head" in seen
    for path, (x, y) in seen.items():
        assert float(found.inputs[path]) == pytest.approx(np.abs(x).max(), rel=1e-5)
        assert float(found.outputs[path]) == pytest.approx(np.abs(y).max(), rel=1e-5)


def test_a_model_that_recomputes_its_blocks_is_calibrated(params):
    plain = quant.calibrate(Transformer(CONFIG), params, TOKENS)
    found = quant.calibrate(Transformer(dataclasses.replace(CONFIG, remat=True)), params, TOKENS)
    jax.tree.map(np.testing.assert_array_equal, found, plain)


@pytest.mark.parametrize("setting", [quant.INT8_MODERATE, quant.INT8_COARSE])
@pytest.mark.parametrize("peak", [2.0, 8.0])
def test_a_layer_is_its_definition_in_float64(setting, peak):
    rng = np.random.default_rng(1)
    x, kernel, bias = rng.normal(size=(5, 16)) * 2, rng.normal(size=(16, 9)), rng.normal(size=9)
    assert 2.0 < np.abs(x).max() < 8.0
    calibration = quant.Calibration({"a": jnp.float32(peak)}, {"a": jnp.float32(6.0)})

    def on_scale(values, largest):
        return np.clip(np.round(values / (largest / 127)), -127, 127) * (largest / 127)

    wanted = on_scale(x, peak) @ on_scale(kernel, np.abs(kernel).max()) + bias
    if setting.outputs:
        wanted = on_scale(wanted, 6.0)
    with jax.enable_x64(True):
        found = quant.static_linear(setting, calibration)(*map(jnp.asarray, (x, kernel, bias)), "a")
    np.testing.assert_allclose(found, wanted, atol=1e-9)


def test_on_its_own_text_a_model_is_that_of_dynamic_scales(params):
    """One batch, whose largest inputs are those of the calibration where nothing before is rounded."""
    calibration = quant.calibrate(Transformer(CONFIG), params, TOKENS)
    first = "layers_0/attention/(query|key|value)$"
    linears = (
        quant.static_linear(quant.INT8_MODERATE, calibration, first),
        quant.quantized_linear(quant.INT8_MODERATE, first),
        Transformer(CONFIG).linear,
    )
    models = [Transformer(CONFIG, linear=of) for of in linears]
    static, dynamic, plain = jax.jit(lambda p: [of.apply({"params": p}, TOKENS)[0] for of in models])(params)
    np.testing.assert_allclose(static, dynamic, atol=1e-5)
    assert np.abs(np.asarray(plain) - np.asarray(static)).max() > 1e-4


def test_refused(params):
    scanned = Transformer(dataclasses.replace(CONFIG, scan_layers=True))
    with pytest.raises(UserError, match="scanned"):
        quant.calibrate(scanned, params, TOKENS)
    for setting in (quant.INT8_FINE, quant.INT4_ZEROPOINT, dataclasses.replace(quant.INT8_COARSE, float_features=1)):
        with pytest.raises(UserError, match="static scales"):
            quant.static_linear(setting, quant.Calibration({}, {}))
    x = jnp.ones((2, 2))
    with pytest.raises(UserError, match="no scale of b"):
        quant.static_linear(quant.INT8_COARSE, quant.Calibration({}, {}))(x, x, None, "b")
    still = quant.static_linear(quant.INT8_MODERATE, quant.Calibration({"a": jnp.float32(0)}, {}))
    np.testing.assert_array_equal(still(jnp.zeros((1, 2)), jnp.ones((2, 1)), None, "a"), 0.0)  # a layer without input
