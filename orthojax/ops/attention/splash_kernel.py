"""The splash kernel of `jax.experimental.pallas.ops.tpu`, forward and backward, for masks known when tracing.

The only file that touches the kernel's module, so that its absence is one failed import. Letters as in the package.
Lengths are multiples of 128, the kernel's smallest block.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from orthojax.ops.attention.inputs import ATTENTION_NAME
from orthojax.ops.attention.platforms import compiled_for
from orthojax.ops.attention.splash_sharding import on_shards, sharded_alike

BLOCKS = (512, 256, 128)  # positions that the kernel takes at once, of queries and of keys


@dataclasses.dataclass(frozen=True)
class Visible(masks.Mask):
    """Query t sees keys t - left .. t + right below `keys`; None leaves a side open. Never a [T, S] array.

    The kernel evaluates it for one block at a time; splash's own masks know no end of the keys. A mask with
    `q_sequence` and `mask_function` is one that splash computes in the kernel.
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


def _kernel(visible: Visible, *, interpret: bool, with_lse: bool) -> kernels.SplashAttentionKernel:
    """Splash's object for one mask and any number of heads: a pytree of small arrays, an entry for each two blocks."""
    is_open = visible.left is visible.right is visible.keys is None
    mask = masks.FullMask(visible.lengths) if is_open else visible  # splash tests no positions under a full mask
    q, k = (next(block for block in BLOCKS if length % block == 0) for length in visible.lengths)
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


def _on_shards(function, results, kernel, arrays):
    names = tuple(name for name in _DIMENSIONS if arrays.get(name) is not None)  # the query first

    def named(kernel, *shards):
        return function(kernel, **dict(zip(names, shards, strict=True)))

    operands, results = (tuple(_DIMENSIONS[name] for name in side) for side in (names, results))
    return on_shards(named, operands, results, kernel, *(arrays[name] for name in names))


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
    if "sinks" in arrays:  # dead code where they are constants; splash's own rounds these terms to bfloat16
        rows = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1)
        gradients["sinks"] = -jnp.sum(jnp.exp(arrays["sinks"][..., None] - lse) * rows, -1)
    return (gradients,)


_attention.defvjp(_attention_fwd, _attention_bwd)


def attention(visible: Visible, interpret: bool, **arrays: jax.Array | None) -> jax.Array:
    """exp(x_i) / (exp(sink) + sum_j exp(x_j)) @ value with x = query @ key^T, on shards of batch and heads.

    Args:
      visible: Which keys each query sees.
      interpret: Run as plain XLA, for tests where there is no TPU.
      **arrays: query [B, N, T, H], scaled; key [B, K, S, H]; value [B, K, S, H]. Optional (None): query_segments int32
        [B, T] with key_segments int32 [B, S], where a query sees keys of its own segment only; sinks float32 [B, N],
        without which a row that sees nothing is undefined.

    Returns:
      [B, N, T, H] in the dtype of `query`.
    """
    given = {name: array for name in _DIMENSIONS if (array := arrays.get(name)) is not None}
    alike = sharded_alike(tuple(_DIMENSIONS[name] for name in given), *given.values())
    return _attention(visible, interpret, dict(zip(given, alike, strict=True)))
