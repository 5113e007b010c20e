"""The choice of an implementation, and `attention_fn` inside flax."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import normal, qkv, reference
from flax import nnx

import orthojax
from orthojax.model import Transformer, gpt2
from orthojax.ops import dot_product_attention
from orthojax.ops.attention import xla
from orthojax.ops.attention.dot_product import fastest

Q, K, V = (jnp.asarray(a, jnp.float32) for a in qkv(8, 8, batch=1))


def traced(length, **options):
    """Traces attention over shapes alone; nothing is computed."""
    q = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    return str(jax.make_jaxpr(functools.partial(dot_product_attention, **options))(q, q, q))


# Sizes are B, T, N, S.
@pytest.mark.parametrize(("platform", "sizes", "options", "expected"), [
    ("gpu", (128, 256, 12, 256), {}, "cudnn"),
    ("gpu", (8, 4096, 12, 4096), {"is_causal": True}, "cudnn"),
    ("tpu", (1, 128, 2, 128), {}, "splash"),
    ("gpu", (8, 1, 12, 4096), {}, "xla"),
    ("gpu", (32, 1024, 12, 1024), {"with_kernel": False}, "xla_chunked"),
    ("gpu", (1, 1024, 12, 1024), {"with_kernel": False}, "xla"),
    ("cpu", (1, 512, 2, 512), {"is_causal": True}, "xla"),
    ("cpu", (1, 1024, 2, 1024), {"is_causal": True}, "xla_chunked"),
    ("cpu", (1, 2048, 2, 2048), {}, "xla"),
    ("cpu", (1, 4096, 2, 4096), {}, "xla_chunked"),
])  # fmt: skip
def test_the_fastest_is_chosen_by_platform_and_size(platform, sizes, options, expected):
    assert fastest(platform, *sizes, **options) == expected
    if platform == "cpu":
        assert ("scan[" in traced(sizes[1], **options)) == (expected == "xla_chunked")
        assert "scan[" not in traced(sizes[1], **options, implementation="xla")


@pytest.mark.parametrize(("platform", "kernel"), [("gpu", "cudnn"), ("tpu", "splash")])
def test_none_falls_back_with_a_warning(platform, kernel):
    with jax.default_device(platform):
        with pytest.warns(UserWarning, match=f"'{kernel}'.*'cpu'"):
            traced(128)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            traced(1)  # a single query is left to XLA
            traced(128, implementation="xla")


@pytest.mark.parametrize("name", ["cudnn", "splash"])
def test_a_kernel_named_on_a_cpu_is_refused(name):
    q = jnp.ones((2, 128, 2, 64), jnp.bfloat16)
    attend = functools.partial(dot_product_attention, implementation=name, is_causal=True)
    assert jax.eval_shape(attend, q, q, q).shape == q.shape  # it may be lowered for another machine
    with pytest.raises(NotImplementedError, match=f"{name}.*'cpu'"):
        attend(q, q, q)


@pytest.mark.parametrize(("implementation", "length"), [("xla_chunked", "8"), (None, "t")])
def test_exported_attention_is_called_with_any_batch(monkeypatch, implementation, length):
    monkeypatch.setitem(xla.CHUNK_BYTES, "cpu", 4 * 4 * 4 * 8)  # four queries of one sequence
    monkeypatch.setattr(xla, "FEWEST_QUERIES", 1)

    def results(q, k, v):
        lengths = jnp.full(q.shape[0], 5)
        options = {"is_causal": True, "local_window_size": 4, "key_value_seq_lengths": lengths}
        options |= {"bias": q[..., :1].transpose(0, 2, 1, 3), "mask": q[:, None, :, :1, 0] > 0}
        attend = lambda q, sink: dot_product_attention(  # noqa: E731
            q, k, v, normalizer=sink, implementation=implementation, **options
        )
        if implementation is not None:
            return (attend(q, jnp.zeros(4)),)
        output, pullback = jax.vjp(attend, q, jnp.zeros(4))
        return output, *pullback(jnp.cos(output))

    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape(f"b, {length}, {heads}, 8", scope=scope) for heads in (4, 2, 2)]
    call = jax.export.export(jax.jit(results))(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).call
    for batch, t in ((1, 8), (3, 8 if length == "8" else 5)):
        arrays = [jnp.asarray(a, jnp.float32) for a in qkv(t, t, 2, batch=batch)]
        for got, expected in zip(call(*arrays), jax.jit(results)(*arrays), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("remat", "scan"), [(False, False), ("full", True), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_attention_is_recomputed_if_nothing_is_kept(remat, scan):
    config = gpt2(
        "tiny", d_model=32, d_mlp=32, num_heads=2, num_layers=2, vocab_size=16, max_length=64, dtype="bfloat16",
        normalizer="softmax1", attention_implementation="cudnn", scan_layers=scan, remat=remat,
    )  # fmt: skip
    model, tokens = Transformer(config), jax.ShapeDtypeStruct((2, 64), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        return jnp.sum(model.apply(params, tokens)[0])

    text = jax.jit(jax.grad(loss)).trace(params, tokens).lower(lowering_platforms=("cuda",)).as_text()
    layers = 1 if scan else 2  # a scan's body stands once
    assert text.count("@__cudnn$fmhaSoftmax(") == layers * (2 if remat == "full" else 1)
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == layers


# `attention_fn` inside flax's own MultiHeadAttention, linen and nnx.

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 16, 4
X = jnp.asarray(normal(BATCH, LENGTH, WIDTH), jnp.float32)
PADDING = jnp.asarray(np.random.default_rng(0).random((BATCH, 1, 1, LENGTH)) < 0.7).at[..., 0].set(True)


@pytest.fixture
def flax_promotes_ranks():
    """Lets flax add biases [heads, width] to [B, T, heads, width], as our own code may not."""
    with jax.numpy_rank_promotion("allow"):
        yield


def linen(attention_fn, **call):
    """(output, query, key and value of the layer's own projections, the projection of its result)."""
    layer = nn.MultiHeadAttention(num_heads=HEADS, attention_fn=attention_fn)
    params = layer.init(jax.random.key(1), X)["params"]
    parts = [(params[name]["kernel"], params[name]["bias"]) for name in ("query", "key", "value", "out")]
    return layer.apply({"params": params}, X, **call), *_projected(parts)


def nnx_layer(attention_fn, **call):
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(1))
    parts = [(part.kernel[...], part.bias[...]) for part in (layer.query, layer.key, layer.value, layer.out)]
    return layer(X, **call), *_projected(parts)


def _projected(parts):
    arrays = [np.einsum("btd,dnh->btnh", X, kernel, dtype=np.float64) + bias for kernel, bias in parts[:3]]
    return arrays, parts[3]


CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
CASES = {
    "nothing hidden": ({}, {}, True),
    "causal": ({"is_causal": True}, {}, CAUSAL),
    "flax's causal mask, of floats": ({}, {"mask": nn.make_causal_mask(X[..., 0])}, CAUSAL),
    "causal and padding": ({"is_causal": True}, {"mask": PADDING}, CAUSAL & np.asarray(PADDING)),
}


@pytest.mark.usefixtures("flax_promotes_ranks")
@pytest.mark.parametrize("library", [linen, nnx_layer])
@pytest.mark.parametrize("case", CASES)
def test_flax_attends_by_the_definition(library, case):
    made, called, mask = CASES[case]
    for normalizer in ("softmax", "softmax1"):
        output, arrays, (kernel, bias) = library(orthojax.attention_fn(normalizer, **made), **called)
        expected = np.einsum("btnh,nhd->btd", reference(*arrays, normalizer=normalizer, mask=mask), kernel) + bias
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("flax_promotes_ranks")
def test_nnx_says_causal_when_called_or_decoding():
    ours = nnx_layer(orthojax.attention_fn(), is_causal=True)[0]
    np.testing.assert_array_equal(ours, nnx_layer(orthojax.attention_fn(is_causal=True))[0])
    causal = nnx.MultiHeadAttention(
        HEADS, WIDTH, attention_fn=orthojax.attention_fn(is_causal=True), decode=True, rngs=nnx.Rngs(1)
    )
    whole = causal(X, decode=False)
    causal.init_cache(X.shape)
    for t in range(LENGTH):
        np.testing.assert_allclose(causal(X[:, t : t + 1]), whole[:, t : t + 1], rtol=1e-5, atol=1e-6)


def sowing_linen(attention_fn, broadcast):
    options = {"dropout_rate": 0.5, "broadcast_dropout": broadcast}
    layer = nn.MultiHeadAttention(num_heads=HEADS, attention_fn=attention_fn, **options)
    inputs, mask, rngs = jnp.stack([X, 2 * X]), PADDING * CAUSAL, {"dropout": jax.random.key(3)}
    params = layer.init(jax.random.key(1), inputs, deterministic=True)["params"]
    call = functools.partial(layer.apply, {"params": params}, inputs, mask=mask, mutable=["intermediates"], rngs=rngs)
    output, sown = call(deterministic=False, sow_weights=True)
    return output, sown["intermediates"]["attention_weights"][0]


def sowing_nnx(attention_fn, broadcast):
    options = {"dropout_rate": 0.5, "broadcast_dropout": broadcast, "rngs": nnx.Rngs(1)}
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention_fn, decode=False, **options)
    call = nnx.capture(layer, nnx.Intermediate)
    output, sown = call(X, mask=PADDING * CAUSAL, deterministic=False, sow_weights=True)
    return output, sown["attention_weights"][0]


@pytest.mark.usefixtures("flax_promotes_ranks")
@pytest.mark.parametrize("library", [sowing_linen, sowing_nnx])
@pytest.mark.parametrize("broadcast", [True, False])
def test_weights_are_sown_and_dropped_as_by_flax(library, broadcast):
    flax_attention = nn.dot_product_attention if library is sowing_linen else nnx.dot_product_attention
    for got, expected in zip(
        library(orthojax.attention_fn("softmax"), broadcast), library(flax_attention, broadcast), strict=True
    ):
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    weights = np.asarray(library(orthojax.attention_fn("softmax1"), broadcast)[1], np.float64)
    total = np.asarray(expected, np.float64)
    np.testing.assert_array_equal(weights > 0, total > 0)
    assert (weights.sum(-1) < 1.0).all()
    np.testing.assert_allclose(weights / weights.sum(-1, keepdims=True), total, rtol=1e-4, atol=1e-6)


def test_more_batch_axes_are_one():
    q, k, v = (jnp.asarray(normal(2, 3, LENGTH, HEADS, 4, seed=i), jnp.float32) for i in range(3))
    mask = jnp.asarray(normal(3, 1, LENGTH, LENGTH) < 0.1)  # shared by the first of the two
    bias = jnp.asarray(normal(LENGTH, LENGTH), jnp.float32)
    output = orthojax.attention_fn()(q, k, v, bias=bias, mask=mask)
    alone = [orthojax.dot_product_attention(*arrays, bias, mask) for arrays in zip(q, k, v, strict=True)]
    np.testing.assert_allclose(output, jnp.stack(alone), rtol=1e-6, atol=1e-6)
    inactive = {"dropout_rate": 0.1, "deterministic": True}
    np.testing.assert_array_equal(orthojax.attention_fn()(q, k, v, bias=bias, mask=mask, **inactive), output)
