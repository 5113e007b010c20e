"""Quantised linear layers against float64 formulas, integer products against int64 sums, qwix, and whole models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from orthojax import quant
from orthojax.errors import UserError
from orthojax.model import Transformer, gpt2, llama2, parameter_shapes
from orthojax.model import linear as model_linear
from orthojax.ops.quantize import Quantized, absmax, dequantize, quantize, zeropoint
from orthojax.quant import QuantizationSetting, integer_linear, integer_params, quantized_linear

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 128)) * np.exp(RNG.normal(size=128))
KERNEL = RNG.normal(size=(128, 9)) * np.exp(RNG.normal(size=9)) + 0.3
BIAS = RNG.normal(size=9)
ON_INTEGERS = ("int8_fine_per_token", "int8_moderate", "int8_coarse", "int4_zeropoint", "w4a8", "w4a4")
ALL = {
    **quant.SETTINGS,
    "zeropoint_groups": QuantizationSetting(4, "zeropoint", "output_channel", "token", None, 8, 32),
    "zeropoint_tensors": QuantizationSetting(8, "zeropoint", "tensor", "tensor", "tensor"),
    "groups_of_odd_size": QuantizationSetting(4, "absmax", "output_channel", "tensor", group_size=1),
    **quant.MORE_SETTINGS,
}
QUICK = {*quant.SETTINGS, "zeropoint_groups"}


def slow_unless(quick, names):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def rounded(x, scheme, bits, axes):
    """(whole numbers, step) in float64, from the equations."""
    if scheme == "absmax":
        step = np.abs(x).max(axis=axes, keepdims=True) / (2 ** (bits - 1) - 1)
        return np.round(x / step).astype(np.int64), step
    low, high = x.min(axis=axes, keepdims=True), x.max(axis=axes, keepdims=True)
    step = (high - low) / (2**bits - 1)
    z = np.round(low / step).astype(np.int64)
    return np.clip(np.round(x / step).astype(np.int64), z, z + 2**bits - 1), step


def reference(x, kernel, bias, setting):
    """y = sum_g s_x s_w (sum_i q_x q_w) + bias, the inner sums in int64 where the step of an input leaves them."""
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


def on_integers(setting, x, kernel, bias):
    """The stored kernel, the product on integers, and its simulation: one program each for the first and the rest."""
    stored = integer_params({"mlp": {"kernel": kernel}}, setting)["mlp"]["kernel"]
    assert isinstance(stored, Quantized)
    integer, simulated = integer_linear(setting), quantized_linear(setting)
    products = jax.jit(lambda x, w, stored, b: (integer(x, stored, b, "mlp"), simulated(x, w, b, "mlp")))
    return stored, *products(x, kernel, stored, bias)


def test_the_settings_by_name():
    assert {name: dataclasses.astuple(setting)[:5] for name, setting in quant.SETTINGS.items()} == {
        "int8_fine": (8, "absmax", "output_channel", "feature", None),
        "int8_fine_per_token": (8, "absmax", "output_channel", "token", None),
        "int8_moderate": (8, "absmax", "tensor", "tensor", None),
        "int8_coarse": (8, "absmax", "tensor", "tensor", "tensor"),
        "int4_zeropoint": (4, "zeropoint", "output_channel", None, None),
    }


@pytest.mark.parametrize("name", slow_unless(QUICK, ALL))
def test_every_setting_is_its_definition_on_integers_and_simulated(name, x64):
    setting, x, kernel = ALL[name], jnp.asarray(X), jnp.asarray(KERNEL)
    bias = None if name in ("w4a8", "int8_moderate", "int8_fine") else BIAS
    given = None if bias is None else jnp.asarray(bias)
    if name not in ON_INTEGERS:
        y = simulated = jax.jit(quantized_linear(setting), static_argnums=3)(x, kernel, given, "mlp")
    else:
        _, y, simulated = on_integers(setting, x, kernel, given)
    expected = reference(X, KERNEL, 0.0 if bias is None else bias, setting)
    np.testing.assert_allclose(simulated, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(y, simulated, rtol=1e-10, atol=1e-11)
    assert not np.allclose(y, X @ KERNEL + (0.0 if bias is None else bias), rtol=1e-6)


def operands(jaxpr):
    """(operand dtypes, result dtype) of every product of a program, those inside its loops too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(str(v.aval.dtype) for v in equation.invars), str(equation.outvars[0].aval.dtype)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", None)
            if inner is not None:
                yield from operands(inner)


def test_the_products_are_of_int8_with_int32_sums_and_floats_only_where_inputs_are():
    x, kernel = jnp.asarray(X, jnp.float32), jnp.asarray(KERNEL, jnp.float32)
    for name in ON_INTEGERS:
        setting = ALL[name]
        stored = integer_params({"kernel": kernel}, setting)["kernel"]
        program = jax.make_jaxpr(integer_linear(setting), static_argnums=3)(x, stored, None, "mlp")
        expected = (("float32", "float32"), "float32") if setting.inputs is None else (("int8", "int8"), "int32")
        assert set(operands(program.jaxpr)) == {expected}, name


def test_sums_are_exact_beyond_float32():
    x, w = RNG.integers(100, 128, (3, 4096)), RNG.integers(100, 128, (4096, 2))
    x[:, 0], w[0] = 127, 127  # so that all steps are 1
    expected = x @ w
    assert (expected > 2**24).all()
    stored = integer_params({"kernel": jnp.asarray(w, jnp.float32)}, quant.INT8_MODERATE)["kernel"]
    got = integer_linear(quant.INT8_MODERATE)(jnp.asarray(x, jnp.float32), stored, None, "mlp")
    np.testing.assert_array_equal(got, expected.astype(np.float32))  # rounded once


# qwix has bounds of 127.5 and 7.5, ours are 127 and 7.
@pytest.mark.parametrize(
    ("bits", "qtype", "bound"),
    [pytest.param(8, jnp.int8, 127.5 / 127, marks=pytest.mark.slow), (4, jnp.int4, 7.5 / 7)],
)
def test_kernels_and_products_agree_with_qwix(bits, qtype, bound):
    x, kernel = jnp.asarray(X[0], jnp.float32), jnp.asarray(KERNEL, jnp.float32)
    setting = QuantizationSetting(bits, "absmax", "output_channel", "token", activation_bits=8)
    stored, y, _ = on_integers(setting, x, kernel, None)

    @jax.jit
    def theirs(x, kernel, integers):
        w = qwix.quantize(kernel, qtype, channelwise_axes=(1,), calibration_method=f"absmax,{bound}")
        tokens = qwix.quantize(x, jnp.int8, channelwise_axes=(0,), calibration_method="absmax,1.003937")
        # The same integers for both: theirs may differ from ours where an element is near a tie.
        same = dataclasses.replace(w, qvalue=integers.astype(qtype))
        return w.qvalue.astype(jnp.int8), w.scale, qwix.dot_general(tokens, same, (((1,), (0,)), ((), ())))

    their_integers, step, product = theirs(x, kernel, stored.qvalue)
    assert np.mean(stored.qvalue == their_integers) > 0.999
    np.testing.assert_allclose(stored.scale, step, rtol=1e-5)
    np.testing.assert_allclose(y, product, rtol=1e-4, atol=1e-5 * np.max(np.abs(product)))


# What integers stand for.


@pytest.mark.parametrize("scheme", ["absmax", "zeropoint"])
@pytest.mark.parametrize("bits", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_integers_are_the_fake_quantised_values_and_lie_where_they_may(scheme, bits):
    function = {"absmax": absmax, "zeropoint": zeropoint}[scheme]

    @jax.jit
    def both(x):
        q = quantize(x, scheme, bits, 0)
        return q.qvalue, dequantize(q), function(x, bits, 0)

    integers, values, expected = map(np.asarray, both(jnp.asarray(KERNEL, jnp.float32)))
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    assert integers.dtype == np.int8
    assert integers.min() == (-(2 ** (bits - 1)) if scheme == "zeropoint" else 1 - 2 ** (bits - 1))
    assert integers.max() == 2 ** (bits - 1) - 1


def test_degenerate_slices_keep_their_values():
    x = jnp.array([[0.0, 0.0, 0.0], [2.5, 2.5, 2.5], [-3.0, -3.0, -3.0], [1.0, 0.0, -2.0], [jnp.inf, 1.0, 0.0]])
    for scheme, function in (("absmax", absmax), ("zeropoint", zeropoint)):
        both = jax.jit(lambda x, s=scheme, f=function: (dequantize(quantize(x, s, 4, 1)), f(x, 4, 1)))
        values, expected = map(np.asarray, both(x))
        np.testing.assert_allclose(values[:4], expected[:4], rtol=1e-6)
        assert np.isnan(values[4]).any()
        assert not np.isnan(values[:4]).any()
    with pytest.raises(ValueError, match="does not fit into int8"):
        quantize(x, "absmax", 9)


# Simulated layers and trees.


def test_an_outlier_channel_hurts_per_tensor_steps_only():
    def error(name, x, kernel):
        y = jax.jit(quantized_linear(quant.SETTINGS[name]), static_argnums=3)(x, kernel, None, "mlp")
        return np.linalg.norm(y - x @ kernel) / np.linalg.norm(x @ kernel)

    x, kernel, is_outlier = RNG.normal(size=(4, 64, 12)), KERNEL[:12], np.arange(12) == 3
    outliers = x * np.where(is_outlier, 1000.0, 1.0)
    small = kernel * np.where(is_outlier, 1e-3, 1.0)[:, None]  # the outlier's weights: the product is the same
    assert error("int8_fine", x, kernel) < error("int8_moderate", x, kernel) < 0.05
    assert error("int8_moderate", outliers, small) > 0.5
    assert error("int8_coarse", outliers, small) > 0.5
    assert error("int8_fine", outliers, kernel) < 0.05


@pytest.mark.parametrize("outputs", [None, "tensor"])
def test_float_features_are_the_largest_and_no_part_of_any_scale(outputs):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(6, 8)).astype(np.float32), rng.normal(size=(8, 5)).astype(np.float32)
    x[:, [2, 5]] *= 1000
    kernel[[2, 5]] *= 1e-3
    kernel[:, 1] *= 50  # a large output feature
    setting = QuantizationSetting(8, "absmax", "tensor", "tensor", outputs, float_features=2)

    def rounded(a):
        step = np.abs(a).max() / 127
        return np.round(a / step) * step

    rest = np.setdiff1d(np.arange(8), [2, 5])
    a, w = x.astype(np.float64), kernel.astype(np.float64)
    wanted = a[:, [2, 5]] @ w[[2, 5]] + rounded(a[:, rest]) @ rounded(w[rest])
    if outputs:
        small = np.argsort(np.abs(wanted).max(0))[:-2]
        wanted[:, small] = rounded(wanted[:, small])
    found = quantized_linear(setting)(jnp.asarray(x), jnp.asarray(kernel), None, "mlp/input")
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
    every = dataclasses.replace(setting, float_features=8)
    np.testing.assert_allclose(quantized_linear(every)(x, kernel, None, "mlp/input"), a @ w, rtol=1e-5, atol=1e-4)
    with pytest.raises(UserError, match="float_features"):
        quant.require_integers(setting)
    with pytest.raises(UserError, match="float_features"):
        dataclasses.replace(setting, float_features=-1)


def test_include_is_a_path_rule_that_leaves_the_head_float():
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


@pytest.mark.slow
def test_a_float_head_is_the_models_own_in_half_precision():
    x, kernel = (jnp.asarray(RNG.normal(size=shape), jnp.bfloat16) for shape in ((3, 8), (8, 5)))
    expected = model_linear(x, kernel, None, "head")
    assert expected.dtype == jnp.float32  # logits are not rounded
    for setting in quant.SETTINGS.values():
        np.testing.assert_array_equal(quantized_linear(setting)(x, kernel, None, "head"), expected)
        assert quantized_linear(setting, include="")(x, kernel, None, "head").dtype == jnp.float32
        assert quantized_linear(setting)(x, kernel, None, "mlp/input").dtype == jnp.bfloat16


def test_params_are_quantized_by_path_with_stacked_kernels_apart():
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
    (lambda: integer_linear(quant.INT8_FINE), "int8_fine_per_token"),
    (lambda: integer_params(PARAMS, QuantizationSetting(16, "absmax", "tensor", "tensor")), "bits=16"),
    (lambda: integer_params(PARAMS, GROUPS_OF_48), "group_size"),
    (lambda: integer_linear(QuantizationSetting(8, "zeropoint", "tensor", "tensor")), "zeropoint"),
    (lambda: quantized_linear(GROUPS_OF_48)(jnp.asarray(X), jnp.asarray(KERNEL), None, "mlp/kernel"), "group_size=48"),
    (lambda: quant.quantize_params(PARAMS, GROUPS_OF_48, "kernel"), "group_size=48"),
    (lambda: quantized_linear(quant.INT8_FINE, include="("), "include"),
    (lambda: quant.quantize_params(PARAMS, quant.INT8_FINE, "kernel"), "activations"),
    (lambda: quant.quantize_params(PARAMS, quant.INT4_ZEROPOINT, "weight"), "weight"),
    (lambda: quant.quantize_params(PARAMS, quant.INT4_ZEROPOINT, "bias"), "mlp/bias"),
    (lambda: QuantizationSetting(32, "absmax", "tensor"), "bits=32"),
    (lambda: QuantizationSetting(4, "absmax", "tensor", group_size=8), "group_size=8"),
    (lambda: QuantizationSetting(4, "absmax", "tensor", activation_bits=1), "activation_bits=1 "),
    (lambda: QuantizationSetting(8, "absmax", "tensor", "tokens"), "inputs='tokens'"),
    (lambda: QuantizationSetting(8.5, "absmax", "tensor"), "bits=8.5"),
    (lambda: QuantizationSetting(4, "zeropoint", "output_channel", activation_bits=8), "activation_bits=8"),
    (lambda: QuantizationSetting(4, "zeropoint", "output_channel", float_features=1), "float_features=1"),
    (lambda: quant.setting_named("w4a8_group46"), "did you mean 'w4a8_group64'"),
]


def test_settings_that_say_nothing_are_refused():
    for call, words in REFUSED:
        with pytest.raises(UserError, match=words):
            call()


# A whole model.


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_layer_of_a_model_on_integers_is_its_simulation_with_stacked_kernels_apart(scan):
    sizes = {"d_model": 64, "num_layers": 2, "num_heads": 2, "d_mlp": 64, "vocab_size": 50, "scan_layers": scan}
    config = llama2("tiny", **sizes) if scan else gpt2("tiny", **sizes, max_length=8)
    setting = quant.setting_named("w4a8")
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 50, (2, 8)))
    shapes = parameter_shapes(config)

    def numbers(leaf):
        # Stacked kernels of very different sizes: a step shared by two layers would show.
        sizes = np.array([1.0, 10.0]).reshape(2, 1, 1) if leaf.ndim == 3 else 1.0
        return jnp.asarray(0.3 * sizes * rng.normal(size=leaf.shape), jnp.float32)

    params = jax.tree.map(numbers, shapes)
    to_integers = jax.jit(lambda params: integer_params(params, setting))
    stored = to_integers(params)
    leaves = jax.tree.leaves(stored, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    assert sum(isinstance(leaf, Quantized) for leaf in leaves) == (7 if scan else 12)  # stacked are one
    assert not isinstance(stored.get("head", {}).get("kernel"), Quantized)
    if scan:
        for layer in range(2):
            alone = to_integers(jax.tree.map(lambda leaf, i=layer: leaf[i], params["layers"]))
            part = jax.tree.map(lambda leaf, i=layer: leaf[i], stored["layers"])
            jax.tree.map(np.testing.assert_array_equal, part, alone)
    integer, simulated, paths = integer_linear(setting), quantized_linear(setting), set()

    def both(x, kernel, bias, path):
        # Compared on the same inputs: two models would differ by more wherever the rounding of floats puts an
        # activation on either side of a tie, which it does for 3% of random parameters.
        y = integer(x, kernel, bias, path)
        if not isinstance(kernel, Quantized):
            return y
        paths.add(path)
        expected = simulated(x, dequantize(kernel), bias, path)
        is_same = jnp.max(jnp.abs(y - expected)) < 1e-6 * jnp.max(jnp.abs(expected))
        return jnp.where(is_same, y, jnp.nan)

    @jax.jit
    def run(params, stored):
        observe = lambda taps: jnp.sum(taps.value_norms)  # noqa: E731
        compared, seen = Transformer(config, linear=both).apply({"params": stored}, tokens, observe=observe)
        plain, _ = Transformer(config).apply({"params": params}, tokens)
        return compared, seen, plain

    compared, seen, plain = map(np.asarray, run(params, stored))
    assert len(paths) == (7 if scan else 12)
    assert np.isfinite(compared).all()
    assert np.isfinite(seen).all()
    assert np.max(np.abs(compared - plain)) > 1e-3 * np.max(np.abs(plain))
