"""Attention by plain XLA operations in memory linear in the length: one chunk of queries at a time.

The backward pass computes the weights of a chunk again. Of the keys, a chunk takes those that causality and a local
window leave it, as far as shapes known beforehand can say.
"""

import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from orthojax.ops.attention.inputs import AttentionInputs
from orthojax.ops.attention.visibility import visible_keys
from orthojax.ops.attention.xla import attend_visible, without_padding
from orthojax.ops.statistics import at_least_float32

# Weights of one chunk: larger ones fall out of a CPU's cache, many smaller ones pay for each turn of the loop. A GPU
# or TPU wants enough to do in each turn.
_CHUNK_BYTES = {"cpu": 2**23}
_FEWEST_QUERIES = 32
# Under a causal mask the chunks are split into so many runs; those of a run take the keys up to the end of the run.
_CAUSAL_RUNS = 4


def unsupported(inputs: AttentionInputs) -> str:
    """Nothing is: "" for all inputs."""
    del inputs
    return ""


def _queries_per_chunk(inputs: AttentionInputs) -> int:
    B, T, N, _ = inputs.query.shape
    row = B * N * inputs.key.shape[1] * jnp.promote_types(inputs.query.dtype, jnp.float32).itemsize
    chunks = -(-T // max(_CHUNK_BYTES.get(jax.default_backend(), 2**28) // row, _FEWEST_QUERIES))
    return -(-T // chunks)  # chunks of nearly one size: little padding


def _may_leave_keys_out(inputs: AttentionInputs) -> bool:
    """Whether keys that causality or the window hides have no weight: in an empty row of softmax they have."""
    if not isinstance(inputs.normalizer, str) or inputs.normalizer != "softmax":
        return True
    left, _ = inputs.local_window_size or (inputs.query.shape[1], 0)
    no_row_is_empty = inputs.query.shape[1] - left <= inputs.key.shape[1]
    return inputs.mask is None and inputs.key_value_seq_lengths is None and no_row_is_empty


class _Run(NamedTuple):
    """Consecutive chunks of queries that take equally many keys."""

    first: int  # chunks first..last - 1
    last: int
    keys: int  # how many keys each takes
    left: int | None  # the keys begin so far before the chunk's first query, as near as there are keys; None: at key 0


def _runs(inputs: AttentionInputs, size: int, chunks: int) -> list[_Run]:
    S = inputs.key.shape[1]
    everything = [_Run(0, chunks, S, None)]
    if not _may_leave_keys_out(inputs):
        return everything
    if inputs.local_window_size is not None:
        left, right = inputs.local_window_size
        keys = left + size + (0 if inputs.is_causal else right)
        if keys < S:
            return [_Run(0, chunks, keys, left)]
    if not inputs.is_causal:
        return everything
    runs = min(_CAUSAL_RUNS, chunks)
    ends = [chunks * run // runs for run in range(runs + 1)]
    return [_Run(first, last, min(last * size, S), None) for first, last in itertools.pairwise(ends)]


def _split(array: jax.Array, size: int, chunks: int, axis: int) -> jax.Array:
    """[..., T, ...] -> [chunks, ..., size, ...], the last chunk filled up with zeros."""
    missing = chunks * size - array.shape[axis]
    if missing:
        array = jnp.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
    return jnp.moveaxis(array.reshape(*array.shape[:axis], chunks, size, *array.shape[axis + 1 :]), axis, 0)


def _keys(array: jax.Array, start: int | jax.Array, number: int, axis: int) -> jax.Array:
    if array.shape[axis] in (1, number):  # 1: a bias or a mask that is the same for all keys
        return array
    return lax.dynamic_slice_in_dim(array, start, number, axis)


def _attend_run(inputs: AttentionInputs, run: _Run, queries: dict[str, jax.Array]) -> jax.Array:
    """Attention of the chunks of one run.

    Args:
      inputs: Without what `queries` has.
      run: Which chunks, and which keys they take.
      queries: Of each chunk the position of its first query and its query, and bias and mask where these have queries.

    Returns:
      [chunks of the run, B, size, N, H].
    """
    dtype = inputs.value.dtype
    # Every chunk adds to the gradients of what all chunks share, which are summed in float32 as in one product.
    shared = {name: getattr(inputs, name) for name in ("key", "value", "bias", "normalizer")}
    shared = {name: at_least_float32(a) if isinstance(a, jax.Array) else a for name, a in shared.items()}
    if run.left is None:
        shared |= {name: _keys(shared[name], 0, run.keys, 1) for name in ("key", "value")}

    @partial(jax.checkpoint, prevent_cse=False)  # in a loop nothing can be merged with the recomputation
    def attend_chunk(chunk: dict[str, jax.Array]) -> jax.Array:
        length = chunk["query"].shape[1]
        first = 0 if run.left is None else jnp.clip(chunk["start"] - run.left, 0, inputs.key.shape[1] - run.keys)
        key, value = (_keys(shared[name], first, run.keys, 1).astype(dtype) for name in ("key", "value"))
        bias, mask = chunk.get("bias", shared["bias"]), chunk.get("mask", inputs.mask)
        bias, mask = (None if array is None else _keys(array, first, run.keys, 3) for array in (bias, mask))
        visible = visible_keys(
            key.shape[0],
            length,
            run.keys,
            mask=mask,
            is_causal=inputs.is_causal,
            query_seq_lengths=inputs.query_seq_lengths,
            key_value_seq_lengths=inputs.key_value_seq_lengths,
            local_window_size=inputs.local_window_size,
            query_start=chunk["start"],
            key_start=first,
        )
        options = {"normalizer": shared["normalizer"], "scale": inputs.scale}
        return attend_visible(chunk["query"], key, value, bias, visible, **options)

    return lax.map(attend_chunk, queries)


def attend(inputs: AttentionInputs) -> jax.Array:
    """Attention chunk by chunk, for every normalizer and every kind of mask.

    Args:
      inputs: Arrays of any floating dtype; logits and weights are float32 at least.

    Returns:
      [B, T, N, H] in the dtype of `value`.
    """
    B, T, N, H = inputs.query.shape
    size = _queries_per_chunk(inputs)
    chunks = -(-T // size)
    queries = {"query": _split(inputs.query, size, chunks, 1), "start": size * jnp.arange(chunks)}
    for name in ("bias", "mask"):
        array = getattr(inputs, name)
        if array is not None and array.shape[2] > 1:  # sliced as it was given: never broadcast to [B, N, T, S]
            queries[name] = _split(array, size, chunks, 2)
    outputs = []
    for run in _runs(inputs, size, chunks):
        part = {name: array[run.first : run.last] for name, array in queries.items()}
        outputs.append(_attend_run(inputs, run, part))
    output = jnp.moveaxis(jnp.concatenate(outputs), 0, 1).reshape(B, chunks * size, N, H)[:, :T]
    return without_padding(output, inputs.query_seq_lengths)
