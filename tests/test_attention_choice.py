"""Which implementation computes an attention, what happens where a kernel cannot, and `attention_fn` inside flax."""

import functools
import itertools
import threading
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
from orthojax.ops import dot_product_attention, forbid_fallback
from orthojax.ops.attention import dot_product, xla

Q, K, V = (jnp.asarray(a, jnp.float32) for a in qkv(8, 8, batch=1))


class Kernel:
    """Stands for a vendor's: it doubles what plain XLA gives, so that its use shows."""

    def __init__(self, **problems):
        self.problems = problems

    def unsupported(self, inputs):
        return self.problems.get("unsupported", "")

    def unavailable(self):
        return self.problems.get("unavailable", "")

    def attend(self, inputs):
        return 2 * xla.attend(inputs)


@pytest.fixture
def on(monkeypatch):
    """on(platform, kernel): that default backend, with that module for its kernel."""

    def change(platform, kernel):
        monkeypatch.setattr(dot_product, "_kernel", lambda name: kernel)
        monkeypatch.setattr(dot_product, "_platform", lambda array: platform)
        dot_product._warn.cache_clear()

    yield change
    dot_product._warn.cache_clear()


def is_kernel(**options):
    plain = dot_product_attention(Q, K, V, implementation="xla")
    output = dot_product_attention(Q, K, V, **options)
    doubled = bool(np.allclose(output, 2 * plain, rtol=1e-5))
    assert doubled or np.allclose(output, plain, rtol=1e-5)
    return doubled


@pytest.mark.parametrize(("platform", "expected"), [("gpu", True), ("tpu", True), ("cpu", False), ("other", False)])
def test_none_picks_the_kernel_of_the_platform(on, platform, expected):
    on(platform, Kernel())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_kernel() is expected
        assert is_kernel(implementation="xla") is False
        with forbid_fallback():
            assert is_kernel() is expected
    one = dot_product_attention(Q[:, :1], K, V)  # a single query is left to XLA
    np.testing.assert_allclose(one, dot_product_attention(Q[:, :1], K, V, implementation="xla"), rtol=1e-6)


@pytest.mark.parametrize("where", ["unsupported", "unavailable"])
def test_none_falls_back_with_one_warning_per_reason_unless_that_is_forbidden(on, where):
    kernel = Kernel(**{where: "the first reason"})
    on("gpu", kernel)
    with pytest.warns(UserWarning, match="'cudnn' to plain XLA.*the first reason") as caught:
        assert is_kernel() is False
    assert caught[0].filename == __file__  # where attention was called
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_kernel() is False
    kernel.problems[where] = "another reason"
    with pytest.warns(UserWarning, match="another reason"):
        assert is_kernel() is False
    with forbid_fallback(), pytest.raises(NotImplementedError, match="fall back from 'cudnn' here: another reason"):
        dot_product_attention(Q, K, V)


def test_the_ban_holds_in_its_own_thread_and_ends_with_an_error(on):
    on("gpu", Kernel(unsupported="no"))
    found = []

    def fail():
        with forbid_fallback():
            other = threading.Thread(target=lambda: found.append(is_kernel()))
            other.start()
            other.join()
            raise RuntimeError("ours")

    with pytest.warns(UserWarning, match="falls back"), pytest.raises(RuntimeError, match="ours"):
        fail()
    assert found == [False]
    assert is_kernel() is False


def test_an_implementation_by_name_never_falls_back(on):
    for unsupported in ("rows are too long", ""):
        on("gpu", Kernel(unsupported=unsupported, unavailable="its library is missing"))
        problem = unsupported or "its library is missing"
        with pytest.raises(NotImplementedError, match=f"implementation='cudnn': {problem}"):
            dot_product_attention(Q, K, V, implementation="cudnn")
    on("cpu", Kernel(unavailable="there is no GPU"))  # lowered here, run elsewhere
    assert is_kernel(implementation="cudnn") is True


def test_the_real_kernel_is_asked_once_and_its_reason_given(monkeypatch):
    monkeypatch.setitem(dot_product._KERNELS, "cpu", "cudnn")
    dot_product._warn.cache_clear()
    q = jnp.zeros((2, 6, 4, 8), jnp.bfloat16)
    with pytest.warns(UserWarning, match=r"'cudnn' to plain XLA.*needs an NVIDIA GPU"):
        assert (dot_product_attention(q, q, q) == 0.0).all()
    with forbid_fallback(), pytest.raises(NotImplementedError, match=r"may not fall back.*needs an NVIDIA GPU"):
        dot_product_attention(q, q, q)
    with forbid_fallback(), pytest.raises(NotImplementedError, match="got float32"):
        dot_product_attention(*[q.astype(jnp.float32)] * 3)
    dot_product._warn.cache_clear()


@pytest.mark.parametrize(("name", "hardware"), [("cudnn", "an NVIDIA GPU"), ("splash", "a TPU")])
def test_a_kernel_by_name_on_a_cpu_is_refused_when_it_is_compiled(name, hardware):
    q = jnp.ones((2, 128, 2, 64), jnp.bfloat16)

    def attend(q):
        return jnp.sum(dot_product_attention(q, q, q, implementation=name, is_causal=True))

    assert jax.eval_shape(attend, q).shape == ()
    grad = jax.grad(attend)
    for call in (attend, jax.jit(attend), grad, jax.jit(grad), jax.vmap(attend), jax.jit(attend).lower):
        with pytest.raises(NotImplementedError, match=f"implementation='{name}' needs {hardware}.* compiled for 'cpu'"):
            call(q)


@pytest.mark.parametrize(
    ("length", "causal", "expected"), [(8, False, False), (9, False, True), (4, True, False), (5, True, True)]
)
def test_many_weights_are_computed_in_chunks_and_fewer_where_that_saves_work(monkeypatch, length, causal, expected):
    monkeypatch.setitem(dot_product._CHUNKED_FROM_BYTES, "cpu", 4 * 2 * 9 * 9)
    monkeypatch.setitem(dot_product._CAUSAL_CHUNKED_FROM_BYTES, "cpu", 4 * 2 * 5 * 5)
    q = jnp.zeros((1, length, 2, 8))
    assert (
        "scan[" in str(jax.make_jaxpr(functools.partial(dot_product_attention, is_causal=causal))(q, q, q))
    ) is expected


def _exported(f, *shapes):
    """f(query, key, value) exported for shapes that may have letters."""
    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape(shape, scope=scope) for shape in shapes]
    return jax.export.export(jax.jit(f))(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).call


@pytest.mark.parametrize(
    ("implementation", "length"), [pytest.param(None, "8", marks=pytest.mark.slow), ("xla_chunked", "8"), (None, "t")]
)
def test_attention_is_exported_for_any_batch_and_called_as_it_is(monkeypatch, implementation, length):
    monkeypatch.setitem(xla._CHUNK_BYTES, "cpu", 4 * 4 * 4 * 8)  # four queries of one sequence
    monkeypatch.setattr(xla, "_FEWEST_QUERIES", 1)

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

    call = _exported(results, f"b, {length}, 4, 8", *[f"b, {length}, 2, 8"] * 2)
    for batch, t in ((1, 8), (3, 8 if length == "8" else 5)):
        arrays = [jnp.asarray(a, jnp.float32) for a in qkv(t, t, 2, batch=batch)]
        for got, expected in zip(call(*arrays), jax.jit(results)(*arrays), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_symbolic_shapes_are_left_to_plain_xla_and_chunks_refuse_symbolic_lengths(on):
    on("gpu", Kernel())
    with pytest.warns(UserWarning, match="known shapes, got .b, 8, 4, 8."):
        call = _exported(dot_product_attention, *["b, 8, 4, 8"] * 3)
    expected = dot_product_attention(Q, K, V, implementation="xla")
    np.testing.assert_allclose(call(Q, K, V), expected, rtol=1e-5, atol=1e-6)
    _exported(orthojax.attention_fn(implementation="xla"), *["b, 3, t, 4, 8"] * 3)
    for implementation, problem in (("cudnn", "known shapes"), ("xla_chunked", "known lengths, got .t, t.")):
        attend = lambda *a, name=implementation: dot_product_attention(*a, implementation=name)  # noqa: E731
        with pytest.raises(NotImplementedError, match=f"implementation='{implementation}': .*{problem}"):
            _exported(attend, *["b, t, 4, 8"] * 3)


QUICK = [(False, False), (True, True)]  # of what is kept, "dots" counts as False and "full" as True


@pytest.mark.parametrize(
    ("remat", "scan"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
        for case in itertools.product([False, True, "dots", "full"], [False, True])
    ],
)
def test_a_model_on_cudnn_attends_once_forward_unless_it_keeps_nothing_and_once_backward_in_each_layer(remat, scan):
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


def test_none_picks_for_the_device_of_arrays_and_for_the_default_device_of_traces(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seen = [dot_product._platform(Q)]
    for device in (None, jax.devices("cpu")[1], "tpu"):
        with jax.default_device(device):
            jax.eval_shape(lambda q: (seen.append(dot_product._platform(q)), q)[1], Q)
    assert seen == ["cpu", "gpu", "cpu", "tpu"]


# `attention_fn` inside flax's own MultiHeadAttention, linen and nnx.

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 16, 4
X = jnp.asarray(normal(BATCH, LENGTH, WIDTH), jnp.float32)
PADDING = jnp.asarray(np.random.default_rng(0).random((BATCH, 1, 1, LENGTH)) < 0.7).at[..., 0].set(True)
HEADED = X.reshape(BATCH, LENGTH, HEADS, -1)


@pytest.fixture
def flax_promotes_ranks():
    """Its layers add biases [heads, width] to [B, T, heads, width], which our own code may not do."""
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
@pytest.mark.parametrize("library", [linen, nnx_layer])
def test_sowing_is_refused(library):
    with pytest.raises(NotImplementedError, match="sown"):
        library(orthojax.attention_fn(), sow_weights=True)


@pytest.mark.usefixtures("flax_promotes_ranks")
def test_nnx_may_say_causal_when_it_calls_and_cached_decoding_sees_all_that_is_cached():
    ours = nnx_layer(orthojax.attention_fn(), is_causal=True)[0]
    np.testing.assert_array_equal(ours, nnx_layer(orthojax.attention_fn(is_causal=True))[0])
    causal = nnx.MultiHeadAttention(
        HEADS, WIDTH, attention_fn=orthojax.attention_fn(is_causal=True), decode=True, rngs=nnx.Rngs(1)
    )
    whole = causal(X, decode=False)
    causal.init_cache(X.shape)
    for t in range(LENGTH):
        np.testing.assert_allclose(causal(X[:, t : t + 1]), whole[:, t : t + 1], rtol=1e-5, atol=1e-6)


def test_more_batch_axes_are_one():
    q, k, v = (jnp.asarray(normal(2, 3, LENGTH, HEADS, 4, seed=i), jnp.float32) for i in range(3))
    mask = jnp.asarray(normal(3, 1, LENGTH, LENGTH) < 0.1)  # shared by the first of the two
    bias = jnp.asarray(normal(LENGTH, LENGTH), jnp.float32)
    output = orthojax.attention_fn()(q, k, v, bias=bias, mask=mask)
    alone = [orthojax.dot_product_attention(*arrays, bias, mask) for arrays in zip(q, k, v, strict=True)]
    np.testing.assert_allclose(output, jnp.stack(alone), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("flax_promotes_ranks")
def test_dtype_is_that_of_the_layer():
    layer = nn.MultiHeadAttention(num_heads=HEADS, attention_fn=orthojax.attention_fn(), dtype=jnp.bfloat16)
    assert layer.init_with_output(jax.random.key(1), X)[0].dtype == jnp.bfloat16
    assert orthojax.attention_fn()(HEADED, HEADED, HEADED, dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"dropout_rate": 0.1}, "dropout"),
        ({"precision": "highest"}, "precision"),
        ({"module": object()}, "sown"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "einsum"),
    ],
)
def test_what_it_would_ignore_is_refused(asked, problem):
    with pytest.raises(NotImplementedError, match=problem):
        orthojax.attention_fn()(HEADED, HEADED, HEADED, **asked)
    inactive = {"dropout_rate": 0.1, "deterministic": True}
    assert orthojax.attention_fn()(HEADED, HEADED, HEADED, **inactive).shape == HEADED.shape


@pytest.mark.parametrize(("queries", "mask"), [(1, None), (3, None), (3, np.ones((1, 1, 3, LENGTH), bool))])
def test_causal_attention_of_other_lengths_is_refused_but_for_one_query_with_a_mask(queries, mask):
    with pytest.raises(ValueError, match=f"causal attention of {queries} queries to 7 keys"):
        orthojax.attention_fn(is_causal=True)(HEADED[:, :queries], HEADED, HEADED, mask=mask)
