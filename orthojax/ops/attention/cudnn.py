"""Attention by NVIDIA's cuDNN, with a sink around its softmax.

cuDNN computes o = softmax(x) v and lse = log sum_j exp(x_j). With a sink logit a in the denominator (0 for softmax-1,
log n for softmax_n, learned otherwise) the weights are exp(x_j) / (exp(a) + sum_k exp(x_k)) = exp(x_j - lse'), so

    lse' = logaddexp(lse, a),   o' = o * exp(lse - lse') = o * sigmoid(lse - a),

and since their Jacobian has softmax's form, d w_j = w_j (d x_j - sum_k w_k d x_k - w_sink d a), the vendor's backward
kernel gives the exact gradients when it is handed lse' and o' instead of lse and o. What is left is
d a = -sum exp(a - lse') <d o', o'> over the rows of a head. Differentiating o * sigmoid(lse) instead would be wrong:
JAX gives the kernel's lse no gradient.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from orthojax.ops.attention import cudnn_partition, cudnn_probe, cudnn_public
from orthojax.ops.attention.cudnn_kernel import Operands, Settings, Statistics, private_module
from orthojax.ops.attention.inputs import ATTENTION_NAME, AttentionInputs
from orthojax.ops.normalizers import sink_logit


def unsupported(inputs: AttentionInputs) -> str:
    """Why cuDNN cannot do this, naming what is allowed, or ""."""
    H = inputs.query.shape[3]
    widest = cudnn_probe.widest_head()
    dtypes = {a.dtype.name for a in (inputs.query, inputs.key, inputs.value)}
    if not isinstance(inputs.scale, int | float | np.number):
        return "scale must be a number, not an array: the kernel is compiled for it"
    if sink_logit(inputs.normalizer) is None:
        return f"normalizer {inputs.normalizer!r} has no kernel; allowed: 'softmax1', 'softmax', a number, an array"
    if dtypes not in ({"bfloat16"}, {"float16"}):
        return f"query, key and value must all be bfloat16 or all float16, got {', '.join(sorted(dtypes))}"
    if H % 8 or not 0 < H <= widest:
        return f"the head width must be a multiple of 8 up to {widest}, got {H}"
    return (
        _unsupported_visibility(inputs)
        or _unsupported_sharding(inputs)
        or ("" if private_module() else cudnn_public.unsupported(inputs))
    )


def _unsupported_visibility(inputs: AttentionInputs) -> str:
    T, S = inputs.query.shape[1], inputs.key.shape[1]
    has_bias = inputs.bias is not None or inputs.mask is not None
    has_lengths = inputs.query_seq_lengths is not None or inputs.key_value_seq_lengths is not None
    if has_bias and (T % 2 or S % 2):
        return f"with a bias or a mask the numbers of queries and keys must be even, got {T} and {S}"
    if inputs.local_window_size is not None:
        if inputs.local_window_size[1] and not inputs.is_causal:
            return f"a window must be (left, 0) or causal, got {inputs.local_window_size} without is_causal"
        if has_bias:
            return "a window cannot be combined with a bias or a mask"
        if T > S and not has_lengths:
            return f"a window needs at least as many keys as queries, got {S} and {T}"
    without_sink = not isinstance(inputs.normalizer, str | jax.Array | np.ndarray) and not inputs.normalizer
    if without_sink and (inputs.mask is not None or inputs.key_value_seq_lengths is not None):
        return "softmax_n with n = 0 cannot have a mask or key lengths: rows that see no key would not be zero"
    return ""


def _unsupported_sharding(inputs: AttentionInputs) -> str:
    sharding = jax.typeof(inputs.query).sharding
    batch, length, heads, width = (*sharding.spec, None, None, None, None)[:4]
    if length or width:
        return f"only batch and heads can be sharded, got a query with {sharding.spec}"
    B, _, N, _ = inputs.query.shape
    K = inputs.key.shape[2]
    if cudnn_partition.axes(sharding.spec, sharding.mesh.shape, B, N, K) != (batch, heads):
        return f"the mesh axes {sharding.spec} must divide the batch ({B}) and the key-value heads ({K})"
    return ""


@functools.cache
def unavailable() -> str:
    """Why the kernel cannot run in this process, or "". Found out once, by running it."""
    return cudnn_probe.problem(attend)


def attend(inputs: AttentionInputs) -> jax.Array:
    """Attention by the kernel, for inputs that `unsupported` does not refuse.

    Args:
      inputs: bfloat16 or float16; a bias is rounded to that dtype. The scale is fixed when compiled.

    Returns:
      [B, T, N, H] in the dtype of the query. Rows that see no key are zero where there is a finite sink, and what
      cuDNN makes of them for "softmax" and a sink of -inf, gradients included (NaN for a key length of 0); queries
      beyond their length are zero. In float16 a mask hides logits up to 2^15 only. Saved for the backward pass under
      `ATTENTION_NAME`. It has no forward-mode derivative and no second one.

    Raises:
      NotImplementedError: When it is compiled for another platform than CUDA.
    """
    cudnn_probe.preload_builtins()
    if private_module() is None:
        return cudnn_public.attend(inputs)
    window = inputs.local_window_size
    settings = Settings(
        scale=float(inputs.scale),
        is_causal=inputs.is_causal or window is not None,  # a window to the left alone is causal
        left_window=None if window is None else window[0],
    )
    operands = Operands(inputs.query, inputs.key, inputs.value, _bias(inputs), *_lengths(inputs))
    return _attention(settings, *cudnn_partition.varying_alike((operands, _sinks(inputs))))


def _sinks(inputs: AttentionInputs) -> jax.Array | None:
    """One logit for each query head, float32 [N]; None for softmax, which then computes no gate."""
    a = sink_logit(inputs.normalizer)
    if isinstance(a, float) and a == -np.inf:
        return None
    return jnp.broadcast_to(jnp.asarray(a, jnp.float32), inputs.query.shape[2:3])


def _bias(inputs: AttentionInputs) -> jax.Array | None:
    """Bias and mask as one array [B or 1, N or 1, T, S] of the query's dtype, finite as the kernel wants it."""
    if inputs.bias is None and inputs.mask is None:
        return None
    dtype = inputs.query.dtype
    # Far below any logit, and far enough from the dtype's lowest number that a logit may be added to it.
    hidden = jnp.asarray(-(2.0**15) if dtype == jnp.float16 else -(2.0**41), dtype)
    bias = (
        jnp.zeros((1, 1, 1, 1), dtype) if inputs.bias is None else jnp.clip(inputs.bias, hidden, -hidden).astype(dtype)
    )
    if inputs.mask is not None:
        bias = jnp.where(inputs.mask, bias, hidden)
    return jnp.broadcast_to(bias, (*bias.shape[:2], inputs.query.shape[1], inputs.key.shape[1]))


def _lengths(inputs: AttentionInputs) -> tuple[jax.Array | None, jax.Array | None]:
    queries, keys = inputs.query_seq_lengths, inputs.key_value_seq_lengths
    if queries is None and keys is None:
        return None, None
    B, T = inputs.query.shape[:2]
    queries = jnp.full(B, T) if queries is None else queries
    keys = jnp.full(B, inputs.key.shape[1]) if keys is None else keys
    return queries.astype(jnp.int32), keys.astype(jnp.int32)


# The derivative rule.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Fixed:
    """What the forward rule knows and the backward rule needs, besides arrays."""

    bias_gradient: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: Settings, operands: Operands, sink: jax.Array | None) -> jax.Array:
    return _forward(settings, operands, sink)[0]


def _forward(settings: Settings, operands: Operands, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The output [B, T, N, H] and lse' [B, N, T]."""
    output, lse = cudnn_partition.forward(settings, operands)
    if sink is None:
        if operands.query_lengths is not None:
            output = jnp.where(_before_end(output, operands.query_lengths), output, 0)
        return output, lse
    a = sink[None, :, None]
    gate = jax.nn.sigmoid(lse - a)
    lse = jnp.logaddexp(lse, a)
    sees = _rows_that_see(settings, operands)
    if sees is not None:  # the kernel's numbers of rows that see nothing may be anything
        gate = jnp.where(sees, gate, 0.0)
        lse = jnp.where(sees, lse, jnp.maximum(a, 0.0))  # finite, also where a learned sink is -inf
    gate = jnp.swapaxes(gate, 1, 2)[..., None]
    return jnp.where(gate == 0.0, 0.0, output * gate).astype(output.dtype), lse


def _before_end(rows: jax.Array, lengths: jax.Array) -> jax.Array:
    """Which positions of [B, T, N, H] are no padding: [B, T, 1, 1]."""
    return (jnp.arange(rows.shape[1])[None] < lengths[:, None])[..., None, None]


def _rows_that_see(settings: Settings, operands: Operands) -> jax.Array | None:
    """Which queries are no padding and see a key: [B, 1, T]; None for all. What a mask hides is a finite bias here."""
    if operands.query_lengths is None or operands.key_lengths is None:
        return None
    t = jnp.arange(operands.query.shape[1])[None]
    first = 0 * t if settings.left_window is None else jnp.maximum(t - settings.left_window, 0)
    return ((t < operands.query_lengths[:, None]) & (first < operands.key_lengths[:, None]))[:, None]


def _forward_rule(settings, operands, sink):
    bias_gradient = operands.bias is not None and operands.bias.perturbed
    operands, sink = jax.tree.map(lambda primal: primal.value, (operands, sink), is_leaf=_is_primal)
    output, lse = _forward(settings, operands, sink)
    output, lse = checkpoint_name(output, ATTENTION_NAME), checkpoint_name(lse, ATTENTION_NAME)
    return output, (operands, sink, output, lse, _Fixed(bias_gradient))


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def _backward_rule(settings, residuals, cotangent):
    operands, sink, output, lse, fixed = residuals
    queries, keys = operands.query_lengths, operands.key_lengths
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros(output.shape, output.dtype)
    if queries is not None:
        # Nothing of what stands in padding may leak, neither into the gradients nor out of them.
        cotangent = jnp.where(_before_end(output, queries), cotangent, 0)
    settings = settings._replace(bias_gradient=fixed.bias_gradient)
    query, key, value, *rest = cudnn_partition.backward(settings, operands, Statistics(lse, output, cotangent))
    bias = rest[0] if rest else None
    if queries is not None:
        query = jnp.where(_before_end(query, queries), query, 0)
        key = jnp.where(_before_end(key, keys), key, 0)
        value = jnp.where(_before_end(value, keys), value, 0)
    sink_gradient = None
    if sink is not None:
        inner = jnp.sum(cotangent.astype(jnp.float32) * output.astype(jnp.float32), -1)
        weight = jnp.exp(sink[None, :, None] - lse)
        sink_gradient = -jnp.sum(weight * jnp.swapaxes(inner, 1, 2), (0, 2))
    pairs = zip((query, key, value, bias, sink_gradient), (*operands[:4], sink), strict=True)
    query, key, value, bias, sink_gradient = itertools.starmap(cudnn_partition.sharded_as, pairs)
    return Operands(query, key, value, bias, None, None), sink_gradient  # pyright: ignore[reportArgumentType]


_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
