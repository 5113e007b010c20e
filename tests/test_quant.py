"""Quantised linear layers against float64 formulas, and whole models."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from test_quantize import rounded
from thinned import quick_and_slow
from tiny_run import drawn_params

from orthojax import quant
from orthojax.config import ModelConfig
from orthojax.model import Transformer, init_cache, llama2, parameter_shapes, unstack_layers
from orthojax.model import linear as model_linear
from orthojax.ops import quantize
from orthojax.quant import QuantizationSetting, quantized_linear

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 128)) * np.exp(RNG.normal(size=128))
KERNEL = RNG.normal(size=(128, 9)) * np.exp(RNG.normal(size=9)) + 0.3
BIAS = RNG.normal(size=9)
LLAMA = llama2("tiny", num_layers=2, d_model=16, num_heads=2, d_mlp=24, vocab_size=32, max_length=8,
               scan_layers=False)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 32, (3, 8))
ALL = {
    **quant.SETTINGS,
    "zeropoint_groups": QuantizationSetting(4, "zeropoint", "output_channel", "token", None, 8, 32),
    "zeropoint_tensors": QuantizationSetting(8, "zeropoint", "tensor", "tensor", "tensor"),
    "groups_of_odd_size": QuantizationSetting(4, "absmax", "output_channel", "tensor", group_size=1),
    **quant.MORE_SETTINGS,
}
INTEGERS = {name: setting for name, setting in ALL.items() if setting.scheme in ("absmax", "zeropoint")}
SLOW = ("zeropoint_tensors", "groups_of_odd_size", *quant.MORE_SETTINGS)


def reference(x, kernel, bias, setting):
    """Computes y = sum_g s_x s_w (sum_i q_x q_w) + bias, the inner sums in int64 if inputs are integers."""
    features, outputs = kernel.shape
    groups, bits = features // (setting.group_size or features), setting.activation_bits or setting.bits
    axes = (0, 1, 2) if setting.weights == "tensor" else 1
    w, s_w = rounded(kernel.reshape(groups, -1, outputs), setting.scheme, setting.bits, axes)
    x = x.reshape(*x.shape[:-1], groups, -1)
    if setting.inputs is None:
        q_x, s_x = x, np.ones(1)
    else:
        axes = {"tensor": None, "token": (-2, -1), "feature": (0, 1)}[setting.inputs]
        q_x, s_x = rounded(x, setting.scheme, bits, axes)
    if setting.inputs == "feature":
        q_x, s_x = q_x * s_x, np.ones(1)
    s_w = np.broadcast_to(s_w, (groups, 1, outputs))
    s_x = np.broadcast_to(s_x, (*x.shape[:-1], 1))
    y = sum((q_x[..., g, :] @ w[g]) * s_w[g] * s_x[..., g, :] for g in range(groups)) + bias
    if setting.outputs is not None:
        q, step = rounded(y, setting.scheme, bits, None)
        y = q * step
    return y


@pytest.mark.parametrize("name", quick_and_slow(INTEGERS, SLOW))
def test_settings_are_their_definition(name, x64):
    setting = ALL[name]
    bias = None if name in ("w4a8", "int8_moderate", "int8_fine") else BIAS
    y = jax.jit(quantized_linear(setting), static_argnums=3)(X, KERNEL, bias, "mlp")
    expected = reference(X, KERNEL, 0.0 if bias is None else bias, setting)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
    assert not np.allclose(y, X @ KERNEL + (0.0 if bias is None else bias), rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in quant.MORE_SETTINGS if name not in INTEGERS])
def test_a_layer_of_narrow_floats_is_the_product_of_its_rounded_operands(name, x64):
    x = RNG.normal(size=(2, 5, 150))
    kernel = RNG.normal(size=(150, 140)) * np.exp(RNG.normal(size=140))
    of = {
        "fp8_e4m3": (quantize.e4m3(x), quantize.e4m3(kernel)),
        "fp8_e5m2": (quantize.e5m2(x), quantize.e5m2(kernel)),
        "fp8_e4m3_block128": (quantize.e4m3(x, -1, 128), quantize.e4m3(kernel, (0, 1), 128)),
        "mxfp4": (quantize.mxfp4(x), quantize.mxfp4(kernel, 0)),
        "nvfp4": (quantize.nvfp4(x), quantize.nvfp4(kernel, 0)),
    }
    a, w = map(np.asarray, of[name])
    y = quantized_linear(quant.setting_named(name))(jnp.asarray(x), jnp.asarray(kernel), None, "mlp")
    np.testing.assert_allclose(y, a @ w, rtol=1e-10, atol=1e-11)
    weights_only = dataclasses.replace(quant.setting_named(name), inputs=None)
    stacked = quant.quantize_params({"kernel": np.stack([kernel, 100 * kernel])}, weights_only, "kernel")["kernel"]
    np.testing.assert_allclose(stacked[0], w, rtol=1e-12)  # layers know nothing of each other


def test_include_leaves_the_head_float():
    x, kernel = jnp.asarray(X, jnp.float32), jnp.asarray(KERNEL, jnp.float32)

    def is_quantized(path, **include):
        return not np.array_equal(quantized_linear(quant.INT8_MODERATE, **include)(x, kernel, None, path), x @ kernel)

    assert not is_quantized("head")
    assert not is_quantized("model/head")
    for path in ("layers/attention/query", "layers/mlp/output", "multi_head/query", "layers/heads"):
        assert is_quantized(path)
    assert is_quantized("head", include="")
    assert is_quantized("layers/mlp/input", include="mlp/")
    assert not is_quantized("layers/attention/query", include="mlp/")


def test_a_float_head_is_that_of_the_model():
    x, kernel = (jnp.asarray(RNG.normal(size=shape), jnp.bfloat16) for shape in ((3, 8), (8, 5)))
    expected = model_linear(x, kernel, None, "head")
    assert expected.dtype == jnp.float32  # logits are not rounded
    for setting in quant.SETTINGS.values():
        np.testing.assert_array_equal(quantized_linear(setting)(x, kernel, None, "head"), expected)
        assert quantized_linear(setting, include="")(x, kernel, None, "head").dtype == jnp.float32
        assert quantized_linear(setting)(x, kernel, None, "mlp/input").dtype == jnp.bfloat16


def test_params_are_quantized_by_path_and_layer():
    stacked = np.stack([KERNEL, 100 * KERNEL[::-1]]).astype(np.float32)
    params = {"layers": {"dense": {"kernel": stacked, "bias": BIAS}}, "embed": {"embedding": KERNEL}}
    for setting, axes, rtol in (
        (quant.INT4_ZEROPOINT, 0, 1e-4),
        (QuantizationSetting(8, "absmax", "tensor"), None, 1e-5),
    ):
        got = quant.quantize_params(params, setting, "kernel$")
        for layer in range(2):
            q, step = rounded(stacked[layer].astype(np.float64), setting.scheme, setting.bits, axes)
            np.testing.assert_allclose(got["layers"]["dense"]["kernel"][layer], q * step, rtol=rtol)
        assert got["layers"]["dense"]["bias"] is BIAS
        assert got["embed"]["embedding"] is KERNEL


PARAMS = {"mlp": {"kernel": KERNEL, "bias": BIAS}}
GROUPS_OF_48 = QuantizationSetting(4, "absmax", "output_channel", group_size=48)
REFUSED = [
    (lambda: quantized_linear(GROUPS_OF_48)(jnp.asarray(X), jnp.asarray(KERNEL), None, "mlp/kernel"), "group_size=48"),
    (lambda: quantized_linear(quant.INT8_FINE, include="("), "include"),
    (lambda: quant.quantize_params(PARAMS, quant.INT8_FINE, "kernel"), "activations"),
    (lambda: quant.quantize_params(PARAMS, quant.INT4_ZEROPOINT, "weight"), "weight"),
    (lambda: quant.quantize_params(PARAMS, quant.INT4_ZEROPOINT, "bias"), "mlp/bias"),
    (lambda: QuantizationSetting(32, "absmax", "tensor"), "bits=32"),
    (lambda: QuantizationSetting(4, "absmax", "tensor", group_size=8), "group_size=8"),
    (lambda: QuantizationSetting(4, "absmax", "tensor", activation_bits=1), "activation_bits=1 "),
    (lambda: QuantizationSetting(8, "absmax", "tensor", "tokens"), "inputs='tokens'"),
    (lambda: QuantizationSetting(4, "zeropoint", "output_channel", activation_bits=8), "activation_bits=8"),
    (lambda: quant.setting_named("w4a8_group46"), "w4a8_group64"),
    (lambda: QuantizationSetting(8, "absmax", "block"), "weights='block'"),
    (lambda: QuantizationSetting(8, "absmaxx", "tensor"), ("scheme='absmaxx'", "allowed: 'absmax', ", "'absmax'?")),
    (lambda: QuantizationSetting(4, "e4m3", "tensor"), "bits=4"),
    (lambda: QuantizationSetting(8, "e4m3", "output_channel", group_size=8), "group_size=8"),
    (lambda: QuantizationSetting(4, "mxfp4", "output_channel"), "weights='output_channel'"),
    (lambda: QuantizationSetting(4, "nvfp4", "block", "token"), "inputs='token'"),
    (lambda: QuantizationSetting(4, "absmax", "tensor", keys_and_values=1), "keys_and_values=1 "),
    (lambda: quant.quantize_params(PARAMS, dataclasses.replace(quant.INT4_ZEROPOINT, keys_and_values=4), "kernel"),
     "keys_and_values=4"),
    (lambda: quant.rounded_cache(Transformer(LLAMA), 1), "bits=1"),
    *((lambda bits=bits, first=first: quant.rounded_cache(Transformer(LLAMA), bits, first), "allowed: integers")
      for bits, first in ((2.5, 0), (1, 0), (8, -1), (8, 0.5))),
]  # fmt: skip


test_refused = refused((lambda _, call: call(), REFUSED))


@pytest.mark.parametrize("scan", [True, False])
def test_keys_and_values_are_rounded_by_token_and_head(scan):
    sizes = {"d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_mlp": 24, "vocab_size": 32}
    config = llama2("tiny", **sizes, scan_layers=scan)
    params, tokens = drawn_params(config, 0.3), IDS
    setting = quant.setting_named("w4a4kv4")
    observe = lambda taps: (taps.keys, taps.values)  # noqa: E731

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, params):
        return model.apply({"params": params}, tokens, observe=observe)

    linear_only = Transformer(config, linear=quantized_linear(setting))
    (_, floats), (_, (keys, values)) = run(linear_only, params), run(quant.rounded_model(config, setting), params)
    for found, plain in zip((keys, values), floats, strict=True):
        # The first layer gets the same inputs in both, by token and head over its channels.
        expected, step = rounded(np.asarray(plain[0], np.float64), "zeropoint", 4, -1)
        np.testing.assert_allclose(found[0], expected * step, atol=1e-5)
        assert np.abs(found[0] - plain[0]).max() > 0.01
        assert np.abs(found[1] - plain[1]).max() > 0.01
    assert quant.rounded_model(config, setting) == quant.rounded_model(config, setting)  # one program for both


def test_without_rounded_keys_and_values_a_model_is_the_plain_one():
    params = parameter_shapes(LLAMA)

    def program(**rounded):
        return str(jax.make_jaxpr(lambda p: Transformer(LLAMA, **rounded).apply({"params": p}, IDS)[0])(params))

    plain = program()
    assert program(round_kv=None) == plain == program(round_kv=lambda x: x)
    assert program(round_kv=lambda x: 2 * x) != plain


def test_the_first_keys_and_values_may_stay_float():
    params, observe = drawn_params(LLAMA, 0.3), lambda taps: (taps.keys, taps.values)
    models = Transformer(LLAMA), *(quant.rounded_cache(Transformer(LLAMA), 4, first) for first in (2, 0))
    floats, some, none = (model.apply({"params": params}, IDS, observe=observe)[1] for model in models)
    for plain, kept, rest in zip(floats, some, none, strict=True):  # of the first layer
        expected, step = rounded(np.asarray(plain[0], np.float64), "zeropoint", 4, -1)
        np.testing.assert_allclose(rest[0], expected * step, atol=1e-5)
        np.testing.assert_array_equal(kept[0][:, :2], plain[0][:, :2])
        np.testing.assert_array_equal(kept[0][:, 2:], rest[0][:, 2:])
        assert np.abs(rest[0][:, :2] - plain[0][:, :2]).max() > 0.01


@pytest.mark.parametrize("first", [None, 2])
def test_a_cache_gives_rounded_keys_and_values_too(first):
    config = dataclasses.replace(LLAMA, scan_layers=True)
    model = quant.rounded_model(config, QuantizationSetting(16, "absmax", "output_channel", keys_and_values=3))
    model = model if first is None else quant.rounded_cache(Transformer(config), 3, first)

    @jax.jit
    def run(params, cache):
        def read(cache, tokens):
            return model.apply({"params": params}, tokens, cache=cache)[::-1]

        whole, (_, prefill) = model.apply({"params": params}, IDS)[0], read(cache, IDS)
        cache, start = read(cache, IDS[:, :3])
        rest = jax.lax.scan(read, cache, IDS[:, 3:].T[..., None])[1][:, :, 0]
        plain = Transformer(config).apply({"params": params}, IDS)[0]
        return prefill, whole, jnp.concatenate([start, jnp.swapaxes(rest, 0, 1)], 1), plain

    prefill, whole, one_by_one, plain = run(drawn_params(config, 0.3), init_cache(config, len(IDS), 8))
    np.testing.assert_allclose(prefill, whole, atol=1e-4)
    np.testing.assert_allclose(one_by_one, prefill, atol=1e-4)
    assert np.abs(whole - plain).max() > 0.01


def in_db(signal, noise):
    return 10 * np.log10(np.sum(signal**2) / np.sum(noise**2))


@pytest.mark.parametrize("scan", [True, False])
def test_errors_of_layers_are_those_of_float64(scan):
    sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_mlp": 24, "vocab_size": 32, "max_length": 8}
    plain = {"attention": False, "norm": "none", "mlp": "relu", "position": "none", "tie_embeddings": False}
    config = ModelConfig(**sizes, **plain, scan_layers=scan)
    params = drawn_params(config, 0.3)
    setting = QuantizationSetting(5, "absmax", "output_channel", "token")
    found = quant.rounding_error(Transformer(config), params, setting, IDS)
    of = jax.tree.map(np.float64, unstack_layers(params) if scan else params)

    def on_grid(x, axis):
        q, step = rounded(x, "absmax", 5, axis)
        return q * step

    h = g = of["token_embedding"]["embedding"][IDS]
    for layer in range(2):
        hidden, other = h, g
        for name in ("input", "output"):
            w = of[f"layers_{layer}"]["mlp"][name]["kernel"]
            y, without, with_rounding = hidden @ w, other @ w, on_grid(other, -1) @ on_grid(w, 0)
            path = f"layers_{layer}/mlp/{name}"
            assert found.linear[path].whole == pytest.approx(in_db(y, with_rounding - y), abs=0.02)
            assert found.linear[path].added == pytest.approx(in_db(y, with_rounding - without), abs=0.02)
            if path == "layers_0/mlp/input":
                assert found.linear[path].inherited == np.inf
            else:
                assert found.linear[path].inherited == pytest.approx(in_db(y, without - y), abs=0.02)
            hidden, other = np.maximum(y, 0), np.maximum(with_rounding, 0)
        h, g = h + y, g + with_rounding
    w = of["head"]["kernel"]
    assert (
        found.linear["head"].whole
        == found.linear["head"].inherited
        == pytest.approx(in_db(h @ w, (g - h) @ w), abs=0.02)
    )
    assert found.linear["head"].added == np.inf
    error = np.linalg.norm(g - h, axis=-1) / np.linalg.norm(h, axis=-1)
    assert found.last_state == pytest.approx(error.mean(), rel=1e-3)
    assert [of.layer for of in found.linear.values()] == [None, 0, 0, 1, 1]


def test_rounded_keys_and_values_are_inherited_by_the_output_of_attention():
    setting = QuantizationSetting(16, "absmax", "output_channel", "token", keys_and_values=2)
    found = quant.rounding_error(Transformer(LLAMA), drawn_params(LLAMA), setting, IDS)
    assert found.linear["layers_0/attention/value"].whole > 60
    assert found.linear["layers_0/attention/output"].inherited < 20 < found.linear["layers_0/attention/output"].added
