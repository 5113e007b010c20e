"""cuDNN's fused softmax attention, forward and backward, with the statistics between them.

JAX keeps the two primitives in a private module; `jax.nn.dot_product_attention` is built on them, but does not let the
statistics be changed. `attention` takes vmap and a mesh: JAX's own rules for the primitives partition the query and the
value and leave every other operand whole, so that a bias or lengths would be read at the wrong place. Here the query's
batch and head axes decide for all operands; sequences, head widths, and a key head with its group stay whole.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


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
