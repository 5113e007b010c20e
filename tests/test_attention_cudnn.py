"""The real custom derivative with its rules for vmap and meshes, on CPU: only cuDNN's two primitives are stand-ins."""

import contextlib
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

from orthojax.ops.attention import cudnn, cudnn_kernel, dot_product_attention
from orthojax.ops.attention.inputs import prepare_inputs

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


@contextlib.contextmanager
def _lowered_on_cpu(rules):
    for primitive, rule in rules.items():
        mlir.register_lowering(primitive, mlir.lower_fun(rule, multiple_results=True), platform="cpu")
    yield
    for primitive in rules:
        del mlir._platform_specific_lowerings["cpu"][primitive]
    jax.clear_caches()  # what was compiled with the stand-ins


@pytest.fixture(scope="module")
def kernels():
    rules = {
        vendor._dot_product_attention_fwd_p: _kernel_forward,
        vendor._dot_product_attention_bwd_p: _kernel_backward,
        cudnn_kernel.needs_cuda_p: lambda x: [x],
    }
    with _lowered_on_cpu(rules):
        yield


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


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES)
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
    specs = [P("data", None, "tensor", None)] * 3 + [P(), P()]
    if kind == AxisType.Explicit:
        bias = arrays[3].shape
        specs[3:] = [P("data" if bias[0] == B else None, "tensor" if bias[1] == N else None, None, None), P("tensor")]
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("case", MESHED)
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
@pytest.mark.parametrize("case", ["sink", "one length", "bias of each"])
def test_inside_shard_map_it_is_attention_of_the_parts(case):
    attend, arrays = _meshed(case)
    if case == "one length":
        attend = lambda q, k, v, bias, sink: _attend(q, k, v, is_causal=True, key_value_seq_lengths=jnp.full(len(q), 4))
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
