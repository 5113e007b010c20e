"""Attention one chunk of queries at a time, and the whole matrix of weights, against one definition in float64."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.ops import dot_product_attention
from orthojax.ops.attention import xla as xla_chunked
from orthojax.ops.normalizers import ClippedSoftmax

NORMALIZERS = {"softmax": "softmax", "softmax1": "softmax1", "softmax_n": 0.5, "sink": np.array([0.3, -1.0, 2.0, 0.0])}
NORMALIZERS |= {"relu": "relu", "sigmoid": "sigmoid", "clipped": ClippedSoftmax(-0.1, 1.2)}
DENOMINATORS = {"softmax": 0.0, "softmax1": 1.0, "softmax_n": 0.5}
IMPLEMENTATIONS = ["xla", "xla_chunked"]
B, N, H = 2, 4, 8


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of at most three queries, so that lengths of tests have many."""
    monkeypatch.setitem(xla_chunked._CHUNK_BYTES, "cpu", 1)
    monkeypatch.setattr(xla_chunked, "_FEWEST_QUERIES", 3)


def _arrays(t, s, kv_heads=N, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(B, length, heads, H)) for length, heads in ((t, N), (s, kv_heads), (s, kv_heads))]


def _random(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape)


def reference(name, q, k, v, bias=None, sink=NORMALIZERS["sink"], scale=None, **hides):
    """The definition in float64 NumPy: the whole matrix, masks by comparison of positions."""
    t, s = np.ogrid[: q.shape[1], : k.shape[1]]
    k, v = (np.repeat(a, N // a.shape[2], 2) for a in (k, v))
    x = np.einsum("BTNH,BSNH->BNTS", q, k) * (H**-0.5 if scale is None else scale)
    x = x + (0.0 if bias is None else bias)
    sees = np.broadcast_to(hides.get("mask", True), x.shape).copy()
    sees &= (s <= t) | (not hides.get("is_causal", False))
    left, right = np.broadcast_to(hides.get("local_window_size", 10**6), 2)
    sees &= (t - left <= s) & (s <= t + right)
    rows = np.asarray(hides.get("query_seq_lengths", [10**6] * B))[:, None, None, None] > t
    sees &= rows & (np.asarray(hides.get("key_value_seq_lengths", [10**6] * B))[:, None, None, None] > s)
    empty = ~sees.any(-1, keepdims=True)
    if name == "relu":
        weights = np.maximum(x, 0.0) / np.maximum(sees.sum(-1, keepdims=True), 1) * sees
    elif name == "sigmoid":
        weights = sees / (1.0 + np.exp(-x))
    else:
        logit = np.log(DENOMINATORS[name]) if DENOMINATORS.get(name) else -np.inf
        logit = sink[:, None, None] if name == "sink" else np.full((N, 1, 1), logit)
        x = np.where(sees, x, -np.inf)
        shift = np.maximum(x.max(-1, keepdims=True), logit)
        shift = np.where(np.isfinite(shift), shift, 0.0)
        total = np.exp(x - shift).sum(-1, keepdims=True) + np.exp(logit - shift)
        weights = np.exp(x - shift) / np.where(total == 0.0, 1.0, total)
        if name == "softmax":
            weights = np.where(empty, 1.0 / x.shape[-1], weights)  # as jax.nn has it
        if name == "clipped":
            weights = np.clip(1.3 * weights - 0.1, 0.0, 1.0)
    return np.einsum("BNTS,BSNH->BTNH", weights * rows, v)


def _mask(*shape, seed=3):
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., -1:, :] = False  # the last query sees nothing
    return mask


CASES = {
    # name: (T, S, key-value heads, options)
    "causal": (13, 13, 4, {"is_causal": True}),
    "one query": (1, 9, 2, {}),
    "one key": (7, 1, 4, {"bias": _random(1, N, 7, 1)}),
    "plain, grouped": (11, 5, 1, {"scale": 0.7}),
    "more queries than keys, causal": (17, 4, 2, {"is_causal": True}),
    "window": (19, 19, 4, {"local_window_size": (2, 1)}),
    "causal window, grouped": (19, 19, 2, {"local_window_size": 3, "is_causal": True}),
    "window beyond the keys": (16, 5, 4, {"local_window_size": (1, 0)}),
    "window of all": (8, 8, 4, {"local_window_size": 30, "is_causal": True}),
    "mask with an empty row": (13, 13, 2, {"mask": _mask(B, N, 13, 13), "is_causal": True}),
    "mask of keys, bias of keys": (10, 7, 4, {"mask": np.arange(7).reshape(1, 1, 1, 7) % 3 < 2,
                                              "bias": _random(1, N, 1, 7)}),
    "mask of queries": (10, 10, 4, {"mask": _mask(1, 1, 10, 1), "is_causal": True, "bias": _random(B, 1, 10, 1)}),
    "lengths": (9, 9, 4, {"query_seq_lengths": np.array([4, 9], np.int32), "is_causal": True,
                          "key_value_seq_lengths": np.array([9, 0], np.int32)}),
    "everything": (14, 11, 2, {"bias": _random(1, N, 14, 11), "mask": _mask(B, 1, 14, 11), "is_causal": True,
                               "local_window_size": (3, 2), "query_seq_lengths": np.array([14, 6], np.int32),
                               "key_value_seq_lengths": np.array([11, 5], np.int32), "scale": 1.3}),
}  # fmt: skip

# What one query sees matters to all normalizers alike; these differ in what they do with the other keys.
KINDS = ["softmax", "softmax1", "relu"]
EVERY_NORMALIZER = ["mask with an empty row", "everything"]
GRADIENT_CASES = ["mask with an empty row", "causal window, grouped", "everything"]


def _normalizer(name):
    value = NORMALIZERS[name]
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def _as_arrays(options, dtype) -> dict[str, Any]:
    cast = lambda a: jnp.asarray(a, dtype if a.dtype == np.float64 else a.dtype)  # noqa: E731
    return {name: cast(a) if isinstance(a, np.ndarray) else a for name, a in options.items()}


@pytest.mark.usefixtures("x64", "small_chunks")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "xla_chunked"])
def test_every_normalizer_is_the_definition_in_float64(implementation, case):
    t, s, kv_heads, options = CASES[case]
    args = _arrays(t, s, kv_heads)
    arrays = _as_arrays(options, np.float64)

    @jax.jit
    def every(q, k, v):
        attend = lambda name: dot_product_attention(  # noqa: E731
            q, k, v, normalizer=_normalizer(name), implementation=implementation, **arrays
        )
        return {name: attend(name) for name in (NORMALIZERS if case in EVERY_NORMALIZER else KINDS)}

    for name, got in every(*map(jnp.asarray, args)).items():
        assert got.dtype == jnp.float64
        expected = reference(name, *args, **options)
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.usefixtures("x64", "small_chunks")
@pytest.mark.parametrize("case", GRADIENT_CASES)
@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "xla_chunked"])
def test_gradients_are_finite_differences_of_the_definition(implementation, case):
    t, s, kv_heads, options = CASES[case]
    q, k, v = _arrays(t, s, kv_heads)
    options = {"bias": 0.3 * _random(1, N, t, s, seed=5), **options}
    cotangent = _random(B, t, N, H, seed=6)
    point = {"q": q, "k": k, "v": v, "bias": options.pop("bias"), "sink": NORMALIZERS["sink"]}
    direction = {name: _random(*a.shape, seed=7 + i) for i, (name, a) in enumerate(point.items())}
    arrays = _as_arrays(options, np.float64)

    def loss(point, name):
        q, k, v, bias, sink = (point[part] for part in ("q", "k", "v", "bias", "sink"))
        normalizer = sink if name == "sink" else NORMALIZERS[name]
        out = dot_product_attention(q, k, v, bias, normalizer=normalizer, implementation=implementation, **arrays)
        return jnp.vdot(cotangent, out)

    normalizers = NORMALIZERS if case == "everything" else [*KINDS, "sink"]
    derivatives = jax.jit(lambda point: [jax.grad(loss)(point, normalizer) for normalizer in normalizers])
    for normalizer, gradient in zip(normalizers, derivatives(jax.tree.map(jnp.asarray, point)), strict=True):
        for name in point:
            if name == "sink" and normalizer != "sink":
                continue
            at = [{**point, name: point[name] + step * direction[name]} for step in (1e-6, -1e-6)]
            args = ([p.pop("q"), p.pop("k"), p.pop("v")] for p in at)
            up, down = (
                np.vdot(cotangent, reference(normalizer, *a, **p, **options)) for a, p in zip(args, at, strict=True)
            )
            expected = (up - down) / 2e-6
            got = np.vdot(gradient[name], direction[name])
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7, err_msg=f"{normalizer}, {name}")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow), jnp.float16])
@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "xla_chunked"])
def test_scores_of_ten_thousand_give_the_definition_and_finite_gradients(implementation, dtype, size):
    t = 7
    q, k, v = (jnp.asarray(a, dtype) for a in _arrays(t, t))
    q, k = jnp.full_like(q, 100.0 * np.sign(size)), jnp.full_like(k, 100.0 / H)
    k *= (1 + jnp.arange(t) % 2).reshape(1, t, 1, 1).astype(dtype)
    f = lambda *a: dot_product_attention(*a, is_causal=True, scale=1.0, implementation=implementation)  # noqa: E731
    out, pullback = jax.vjp(jax.jit(f), q, k, v)
    exact = reference("softmax1", *(np.asarray(a, np.float64) for a in (q, k, v)), is_causal=True, scale=1.0)
    assert (np.abs(exact).max() > 0.1) == (size > 0)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), exact, rtol=4 * float(jnp.finfo(dtype).eps), atol=4 * float(jnp.finfo(dtype).eps)
    )
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in pullback(jnp.ones_like(out)))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_negative_logits_in_half_precision_keep_their_small_weights(implementation, dtype):
    t = 7
    q, k = jnp.full((1, t, 1, 1), -1.0, dtype), jnp.asarray(7.0 + np.arange(t) / 8, dtype).reshape(1, t, 1, 1)
    v = jnp.ones((1, t, 1, 1), dtype)
    out = dot_product_attention(q, k, v, scale=1.0, is_causal=True, implementation=implementation)[0, :, 0, 0]
    total = np.cumsum(np.exp(-7.0 - np.arange(t) / 8))
    np.testing.assert_allclose(np.asarray(out, np.float64), total / (1.0 + total), rtol=2 * float(jnp.finfo(dtype).eps))


@pytest.mark.usefixtures("small_chunks")
def test_half_precision_gradients_of_many_chunks_are_summed_in_float32():
    t = 600  # 200 chunks: a sum in bfloat16 would stop growing at 256 times its terms
    ones = jnp.ones((1, t, 1, 1), jnp.bfloat16)
    f = lambda v: dot_product_attention(ones, ones, v, normalizer=0.0, implementation="xla_chunked").astype(jnp.float32)  # noqa: E731
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(f(v))))(ones)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), 1.0, rtol=2.0**-7)


# Memory.


def _temporary_bytes(t, implementation, **options):
    q = jax.ShapeDtypeStruct((1, t, 2, 32), jnp.float32)
    f = lambda *a: jnp.sum(dot_product_attention(*a, implementation=implementation, **options))  # noqa: E731
    memory = jax.jit(jax.grad(f, (0, 1, 2))).lower(q, q, q).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


_slow = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=_slow),
        {"is_causal": True},
        pytest.param({"is_causal": True, "local_window_size": 256}, marks=_slow),
    ],
)
def test_memory_of_chunks_is_linear_in_the_length(options):
    lengths = (2048, 4096, 8192)
    chunked = [_temporary_bytes(t, "xla_chunked", **options) for t in lengths]
    full = [_temporary_bytes(t, "xla", **options) for t in lengths[:2]]
    assert full[1] > 3.5 * full[0]  # so that the measure itself can fail
    for shorter, longer in itertools.pairwise(chunked):
        assert longer < 2.5 * shorter
    assert chunked[1] < full[1] / 3
    assert chunked[2] < 4 * full[1] / 8


def test_a_bias_of_one_row_and_a_mask_of_all_pairs_are_not_broadcast_to_heads_and_sequences():
    t, heads = 2048, 8
    q = jax.ShapeDtypeStruct((2, t, heads, 8), jnp.float32)
    bias, mask = jax.ShapeDtypeStruct((1, heads, 1, t), jnp.float32), jax.ShapeDtypeStruct((1, 1, t, t), bool)
    f = lambda *a: jnp.sum(dot_product_attention(*a, implementation="xla_chunked"))  # noqa: E731
    memory = jax.jit(jax.grad(f, (0, 1, 2, 3))).lower(q, q, q, bias, mask).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * heads * t * t * 4 / 4
