"""Attention by NVIDIA's cuDNN, with a sink around its softmax.

cuDNN computes o = softmax(x) v and lse = log sum_j exp(x_j). With a sink logit a in the denominator (0 for softmax-1,
log n for softmax_n, learned otherwise) the weights are exp(x_j) / (exp(a) + sum_k exp(x_k)) = exp(x_j - lse'), so

    lse' = logaddexp(lse, a),   o' = o * exp(lse - lse') = o * sigmoid(lse - a),

and since their Jacobian has softmax's form, d w_j = w_j (d x_j - sum_k w_k d x_k - w_sink d a), the vendor's backward
kernel gives the exact gradients when it is handed lse' and o' instead of lse and o. What is left is
d a = -sum exp(a - lse') <d o', o'> over the rows of a head. Differentiating o * sigmoid(lse) instead would be wrong:
JAX gives the kernel's lse no gradient.

JAX keeps the two primitives in a private module; `jax.nn.dot_product_attention` is built on them, but does not let the
statistics be changed. `attention` takes vmap and a mesh: JAX's own rules for the primitives partition the query and the
value and leave every other operand whole, so that a bias or lengths would be read at the wrong place. Here the query's
batch and head axes decide for all operands; sequences, head widths, and a key head with its group stay whole.
"""

import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orthojax.ops.attention import xla
from orthojax.ops.attention.inputs import ATTENTION_NAME, AttentionInputs, known_window, unsupported_window
from orthojax.ops.normalizers import sink_logit
from orthojax.ops.products import varying_alike


class Settings(NamedTuple):
    """Numbers that are fixed when attention is compiled."""

    scale: float
    is_causal: bool
    left_window: int | None  # query t sees keys t - left_window .. t; None: no window
    bias_gradient: bool = False


class Operands(NamedTuple):
    """The arrays of the forward kernel; all of `query`, `key`, `value` and `bias` have one half-precision dtype."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array  # [B, S, K, H]
    bias: jax.Array | None  # [B or 1, N or 1, T, S]
    query_lengths: jax.Array | None  # int32 [B]; both lengths or none
    key_lengths: jax.Array | None  # int32 [B]


class Statistics(NamedTuple):
    """Further arrays of the backward kernel."""

    lse: jax.Array  # [B, N, T] float32: log sum_j exp(logit_j)
    output: jax.Array  # [B, T, N, H]
    cotangent: jax.Array  # [B, T, N, H], of the output


# JAX's private module.


@functools.cache
def private_module() -> ModuleType | None:
    """Returns the module with the two primitives, or None if this JAX has none that work as they are used here.

    They are lowered for CUDA to find out, which needs no GPU and exercises shapes, parameters and their names.
    """
    try:
        module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        outside_of_traces(lambda: _lower_once(module))
    except Exception:  # whatever a future JAX raises, plain XLA is left
        return None
    return module


def outside_of_traces(function: Callable[[], Any]) -> Any:
    """Calls a function in a thread: no transformation, mesh or default device of the caller's is in force there."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _lower_once(module: ModuleType) -> None:
    q = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((1, 1, 8), jnp.float32)
    settings = Settings(1.0, True, None)

    def both(q, lse):
        operands = Operands(q, q, q, None, None, None)
        output, new_lse = _bind(module, settings, operands, None)
        assert (output.shape, output.dtype, new_lse.shape, new_lse.dtype) == (q.shape, q.dtype, lse.shape, lse.dtype)
        return _bind(module, settings, operands, Statistics(lse, output, output))

    gradients = jax.eval_shape(both, q, lse)
    assert [(g.shape, g.dtype) for g in gradients] == [(q.shape, q.dtype)] * 3
    jax.jit(both).trace(q, lse).lower(lowering_platforms=("cuda",))


def _bind(module: Any, settings: Settings, operands: Operands, statistics: Statistics | None) -> tuple[jax.Array, ...]:
    """Calls the vendor's forward primitive on one device, or given statistics its backward one.

    The weights of the backward kernel are exp(logits - lse), whatever lse it is given.
    """
    query, key, value, bias, query_lengths, key_lengths = operands
    unused = jnp.zeros(0, query.dtype)
    padded = query_lengths is not None
    mask_name = "_".join(["PADDING"] * padded + ["CAUSAL"] * settings.is_causal) or "NO_MASK"
    parameters = {
        "scale": settings.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, settings.bias_gradient),
        "mask_type": module.MaskType[mask_name],
        "layout": module.AttentionLayout.BTNH.value,
        # The kernel counts the query's own position as part of the window.
        "sliding_window_length": None if settings.left_window is None else settings.left_window + 1,
    }
    if "score_mod" in inspect.signature(module._dot_product_attention_fwd).parameters:  # from jax 0.12 on
        parameters["score_mod"] = None
    lengths = (query_lengths, key_lengths) if padded else (unused, unused)
    arrays = (query, key, value, unused if bias is None else bias, *lengths, unused, unused, unused, unused)
    if statistics is None:
        return tuple(module._dot_product_attention_fwd_p_wrapper.bind(*arrays, **parameters, is_training=True))
    return tuple(module._dot_product_attention_bwd_p_wrapper.bind(*arrays, *statistics, **parameters))


# vmap: a further batch axis is folded into the kernel's own.


def attention(settings: Settings, operands: Operands, statistics: Statistics | None = None) -> tuple[jax.Array, ...]:
    """Computes softmax attention: the output [B, T, N, H] in the dtype of the query, and lse [B, N, T] in float32.

    Given statistics, it computes gradients of query, key and value, and of the bias if `settings.bias_gradient`.
    """

    @custom_vmap
    def kernel(operands, statistics):
        return _over_mesh(settings, operands, statistics)

    @kernel.def_vmap
    def rule(size, batched, operands, statistics):
        B = operands.query.shape[int(batched[0].query)]
        bias, bias_is_batched = operands.bias, batched[0].bias
        summed = bias is not None and bias.shape[int(bias_is_batched)] != B  # one bias for all B sequences
        # It stays one, unless it or its gradient differs between the mapped calls.
        keep = bias is not None and bias.shape[0] == 1 and not bias_is_batched and not settings.bias_gradient

        def fold(array, is_batched):
            array = array if is_batched else array[None]
            return jnp.broadcast_to(array, (size, B, *array.shape[2:])).reshape(size * B, *array.shape[2:])

        without_bias = (operands._replace(bias=None), statistics), (batched[0]._replace(bias=None), batched[1])
        folded, folded_statistics = jax.tree.map(fold, *without_bias)
        folded = folded._replace(bias=bias if bias is None or keep else fold(bias, bias_is_batched))
        results = attention(settings, folded, folded_statistics)
        results = [array.reshape(size, B, *array.shape[1:]) for array in results]
        if settings.bias_gradient and summed:
            results[3] = jnp.sum(results[3], 1, keepdims=True)
        return tuple(results), (True,) * len(results)

    return kernel(operands, statistics)


# A mesh.


def mesh_axes(spec: Sequence[Any], sizes: Any, batch: int, heads: int, key_heads: int) -> tuple[Any, Any]:
    """Returns the mesh axes of the query's PartitionSpec that can split batch and heads: a name, a tuple, or None.

    Axes must divide the batch, and the key heads; a single key head serves query heads on any number of devices.
    """
    over_batch, _, over_heads, *_ = (*spec, None, None, None)

    def dividing(names: Any, length: int) -> Any:
        return None if length % math.prod(sizes[name] for name in _as_tuple(names)) else names

    return dividing(over_batch, batch), dividing(over_heads, heads if key_heads == 1 else key_heads)


def _as_tuple(names: Any) -> tuple[str, ...]:
    return () if names is None else names if isinstance(names, tuple) else (names,)


class _Specs(NamedTuple):
    arguments: tuple[Operands, Statistics | None]  # of PartitionSpecs
    results: tuple[P, ...]
    sums: tuple[tuple[str, ...], ...]  # per result: mesh axes whose devices each have a part of the sum


def _specs(sharding: Any, settings: Settings, operands: Operands, statistics: Statistics | None) -> _Specs:
    B, _, N, _ = operands.query.shape
    K = operands.key.shape[2]
    over_batch, over_heads = mesh_axes(sharding.spec, sharding.mesh.shape, B, N, K)
    rows, lse = P(over_batch, None, over_heads, None), P(over_batch, over_heads, None)
    keys = P(over_batch, None, None if K == 1 else over_heads, None)
    key_sum = _as_tuple(over_heads) if K == 1 else ()
    bias, lengths, bias_sum = None, None, ()
    if operands.bias is not None:
        batch = over_batch if operands.bias.shape[0] == B else None
        heads = over_heads if operands.bias.shape[1] == N else None
        bias = P(batch, heads, None, None)
        bias_sum = (*(() if batch else _as_tuple(over_batch)), *(() if heads else _as_tuple(over_heads)))
    if operands.query_lengths is not None:
        lengths = P(over_batch)
    inputs: Any = Operands(rows, keys, keys, bias, lengths, lengths)  # pyright: ignore[reportArgumentType]
    if statistics is None:
        return _Specs((inputs, None), (rows, lse), ((), ()))
    outputs: Any = Statistics(lse, rows, rows)  # pyright: ignore[reportArgumentType]
    results, sums = (rows, keys, keys), ((), key_sum, key_sum)
    if settings.bias_gradient and bias is not None:
        results, sums = (*results, bias), (*sums, bias_sum)
    return _Specs((inputs, outputs), results, sums)


def _on_one_device(settings, operands, statistics, sums=((),) * 4) -> tuple[jax.Array, ...]:
    results = _bind(private_module(), settings, operands, statistics)
    pairs = zip(results, sums, strict=False)
    return tuple(jax.lax.psum(result, names) if names else result for result, names in pairs)


def _over_mesh(settings: Settings, operands: Operands, statistics: Statistics | None) -> tuple[jax.Array, ...]:
    sharding = jax.typeof(operands.query).sharding
    mesh = sharding.mesh
    if not _is_explicit(sharding):
        return _partitioned(settings, operands, statistics)
    # Explicit axes are part of the arrays' types, so the partition is known while tracing.
    specs = _specs(sharding, settings, operands, statistics)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs.arguments)
    arguments = jax.tree.map(jax.sharding.reshard, (operands, statistics), shardings)
    local = functools.partial(_on_one_device, settings, sums=specs.sums)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs.arguments, out_specs=specs.results, check_vma=False)
    return mapped(*arguments)


def _is_explicit(sharding: Any) -> bool:
    return AxisType.Explicit in (sharding.mesh.axis_types or ())


def sharded_as(gradient: jax.Array | None, primal: jax.Array | None) -> jax.Array | None:
    """Shards a gradient as its input, which is part of its type if mesh axes are Explicit."""
    if gradient is None or primal is None or not _is_explicit(jax.typeof(primal).sharding):
        return gradient
    return jax.sharding.reshard(gradient, jax.typeof(primal).sharding)


# Auto axes: the compiler calls back with the partition that it arrived at.


def _sharding_rule(settings, mesh, value_types, result_types) -> str:
    """Writes how shardings propagate between the arrays, in the einsum-like notation of Shardy."""
    del mesh
    shapes = [list(value_type.shape) for value_type in value_types]
    (B, _, N, _), (_, _, K, _) = shapes[0], shapes[1]
    # Heads of queries and of groups of them stay unrelated here: half a mesh axis has no name for `_partition` to read.
    rows, keys, lse = "b t n h", "b s n h" if N == K else "b s k h", "b n t"
    arguments = [rows, keys, keys]
    backward = len(result_types) > 2
    rest = shapes[3 : len(shapes) - 3 if backward else None]
    bias = ""
    if rest and len(rest[0]) == 4:
        bias = f"{'b' if rest[0][0] == B else 'x'} {'n' if rest[0][1] == N else 'y'} t s"
        arguments.append(bias)
    arguments += ["b"] * sum(len(shape) == 1 for shape in rest)
    if backward:
        arguments += [lse, rows, rows]
        results = [rows, keys, keys] + [bias] * settings.bias_gradient
    else:
        results = [rows, lse]
    return f"{', '.join(arguments)} -> {', '.join(results)}"


def _partition(settings, mesh, arguments, results):
    del results
    operands, statistics = arguments
    specs = _specs(operands.query.sharding, settings, operands, statistics)
    arguments, results = (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree) for tree in (specs.arguments, specs.results)
    )
    return mesh, functools.partial(_on_one_device, settings, sums=specs.sums), results, arguments


def _whole(settings, operands, statistics):  # without a default, which would become an operand
    return _on_one_device(settings, operands, statistics)


_partitioned = custom_partitioning(_whole, static_argnums=(0,))
_partitioned.def_partition(partition=_partition, sharding_rule=_sharding_rule)


_LEAST_CAPABILITY = (8, 0)  # Ampere
_PROBE_TOLERANCE = 0.05  # of bfloat16 numbers near 1; a kernel that is wrong is wrong by far more
_WIDTH_MULTIPLE = 8


def unsupported(inputs: AttentionInputs) -> str:
    """Returns why cuDNN does not support the arguments, naming what is allowed, or ""."""
    H, widest = max(inputs.query.shape[3], inputs.value.shape[3]), widest_head()
    dtypes = {a.dtype.name for a in (inputs.query, inputs.key, inputs.value)}
    if not isinstance(inputs.scale, float):
        return "scale must be a number, not an array: the kernel is compiled for it"
    if inputs.logits_soft_cap is not None:
        return "the kernel has no soft cap; allowed: logits_soft_cap=None"
    if sink_logit(inputs.normalizer) is None:
        return f"normalizer {inputs.normalizer!r} has no kernel; allowed: 'softmax1', 'softmax', a number, an array"
    if dtypes not in ({"bfloat16"}, {"float16"}):
        return f"query, key and value must all be bfloat16 or all float16, got {', '.join(sorted(dtypes))}"
    if H % _WIDTH_MULTIPLE or not 0 < H <= widest:
        return f"the head width must be a multiple of {_WIDTH_MULTIPLE} up to {widest}, got {H}"
    if private_module() is None:
        return f"jax {jax.__version__} keeps its cuDNN primitives elsewhere than orthojax looks for them"
    return _unsupported_masking(inputs) or _unsupported_sharding(inputs)


def _unsupported_masking(inputs: AttentionInputs) -> str:
    T, S = inputs.query.shape[1], inputs.key.shape[1]
    has_bias = not (inputs.bias is None and inputs.mask is None and inputs.segment_ids is None)
    has_lengths = inputs.query_seq_lengths is not None or inputs.key_value_seq_lengths is not None
    if has_bias and (T % 2 or S % 2):
        return f"with a bias, a mask or segments the numbers of queries and keys must be even, got {T} and {S}"
    if problem := unsupported_window(inputs.local_window_size):
        return problem
    if (window := known_window(inputs.local_window_size)) is not None:
        if window[1] and not inputs.is_causal:
            return f"a window must be (left, 0) or causal, got {window} without is_causal"
        if has_bias:
            return "a window cannot be combined with a bias, a mask or segments"
        if T > S and not has_lengths:
            return f"a window needs at least as many keys as queries, got {S} and {T}"
    without_sink = not isinstance(inputs.normalizer, str | jax.Array | np.ndarray) and not inputs.normalizer
    hiding = (inputs.mask, inputs.key_value_seq_lengths, inputs.segment_ids)
    if without_sink and any(array is not None for array in hiding):
        return "softmax_n with n = 0 cannot have a mask, lengths or segments: rows that see no key would not be zero"
    return ""


def _unsupported_sharding(inputs: AttentionInputs) -> str:
    sharding = jax.typeof(inputs.query).sharding
    batch, length, heads, width = (*sharding.spec, None, None, None, None)[:4]
    if length or width:
        return f"only batch and heads can be sharded, got a query with {sharding.spec}"
    B, _, N, _ = inputs.query.shape
    K = inputs.key.shape[2]
    if mesh_axes(sharding.spec, sharding.mesh.shape, B, N, K) != (batch, heads):
        return f"the mesh axes {sharding.spec} must divide the batch ({B}) and the key-value heads ({K})"
    return ""


def attend(inputs: AttentionInputs) -> jax.Array:
    """Computes attention by the kernel, for inputs that `unsupported` does not refuse.

    A bias is rounded to the dtype of the query, and the scale is fixed when compiled. If values have another width than
    keys, the narrower ones are padded with zeros, since the kernel has one width. Returns [B, T, N, V] in the dtype of
    the query. Rows that see no key are zero if there is a finite sink, and what cuDNN makes of them for "softmax" and a
    sink of -inf, gradients included (NaN for a key length of 0); queries beyond their length are zero. In float16 a
    mask hides logits up to 2^15 only. Saved for the backward pass under `ATTENTION_NAME`.
    """
    H, V = inputs.query.shape[3], inputs.value.shape[3]
    if H != V:
        missing = {"query": max(V - H, 0), "key": max(V - H, 0), "value": max(H - V, 0)}
        wide = {name: jnp.pad(getattr(inputs, name), [(0, 0)] * 3 + [(0, n)]) for name, n in missing.items()}
        return attend(dataclasses.replace(inputs, **wide))[..., :V]
    preload_builtins()
    window = known_window(inputs.local_window_size)
    settings = Settings(
        scale=float(inputs.scale),
        is_causal=inputs.is_causal or window is not None,  # a window to the left alone is causal
        left_window=None if window is None else window[0],
    )
    operands = Operands(inputs.query, inputs.key, inputs.value, _bias(inputs), *_lengths(inputs))
    return _attention(settings, *varying_alike((operands, _sinks(inputs))))


def _sinks(inputs: AttentionInputs) -> jax.Array | None:
    """Returns one logit per query head, float32 [N]; None for softmax, which then computes no gate."""
    a = sink_logit(inputs.normalizer)
    if isinstance(a, float) and a == -np.inf:
        return None
    return jnp.broadcast_to(jnp.asarray(a, jnp.float32), inputs.query.shape[2:3])


def _bias(inputs: AttentionInputs) -> jax.Array | None:
    """Joins bias, mask and segments: [B or 1, N or 1, T, S] of the query's dtype, finite as the kernel expects it."""
    mask = inputs.mask
    if inputs.segment_ids is not None:  # the kernel's own form of packing, lengths, needs a number of segments
        same = xla.same_segment(*inputs.segment_ids)
        mask = same if mask is None else mask & same
    if inputs.bias is None and mask is None:
        return None
    dtype = inputs.query.dtype
    # Far below any logit, and far enough from the dtype's lowest number that a logit may be added to it.
    lowest = -(2.0**15) if dtype == jnp.float16 else -(2.0**41)
    hidden, bias = jnp.asarray(lowest, dtype), jnp.zeros((1, 1, 1, 1), dtype)
    if inputs.bias is not None:
        bias = jnp.clip(inputs.bias.astype(jnp.float32), lowest, -lowest).astype(dtype)
    if mask is not None:
        bias = jnp.where(mask, bias, hidden)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: Settings, operands: Operands, sink: jax.Array | None) -> jax.Array:
    return _forward(settings, operands, sink)[0]


def _forward(settings: Settings, operands: Operands, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Computes the output [B, T, N, H] and lse' [B, N, T]."""
    output, lse = attention(settings, operands)
    if sink is None:
        if operands.query_lengths is not None:
            output = jnp.where(_before_end(output, operands.query_lengths), output, 0)
        return output, lse
    a = sink[None, :, None]
    gate = jax.nn.sigmoid(lse - a)
    lse = jnp.logaddexp(lse, a)
    sees = _rows_that_see(settings, operands)
    if sees is not None:  # the kernel's numbers for rows that see nothing may be anything
        gate = jnp.where(sees, gate, 0.0)
        lse = jnp.where(sees, lse, jnp.maximum(a, 0.0))  # finite, even for a learned sink of -inf
    gate = jnp.swapaxes(gate, 1, 2)[..., None]
    return jnp.where(gate == 0.0, 0.0, output.astype(gate.dtype) * gate).astype(output.dtype), lse


def _before_end(rows: jax.Array, lengths: jax.Array) -> jax.Array:
    return (jnp.arange(rows.shape[1])[None] < lengths[:, None])[..., None, None]


def _rows_that_see(settings: Settings, operands: Operands) -> jax.Array | None:
    """Marks queries that are no padding and see a key: [B, 1, T]; None for all. A mask is a finite bias here."""
    if operands.query_lengths is None or operands.key_lengths is None:
        return None
    t = jnp.arange(operands.query.shape[1])[None]
    first = 0 * t if settings.left_window is None else jnp.maximum(t - settings.left_window, 0)
    return ((t < operands.query_lengths[:, None]) & (first < operands.key_lengths[:, None]))[:, None]


def _forward_rule(settings, operands, sink):
    bias_gradient = operands.bias is not None and operands.bias.perturbed
    operands, sink = jax.tree.map(lambda p: p.value, (operands, sink), is_leaf=lambda p: hasattr(p, "perturbed"))
    output, lse = _forward(settings, operands, sink)
    output, lse = checkpoint_name(output, ATTENTION_NAME), checkpoint_name(lse, ATTENTION_NAME)
    return output, (operands, sink, output, lse, () if bias_gradient else None)  # the last is no array, but structure


def _backward_rule(settings, residuals, cotangent):
    operands, sink, output, lse, bias_gradient = residuals
    queries, keys = operands.query_lengths, operands.key_lengths
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros(output.shape, output.dtype)
    if queries is not None:
        # Nothing that stands in padding may leak, neither into the gradients nor out of them.
        cotangent = jnp.where(_before_end(output, queries), cotangent, 0)
    settings = settings._replace(bias_gradient=bias_gradient is not None)
    query, key, value, *rest = attention(settings, operands, Statistics(lse, output, cotangent))
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
    query, key, value, bias, sink_gradient = itertools.starmap(sharded_as, pairs)
    return Operands(query, key, value, bias, None, None), sink_gradient  # pyright: ignore[reportArgumentType]


_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


# The probe: does the kernel run in this process? On CUDA 13 cuDNN compiles its attention kernels with NVRTC, which
# opens `libnvrtc-builtins` by its bare name. The wheel that brings it is on no search path, so cuDNN finds no execution
# plan (https://github.com/jax-ml/jax/issues/32430). Loading the builtins beforehand lets the name resolve.


@functools.cache
def unavailable() -> str:
    """Returns why the kernel cannot run in this process, or "": once, forward and backward are run against XLA's."""
    capability = compute_capability()
    if capability is None:
        return f"cuDNN needs an NVIDIA GPU; the default device is {jax.local_devices()[0].device_kind!r}"
    if capability < _LEAST_CAPABILITY:
        return "cuDNN's attention needs compute capability {}.{}, got {}.{}".format(*_LEAST_CAPABILITY, *capability)
    not_loaded = preload_builtins()
    try:
        error = outside_of_traces(_largest_difference)
    except Exception as raised:  # whatever the vendor's stack raises, the caller falls back
        detail = str(raised).strip().split("\n")[0][:300]
        loading = f" (and {not_loaded})" if not_loaded else ""
        folders = ":".join(map(str, _library_folders()))
        advice = f"it may miss libnvrtc-builtins: try LD_LIBRARY_PATH={folders or 'ITS_FOLDER'}:$LD_LIBRARY_PATH"
        return f"cuDNN's attention fails: {type(raised).__name__}: {detail}{loading}. With CUDA 13, {advice}"
    if not error < _PROBE_TOLERANCE:  # NaN is a failure as well
        return f"cuDNN's attention is wrong: it differs from XLA's by {error:.2g} where {_PROBE_TOLERANCE} is allowed"
    return ""


def compute_capability() -> tuple[int, int] | None:
    """Returns that of the default backend's GPU, or None if that backend is not NVIDIA's."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version:
        return None
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


def widest_head() -> int:
    """Returns the largest head width of the kernel: 256 from Hopper on, which is also assumed without a GPU."""
    return 128 if (compute_capability() or (9, 0)) < (9, 0) else 256


def _library_folders() -> list[Path]:
    package = importlib.util.find_spec("nvidia")
    places = [] if package is None else package.submodule_search_locations or []
    return [folder for place in places if (folder := Path(place) / "cu13" / "lib").is_dir()]


@functools.cache
def preload_builtins() -> str:
    """Loads the builtins of NVRTC if a CUDA GPU is used and a CUDA 13 wheel has them; returns what failed, or ""."""
    if compute_capability() is None:
        return ""
    for folder in _library_folders():
        for library in sorted(folder.glob("libnvrtc-builtins.so*")):
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                return str(error)
    return ""


def _largest_difference() -> float:
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in np.random.default_rng(0).normal(size=(3, 1, 64, 1, 64)))

    def results(attend, q, k, v):
        def loss(q, k, v):
            output = attend(AttentionInputs(q, k, v, None, None, "softmax1", 0.125, is_causal=True))
            return jnp.mean(jnp.square(output.astype(jnp.float32))) * 64, output

        (_, output), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return output, *gradients

    got, expected = (jax.device_get(jax.jit(results, static_argnums=0)(f, q, k, v)) for f in (attend, xla.attend))
    pairs = zip(got, expected, strict=True)
    return max(float(np.abs(a.astype(np.float32) - b.astype(np.float32)).max()) for a, b in pairs)
