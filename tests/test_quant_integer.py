"""Linear layers on integers, against int64 sums of NumPy, the simulation in floats, qwix, and a whole model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from orthojax import quant
from orthojax.errors import UserError
from orthojax.model import Transformer, gpt2, llama2
from orthojax.ops.quantize import Quantized, absmax, dequantize, pack, quantize, unpack, zeropoint
from orthojax.quant import QuantizationSetting, integer_linear, integer_params, integer_product, quantized_linear

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 128)) * np.exp(RNG.normal(size=128))
KERNEL = RNG.normal(size=(128, 9)) * np.exp(RNG.normal(size=9)) + 0.3
BIAS = RNG.normal(size=9)
ON_INTEGERS = {
    "int8_fine_per_token": quant.INT8_FINE_PER_TOKEN,
    "int8_moderate": quant.INT8_MODERATE,
    "int8_coarse": quant.INT8_COARSE,
    "int4_zeropoint": quant.INT4_ZEROPOINT,
    "zeropoint_both": QuantizationSetting(4, "zeropoint", "output_channel", "token", None, 8, 32),
    "zeropoint_groups_of_both": QuantizationSetting(4, "zeropoint", "output_channel", "group", None, 8, 32),
    "one_group_of_both": QuantizationSetting(4, "absmax", "output_channel", "group", group_size=128),
    "zeropoint_tensors": QuantizationSetting(8, "zeropoint", "tensor", "tensor", "tensor"),
    "groups_of_odd_size": QuantizationSetting(4, "absmax", "output_channel", "tensor", group_size=1),
    **quant.MORE_SETTINGS,
}


def rounded(x, scheme, bits, axes):
    """(stored number, step, zero point) in float64, unsigned for zeropoint, from the equations."""
    if scheme == "absmax":
        step = np.abs(x).max(axis=axes, keepdims=True) / (2 ** (bits - 1) - 1)
        return np.round(x / step).astype(np.int64), step, np.zeros_like(step, np.int64)
    low, high = x.min(axis=axes, keepdims=True), x.max(axis=axes, keepdims=True)
    step = (high - low) / (2**bits - 1)
    z = np.round(low / step).astype(np.int64)
    return np.clip(np.round(x / step).astype(np.int64) - z, 0, 2**bits - 1), step, z


def reference(x, kernel, bias, setting):
    """y = s_x sum_g s_w (sum_i (q_x + z_x) (q_w + z_w)) + bias, the sums in int64."""
    features, outputs = kernel.shape
    groups = features // setting.group_size if setting.group_size else 1
    q, step, z = rounded(
        kernel.reshape(groups, -1, outputs),
        setting.scheme,
        setting.bits,
        (0, 1, 2) if setting.weights == "tensor" else 1,
    )
    w = q + z
    if setting.inputs is None:
        y = sum(
            x.reshape(-1, groups, features // groups)[:, g] @ (w[g] * step[min(g, len(step) - 1)])
            for g in range(groups)
        )
    else:
        bits = setting.activation_bits or setting.bits
        qx, sx, zx = rounded(
            x.reshape(*x.shape[:-1], groups, features // groups),
            setting.scheme,
            bits,
            {"tensor": None, "token": (-2, -1), "group": -1}[setting.inputs],
        )
        sx = np.broadcast_to(sx, (*x.shape[:-1], groups, 1))
        y = sum(((qx + zx)[..., g, :] @ w[g]) * step[min(g, len(step) - 1)] * sx[..., g, :] for g in range(groups))
    y = y.reshape(*x.shape[:-1], outputs) + bias
    if setting.outputs is not None:
        q, step, z = rounded(y, setting.scheme, setting.activation_bits or setting.bits, None)
        y = (q + z) * step
    return y


def on_integers(setting, x, kernel, bias):
    """The stored kernel, the product on integers, and its simulation: one program each for the first and the rest."""
    stored = integer_params({"mlp": {"kernel": kernel}}, setting)["mlp"]["kernel"]
    assert isinstance(stored, Quantized)
    integer, simulated = integer_linear(setting), quantized_linear(setting)
    products = jax.jit(lambda x, w, stored, b: (integer(x, stored, b, "mlp"), simulated(x, w, b, "mlp")))
    return stored, *products(x, kernel, stored, bias)


# A program for each takes its time; these see every part of the sum.
QUICK = ("int8_coarse", "zeropoint_both", "zeropoint_groups_of_both", "w4a4_group64")
SETTINGS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ON_INTEGERS]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_its_integer_sums_and_its_simulation(name, x64):
    setting = ON_INTEGERS[name]
    bias = BIAS if name != "w4a8" else np.zeros(9)
    given = None if name == "w4a8" else jnp.asarray(bias)
    _, y, simulated = on_integers(setting, jnp.asarray(X), jnp.asarray(KERNEL), given)
    np.testing.assert_allclose(y, reference(X, KERNEL, bias, setting), rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(y, simulated, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "name", [name if name == "w4a4_group64" else pytest.param(name, marks=pytest.mark.slow) for name in ON_INTEGERS]
)
def test_in_float32_they_agree_to_a_millionth_of_the_largest_output(name):
    x, kernel, bias = (jnp.asarray(a, jnp.float32) for a in (X, KERNEL, BIAS))
    _, y, simulated = on_integers(ON_INTEGERS[name], x, kernel, bias)
    assert y.dtype == jnp.float32
    assert float(jnp.max(jnp.abs(y - simulated))) < 1e-6 * float(jnp.max(jnp.abs(simulated)))


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
    for name in (*QUICK, "int4_zeropoint"):
        setting = ON_INTEGERS[name]
        stored = integer_params({"kernel": kernel}, setting)["kernel"]
        linear = integer_linear(setting)
        program = jax.make_jaxpr(linear, static_argnums=3)(x, stored, None, "mlp")
        expected = ("float32", "float32"), "float32"
        if setting.inputs is not None:
            expected = ("int8", "int8"), "int32"
        assert set(operands(program.jaxpr)) == {expected}, name


def test_sums_that_float32_does_not_hold_are_exact():
    x, w = RNG.integers(100, 128, (3, 4096)), RNG.integers(100, 128, (4096, 2))
    one = jnp.ones((1, 1), jnp.float32)
    expected = x @ w
    assert (expected > 2**24).all()
    got = integer_product(Quantized(jnp.int8(x), one), Quantized(jnp.int8(w), one))
    np.testing.assert_array_equal(got, expected.astype(np.float32))  # rounded once


def test_sums_that_int32_does_not_hold_are_refused():
    kernel = jnp.ones((2**17, 1), jnp.float32)
    with pytest.raises(UserError, match="int32 may not hold"):
        integer_params({"kernel": kernel}, quant.INT8_FINE_PER_TOKEN)
    integer_params({"kernel": kernel[:-1]}, quant.INT8_FINE_PER_TOKEN)
    integer_params({"kernel": kernel}, quant.MORE_SETTINGS["w8a8_group64"])


# qwix has bounds of 127.5 and 7.5, ours are 127 and 7.
@pytest.mark.parametrize(
    ("bits", "qtype", "bound"),
    [pytest.param(8, jnp.int8, 127.5 / 127, marks=pytest.mark.slow), (4, jnp.int4, 7.5 / 7)],
)
def test_groups_and_products_agree_with_qwix(bits, qtype, bound):
    x, kernel = jnp.asarray(X[0], jnp.float32), jnp.asarray(KERNEL, jnp.float32)
    setting = QuantizationSetting(bits, "absmax", "output_channel", "token", activation_bits=8, group_size=32)
    stored, y, _ = on_integers(setting, x, kernel, None)

    @jax.jit
    def theirs(x, kernel, integers):
        w = qwix.quantize(
            kernel, qtype, channelwise_axes=(1,), tiled_axes={0: 32}, calibration_method=f"absmax,{bound}"
        )
        tokens = qwix.quantize(x, jnp.int8, channelwise_axes=(0,), calibration_method="absmax,1.003937")
        # The same integers for both: theirs may differ from ours where an element is near a tie.
        same = dataclasses.replace(w, qvalue=integers.astype(qtype))
        return w.qvalue.astype(jnp.int8), w.scale, qwix.dot_general(tokens, same, (((1,), (0,)), ((), ())))

    integers = unpack(stored.qvalue) if stored.is_packed else stored.qvalue
    their_integers, step, product = theirs(x, kernel, integers)
    assert np.mean(integers == their_integers) > 0.999
    np.testing.assert_allclose(stored.scale, step, rtol=1e-5)
    np.testing.assert_allclose(y, product, rtol=1e-4, atol=1e-5 * np.max(np.abs(product)))


@pytest.mark.parametrize("scheme", ["absmax", "zeropoint"])
@pytest.mark.parametrize("bits", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_integers_are_the_fake_quantised_values_and_lie_where_they_may(scheme, bits):
    function = {"absmax": absmax, "zeropoint": zeropoint}[scheme]

    @jax.jit
    def both(x):
        q = quantize(x, scheme, bits, 0)
        return q.qvalue, dequantize(q), function(x, bits, 0)

    integers, values, expected = both(jnp.asarray(KERNEL, jnp.float32))
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    integers = np.asarray(integers)
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


def test_packed_integers_are_half_the_bytes_and_come_back():
    every = jnp.asarray(np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8))).reshape(2, 256), jnp.int8)
    packed = pack(every)
    assert packed.dtype == jnp.uint8
    assert packed.nbytes * 2 == every.nbytes
    assert len(np.unique(packed)) == 256
    np.testing.assert_array_equal(unpack(packed), every)
    # As NumPy decodes it from the words of `pack`.
    low, high = np.asarray(packed) & 15, np.asarray(packed) >> 4
    np.testing.assert_array_equal(
        np.concatenate([low, high]).astype(int) - 16 * (np.concatenate([low, high]) > 7), every
    )


def test_refusals_say_why():
    with pytest.raises(UserError, match="cannot be pulled out of the sum") as error:
        integer_linear(quant.INT8_FINE)
    assert "int8_fine_per_token" in str(error.value)
    with pytest.raises(UserError, match="operands of 8 bits"):
        integer_params({"kernel": KERNEL}, QuantizationSetting(16, "absmax", "tensor", "tensor"))
    setting = QuantizationSetting(4, "absmax", "output_channel", group_size=48)
    for call in (
        lambda: integer_params({"mlp": {"kernel": KERNEL}}, setting),
        lambda: quantized_linear(setting)(jnp.asarray(X), jnp.asarray(KERNEL), None, "mlp/kernel"),
        lambda: quant.quantize_params({"mlp": {"kernel": KERNEL}}, setting, "kernel"),
    ):
        with pytest.raises(UserError, match="group_size=48 does not divide the 128 input features of mlp/kernel"):
            call()
    with pytest.raises(UserError, match="group_size=8 with weights='tensor'"):
        QuantizationSetting(4, "absmax", "tensor", group_size=8)
    with pytest.raises(UserError, match="inputs='group' without group_size"):
        QuantizationSetting(4, "absmax", "output_channel", "group")
    with pytest.raises(UserError, match="activation_bits=1 "):
        QuantizationSetting(4, "absmax", "tensor", activation_bits=1)
    with pytest.raises(UserError, match="did you mean 'w4a8_group64'"):
        quant.setting_named("w4a8_group46")


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_layer_of_a_model_on_integers_is_its_simulation_with_stacked_kernels_apart(scan):
    sizes = {"d_model": 64, "num_layers": 2, "num_heads": 2, "d_mlp": 64, "vocab_size": 50, "scan_layers": scan}
    config = llama2("tiny", **sizes) if scan else gpt2("tiny", **sizes, max_length=8)
    setting = QuantizationSetting(4, "absmax", "output_channel", "token", activation_bits=8, group_size=32)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 50, (2, 8)))
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]

    def numbers(leaf):
        # Stacked kernels of very different sizes: a step shared by two layers would show.
        sizes = np.array([1.0, 10.0]).reshape(2, 1, 1) if leaf.ndim == 3 else 1.0
        return jnp.asarray(0.3 * sizes * rng.normal(size=leaf.shape), jnp.float32)

    params = jax.tree.map(numbers, shapes)
    stored = integer_params(params, setting)
    leaves = jax.tree.leaves(stored, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    assert sum(isinstance(leaf, Quantized) for leaf in leaves) == (7 if scan else 12)  # stacked are one
    assert not isinstance(stored.get("head", {}).get("kernel"), Quantized)
    if scan:
        for layer in range(2):
            alone = integer_params(jax.tree.map(lambda leaf, i=layer: leaf[i], params["layers"]), setting)
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
