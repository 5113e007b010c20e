"""Attention by the splash kernel for TPUs, which jax brings: exp(x_i) / (exp(a) + sum_j exp(x_j)) with sink logits a.

softmax-1 is a = 0. Our tests have no TPU: they run the kernel in interpret mode, and lower it for TPUs.
"""

import inspect
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from orthojax.ops.attention.inputs import ATTENTION_NAME, AttentionInputs, known_window, unsupported_window
from orthojax.ops.normalizers import sink_logit

try:  # experimental modules of jax: they may move
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _MISSING = ""
    if "sinks" not in inspect.signature(kernels.attention_reference).parameters:
        _MISSING = f"the splash kernel of jax {jax.__version__} has no sinks"
except ImportError as error:
    _MISSING = f"jax {jax.__version__} has no splash kernel ({error})"

BATCH_AXES, HEAD_AXIS = ("data", "fsdp"), "tensor"  # of the current mesh, as far as it has them
_DTYPES = ("float32", "bfloat16")
_BLOCKS = (512, 256, 128)  # positions that the kernel takes at once, of queries and of keys
_LENGTH_MULTIPLE = _BLOCKS[-1]
_WIDTH_MULTIPLE = 64
# Stands for a sink of -inf, with which a row that sees nothing would be 0 / 0; its exp is zero beside any logit.
_NO_SINK = -1e38


def unsupported(inputs: AttentionInputs) -> str:
    """Returns why the kernel does not support the arguments, naming what is allowed, or ""."""
    dtypes = sorted({str(a.dtype) for a in (inputs.query, inputs.key, inputs.value)})
    if _MISSING:
        return _MISSING
    if jax.typeof(inputs.query).mat.varying:
        return "splash's results carry no record of mesh axes; allowed within shard_map: check_vma=False"
    if AxisType.Explicit in jax.typeof(inputs.query).sharding.mesh.axis_types:
        return "splash does not know Explicit mesh axes; allowed: Auto axes of jax.set_mesh, or within shard_map"
    if jax.config.read("jax_enable_x64"):
        return "splash's index arithmetic mixes int32 with the wider default; allowed: jax_enable_x64 off"
    if inputs.bias is not None:
        return "the kernel adds no bias; allowed: bias=None"
    if inputs.mask is not None:
        return "the kernel takes no mask array; allowed: is_causal, local_window_size, segment_ids and sequence lengths"
    if sink_logit(inputs.normalizer) is None:
        return f"normalizer {inputs.normalizer!r} has no kernel; allowed: 'softmax1', 'softmax', a number, an array"
    if len(dtypes) > 1 or dtypes[0] not in _DTYPES:
        return f"query, key and value are {', '.join(dtypes)}; allowed: one of {', '.join(_DTYPES)} for all three"
    if jnp.size(inputs.scale) > 1:
        return f"scale must be one number or an array of one, got {jnp.shape(inputs.scale)}"
    return unsupported_window(inputs.local_window_size)


def unavailable() -> str:
    """Returns why the kernel cannot run in this process, or ""."""
    backend = jax.default_backend()
    if backend != "tpu":
        return f"the kernel runs on TPUs; the backend is {backend!r}"
    if jax.device_count() > 1 and jax.sharding.get_abstract_mesh().empty:
        return "XLA cannot partition the kernel by itself; allowed on several devices: within jax.set_mesh or shard_map"
    return _MISSING


def attend(inputs: AttentionInputs, *, interpret: bool = False) -> jax.Array:
    """Computes attention by the splash kernel, for any lengths and head width.

    Lengths are padded to multiples of 128 and head widths to multiples of 64. The scale is multiplied into the query in
    float32 and rounded once: exact if the scale is a power of two, as for widths of 64 and 256. On the Auto axes of the
    current mesh (`jax.set_mesh`) the batch is over "data" and "fsdp" and heads are over "tensor", as far as such axes
    exist and divide them; along other axes every device computes everything. With `interpret` plain XLA runs the
    kernel, on any machine. Returns [B, T, N, V] in the dtype of `value`; with "softmax", rows that see no key are not
    defined. Saved for the backward pass under `ATTENTION_NAME`.
    """
    B, T, N, _ = inputs.query.shape
    query = (inputs.query.astype(jnp.float32) * inputs.scale).astype(inputs.query.dtype)
    query, key, value = (_kernel_layout(array) for array in (query, inputs.key, inputs.value))
    sinks = None
    if not (isinstance(inputs.normalizer, str) and inputs.normalizer == "softmax"):
        sink = jnp.asarray(sink_logit(inputs.normalizer), jnp.float32)
        sinks = jnp.broadcast_to(jnp.maximum(sink, _NO_SINK), (B, N))
    kernel = _kernel(inputs, query.shape[2], key.shape[2], interpret)
    out = _on_shards(kernel, query, key, value, _segments(inputs), sinks)
    out = jnp.swapaxes(out[:, :, :T, : inputs.value.shape[3]], 1, 2)
    if inputs.query_seq_lengths is None:
        return out
    return jnp.where((jnp.arange(T)[None] < inputs.query_seq_lengths[:, None])[..., None, None], out, 0)


def _kernel(inputs: AttentionInputs, T: int, S: int, interpret: bool) -> "kernels.SplashAttentionKernel":
    """Makes splash's object for any number of heads: a pytree of small arrays, an entry for each pair of blocks."""
    left, right = known_window(inputs.local_window_size) or (None, None)
    mask = masks.LocalMask((T, S), (left, 0 if inputs.is_causal else right), 0)
    if mask.window_size == (None, None):
        mask = masks.FullMask((T, S))
    q, k = (next(block for block in _BLOCKS if length % block == 0) for length in (T, S))
    return kernels.make_splash_mha(
        masks.MultiHeadMask((mask,)),
        block_sizes=kernels.BlockSizes(
            block_q=q, block_kv=k, block_q_dkv=q, block_kv_dkv=k, block_kv_dkv_compute=k, use_fused_bwd_kernel=True
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=inputs.logits_soft_cap,
        residual_checkpoint_name=ATTENTION_NAME,
        interpret=interpret,
    )


def _kernel_layout(array: jax.Array) -> jax.Array:
    """Returns [B, T, N, H] as [B, N, length, width], padded with zeros."""
    _, T, _, H = array.shape
    return jnp.swapaxes(jnp.pad(array, ((0, 0), (0, -T % _LENGTH_MULTIPLE), (0, 0), (0, -H % _WIDTH_MULTIPLE))), 1, 2)


def _segments(inputs: AttentionInputs) -> "kernels.SegmentIds | None":
    """Returns segment ids, int32 [B, T] and [B, S]; padded queries are alone in one segment, padded keys in another."""
    B, T, S = *inputs.query.shape[:2], inputs.key.shape[1]
    queries, keys = inputs.query_seq_lengths, inputs.key_value_seq_lengths
    reaches_padding = S % _LENGTH_MULTIPLE and not (inputs.is_causal and T <= S)
    if queries is None and keys is None and inputs.segment_ids is None and not reaches_padding:
        return None
    ends = (jnp.full(B, T) if queries is None else queries, jnp.full(B, S) if keys is None else keys)
    lengths = (length + -length % _LENGTH_MULTIPLE for length in (T, S))
    padded = [jnp.arange(length)[None] >= end[:, None] for length, end in zip(lengths, ends, strict=True)]
    ids = inputs.segment_ids or (jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32))
    ids = [jnp.pad(i.astype(jnp.int32), ((0, 0), (0, -i.shape[1] % _LENGTH_MULTIPLE))) for i in ids]
    unused = jnp.iinfo(jnp.int32).min  # as an id, like the one after it
    return kernels.SegmentIds(*(jnp.where(p, unused + i, ids[i]) for i, p in enumerate(padded)))


def _on_shards(kernel, query, key, value, segments, sinks) -> jax.Array:
    """Runs the kernel [B, N, T, H] on each device's part of batch and heads: XLA cannot partition it by itself."""

    def run(kernel, *arrays):
        # By name: an argument that another jax has before the sinks must not take them.
        named = lambda q, k, v, segments, sinks: kernel(q, k, v, segment_ids=segments, sinks=sinks)  # noqa: E731
        return jax.vmap(named)(*arrays)

    mesh = jax.sharding.get_abstract_mesh()
    free = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    if not free:
        return run(kernel, query, key, value, segments, sinks)
    batch = ()
    for name in (name for name in BATCH_AXES if name in free):
        if query.shape[0] % math.prod(mesh.shape[axis] for axis in (*batch, name)) == 0:
            batch = (*batch, name)
    heads = HEAD_AXIS if HEAD_AXIS in free and key.shape[1] % mesh.shape[HEAD_AXIS] == 0 else None
    rows = PartitionSpec(batch or None, heads)
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows, rows, PartitionSpec(batch or None), rows),
        out_specs=rows,
        axis_names=free,
        check_vma=False,  # what the kernel returns carries no record of the axes over which it varies
    )
    return mapped(kernel, query, key, value, segments, sinks)
