"""Cross-entropy of next tokens, from logits or from final hidden states without ever materialising all logits.

Letters: B sequences, T positions, D d_model, V vocabulary.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from orthojax.ops.products import kernel_product, transposed_product, varying_alike
from orthojax.ops.statistics import at_least_float32, wide_dtype

BATCH_AXES, VOCAB_AXIS = ("data", "fsdp"), "tensor"  # of the current mesh, as far as it has them
# The logits that one device materialises at a time; their exponentials and gradients take as much again. An accelerator
# needs enough work per iteration of the loop, which also reads and writes the kernel's gradient.
_LOGITS_BYTES = {"cpu": 2**28}
_LOGITS_BYTES_ELSEWHERE = 2**29


def cross_entropy_nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes -log softmax(logits)[target] for every position, in nats.

    Logits [..., V] and integer targets [...] give [...], at least float32; a target outside 0..V - 1 gives NaN.

    >>> import jax.numpy as jnp
    >>> round(float(cross_entropy_nats(jnp.zeros((1, 4)), jnp.array([2]))[0]), 4)  # ln 4
    1.3863
    """
    logits = at_least_float32(logits)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - target
    known = targets.astype(jnp.uint32) < logits.shape[-1]  # as an index, -1 is the last one, in unsigned types as well
    return jnp.where(known, nats, jnp.nan)


def positions_at_once(B: int, T: int, V: int, asked: int | None = None, dtype: DTypeLike = jnp.float32) -> int:
    """Returns how many positions of every sequence have logits at a time: T if no chunks are needed.

    It is `asked`, but at most T; by default as many as fit in 256 MB of logits on a CPU or 512 MB on another device, at
    least one, or somewhat fewer if that makes all chunks equally long. `dtype` is the dtype of the logits. On the Auto
    axes of the current mesh (`jax.set_mesh`), sequences are split over "data" and "fsdp" and the vocabulary over
    "tensor", if they divide.
    """
    if asked is not None:
        return max(min(asked, T), 1)
    mesh = jax.sharding.get_abstract_mesh()
    tensor = mesh.shape[VOCAB_AXIS] if VOCAB_AXIS in _auto_axes(mesh) else 1
    logits = B // _shards(mesh, _batch_axes(mesh, B)) * (V // tensor if V % tensor == 0 else V)
    row = logits * jnp.dtype(dtype).itemsize
    most = _LOGITS_BYTES.get(jax.default_backend(), _LOGITS_BYTES_ELSEWHERE) // max(row, 1)
    chunks = max(-(-T // max(most, 1)), 1)
    # Chunks of equal size compute nothing twice, chunks of nearly equal size little.
    chunks = next((more for more in range(chunks, 2 * chunks) if T % more == 0), chunks)
    return max(-(-T // chunks), 1)


def _auto_axes(mesh: jax.sharding.AbstractMesh) -> set[str]:
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}


def _shards(mesh: jax.sharding.AbstractMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _batch_axes(mesh: jax.sharding.AbstractMesh, B: int) -> tuple[str, ...]:
    axes = tuple(name for name in BATCH_AXES if name in _auto_axes(mesh))
    return axes if B % _shards(mesh, axes) == 0 else ()


class _Settings(NamedTuple):
    """Numbers that are fixed when the loss is compiled: three arguments of `chunked_cross_entropy_sum_nats`."""

    positions: int
    vocab_axis: int
    logits_dtype: DTypeLike | None


def chunked_cross_entropy_sum_nats(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    positions: int,
    vocab_axis: int = 1,
    logits_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Computes sum_bt weights[b, t] (logsumexp(x[b, t] W) - (x[b, t] W)[targets[b, t]]), in nats.

    This is the weighted sum of `cross_entropy_nats` over the logits x W, in the memory of one chunk's logits. When
    differentiated, the forward pass computes the gradients of x, W and weights along with the loss, chunk by chunk,
    since the backward pass only multiplies them by one number: the product x W is computed once. Only first derivatives
    in reverse mode are supported.

    On the Auto axes "data" and "fsdp" of the current mesh (`jax.set_mesh`) every device processes its own sequences: W
    is gathered once, its gradient summed over devices once, and x stays where it is.

    Args:
      hidden: x, [B, T, D]; products have operands of its dtype and are summed in at least float32.
      kernel: W, [D, V], or [V, D] with `vocab_axis=0`, as an embedding table is; its gradient is summed in float32.
      targets: int [B, T]; one outside 0..V - 1 makes the loss NaN, unless its weight is 0, in which case it is ignored.
      weights: [B, T] or [1, T].
      positions: Positions of every sequence whose logits are materialised at a time.
      vocab_axis: The axis of V in the kernel.
      logits_dtype: Dtype to which logits are rounded, by default at least float32. Their sums and everything computed
        from them are still at least float32; bfloat16 logits take half the memory and time.

    Returns:
      A scalar, at least float32; ValueError for fewer than one position.

    >>> import jax.numpy as jnp
    >>> x, W, targets = jnp.zeros((1, 3, 2)), jnp.ones((2, 4)), jnp.array([[0, 3, 1]])
    >>> float(chunked_cross_entropy_sum_nats(x, W, targets, jnp.ones((1, 3)), positions=2))  # 3 ln 4
    4.158883094787598
    """
    if positions < 1:
        raise ValueError(f"positions={positions}; allowed: at least 1")
    dtype = wide_dtype(hidden)
    weights = jnp.broadcast_to(weights.astype(dtype), targets.shape)
    if jnp.iinfo(targets.dtype).bits < 32:
        targets = targets.astype(jnp.int32)  # they are compared with every id, which may not fit in their dtype
    operands = varying_alike((hidden, kernel, targets, weights))  # within a shard_map of the caller
    return _loss(_Settings(min(positions, targets.shape[1]), vocab_axis, logits_dtype), *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(settings: _Settings, hidden, kernel, targets, weights) -> jax.Array:
    return _on_shards(settings, False, hidden, kernel, targets, weights)[0]


def _forward(settings: _Settings, hidden, kernel, targets, weights):
    loss, dx, dweights, dW = _on_shards(settings, True, hidden, kernel, targets, weights)
    return loss, (dx, dW.astype(kernel.dtype), dweights)


def _backward(settings: _Settings, gradients, cotangent):
    del settings
    dx, dW, dweights = ((g.astype(cotangent.dtype) * cotangent).astype(g.dtype) for g in gradients)
    return dx, dW, None, dweights


_loss.defvjp(_forward, _backward)


def _on_shards(settings: _Settings, with_gradients: bool, hidden, kernel, targets, weights):
    """Returns (loss, gradients of hidden, weights and kernel), or (loss,): each device on its own sequences."""
    kernel = kernel.astype(hidden.dtype)  # before it is gathered
    local = partial(_chunk_by_chunk, settings, with_gradients)
    mesh = jax.sharding.get_abstract_mesh()
    axes = _batch_axes(mesh, hidden.shape[0])
    if _shards(mesh, axes) == 1:
        return local(hidden, kernel, targets, weights)

    def shard(*operands):
        # The partitioner would sum the kernel's gradient over devices in every chunk.
        loss, *gradients = local(*operands)
        return (lax.psum(loss, axes), *gradients[:2], *(lax.psum(g, axes) for g in gradients[2:]))

    split, whole = PartitionSpec(axes), PartitionSpec()
    mapped = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(split, whole, split, split),
        out_specs=(whole, split, split, whole) if with_gradients else (whole,),
        axis_names=set(axes),
        check_vma=False,
    )
    return mapped(hidden, kernel, targets, weights)


def _chunk_by_chunk(settings: _Settings, with_gradients: bool, hidden, kernel, targets, weights):
    T, positions = hidden.shape[1], settings.positions
    gradients = partial(_loss_and_gradients, settings, with_gradients, kernel)
    if positions == T:  # without a loop, whose slices and sums would each be another pass over the arrays
        return gradients(hidden, targets, weights)

    def chunk(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        # The last chunk begins early enough to be full; positions that an earlier one has done do not count there.
        start = jnp.minimum(i * positions, T - positions)
        x, target, weight = (lax.dynamic_slice_in_dim(a, start, positions, 1) for a in (hidden, targets, weights))
        new = (start + jnp.arange(positions) >= i * positions)[None]
        loss, *others = gradients(x, target, jnp.where(new, weight, 0.0))
        if not others:
            return (carry[0] + loss,)
        *by_position, dW = others
        for k, (whole, is_new) in enumerate(zip(carry[1:3], (new[..., None], new), strict=True)):
            part = jnp.where(is_new, by_position[k], lax.dynamic_slice_in_dim(whole, start, positions, 1))
            by_position[k] = lax.dynamic_update_slice_in_dim(whole, part, start, 1)
        return carry[0] + loss, *by_position, carry[3] + dW

    carry: tuple[Any, ...] = (jnp.zeros((), weights.dtype),)
    if with_gradients:
        carry = (*carry, jnp.zeros_like(hidden), jnp.zeros_like(weights), jnp.zeros(kernel.shape, weights.dtype))
    carry, _ = varying_alike((carry, weights))
    return lax.fori_loop(0, -(-T // positions), chunk, carry)


def _loss_and_gradients(settings: _Settings, with_gradients: bool, kernel, x, target, weight) -> tuple[jax.Array, ...]:
    """Computes the loss of some positions, [B, T] each, and its gradients with respect to x, weight and kernel."""
    vocab_axis, wide = settings.vocab_axis, weight.dtype
    product = partial(kernel_product, x, kernel, contract=1 - vocab_axis)
    logits = product(preferred_element_type=settings.logits_dtype or wide).astype(wide)
    # Compared with every id rather than looked up: if the vocabulary is split, nothing has to be gathered.
    is_target = lax.broadcasted_iota(target.dtype, logits.shape, 2) == target[..., None]
    logsumexp, target_logit = _statistics(logits, is_target)
    nats = logsumexp[..., 0] - target_logit
    known = (target >= 0) & (target < logits.shape[-1])
    nats = jnp.where(known, nats, jnp.where(weight == 0.0, 0.0, jnp.nan))
    loss = jnp.sum(weight * nats)
    if not with_gradients:
        return (loss,)
    error = (weight[..., None] * (jnp.exp(logits - logsumexp) - is_target.astype(logits.dtype))).astype(x.dtype)
    dx = kernel_product(error, kernel, contract=vocab_axis, preferred_element_type=wide).astype(x.dtype)
    operands = (x, error) if vocab_axis == 1 else (error, x)
    dW = transposed_product(*operands, preferred_element_type=wide)
    return loss, dx, nats, dW


def _statistics(logits: jax.Array, is_target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes from logits [B, T, V] their log sum exp, [B, T, 1], and the logits of the targets, [B, T]."""
    return (_in_one_pass if jax.default_backend() == "gpu" else _in_three_passes)(logits, is_target)


def _in_three_passes(logits: jax.Array, is_target: jax.Array) -> tuple[jax.Array, jax.Array]:
    top = jnp.max(logits, -1, keepdims=True)
    logsumexp = top + jnp.log(jnp.sum(jnp.exp(logits - top), -1, keepdims=True))
    return logsumexp, jnp.sum(jnp.where(is_target, logits, 0.0), -1)


def _in_one_pass(logits: jax.Array, is_target: jax.Array) -> tuple[jax.Array, jax.Array]:
    # For a GPU, where memory traffic takes the time: every reduction reads all logits, so the three are fused.
    def join(a: Any, b: Any) -> tuple[jax.Array, ...]:
        (top, total, target), (other_top, other_total, other_target) = a, b
        is_first = top >= other_top
        factor = jnp.exp(jnp.where(is_first, other_top - top, top - other_top))
        total = jnp.where(is_first, total + other_total * factor, total * factor + other_total)
        return jnp.where(is_first, top, other_top), total, target + other_target

    zero, lowest = (jnp.asarray(number, logits.dtype) for number in (0.0, jnp.finfo(logits.dtype).min))
    arrays = (logits, jnp.ones_like(logits), jnp.where(is_target, logits, 0.0))
    top, total, target = lax.reduce(arrays, (lowest, zero, zero), join, (logits.ndim - 1,))
    return (top + jnp.log(total))[..., None], target


def perplexity(loss_nats: float) -> float:
    """Computes exp of a loss; e^700 if that is beyond the range of a float, as for a model ruined by quantisation.

    >>> perplexity(0.0), perplexity(1e6) == math.exp(700.0), perplexity(math.nan)
    (1.0, True, nan)
    """
    return math.exp(min(loss_nats, 700.0))
