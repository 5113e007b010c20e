"""The real custom derivative with its rules for vmap and meshes, on CPU: only cuDNN's two primitives are stand-ins."""

import functools
import re

import jax
import jax._src.cudnn.fused_attention_stablehlo as vendor
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orthojax.ops.attention import ATTENTION_NAME, cudnn, dot_product_attention
from orthojax.ops.attention import dot_product as platforms
from orthojax.ops.attention.dot_product import prepare_inputs

B, N, H = 2, 4, 8
SINK = np.array([0.3, -1.0, 2.0, 0.0], np.float32)


# Stand-ins for the kernels: the flash algorithm's formulas. What cuDNN need not write is NaN here.


def _logits(query, key, bias, query_lengths, key_lengths, parameters):
    T, S, group = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
    t, s = jnp.arange(T)[:, None], jnp.arange(S)[None]
    visible = jnp.ones((1, 1, T, S), bool)
    if "CAUSAL" in parameters["mask_type"].name:
        visible &= (s <= t)[None, None]
    if window := parameters["sliding_window_length"]:
        visible &= (s > t - window)[None, None]
    if "PADDING" in parameters["mask_type"].name:
        visible &= (t[None, None] < query_lengths.reshape(-1, 1, 1, 1)) & (
            s[None, None] < key_lengths.reshape(-1, 1, 1, 1)
        )
    key = jnp.repeat(key, group, 2).astype(jnp.float32)
    x = parameters["scale"] * jnp.einsum("BTNH,BSNH->BNTS", query.astype(jnp.float32), key, precision="highest")
    if parameters["variadic_args"][0]:
        assert bias.shape[0] in (1, query.shape[0])
        assert bias.shape[1] in (1, query.shape[2])
        x += bias
    return jnp.where(visible, x, -jnp.inf)


def _kernel_forward(query, key, value, bias, query_lengths, key_lengths, *_, **parameters):
    assert parameters["is_training"]
    x = _logits(query, key, bias, query_lengths, key_lengths, parameters)
    lse = jax.nn.logsumexp(x, -1)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], 2).astype(jnp.float32)
    output = jnp.einsum("BNTS,BSNH->BTNH", jnp.exp(x - lse[..., None]), value, precision="highest")
    return output.astype(query.dtype), jnp.where(lse == -jnp.inf, jnp.nan, lse)


def _kernel_backward(query, key, value, bias, query_lengths, key_lengths, *rest, **parameters):
    lse, output, cotangent = rest[4:7]
    group = query.shape[2] // key.shape[2]
    x = _logits(query, key, bias, query_lengths, key_lengths, parameters)
    p = jnp.exp(x - lse[..., None])
    q, d, o = (a.astype(jnp.float32) for a in (query, cotangent, output))
    k, v = (jnp.repeat(a, group, 2).astype(jnp.float32) for a in (key, value))
    einsum = functools.partial(jnp.einsum, precision="highest")
    dx = p * (einsum("BTNH,BSNH->BNTS", d, v) - jnp.swapaxes(jnp.sum(d * o, -1), 1, 2)[..., None])
    dq = einsum("BNTS,BSNH->BTNH", dx, k) * parameters["scale"]
    dk = einsum("BNTS,BTNH->BSNH", dx, q) * parameters["scale"]
    dv = einsum("BNTS,BTNH->BSNH", p, d)
    dk, dv = (jnp.sum(a.reshape(*a.shape[:2], -1, group, a.shape[3]), 3) for a in (dk, dv))
    if "PADDING" in parameters["mask_type"].name:
        padding = [jnp.arange(a.shape[1])[None] >= n.reshape(-1, 1) for a, n in ((q, query_lengths), (k, key_lengths))]
        dq = jnp.where(padding[0][..., None, None], jnp.nan, dq)
        dk, dv = (jnp.where(padding[1][..., None, None], jnp.nan, a) for a in (dk, dv))
    results = [dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)]
    if parameters["variadic_args"][1]:
        axes = [axis for axis in (0, 1) if bias.shape[axis] != dx.shape[axis]]
        results.append(jnp.sum(dx, axes, keepdims=True).astype(bias.dtype))
    return results


STAND_INS = {
    vendor._dot_product_attention_fwd_p: _kernel_forward,
    vendor._dot_product_attention_bwd_p: _kernel_backward,
    platforms._compiled_for_p: lambda x, **_: [x],
}


@pytest.fixture(scope="module", autouse=True)
def _forget_what_was_compiled():
    yield
    jax.clear_caches()


@pytest.fixture
def kernels():
    for primitive, rule in STAND_INS.items():
        mlir.register_lowering(primitive, mlir.lower_fun(rule, multiple_results=True), platform="cpu")
    yield
    for primitive in STAND_INS:
        del mlir._platform_specific_lowerings["cpu"][primitive]


# The definition, in NumPy and float64; its gradients are central differences.


def _visible(t_length, s_length, mask=None, is_causal=False, local_window_size=None, **lengths):
    t, s = np.arange(t_length)[:, None], np.arange(s_length)[None]
    visible = np.ones((B, 1, t_length, s_length), bool) & (True if mask is None else np.asarray(mask))
    if is_causal:
        visible &= s <= t
    if local_window_size:
        visible &= (s >= t - local_window_size[0]) & (s <= t + local_window_size[1])
    visible &= t < np.reshape(lengths.get("query_seq_lengths", [t_length] * B), (B, 1, 1, 1))
    return visible & (s < np.reshape(lengths.get("key_value_seq_lengths", [s_length] * B), (B, 1, 1, 1)))


def oracle(visible, scale, query, key, value, bias, sink):
    group = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, group, 2), np.repeat(value, group, 2)
    x = np.where(visible, scale * np.einsum("btnh,bsnh->bnts", query, key) + bias, -np.inf)
    sink = np.reshape(sink, (1, -1, 1, 1))
    shift = np.maximum(x.max(-1, keepdims=True), sink)
    shift[shift == -np.inf] = 0.0
    e = np.exp(x - shift)
    total = e.sum(-1, keepdims=True) + np.exp(sink - shift)
    return np.einsum("bnts,bsnh->btnh", e / np.where(total == 0.0, 1.0, total), value)


def expected(weights, visible, scale, *arrays, eps=1e-4):
    """The output, and the gradients of sum(output * weights)."""
    arrays = [np.array(a, np.float64) for a in arrays]
    gradients = []
    for array in arrays:
        gradient = np.zeros(array.shape)
        for i in np.ndindex(array.shape):
            x = array[i]
            array[i] = x + eps
            upper = np.sum(oracle(visible, scale, *arrays) * weights)
            array[i] = x - eps
            gradient[i] = (upper - np.sum(oracle(visible, scale, *arrays) * weights)) / (2 * eps)
            array[i] = x
        gradients.append(gradient)
    return oracle(visible, scale, *arrays), gradients


def _arrays(t=6, s=6, kv_heads=N, bias_shape=(1, 1, 1, 1), dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(B, t, N, H), (B, s, kv_heads, H), (B, s, kv_heads, H), bias_shape]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def _attend(query, key, value, bias=None, mask=None, normalizer="softmax1", **options):
    """The kernel's form in any dtype, past the refusal of float32."""
    options = {"scale": None, "is_causal": False, "local_window_size": None} | options
    lengths = {name: options.pop(name, None) for name in ("query_seq_lengths", "key_value_seq_lengths")}
    return cudnn.attend(prepare_inputs(query, key, value, bias, mask, normalizer=normalizer, **options, **lengths))


def results(attend, weights, *arrays):
    """Output and gradients, compiled."""

    def both(*arrays):
        output, pullback = jax.vjp(attend, *arrays)
        return output, pullback(jnp.asarray(weights, output.dtype))

    return jax.jit(both)(*arrays)


def error(a, b):
    """Largest difference relative to the largest number, or to 1."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / max(1.0, np.abs(b).max())


LENGTHS = {"query_seq_lengths": np.array([4, 6], np.int32), "key_value_seq_lengths": np.array([6, 3], np.int32)}
NO_KEYS = {"key_value_seq_lengths": np.array([0, 5], np.int32)}
MASK = np.random.default_rng(3).random((B, 1, 6, 6)) < 0.6
MASK[0, 0, 2] = False  # a row that sees nothing
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7, "is_causal": True},
    "odd lengths": {"t": 5, "s": 7},
    "odd lengths, causal": {"t": 7, "s": 3, "is_causal": True},
    "one query": {"t": 1, "s": 5},
    "two key heads": {"kv_heads": 2, "is_causal": True},
    "one key head": {"kv_heads": 1},
    "window": {"local_window_size": (2, 0)},
    "causal window": {"local_window_size": (1, 3), "is_causal": True},
    "lengths": LENGTHS,
    "causal lengths": {**LENGTHS, "is_causal": True, "kv_heads": 2},
    "no keys": {**NO_KEYS, "local_window_size": (1, 0)},
    "bias": {"bias_shape": (B, N, 6, 6), "is_causal": True},
    "bias for all heads": {"bias_shape": (B, 1, 6, 1)},
    "bias for all sequences": {"bias_shape": (1, N, 1, 6), "kv_heads": 2, **LENGTHS},
    "mask": {"mask": MASK},
    "mask and bias": {"mask": MASK, "bias_shape": (1, N, 6, 6), "kv_heads": 2},
}


def quick_and_slow(cases, slow):
    """Cases for `parametrize`; `slow` are those that others contain in part."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (case in slow)) for case in cases]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "case", quick_and_slow(CASES, {"plain", "scale", "odd lengths", "window", "lengths", "mask", "one query"})
)
def test_output_and_every_gradient_are_the_definition_and_its_finite_differences(case):
    options = dict(CASES[case])
    arrays = _arrays(*(options.pop(name, default) for name, default in (("t", 6), ("s", 6), ("kv_heads", N))))
    has_bias = "bias_shape" in options
    arrays[3] = _arrays(bias_shape=options.pop("bias_shape", (1, 1, 1, 1)), seed=1)[3] * has_bias
    q, k, v, bias = arrays
    weights = np.random.default_rng(5).normal(size=q.shape)
    hides = {name: option for name, option in options.items() if name != "scale"}
    visible = _visible(q.shape[1], k.shape[1], **hides)
    output, gradients = expected(weights, visible, options.get("scale", H**-0.5), q, k, v, bias, SINK)
    fixed = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}

    def attend(q, k, v, bias, sink):
        return _attend(q, k, v, bias if has_bias else None, normalizer=sink, **fixed)

    got, got_gradients = results(attend, weights, q, k, v, bias, jnp.asarray(SINK))
    assert error(got, output) < 1e-5
    unseen = ~np.broadcast_to(visible.any(-1), (B, N, q.shape[1])).swapaxes(1, 2)
    assert (np.asarray(got)[unseen] == 0.0).all()
    for name, a, b in zip("q k v bias sink".split(), got_gradients, gradients, strict=True):
        if name != "bias" or has_bias:
            assert np.abs(b).max() > 1e-2, name
            assert error(a, b) < 1e-5, name


# Meshes.

MESHED = {
    "sink": {"normalizer": jnp.asarray(SINK)},
    "softmax1": {"normalizer": "softmax1", "kv_heads": 2},
    "one key head": {"normalizer": "softmax1", "kv_heads": 1},
    "lengths": {"normalizer": jnp.asarray(SINK), **{name: jnp.asarray(x) for name, x in LENGTHS.items()}},
    "one length": {"normalizer": "softmax1", "key_value_seq_lengths": jnp.array([6, 3], jnp.int32)},
    "bias of each": {"normalizer": "softmax1", "bias_shape": (B, N, 6, 6)},
    "bias for all sequences": {"normalizer": jnp.asarray(SINK), "bias_shape": (1, N, 6, 6), "kv_heads": 2},
    "bias for all": {"normalizer": "softmax", "bias_shape": (1, 1, 6, 6)},
}


def _meshed(case):
    """Arrays and a function of them all, sink and bias included."""
    options = dict(MESHED[case])
    has_bias = "bias_shape" in options
    arrays = _arrays(kv_heads=options.pop("kv_heads", N))[:3]
    arrays += [_arrays(bias_shape=options.pop("bias_shape", (1, 1, 1, 1)), seed=1)[3]]
    normalizer = options.pop("normalizer")
    learned = isinstance(normalizer, jax.Array)

    def attend(q, k, v, bias, sink):
        bias = bias if has_bias else None
        return _attend(q, k, v, bias, normalizer=sink if learned else normalizer, is_causal=True, **options)

    return attend, (*arrays, jnp.asarray(SINK))


def _placed(mesh, arrays, kind):
    """Rows cut over both axes. Bias and sink are whole where the compiler may choose, or else cut like their axes."""
    rows = P("data", None, "tensor", None)
    keys = rows if arrays[1].shape[2] > 1 else P("data")
    specs = [rows, keys, keys, P(), P()]
    if kind == AxisType.Explicit:
        bias = arrays[3].shape
        specs[3:] = [P("data" if bias[0] == B else None, "tensor" if bias[1] == N else None, None, None), P("tensor")]
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "case", quick_and_slow(MESHED, {"softmax1", "one length", "lengths", "bias of each", "bias for all"})
)
def test_over_a_mesh_of_batch_and_heads_nothing_is_gathered(case, kind):
    attend, arrays = _meshed(case)
    weights = jnp.asarray(np.random.default_rng(5).normal(size=arrays[0].shape), jnp.float32)

    def both(weights, *arrays):
        output, pullback = jax.vjp(attend, *arrays)
        return output, pullback(weights)

    output, gradients = jax.jit(both)(weights, *arrays)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))
    placed = _placed(mesh, arrays, kind)
    weights = jax.device_put(weights, placed[0].sharding)
    compiled = jax.jit(both).lower(weights, *placed).compile()
    got, got_gradients = compiled(weights, *placed)
    assert got.sharding.is_equivalent_to(placed[0].sharding, 4)
    assert error(got, output) < 1e-5
    for a, b in zip(got_gradients, gradients, strict=True):
        assert error(a, b) < 1e-5
    assert not re.findall("all-gather|all-to-all|collective-permute", compiled.as_text())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "spec", quick_and_slow([P("data", None, "tensor"), P(None, ("data", "tensor"))], {P(None, ("data", "tensor"))})
)
def test_a_cut_that_the_kernel_cannot_have_is_gathered(spec):
    arrays = _arrays(t=8, s=8, kv_heads=2)[:3]
    loss = lambda *arrays: jnp.sum(jnp.sin(_attend(*arrays, is_causal=True)))  # noqa: E731
    f = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    placed = [jax.device_put(arrays[0], NamedSharding(mesh, spec)), *arrays[1:]]
    placed[1:] = [jax.device_put(array, NamedSharding(mesh, P("data"))) for array in arrays[1:]]
    for a, b in zip(jax.tree.leaves(f(*placed)), jax.tree.leaves(f(*arrays)), strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", ["sink", "bias of each"])
def test_inside_shard_map_it_is_attention_of_the_parts(case):
    attend, arrays = _meshed(case)
    weights = jnp.asarray(np.random.default_rng(5).normal(size=arrays[0].shape), jnp.float32)
    loss = lambda attend: lambda *arrays: jnp.sum(attend(*arrays) * weights)  # noqa: E731
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = P("data", None, "tensor", None)
    specs = (rows, rows, rows, P("data", "tensor") if case == "bias of each" else P(), P("tensor"))
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=rows)
    got = jax.jit(jax.value_and_grad(loss(mapped), range(5)))(*arrays)
    want = jax.jit(jax.value_and_grad(loss(attend), range(5)))(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(a, b) < 1e-5


# Normalizers, precision, extremes.


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("normalizer", "sink"),
    [("softmax", -np.inf), ("softmax1", 0.0), (0.5, np.log(0.5)), (3.0, np.log(3.0)), (0.0, -np.inf)],
)
def test_every_normalizer_with_a_sink_is_the_definition(normalizer, sink):
    q, k, v, bias = _arrays(kv_heads=2)
    weights = np.random.default_rng(5).normal(size=q.shape)
    visible = _visible(6, 6, is_causal=True)
    output, gradients = expected(weights, visible, H**-0.5, q, k, v, 0 * bias, np.full(N, sink))
    got, got_gradients = results(
        lambda q, k, v: _attend(q, k, v, normalizer=normalizer, is_causal=True), weights, q, k, v
    )
    for a, b in zip((got, *got_gradients), (output, *gradients[:3]), strict=True):
        assert error(a, b) < 1e-5


def test_the_gate_with_plain_differentiation_fails_the_same_check(kernels):
    del kernels
    q, k, v, bias = _arrays()
    weights = np.random.default_rng(5).normal(size=q.shape)
    output, gradients = expected(weights, _visible(6, 6, is_causal=True), H**-0.5, q, k, v, 0 * bias, np.zeros(N))

    def naive(q, k, v):
        output, lse = jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
        return output * jax.nn.sigmoid(lse)[..., None]

    def errors(attend):
        got, got_gradients = results(attend, weights, q, k, v)
        pairs = zip((got, *got_gradients), (output, *gradients[:3]), strict=True)
        return [error(a, b) for a, b in pairs]

    assert max(errors(lambda q, k, v: _attend(q, k, v, is_causal=True))) < 1e-5
    wrong = errors(naive)
    assert max(wrong[0], wrong[3]) < 1e-5  # the output and the value's gradient are right, so nobody would notice
    assert min(wrong[1], wrong[2]) > 0.05


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_near_the_definition(dtype):
    q, k, v, bias = _arrays(t=8, s=8, kv_heads=2, bias_shape=(1, N, 8, 8), dtype=dtype)
    weights = np.asarray(jnp.asarray(np.random.default_rng(5).normal(size=q.shape), dtype), np.float64)
    visible = _visible(8, 8, is_causal=True, **LENGTHS)
    output, gradients = expected(weights, visible, H**-0.5, q, k, v, bias, SINK)
    lengths = {name: jnp.asarray(x) for name, x in LENGTHS.items()}

    def attend(q, k, v, bias, sink):
        return dot_product_attention(q, k, v, bias, normalizer=sink, is_causal=True, implementation="cudnn", **lengths)

    got, got_gradients = results(attend, weights, q, k, v, bias, jnp.asarray(SINK))
    assert [a.dtype for a in (got, *got_gradients)] == [dtype] * 5 + [jnp.float32]
    for a, b in zip((got, *got_gradients), (output, *gradients), strict=True):
        assert error(a, b) < 2e-2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("normalizer", "dtype"), [("sink", jnp.float32), ("softmax1", jnp.bfloat16), ("softmax", jnp.float16)]
)
def test_scores_of_ten_thousand_are_exact(normalizer, dtype):
    signs = np.sign(np.random.default_rng(0).normal(size=(B, 6, N, 1)))
    q = jnp.asarray(100 * signs * np.eye(H)[0], dtype)
    k = jnp.asarray(np.arange(-50, 100, 25).reshape(1, 6, 1, 1) * np.ones((B, 6, N, 1)) * np.eye(H)[0], dtype)
    v = _arrays(dtype=dtype)[2]  # scores are -10,000, -7,500 .. 10,000: one key takes it all, or the sink does
    sink = {"softmax1": np.zeros(N), "softmax": np.full(N, -np.inf), "sink": SINK}[normalizer]
    visible = _visible(6, 6, is_causal=True)
    output = oracle(visible, 1.0, *(np.asarray(a, np.float64) for a in (q, k, v)), 0.0, sink)
    argument = jnp.asarray(SINK) if normalizer == "sink" else normalizer
    got, gradients = results(
        lambda q, k, v: _attend(q, k, v, normalizer=argument, scale=1.0, is_causal=True), np.ones(q.shape), q, k, v
    )
    # Scores tie nowhere, so float32 loses nothing, large as they are, but where the score is 0: weight 1/2 or less.
    assert error(got, output) < (1e-5 if dtype == jnp.float32 else 4e-3)
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", quick_and_slow([jnp.bfloat16, jnp.float16], {jnp.bfloat16}))
def test_large_negative_logits_leave_all_to_the_sink(dtype):
    ones = jnp.ones((B, 6, N, H), dtype)
    got, gradients = results(lambda q, k, v: _attend(q, k, v, is_causal=True), ones, -150 * ones, 60 * ones, ones)
    assert (got == 0.0).all()  # logits are -25,456
    assert all((gradient == 0.0).all() for gradient in gradients)
    hidden = jnp.full((1, 1, 1, 6), -1e30)  # beyond what either dtype may add to a logit
    got, gradients = results(lambda q, k, v, bias: _attend(q, k, v, bias), ones, ones, ones, ones, hidden)
    assert (got == 0.0).all()
    assert all((gradient == 0.0).all() for gradient in gradients)


@pytest.mark.usefixtures("kernels")
def test_numbers_that_are_not_are_not_hidden():
    q, k, v, _ = _arrays()
    lengths = {name: jnp.asarray(x) for name, x in LENGTHS.items()}
    got = jax.jit(lambda q: _attend(q, k, v, **lengths))(q.at[0, 3, 1, 0].set(jnp.nan))
    assert jnp.isnan(got[0, 3, 1]).all()
    assert jnp.isfinite(got[1]).all()


# vmap.


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("shared", "bias_batch"),
    [
        ("query", B),
        ("bias", 1),
        ("lengths", B),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("none", B), ("bias", B), ("key", 1))),
    ],
)
def test_vmap_is_a_loop(shared, bias_batch):
    each = [_arrays(t=4, s=4, bias_shape=(bias_batch, N, 4, 4), seed=i) for i in range(3)]
    stacked = [jnp.stack(arrays) for arrays in zip(*each, strict=True)]
    stacked += [jnp.stack([jnp.asarray(SINK) + i for i in range(3)]), jnp.array([[3, 4], [1, 4], [0, 3]], jnp.int32)]
    names = ("query", "key", "value", "bias", "sink", "lengths")
    axes = tuple(None if name == shared else 0 for name in names)
    arguments = [array if axis == 0 else array[0] for array, axis in zip(stacked, axes, strict=True)]

    def loss(q, k, v, bias, sink, lengths):
        return jnp.sum(jnp.sin(_attend(q, k, v, bias, normalizer=sink, key_value_seq_lengths=lengths)))

    def total(*arguments):
        return jnp.sum(jax.vmap(loss, axes)(*arguments))

    f = jax.value_and_grad(loss, range(5))
    got = jax.jit(lambda *a: (jax.vmap(f, axes)(*a), jax.grad(total, range(5))(*a)))(*arguments)
    single = jax.jit(f)
    loop = [single(*(a if axis is None else a[i] for a, axis in zip(arguments, axes, strict=True))) for i in range(3)]
    loop = jax.tree.map(lambda *arrays: jnp.stack(arrays), *loop)
    summed = [a if axis == 0 else jnp.sum(a, 0) for a, axis in zip(loop[1], axes, strict=False)]
    for a, b in zip(jax.tree.leaves(got), (*jax.tree.leaves(loop), *summed), strict=True):
        assert error(a, b) < 1e-5


# What is compiled for CUDA, on a machine without it.

HALF = [jnp.asarray(a, jnp.bfloat16) for a in _arrays(kv_heads=2, bias_shape=(1, N, 6, 6))]


def _for_cuda(f, *arrays):
    """The names of the kernels in what is lowered, and its text."""
    text = jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"__cudnn\$\w+", text), text


def _cudnn(q, k, v, bias=None, **options):
    return dot_product_attention(q, k, v, bias, is_causal=True, implementation="cudnn", **options)


@pytest.mark.parametrize("normalizer", ["softmax1", "softmax", "sink"])
def test_one_kernel_forward_and_one_backward(normalizer):
    normalizer = jnp.asarray(SINK) if normalizer == "sink" else normalizer
    f = lambda q, k, v: jnp.sum(_cudnn(q, k, v, normalizer=normalizer).astype(jnp.float32))  # noqa: E731
    kernels, text = _for_cuda(f, *HALF[:3])
    assert kernels == ["__cudnn$fmhaSoftmax"]
    kernels, _ = _for_cuda(jax.grad(f, (0, 1, 2)), *HALF[:3])
    assert kernels == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert ("exponential" in text or "logistic" in text) == (normalizer != "softmax")  # no gate where there is no sink


def test_a_remat_policy_that_saves_the_name_runs_attention_once():
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names(ATTENTION_NAME)

    def kernels(policy):
        def layer(x, _):
            q = x.reshape(B, 6, N, H)
            x = x + jnp.tanh(_cudnn(q, q[:, :, :2], q[:, :, 2:], normalizer=jnp.asarray(SINK))).reshape(x.shape)
            return x @ jnp.eye(N * H, dtype=x.dtype), None

        body = layer if policy is None else jax.checkpoint(layer, policy=policy, prevent_cse=False)
        loss = lambda x: jnp.sum(jax.lax.scan(body, x, length=2)[0].astype(jnp.float32))  # noqa: E731
        names, _ = _for_cuda(jax.grad(loss), HALF[0].reshape(B, 6, N * H))
        return names.count("__cudnn$fmhaSoftmax"), names.count("__cudnn$fmhaSoftmaxBackward")

    assert kernels(None) == (1, 1)
    assert kernels(policies.nothing_saveable) == (2, 1)  # what the name is for
    assert kernels(named) == (1, 1)
    dots = policies.dots_with_no_batch_dims_saveable
    assert kernels(policies.save_from_both_policies(dots, named)) == (1, 1)


@pytest.mark.parametrize(("wanted", "mask", "has_gradient"), [(0, False, False), (3, False, True), (0, True, False)])
def test_the_kernel_makes_a_gradient_of_the_bias_only_where_one_is_wanted(wanted, mask, has_gradient):
    def loss(q, k, v, bias):
        options = {"mask": jnp.ones((6, 6), bool)} if mask else {"bias": bias}
        return jnp.sum(_cudnn(q, k, v, **options).astype(jnp.float32))

    kernels, text = _for_cuda(jax.grad(loss, wanted), *HALF)
    assert kernels == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    (line,) = (line for line in text.splitlines() if "BiasSoftmaxBackward" in line)
    results = re.findall(r"tensor<[^>]*>", line.rsplit("->", 1)[1])
    assert len(results) == 4 + has_gradient  # query, key, value, workspace


@pytest.mark.parametrize("how", ["eager", "jit", "grad", "vmap", "compile"])
def test_another_platform_is_refused_when_it_is_compiled(how):
    q, k, v, _ = HALF
    calls = {
        "eager": lambda: _cudnn(q, k, v),
        "jit": lambda: jax.jit(_cudnn)(q, k, v),
        "grad": lambda: jax.grad(lambda q: jnp.sum(_cudnn(q, k, v).astype(jnp.float32)))(q),
        "vmap": lambda: jax.vmap(_cudnn)(q[None], k[None], v[None]),
        "compile": lambda: jax.jit(_cudnn).lower(q, k, v),
    }
    assert jax.eval_shape(_cudnn, q, k, v).shape == q.shape
    with pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU.*compiled for 'cpu'"):
        calls[how]()


def test_a_second_derivative_is_refused_in_words():
    q, k, v, _ = HALF

    def loss(q):
        return jnp.sum(_cudnn(q, k, v).astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="'cudnn' has no second derivative"):
        jax.eval_shape(jax.grad(lambda q: jnp.sum(jax.grad(loss)(q).astype(jnp.float32))), q)


# What is refused.


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"normalizer": "relu"}, "'relu'.*allowed: 'softmax1'"),
        ({"scale": jnp.float32(0.5)}, "scale must be a number"),
        ({"dtype": jnp.float32}, "be bfloat16 or all float16, got float32"),
        ({"value_dtype": jnp.float16}, "all be bfloat16 or all float16, got bfloat16, float16"),
        ({"width": 12}, "multiple of 8 up to 256, got 12"),
        ({"width": 264}, "multiple of 8 up to 256, got 264"),
        ({"length": 5, "mask": jnp.ones((5, 5), bool)}, "must be even, got 5 and 5"),
        ({"length": 5, "bias": jnp.ones((5, 5))}, "must be even, got 5 and 5"),
        ({"local_window_size": 2}, r"\(left, 0\) or causal, got \(2, 2\)"),
        ({"local_window_size": (2, 0), "mask": jnp.ones((6, 6), bool)}, "window cannot be combined"),
        ({"local_window_size": (2, 0), "keys": 4}, "at least as many keys as queries, got 4 and 6"),
        ({"normalizer": 0.0, "mask": jnp.ones((6, 6), bool)}, "n = 0"),
        ({"normalizer": 0, "key_value_seq_lengths": jnp.array([1, 2])}, "n = 0"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(options, problem):
    options = dict(options)
    dtype, width = options.pop("dtype", jnp.bfloat16), options.pop("width", 8)
    value_dtype, length = options.pop("value_dtype", dtype), options.pop("length", 6)
    q, v = jnp.zeros((B, length, N, width), dtype), jnp.zeros((B, options.pop("keys", length), N, width), value_dtype)
    with pytest.raises(NotImplementedError, match=problem):
        dot_product_attention(q, v.astype(dtype), v, implementation="cudnn", **options)


@pytest.mark.parametrize(
    ("normalizer", "problem"),
    [("softmax2", "normalizer 'softmax2'"), (-1.0, "got -1"), (jnp.zeros(3), r"\(3,\).*\(4,\)")],
)
def test_a_normalizer_that_is_none_is_an_error_in_the_same_words(normalizer, problem):
    q = jnp.zeros((B, 6, N, H), jnp.bfloat16)
    for implementation in ("cudnn", "xla"):
        with pytest.raises(ValueError, match=problem):
            dot_product_attention(q, q, q, normalizer=normalizer, implementation=implementation)


def test_explicit_axes_that_the_kernel_cannot_be_cut_by_are_refused():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    q, k = jnp.zeros((4, 8, 8, 8), jnp.bfloat16), jnp.zeros((4, 8, 2, 8), jnp.bfloat16)
    for spec, problem in ((P(None, "x"), "only batch and heads"), (P(None, None, "x"), r"key-value heads \(2\)")):
        placed = jax.device_put(q, NamedSharding(mesh, spec))
        with pytest.raises(NotImplementedError, match=problem):
            dot_product_attention(placed, k, k, implementation="cudnn")
