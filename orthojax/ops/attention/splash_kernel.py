"""The splash kernel of `jax.experimental.pallas.ops.tpu`, forward and backward, on shards of batch and heads.

The only file that touches the kernel's module, so that its absence is one failed import. Letters as in the package.
Lengths are multiples of 128, the kernel's smallest block.
"""

import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from orthojax.ops.attention.dot_product import ATTENTION_NAME, compiled_for

_BLOCKS = (512, 256, 128)  # positions that the kernel takes at once, of queries and of keys
BATCH_AXES, HEAD_AXES = ("data", "fsdp"), ("tensor",)  # of a mesh with Auto axes, which types do not record


@dataclasses.dataclass(frozen=True)
class Visible(masks.Mask):
    """Query t sees keys t - left .. t + right below `keys`; None leaves a side open. Never a [T, S] array.

    The kernel evaluates it one block at a time; splash's own masks know no end of the keys. A mask with `q_sequence`
    and `mask_function` is one that splash computes in the kernel.
    """

    lengths: tuple[int, int]  # T, S
    left: int | None
    right: int | None
    keys: int | None

    def __call__(self, t, s):
        """Boolean, for positions of NumPy or of the kernel that broadcast against each other."""
        bounds = [] if self.keys is None else [s < self.keys]
        bounds += [] if self.left is None else [s >= t - self.left]
        bounds += [] if self.right is None else [s <= t + self.right]
        return functools.reduce(operator.and_, bounds)

    def __getitem__(self, slices) -> np.ndarray:
        t, s = (np.arange(length)[part] for length, part in zip(self.lengths, slices, strict=True))
        return np.broadcast_to(self(t[:, None], s[None, :]), (len(t), len(s)))

    @property
    def shape(self) -> tuple[int, int]:
        """(T, S)."""
        return self.lengths

    @property
    def q_sequence(self) -> np.ndarray:
        """The position of each query."""
        return np.arange(self.lengths[0], dtype=np.int32)

    @property
    def mask_function(self) -> "Visible":
        """What the kernel calls; equal masks share compiled code."""
        return self


def attention(visible: Visible, interpret: bool, **arrays: jax.Array | None) -> jax.Array:
    """exp(x_i) / (exp(sink) + sum_j exp(x_j)) @ value with x = query @ key^T, on shards of batch and heads.

    Args:
      visible: Which keys each query sees.
      interpret: Run as plain XLA, for tests without a TPU.
      **arrays: query [B, N, T, H], scaled; key [B, K, S, H]; value [B, K, S, H]. Optional (None): query_segments int32
        [B, T] with key_segments int32 [B, S], where a query sees keys of its own segment only; sinks float32 [B, N],
        without which a row that sees nothing is undefined.

    Returns:
      [B, N, T, H] in the dtype of `query`.
    """
    given = {name: array for name in _DIMENSIONS if (array := arrays.get(name)) is not None}
    # On Explicit axes the gradients of a custom rule must have the types of its arguments.
    if (split := _split_by_type(given["query"], given["key"])) is not None:
        mesh, axes = split
        shardings = {name: NamedSharding(mesh, _spec(name, axes)) for name in given}
        given = {name: jax.sharding.reshard(array, shardings[name]) for name, array in given.items()}
    return _attention(visible, interpret, given)


# The derivative rule.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(visible: Visible, interpret: bool, arrays: dict[str, jax.Array]) -> jax.Array:
    kernel = _kernel(visible, interpret=interpret, with_lse=False)
    return _on_shards(_forward, ("out",), kernel, _for_tpu(arrays, interpret))[0]


def _for_tpu(arrays: dict[str, jax.Array], interpret: bool) -> dict[str, jax.Array]:
    return arrays if interpret else arrays | {"query": compiled_for(arrays["query"], "splash", "tpu")}


def _attention_fwd(visible, interpret, arrays):
    kernel = _kernel(visible, interpret=interpret, with_lse=True)
    results = _on_shards(_forward, ("out", "lse"), kernel, _for_tpu(arrays, interpret))
    out, lse = (checkpoint_name(a, ATTENTION_NAME) for a in results)
    return out, (arrays, out, lse)


def _attention_bwd(visible, interpret, residuals, d_out):
    arrays, out, lse = residuals
    kernel = _kernel(visible, interpret=interpret, with_lse=True)
    names = ("query", "key", "value")
    inputs = {name: array for name, array in arrays.items() if name != "sinks"}
    gradients = _on_shards(_backward, names, kernel, inputs | {"out": out, "lse": lse, "d_out": d_out})
    gradients = dict.fromkeys(arrays) | dict(zip(names, gradients, strict=True))
    if "sinks" in arrays:  # dead code if they are constants; splash's own rule rounds these terms to bfloat16
        rows = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1)
        gradients["sinks"] = -jnp.sum(jnp.exp(arrays["sinks"][..., None] - lse) * rows, -1)
    return (gradients,)


_attention.defvjp(_attention_fwd, _attention_bwd)


# The kernel on one device.


def _kernel(visible: Visible, *, interpret: bool, with_lse: bool) -> kernels.SplashAttentionKernel:
    """Splash's object for one mask and any number of heads: a pytree of small arrays, an entry per pair of blocks."""
    is_open = visible.left is visible.right is visible.keys is None
    mask = masks.FullMask(visible.lengths) if is_open else visible  # splash tests no positions under a full mask
    q, k = (next(block for block in _BLOCKS if length % block == 0) for length in visible.lengths)
    blocks = kernels.BlockSizes(
        block_q=q, block_kv=k, block_q_dkv=q, block_kv_dkv=k, block_kv_dkv_compute=k, use_fused_bwd_kernel=True
    )
    return kernels.make_splash_mha(
        masks.MultiHeadMask((mask,)),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=with_lse,
        interpret=interpret,
    )


def _segment_ids(query_segments: jax.Array | None, key_segments: jax.Array | None) -> kernels.SegmentIds | None:
    return None if query_segments is None or key_segments is None else kernels.SegmentIds(query_segments, key_segments)


def _forward(kernel, query, key, value, query_segments=None, key_segments=None, sinks=None):
    """(out,), or (out, lse) from a kernel made with_lse; lse is log(exp(sink) + sum_j exp(x_j))."""
    result = jax.vmap(kernel)(query, key, value, _segment_ids(query_segments, key_segments), sinks)
    return (result[0], *result[1]) if kernel.kwargs["save_residuals"] else (result,)


def _backward(kernel, query, key, value, out, lse, d_out, query_segments=None, key_segments=None):
    """(d_query, d_key, d_value).

    With `out` and `lse` of an attention with a sink, the backward kernel of softmax is that attention's: its weights
    are exp(x - lse), and the sink adds nothing to rowsum(out * d_out), having no value.
    """

    def gradients(query, key, value, segments, out, lse, d_out):
        # The rule of splash's own derivative: there is no public way to it that does not run the forward again.
        residuals = (query, key, value, segments, None, out, lse, None, kernel.dkv_mask_info)
        return kernels._splash_attention_bwd(**kernel.kwargs, res=residuals, do=d_out)[3:6]

    segments = _segment_ids(query_segments, key_segments)
    return jax.vmap(gradients)(query, key, value, segments, out, lse, d_out)


# Shards: XLA cannot partition a Pallas kernel by itself. "b" (batch), "n" (query heads) and "k" (key-value heads) may
# be sharded, the heads alike; every other dimension is whole.

_DIMENSIONS = {
    "query": "bnth",
    "key": "bksh",
    "value": "bksh",
    "query_segments": "bt",
    "key_segments": "bs",
    "sinks": "bn",
    "out": "bnth",
    "lse": "bnt",
    "d_out": "bnth",
}


def _on_shards(
    function: Callable[..., tuple[jax.Array, ...]], results: tuple[str, ...], kernel: Any, arrays: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """function(kernel, **arrays), each device on its shard of batch and heads.

    - Within a `shard_map` over all axes of a mesh, and without a mesh, it is a plain call.
    - On Explicit axes the type of the query determines the shards.
    - On the Auto axes of the current mesh (`jax.set_mesh`) the batch is over "data" and "fsdp" and heads are over
      "tensor", as far as such axes exist and divide them. Along other axes every device computes everything, with a
      warning.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    names, operands = tuple(arrays), tuple(arrays.values())
    split = None
    if mesh.empty or free:
        split = _split_by_type(arrays["query"], arrays["key"])
    if split is not None:
        mesh, axes = split
        free = free or set(mesh.axis_names)
    elif not free:
        return function(kernel, **arrays)
    else:
        batch, heads = (tuple(name for name in axes if name in free) for axes in (BATCH_AXES, HEAD_AXES))
        _warn_of_others(tuple(sorted(name for name in free.difference(batch, heads) if mesh.shape[name] > 1)))
        axes = _dividing(batch, heads, arrays["query"], arrays["key"], mesh.shape)
    # What the kernel returns carries no record of the axes over which it varies, so there is nothing to check.
    mapped = jax.shard_map(
        lambda kernel, *shards: function(kernel, **dict(zip(names, shards, strict=True))),
        mesh=mesh,
        in_specs=(PartitionSpec(), *(_spec(name, axes) for name in names)),
        out_specs=tuple(_spec(name, axes) for name in results),
        axis_names=free,
        check_vma=False,
    )
    return mapped(kernel, *operands)


Axes = Mapping[str, tuple[str, ...] | None]  # of a letter: the mesh axes over which it is sharded


def _spec(name: str, axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(axes.get(letter) for letter in _DIMENSIONS[name]))


def _dividing(batch, heads, query: jax.Array, key: jax.Array, mesh_shape: Mapping[str, int]) -> Axes:
    """As many of the mesh axes for batch and heads, in their order, as make equal shards."""

    def kept(names: tuple[str, ...], size: int) -> tuple[str, ...] | None:
        kept: tuple[str, ...] = ()
        for name in names:
            if size % math.prod(mesh_shape[axis] for axis in (*kept, name)) == 0:
                kept = (*kept, name)
        return kept or None

    over_heads = kept(heads, math.gcd(query.shape[1], key.shape[1]))
    return {"b": kept(batch, query.shape[0]), "n": over_heads, "k": over_heads}


def _split_by_type(query: jax.Array, key: jax.Array) -> tuple[Any, Axes] | None:
    """The mesh of the query's type and how batch and heads are over it, or None if its axes are not Explicit."""
    sharding = jax.typeof(query).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    batch, heads = (
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in sharding.spec[:2]
    )
    return sharding.mesh, _dividing(batch, heads, query, key, sharding.mesh.shape)


@functools.cache  # one warning per set of names
def _warn_of_others(names: tuple[str, ...]) -> None:
    if names:
        warnings.warn(
            f"attention by 'splash' is not split over the mesh axes {', '.join(map(repr, names))}: the batch is split "
            f"over {', '.join(map(repr, BATCH_AXES))} and heads over {', '.join(map(repr, HEAD_AXES))}; name the axes "
            "so, make them Explicit, or call it within jax.shard_map",
            stacklevel=2,
        )
