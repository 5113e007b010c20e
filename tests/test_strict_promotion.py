"""Every function on arrays of ops, analysis and quant in one dtype, under JAX's strict rules for mixing dtypes."""

import functools
import inspect
import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax import analysis, ops, optim, quant
from orthojax.ops import normalizers, orthogonal, quantize
from orthojax.ops.attention import relaxed_causal_mask

B, N, T, D = 2, 2, 4, 8
HIDDEN, WEIGHTS, HEADS, KERNEL = (B, T, D), (B, N, T, T), (B, T, N, D), (D, D)
IDS, LENGTHS = np.zeros((B, T), np.int32), np.full(B, T, np.int32)
MASK, IS_TRIGGER = np.ones((B, 1, T, T), bool), np.zeros((B, T), bool)
HIDES = {"mask": MASK, "is_causal": True, "local_window_size": 2}
HIDES |= {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}
NORMALIZERS = {name: name for name in get_args(normalizers.Name)}
NORMALIZERS |= {"n": 0.5, "learned sink": None}  # of the dtype of the query


def attend(name, implementation):
    def function(q, k, v, bias, sink):
        normalizer = sink if name == "learned sink" else NORMALIZERS[name]
        options = {"normalizer": normalizer, "implementation": implementation, **HIDES}
        return ops.dot_product_attention(q, k, v, bias, **options)

    return function, HEADS, HEADS, HEADS, WEIGHTS, (N,)


def of_weights(q, k, v, bias):
    visible = ops.visible_keys(B, T, T, **HIDES)
    weights = ops.attention_weights(q, k, bias=bias, mask=visible, normalizer="softmax1", scale=0.3)
    return ops.weighted_values(weights, v), ops.attention_logits(q, k), ops.attention_fn()(q, k, v, bias, MASK)


def linear(setting):
    def function(x, kernel, bias):
        return quant.quantized_linear(setting)(x, kernel, bias, "mlp")

    return function, HIDDEN, (D, 6), (6,)


CASES = {f"attention: {name}, {how}": attend(name, how) for name in NORMALIZERS for how in ("xla", "xla_chunked")}
CASES |= {f"linear: {name}": linear(setting) for name, setting in quant.SETTINGS.items()}
for name in ("fp8_e4m3_block128", *quant.FLOATS):
    of_floats = quant.quantized_linear(quant.setting_named(name))
    CASES[f"linear: {name}"] = (lambda x, w, of=of_floats: of(x, w, None, "mlp"), HIDDEN, (D, 6))
CASES["linear: groups"] = linear(quant.QuantizationSetting(4, "zeropoint", "output_channel", group_size=2))
for name in get_args(normalizers.Name):
    CASES[name] = (lambda x, name=name: [getattr(normalizers, name)(x, where=mask) for mask in (None, MASK)], WEIGHTS)
# Metrics, by the names of their arguments.
ARGUMENTS = {"hidden": HIDDEN, "weights": WEIGHTS, "logits": WEIGHTS, "value_norms": (B, N, T), "mass_by_head": (3, N)}
ARGUMENTS |= {"head_norms": (B, N, T), "residual_before": HIDDEN, "log_probs": HIDDEN, "oracle_probs": HIDDEN}
for name, function in inspect.getmembers(analysis, inspect.isfunction):
    of = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if set(of) - {"is_trigger"} and set(of) <= {*ARGUMENTS, "is_trigger"}:
        fixed = {"is_trigger": IS_TRIGGER} if "is_trigger" in of else {}
        CASES[name] = (functools.partial(function, **fixed), *(ARGUMENTS[name] for name in of if name not in fixed))
CASES |= {
    "softmax_n": (lambda x: ops.softmax_n(x, 2.0, where=MASK), WEIGHTS),
    "softmax_with_sink": (lambda x, a: ops.softmax_with_sink(x, a, where=MASK), WEIGHTS, (1, N, 1, 1)),
    "apply_normalizer": (lambda x, a: ops.apply_normalizer(a, x, MASK), WEIGHTS, (N,)),
    "weights and values": (of_weights, HEADS, HEADS, HEADS, WEIGHTS),
    "rotary": (lambda x: ops.rotary(x, jnp.arange(T), frequencies=ops.rotary_frequencies(2)), HEADS),
    "rotary, yarn": (lambda x: ops.rotary(x, jnp.arange(T), frequencies=ops.yarn_frequencies(2, 9.0, 8.0, 64),
                                          scale=ops.yarn_mscale(8.0, 1.0)), HEADS),
    "llama3_frequencies": (lambda x: ops.llama3_frequencies(x, 8.0, 64), (D,)),
    "relaxed mask": (lambda x: jnp.where(relaxed_causal_mask(T, 2), x, 0), WEIGHTS),
    "cross_entropy_nats": (lambda x: ops.cross_entropy_nats(x, IDS), HIDDEN),
    "chunked_cross_entropy_sum_nats": (
        lambda x, w, c: ops.chunked_cross_entropy_sum_nats(x, w, IDS, c, positions=3), HIDDEN, (D, 6), (B, T)
    ),
    "kurtosis": (ops.kurtosis, HIDDEN),
    "norm_ratio": (ops.norm_ratio, HIDDEN),
    "gu_sink_rate, any key": (lambda w: analysis.gu_sink_rate(w, any_key=True), WEIGHTS),
    "schemes": (lambda x: (quantize.absmax(x), quantize.zeropoint(x)), KERNEL),
    "quantize_params": (lambda x: quant.quantize_params({"kernel": x}, quant.INT4_ZEROPOINT, "kernel"), KERNEL),
    "apply_matrix": (lambda x, m: orthogonal.apply_matrix(x, m, 1), KERNEL, KERNEL),
}  # fmt: skip
for kind, size in itertools.product(("hadamard", "dct"), (8, 12, 30, 131, 1040)):
    CASES[f"{kind} of {size}"] = (lambda x, kind=kind: orthogonal.fixed_transform(x, 1, kind=kind), (2, size))
# Nobody needs their derivatives.
FLAT = {"schemes", "quantize_params", "relaxed mask", *(name for name in CASES if name.startswith("linear"))}


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_mix_no_dtypes(name, dtype):
    function, *shapes = CASES[name]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    def total(*arrays):
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(function(*arrays)))

    with jax.numpy_dtype_promotion("strict"):  # mixing dtypes raises
        if name in FLAT:
            assert jax.eval_shape(total, *arrays).dtype == jnp.float32
            return
        value, gradients = jax.eval_shape(jax.value_and_grad(total, tuple(range(len(arrays)))), *arrays)
    assert value.dtype == jnp.float32
    assert [(gradient.shape, gradient.dtype) for gradient in gradients] == [(a.shape, a.dtype) for a in arrays]


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_rotation_of_bfloat16_mixes_no_dtypes(kind):
    rotation = optim.Rotation(kind, embeddings="", axes="output")
    params = {"w": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)}
    there, back = optim.rotate(rotation), optim.unrotate(rotation)

    def there_and_back(params):
        updates, _ = there.update(params, there.init(params), params)
        return back.update(updates, back.init(params), params)[0]

    with jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(there_and_back, params) == params
