import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.ops import attention_logits, dot_product_attention, visible_keys
from orthojax.ops.attention import relaxed_causal_mask
from orthojax.ops.normalizers import ClippedSoftmax, apply_normalizer

NORMALIZERS = {"softmax": "softmax", "softmax1": "softmax1", "softmax_n": 0.5, "sink": (0.3, -1.0, 2.0, 0.0)}
NORMALIZERS |= {"relu": "relu", "sigmoid": "sigmoid", "clipped": ClippedSoftmax(-0.1, 1.2)}
B, T, S, N, H = 2, 5, 7, 4, 8
LENGTHS = {"query_seq_lengths": np.array([3, 5], np.int32), "key_value_seq_lengths": np.array([7, 4], np.int32)}


def _arrays(t=T, s=S, heads=N, kv_heads=N, dtype=np.float32, seed=0, width=H):
    rng = np.random.default_rng(seed)
    shapes = [(B, t, heads, width), (B, s, kv_heads, width), (B, s, kv_heads, width)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def _normalizer(name):
    value = NORMALIZERS[name]
    return jnp.asarray(value) if isinstance(value, tuple) else value


def _mask(shape=(B, N, T, S), seed=1):
    """Random, but every query sees key 0."""
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.5).at[..., 0].set(True)


def _bias(shape=(B, N, T, S), seed=2):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def sees(b, h, t, s, mask=None, is_causal=False, local_window_size=None, **lengths):
    """Whether query t of head h sees key s."""
    window = local_window_size
    left, right = (window, window) if isinstance(window, int) else window or (10**6, 10**6)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask), (B, N, 99, 99) if mask is None else (B, N, T, S))
    return (
        mask[b, h, t, s]
        and (not is_causal or s <= t)
        and t - left <= s <= t + right
        and t < lengths.get("query_seq_lengths", [10**6] * B)[b]
        and s < lengths.get("key_value_seq_lengths", [10**6] * B)[b]
    )


def oracle(name, q, k, v, bias=None, scale=None, **hides):
    """Attention by its definition: float64, one query of one head at a time."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    batch, t_length, heads, width = q.shape
    s_length, group = k.shape[1], heads // k.shape[2]
    scale = width**-0.5 if scale is None else scale
    bias = np.broadcast_to(0.0 if bias is None else np.asarray(bias, np.float64), (batch, heads, t_length, s_length))
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(batch, t_length, heads):
        keys = [s for s in range(s_length) if sees(b, h, t, s, **hides)]
        x = np.array([scale * (q[b, t, h] @ k[b, s, h // group]) + bias[b, h, t, s] for s in keys])
        if name == "softmax" and not keys and t < hides.get("query_seq_lengths", [t_length + 1] * batch)[b]:
            keys, x = list(range(s_length)), np.zeros(s_length)  # spread evenly, as jax.nn does
        if name == "relu":
            weights = np.maximum(x, 0.0) / max(len(keys), 1)
        elif name == "sigmoid":
            weights = 1.0 / (1.0 + np.exp(-x))
        elif name == "clipped":
            weights = np.clip(1.3 * np.exp(x) / np.exp(x).sum() - 0.1, 0.0, 1.0) if keys else x
        else:
            n = {"softmax": 0.0, "softmax1": 1.0, "softmax_n": 0.5, "sink": np.exp(NORMALIZERS["sink"][h])}[name]
            weights = np.exp(x) / (n + np.exp(x).sum()) if keys else x
        for s, weight in zip(keys, weights, strict=True):
            out[b, t, h] += weight * v[b, s, h // group]
    return out


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": _mask()},
    "mask for all heads": {"mask": _mask((1, 1, T, S))},
    "mask of keys": {"mask": _mask((B, 1, 1, S))},
    "bias": {"bias": _bias()},
    "bias for all sequences": {"bias": _bias((1, N, T, S))},
    "scale": {"scale": 0.7},
    "window": {"local_window_size": 2},
    "left and right window": {"local_window_size": (3, 1)},
    "causal window": {"local_window_size": (1, 0), "is_causal": True},
    "key lengths": {"key_value_seq_lengths": LENGTHS["key_value_seq_lengths"]},
    "query lengths": {"query_seq_lengths": LENGTHS["query_seq_lengths"]},
    "everything": {"bias": _bias((1, N, 1, S)), "mask": _mask(), "is_causal": True, "scale": 1.3, **LENGTHS},
}


def _as_arrays(case):
    return {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in case.items()}


def attend(f, *args, **options):
    """Calls an attention function compiled: one small program is faster than its operations one by one."""
    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    fixed = {name: value for name, value in options.items() if name not in arrays}
    return jax.jit(lambda args, arrays: f(*args, **arrays, **fixed))(args, arrays)


# The softmax of jax.nn is an independent implementation with the same arguments.


GROUPS = [(case, 2) for case in CASES] + [("everything", 1), ("everything", N)]


@pytest.mark.parametrize(("case", "kv_heads"), GROUPS)
def test_softmax_is_jax_nn_dot_product_attention(case, kv_heads):
    q, k, v = _arrays(kv_heads=kv_heads)
    case = _as_arrays(CASES[case])
    ours = attend(dot_product_attention, q, k, v, normalizer="softmax", **case)
    theirs = attend(jax.nn.dot_product_attention, q, k, v, **case)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("t", "s"), [(1, 9), (13, 13)])
def test_softmax_is_jax_nn_for_single_and_odd_lengths(t, s):
    q, k, v = _arrays(t, s, kv_heads=2, width=3)
    for causal in (False, True):
        ours = attend(dot_product_attention, q, k, v, normalizer="softmax", is_causal=causal)
        theirs = attend(jax.nn.dot_product_attention, q, k, v, is_causal=causal)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [N, 2])
def test_softmax_gradients_are_those_of_jax_nn(kv_heads):
    q, k, v = _arrays(kv_heads=kv_heads)
    options = {"mask": _mask(), "is_causal": True, **_as_arrays(LENGTHS)}

    def loss(attend):
        return lambda q, k, v, bias: jnp.sum(jnp.sin(attend(q, k, v, bias, **options)))

    ours = loss(lambda *args, **options: dot_product_attention(*args, normalizer="softmax", **options))
    got = jax.jit(jax.grad(ours, (0, 1, 2, 3)))(q, k, v, _bias())
    expected = jax.jit(jax.grad(loss(jax.nn.dot_product_attention), (0, 1, 2, 3)))(q, k, v, _bias())
    for a, b in zip(got, expected, strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_one_sequence_without_a_batch_axis_is_taken_as_jax_nn_takes_it():
    q, k, v = (a[0] for a in _arrays())
    mask, bias = _mask()[0], _bias()[0, 0]
    ours = attend(dot_product_attention, q, k, v, bias, mask, normalizer="softmax")
    assert ours.shape == q.shape
    theirs = attend(jax.nn.dot_product_attention, q, k, v, bias, mask)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# Every normalizer against the definition.


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("case", ["plain", "mask of keys", "everything"])
def test_every_normalizer_is_the_definition(name, case):
    q, k, v = _arrays(kv_heads=2)
    case = CASES[case]
    got = attend(dot_product_attention, q, k, v, normalizer=_normalizer(name), **_as_arrays(case))
    np.testing.assert_allclose(got, oracle(name, q, k, v, **case), rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", NORMALIZERS)
def test_float64_is_honoured(name):
    q, k, v = _arrays(kv_heads=2, dtype=np.float64)
    got = dot_product_attention(q, k, v, normalizer=_normalizer(name), is_causal=True)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, oracle(name, q, k, v, is_causal=True), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("is_causal", [False, True])
def test_softmax1_is_jax_nn_softmax_with_a_zero_key_and_value(is_causal):
    q, k, v = _arrays(s=T, kv_heads=2)
    mask = jnp.tri(T, dtype=bool) if is_causal else jnp.ones((T, T), bool)
    mask = jnp.pad(mask, ((0, 0), (0, 1)), constant_values=True)[None, None]

    def ours(q, k, v):
        return dot_product_attention(q, k, v, is_causal=is_causal)  # softmax1 is the default

    def theirs(q, k, v):
        k, v = (jnp.pad(a, ((0, 0), (0, 1), (0, 0), (0, 0))) for a in (k, v))
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    def results(f):
        return f(q, k, v), *jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))(q, k, v)

    for a, b in zip(jax.jit(lambda: results(ours))(), jax.jit(lambda: results(theirs))(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "sink", "sigmoid"])
def test_padded_queries_give_zeros_and_no_gradient(name):
    q, k, v = _arrays()
    lengths = jnp.array([2, 0], jnp.int32)

    def padded(q, k, v):
        return dot_product_attention(q, k, v, normalizer=_normalizer(name), query_seq_lengths=lengths)

    out, pullback = jax.vjp(jax.jit(padded), q, k, v)
    assert (out[0, :2] != 0.0).any()
    assert (out[0, 2:] == 0.0).all()
    assert (out[1] == 0.0).all()
    for gradient, array in zip(pullback(jnp.ones_like(out)), (q, k, v), strict=True):
        assert gradient.shape == array.shape
        assert (gradient[1] == 0.0).all()
        assert jnp.isfinite(gradient).all()
        assert (gradient[0] != 0.0).any()


@pytest.mark.parametrize("name", ["softmax1", "sink", "relu", "sigmoid", "clipped"])
def test_fully_masked_rows_are_exact_zeros_with_finite_gradients(name):
    q, k, v = _arrays()
    mask = _mask().at[0, 1, 2].set(False)

    def masked(q, k, v):
        return dot_product_attention(q, k, v, mask=mask, normalizer=_normalizer(name))

    out, pullback = jax.vjp(jax.jit(masked), q, k, v)
    assert (out[0, 2, 1] == 0.0).all()
    assert (out[0, 2, 0] != 0.0).any()
    gradients = pullback(jnp.ones_like(out))
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][0, 2, 1] == 0.0).all()


def test_relu_counts_what_mask_causality_and_lengths_leave_and_not_the_bias():
    q, k = jnp.ones((1, 4, 1, 4)), jnp.ones((1, 4, 1, 4))
    v = jnp.ones((1, 4, 1, 4))
    hidden = jnp.zeros((1, 1, 4, 4)).at[..., 1].set(-1e9)
    options = {"normalizer": "relu", "scale": 0.25, "is_causal": True}
    out = dot_product_attention(q, k, v, hidden, key_value_seq_lengths=jnp.array([3], jnp.int32), **options)
    np.testing.assert_allclose(out[0, :, 0, 0], [1.0, 1 / 2, 2 / 3, 2 / 3], rtol=1e-6)
    out = dot_product_attention(q, k, v, mask=hidden == 0.0, **options)
    np.testing.assert_allclose(out[0, :, 0, 0], [1.0, 1.0, 1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype"), [("softmax1", jnp.float16), *((name, jnp.bfloat16) for name in NORMALIZERS)]
)
def test_half_precision_goes_in_and_out_and_logits_stay_float32(name, dtype):
    q, k, v = _arrays(kv_heads=2, dtype=dtype)
    got = dot_product_attention(q, k, v, normalizer=_normalizer(name), is_causal=True)
    assert got.dtype == dtype
    assert attention_logits(q, k).dtype == jnp.float32
    exact = oracle(name, q, k, v, is_causal=True)
    # Two roundings (the weights, the output) of relative size eps / 2 each, against the sum of absolute terms.
    bound = 2 * float(jnp.finfo(dtype).eps) * np.abs(np.asarray(v, np.float64)).max() * max(1.0, np.abs(exact).max())
    assert np.abs(np.asarray(got, np.float64) - exact).max() < bound


def test_attention_of_half_precision_is_not_the_product_of_rounded_logits():
    q, k, _ = _arrays(dtype=jnp.bfloat16)
    q = q * 16  # logits near 50: bfloat16 would round them to multiples of 0.25
    exact = np.einsum("BTNH,BSNH->BNTS", np.asarray(q, np.float64), np.asarray(k, np.float64)) * H**-0.5
    np.testing.assert_allclose(attention_logits(q, k), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "kv_heads"), [("softmax1", N), *((name, 2) for name in NORMALIZERS)])
def test_weights_for_analysis_times_values_are_the_output(name, kv_heads):
    q, k, v = _arrays(kv_heads=kv_heads)
    hides = {"mask": _mask(), "is_causal": True}
    weights = apply_normalizer(_normalizer(name), attention_logits(q, k, _bias()), visible_keys(B, T, S, **hides))
    assert weights.shape == (B, N, T, S)
    output = np.einsum("BNTS,BSNH->BTNH", weights, np.repeat(v, N // kv_heads, 2))
    got = dot_product_attention(q, k, v, _bias(), normalizer=_normalizer(name), **hides)
    np.testing.assert_allclose(got, output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_grouped_heads_are_repeated_key_value_heads(kv_heads):
    q, k, v = _arrays(kv_heads=kv_heads)
    repeated = (jnp.repeat(a, N // kv_heads, 2) for a in (k, v))
    np.testing.assert_allclose(
        dot_product_attention(q, k, v), dot_product_attention(q, *repeated), rtol=1e-5, atol=1e-6
    )


def test_vmap_and_jit_change_nothing():
    q, k, v = _arrays(kv_heads=2)
    sink = jnp.asarray(NORMALIZERS["sink"])
    f = lambda q, k, v: dot_product_attention(q, k, v, normalizer=sink, is_causal=True)  # noqa: E731
    expected = f(q, k, v)
    np.testing.assert_allclose(jax.jit(f)(q, k, v), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(q, k, v), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(q[:, None], k[:, None], v[:, None])[:, 0], expected, rtol=1e-5, atol=1e-6)


# Who sees whom.


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not {"bias", "scale"} & set(case)])
def test_visible_keys_are_those_of_a_loop(case):
    case = CASES[case]
    visible = visible_keys(B, T, S, **_as_arrays(case))
    if not case:
        assert visible is None
        return
    assert visible.dtype == jnp.bool_
    full = np.broadcast_to(visible, (B, N, T, S))
    assert not full.all()
    for b, h, t, s in np.ndindex(full.shape):
        assert full[b, h, t, s] == sees(b, h, t, s, **case)


@pytest.mark.parametrize("relaxed", [0, 1, 2, 5, 8])
def test_relaxed_causal_mask_is_that_of_a_loop(relaxed):
    mask = np.asarray(relaxed_causal_mask(6, relaxed))
    assert mask.shape == (1, 1, 6, 6)
    for t, s in np.ndindex(6, 6):
        assert mask[0, 0, t, s] == (s <= t or (t < relaxed and s < relaxed))


# What is refused.

GOOD = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 8)}


def _call(shapes=None, dtypes=None, **options):
    shapes, dtypes = GOOD | (shapes or {}), dtypes or {}
    arrays = {name: jnp.zeros(shape, dtypes.get(name, jnp.float32)) for name, shape in shapes.items()}
    return dot_product_attention(**arrays, **options)


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"query": (5, 8)}, r"query.*\(5, 8\)"),
        ({"query": (1, 2, 5, 4, 8)}, r"query.*\(1, 2, 5, 4, 8\)"),
        ({"key": (2, 7, 2, 8, 1)}, r"key.*\(2, 7, 2, 8, 1\)"),
        ({"value": (2, 6, 2, 8)}, r"value.*\(2, 6, 2, 8\)"),
        ({"value": (2, 7, 4, 8)}, r"value.*\(2, 7, 4, 8\)"),
        ({"query": (3, 5, 4, 8)}, r"batch.*width"),
        ({"query": (2, 5, 4, 6)}, r"batch.*width"),
        ({"query": (2, 5, 3, 8)}, r"\(3\).*\(2\)"),
        ({"bias": (2, 4, 5, 6)}, r"bias.*\(2, 4, 5, 6\)"),
        ({"bias": (2, 2, 5, 7)}, r"bias.*\(2, 2, 5, 7\)"),
        ({"bias": (1, 2, 4, 5, 7)}, r"bias"),
        ({"mask": (3, 1, 1, 7)}, r"mask.*\(3, 1, 1, 7\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, problem):
    with pytest.raises(ValueError, match=problem):
        _call(shapes, {"mask": bool})


def test_good_shapes_are_not_refused():
    assert _call({"bias": (1, 4, 1, 7), "mask": (2, 1, 5, 1)}, {"mask": bool}).shape == GOOD["query"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mask": jnp.zeros((1, 1, 5, 7))}, "mask must be boolean.*float32.*bias"),
        ({"implementation": "cuda"}, "implementation 'cuda'.*'xla'"),
        ({"normalizer": "softmax2"}, "normalizer 'softmax2'.*softmax1"),
        ({"normalizer": jnp.zeros(3)}, r"\(3,\).*\(4,\)"),
        ({"normalizer": -1.0}, "-1"),
        ({"query_seq_lengths": jnp.array([1, 2, 3])}, r"query_seq_lengths.*\(2,\).*\(3,\)"),
        ({"key_value_seq_lengths": jnp.array([1.0, 2.0])}, "key_value_seq_lengths.*integers.*float32"),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size.*\(1, 2, 3\)"),
    ],
)
def test_options_that_mean_nothing_are_named(options, problem):
    with pytest.raises(ValueError, match=problem):
        _call(**options)


@pytest.mark.parametrize("window", [-1, (2, -1), 1.5, "3", (1, 2, 3)])
def test_a_window_that_is_none_is_refused(window):
    q, k, v = _arrays()
    with pytest.raises(ValueError, match="local_window_size"):
        dot_product_attention(q, k, v, local_window_size=window)


def test_numpy_numbers_are_numbers():
    q, k, v = _arrays()
    np.testing.assert_array_equal(
        dot_product_attention(q, k, v, local_window_size=np.int64(2), normalizer=np.float32(2.0)),
        dot_product_attention(q, k, v, local_window_size=2, normalizer=2.0),
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_no_sequences_and_no_queries_give_nothing(axis):
    q, k, v = _arrays()
    q = q[:0] if axis == 0 else q[:, :0]
    k, v = (k[:0], v[:0]) if axis == 0 else (k, v)
    for implementation in ("xla", "xla_chunked", None):
        assert dot_product_attention(q, k, v, implementation=implementation).shape == q.shape


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"key": np.ones((B, 0, N, H), np.float32), "value": np.ones((B, 0, N, H), np.float32)}, "there are no keys"),
        ({"query": np.ones((B, T, N, H), np.int32)}, "query must be of a floating dtype, got int32"),
        ({"value": np.ones((B, S, N, H), np.complex64)}, "value must be of a floating dtype, got complex64"),
        ({"scale": "0.3"}, "scale must be a number, got '0.3'"),
        ({"scale": np.ones(3)}, "scale must be a number"),
    ],
)
def test_what_has_no_attention_is_named(change, problem):
    q, k, v = _arrays()
    with pytest.raises(ValueError, match=problem):
        dot_product_attention(**({"query": q, "key": k, "value": v} | change))


@pytest.mark.parametrize("implementation", ["xla", pytest.param("xla_chunked", marks=pytest.mark.slow)])
def test_on_a_mesh_batch_and_heads_stay_where_they_are(implementation):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    where = jax.NamedSharding(mesh, jax.P("a", None, "b"))
    q, k, v = (jnp.asarray(np.tile(a, (4, 1, 1, 1))[:8]) for a in _arrays())

    def loss(q, k, v):
        return jnp.sum(jnp.square(dot_product_attention(q, k, v, is_causal=True, implementation=implementation)))

    gradients = jax.grad(loss, (0, 1, 2))
    compiled = jax.jit(gradients, in_shardings=(where,) * 3, out_shardings=where).lower(q, k, v).compile()
    assert not [word for word in ("all-gather", "all-to-all", "all-reduce") if word in compiled.as_text()]
    for got, expected in zip(compiled(q, k, v), gradients(q, k, v), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
