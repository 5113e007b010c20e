"""The definition of attention in float64 NumPy, and stand-ins for cuDNN's two kernels."""

import contextlib
from typing import get_args

import jax
import jax._src.cudnn.fused_attention_stablehlo as vendor
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from scipy.special import ndtr

from orthojax.ops import normalizers
from orthojax.ops.attention import cudnn, splash
from orthojax.ops.attention.inputs import prepare_inputs

SINK = np.array([0.3, -1.0, 2.0, 0.0])
NORMALIZERS = {name: name for name in get_args(normalizers.Name)}
NORMALIZERS |= {"softmax_n": 0.5, "sink": SINK}


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def qkv(t, s, kv_heads=4, *, batch=2, heads=4, width=8, seed=0):
    """Draws query, key and value in float64."""
    rng = np.random.default_rng(seed)
    shapes = ((t, heads), (s, kv_heads), (s, kv_heads))
    return [rng.normal(size=(batch, length, n, width)) for length, n in shapes]


def visible(
    shape, mask=True, is_causal=False, window=10**6, query_seq_lengths=None, key_value_seq_lengths=None, segment_ids=0
):
    """Returns a boolean mask [B, N, T, S], by comparing positions."""
    batch, _, t_length, s_length = shape
    t, s = np.ogrid[:t_length, :s_length]
    left, right = np.broadcast_to(10**6 if window is None else window, 2)
    sees = np.broadcast_to(mask, shape) & ((s <= t) | (not is_causal)) & (t - left <= s) & (s <= t + right)
    ends = (query_seq_lengths, key_value_seq_lengths)
    queries, keys = (np.full(batch, 10**6) if end is None else np.asarray(end) for end in ends)
    of_query, of_key = map(np.atleast_1d, segment_ids if isinstance(segment_ids, tuple) else (segment_ids,) * 2)
    sees &= of_query[..., None, :, None] == of_key[..., None, None, :]
    return sees & (t < queries[:, None, None, None]) & (s < keys[:, None, None, None])


def weights(x, sees, normalizer):
    """Computes every normalizer by its definition, over the last axis of float64 logits; an array holds sinks [N]."""
    if isinstance(normalizer, str) and normalizer == "relu":
        return np.maximum(x, 0.0) / np.maximum(sees.sum(-1, keepdims=True), 1) * sees
    if isinstance(normalizer, str) and normalizer == "gelu":
        x = np.where(sees, x, 0.0)
        return x * ndtr(x) / np.maximum(sees.sum(-1, keepdims=True), 1)
    if isinstance(normalizer, str) and normalizer == "sigmoid":
        return sees / (1.0 + np.exp(-x))
    if isinstance(normalizer, str) and normalizer == "softpick":
        x = np.expm1(np.where(sees, x, 0.0))
        return np.maximum(x, 0.0) / (np.abs(x).sum(-1, keepdims=True) + 1e-8)
    sink = -np.inf
    if isinstance(normalizer, str):
        sink = {"softmax": -np.inf, "softmax1": 0.0}[normalizer]
    else:
        array = np.ndim(normalizer) > 0
        sink = np.asarray(normalizer)[:, None, None] if array else np.log(normalizer) if normalizer else -np.inf
    x = np.where(sees, x, -np.inf)
    shift = np.maximum(x.max(-1, keepdims=True), sink)
    shift = np.where(np.isfinite(shift), shift, 0.0)
    total = np.exp(x - shift).sum(-1, keepdims=True) + np.exp(sink - shift)
    y = np.exp(x - shift) / np.where(total == 0.0, 1.0, total)
    if isinstance(normalizer, str) and normalizer == "softmax":  # a row that sees nothing is spread, as in jax.nn
        return np.where(sees.any(-1, keepdims=True), y, 1.0 / x.shape[-1])
    return y


def reference(
    q, k, v, bias=0.0, *, normalizer="softmax1", scale=None, local_window_size=None, logits_soft_cap=None, **hides
):
    """Computes attention by its definition, [B, T, N, width of v] in float64."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, group, 2) for a in (k, v))
    x = np.einsum("BTNH,BSNH->BNTS", q, k) * (q.shape[3] ** -0.5 if scale is None else scale) + bias
    x = x if logits_soft_cap is None else logits_soft_cap * np.tanh(x / logits_soft_cap)
    y = weights(x, visible(x.shape, window=local_window_size, **hides), normalizer)
    if hides.get("query_seq_lengths") is not None:
        y = y * (np.arange(q.shape[1])[None, None, :, None] < hides["query_seq_lengths"][:, None, None, None])
    return np.einsum("BNTS,BSNH->BTNH", y, v)


def check_definition(attend, arrays, normalizer, *, rtol, atol, slope_tolerance, gradients=True, **options):
    """Compares attend(q, k, v, [bias], normalizer=, **options) and its gradients with the definition and its slopes.

    Rows that the definition leaves empty are exact zeros, and so are the gradients of their queries. Arrays are float64
    NumPy, given to `attend` in the widest dtype that JAX has; the slope of sum(output * weights) is that along one
    random direction of each array, and of the sinks if the normalizer is an array.
    """
    learned = isinstance(normalizer, np.ndarray)
    point = [np.asarray(jnp.asarray(a), np.float64) for a in (*arrays, *([normalizer] if learned else []))]
    weights = normal(*point[0].shape[:3], point[2].shape[3], seed=6)
    fixed = {name: jnp.asarray(a) if isinstance(a, np.ndarray) else a for name, a in options.items()}

    def call(function, point, fixed):
        *arrays, own = point if learned else (*point, normalizer)
        return function(*arrays, normalizer=own, **fixed)

    def both(*point):
        output, pullback = jax.vjp(lambda *point: call(attend, point, fixed), *point)
        return output, pullback(jnp.asarray(weights, output.dtype)) if gradients else ()

    output, slopes = jax.jit(both)(*map(jnp.asarray, point))
    expected = call(reference, point, options)
    np.testing.assert_allclose(output, expected, rtol=rtol, atol=atol)
    empty = (expected == 0.0).all(-1)
    assert all((np.asarray(array)[empty] == 0.0).all() for array in (output, *slopes[:1]))
    for i, gradient in enumerate(slopes):
        loss = lambda a, i=i: np.vdot(weights, call(reference, [*point[:i], a, *point[i + 1 :]], options))  # noqa: E731
        assert_slope(loss, point[i], gradient, slope_tolerance, str(i), least=0.1)
    return output, slopes


def assert_slope(loss, point, gradient, tolerance, name="", least=0.0):
    """Holds a gradient to the difference of a loss in float64 NumPy along a random direction; both may be trees."""
    rng = np.random.default_rng(7)
    direction = jax.tree.map(lambda a: rng.choice([-1, 1], np.shape(a)) * rng.uniform(0.5, 1.5, np.shape(a)), point)
    ends = (jax.tree.map(lambda a, d, h=h: np.float64(a) + h * d, point, direction) for h in (1e-5, -1e-5))
    up, down = map(loss, ends)
    terms = jax.tree.map(lambda g, d: (np.float64(g) * d).ravel(), gradient, direction)
    terms = np.concatenate(jax.tree.leaves(terms))
    assert np.isfinite(terms).all(), name
    assert np.abs(terms).sum() > 0.01, name
    assert abs((up - down) / 2e-5 - terms.sum()) < tolerance * (np.abs(terms).sum() + least), name


def assert_near(found, expected, tolerance=1e-5):
    """Bounds differences relative to the largest number of each array, or to 1."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() < tolerance * max(1.0, np.abs(b).max())


# Stand-ins for cuDNN's kernels: the flash algorithm's formulas. What cuDNN need not write is NaN here.


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
    key = jnp.repeat(key.astype(jnp.float32), group, 2)
    x = parameters["scale"] * jnp.einsum("BTNH,BSNH->BNTS", query.astype(jnp.float32), key, precision="highest")
    if parameters["variadic_args"][0]:
        assert bias.shape[0] in (1, query.shape[0])
        assert bias.shape[1] in (1, query.shape[2])
        x += bias
    return jnp.where(visible, x, -jnp.inf)


def _kernel_forward(query, key, value, bias, query_lengths, key_lengths, *_, **parameters):
    x = _logits(query, key, bias, query_lengths, key_lengths, parameters)
    lse = jax.nn.logsumexp(x, -1)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], 2).astype(jnp.float32)
    output = jnp.einsum("BNTS,BSNH->BTNH", jnp.exp(x - lse[..., None]), value, precision="highest")
    return output.astype(query.dtype), jnp.where(lse == -jnp.inf, jnp.nan, lse)


def _kernel_backward(query, key, value, bias, query_lengths, key_lengths, *rest, **parameters):
    lse, output, cotangent = rest[4:7]
    d, group = cotangent.astype(jnp.float32), query.shape[2] // key.shape[2]

    def surrogate(query, key, value, bias):
        """Has the gradients of the kernel: weights exp(x - lse), and dx = p (d.v - d.o)."""
        x = _logits(query, key, bias, query_lengths, key_lengths, parameters)
        p = jax.lax.stop_gradient(jnp.exp(x - lse[..., None]))
        value = jnp.repeat(value.astype(jnp.float32), group, 2)
        dp = jnp.einsum("BTNH,BSNH->BNTS", d, value, precision="highest")
        dx = p * (dp - jnp.swapaxes(jnp.sum(d * output.astype(jnp.float32), -1), 1, 2)[..., None])
        return jnp.sum(p * dp) + jnp.sum(jax.lax.stop_gradient(dx) * x)

    wanted = range(3 + parameters["variadic_args"][1])
    results = list(jax.grad(surrogate, tuple(wanted))(query, key, value, bias))
    if "PADDING" in parameters["mask_type"].name:
        for i, lengths in enumerate((query_lengths, key_lengths, key_lengths)):
            padding = jnp.arange(results[i].shape[1])[None] >= lengths.reshape(-1, 1)
            results[i] = jnp.where(padding[..., None, None], jnp.nan, results[i])
    return results


_STAND_INS = {
    vendor._dot_product_attention_fwd_p: _kernel_forward,
    vendor._dot_product_attention_bwd_p: _kernel_backward,
}


@contextlib.contextmanager
def cudnn_stand_ins():
    """Runs cuDNN's primitives on CPU, as these formulas."""
    for primitive, rule in _STAND_INS.items():
        mlir.register_lowering(primitive, mlir.lower_fun(rule, multiple_results=True), platform="cpu")
    yield
    for primitive in _STAND_INS:
        del mlir._platform_specific_lowerings["cpu"][primitive]


def attend_by_cudnn(query, key, value, bias=None, mask=None, *, normalizer="softmax1", **options):
    """Calls cuDNN's attention in any dtype, past the refusal of float32."""
    return cudnn.attend(prepare_inputs(query, key, value, bias, mask, normalizer=normalizer, **options))


def attend_by_splash(query, key, value, **options):
    """Calls splash's attention in interpret mode."""
    return splash.attend(prepare_inputs(query, key, value, **{"normalizer": "softmax1"} | options), interpret=True)
