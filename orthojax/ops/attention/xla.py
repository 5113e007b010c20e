"""Attention by plain XLA operations: masks, weights, weighted values; all queries at once or one chunk at a time."""

import dataclasses
import functools
import itertools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from orthojax.ops.attention.inputs import AttentionInputs, Window, known_window, window_sides
from orthojax.ops.normalizers import Normalizer, apply_normalizer
from orthojax.ops.statistics import at_least_float32, wide_dtype

# Weights of one chunk. Larger ones fall out of a CPU's cache; many smaller ones pay for each iteration of the loop,
# which adds to the gradients of all keys and values. A GPU or TPU needs enough work per iteration.
CHUNK_BYTES = {"cpu": 2**23}
# On a CPU, under a causal mask: as few chunks as save work, unless their weights are larger than this: several times it
# is held at once, since the runs of `_runs` share no memory.
CAUSAL_CHUNK_BYTES = {"cpu": 2**24}
FEWEST_QUERIES = 32
_SHAPED_AS_LOGITS = ("bias", "mask", "scale")
# Under a causal mask the chunks are split into this many runs; those of a run take the keys up to the end of the run.
_CAUSAL_RUNS = 4


def known(dimension: int) -> int:
    """Returns the dimension as far as tracing knows it: 1 for a symbolic one of `jax.export`."""
    return dimension if isinstance(dimension, int) else 1


def visible_keys(
    batch: int,
    query_length: int,
    key_length: int,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    local_window_size: int | jax.Array | Window | None = None,
    query_start: int | jax.Array = 0,
    key_start: int | jax.Array = 0,
) -> jax.Array | None:
    """Marks the keys that each query sees: everything that hides a key, in one boolean mask.

    B, T and S are `batch`, `query_length` and `key_length`; other arguments are those of `dot_product_attention`, but
    queries from `query_seq_lengths` on see nothing. For a part of a sequence, whose mask is `mask`, `query_start` and
    `key_start` are the positions of the first query and key. Returns a boolean mask that broadcasts to [B, N, T, S], or
    None if every query sees every key.
    """
    t = (query_start + jnp.arange(query_length))[:, None]
    s = (key_start + jnp.arange(key_length))[None, :]
    parts: list[jax.Array] = [] if mask is None else [mask]
    if is_causal:
        parts.append((s <= t)[None, None])
    if local_window_size is not None:
        left, right = window_sides(local_window_size)
        parts.append(((t - s <= left) & (s - t <= right))[None, None])
    if query_seq_lengths is not None:
        parts.append((t[None] < query_seq_lengths.reshape(batch, 1, 1))[:, None])
    if key_value_seq_lengths is not None:
        parts.append((s[None] < key_value_seq_lengths.reshape(batch, 1, 1))[:, None])
    if segment_ids is not None:
        parts.append(same_segment(*segment_ids))
    return functools.reduce(operator.and_, parts) if parts else None


def same_segment(query_ids: jax.Array, key_ids: jax.Array) -> jax.Array:
    """Marks the keys [B, S] of the same segment as each query [B, T]: bool [B, 1, T, S]."""
    return query_ids[:, None, :, None] == key_ids[:, None, None, :]


def relaxed_causal_mask(
    queries: int | jax.Array, relaxed: int, window: int | None = None, *, keys: jax.Array | None = None
) -> jax.Array:
    """Makes the causal mask with the first `relaxed` tokens seeing each other (From Attention to Activation, 3.2).

    Args:
      queries: T, or the positions [T] of a part of a sequence, or [B, T] of parts of several.
      relaxed: k; 0 or 1 is the causal mask.
      window: Query t sees no key before t - window + 1; None hides none.
      keys: Positions [S] or [B, S] of keys, those of the queries if None.

    Returns a boolean mask [1, 1, T, S] or [B, 1, T, S].
    """
    queries = queries if isinstance(queries, jax.Array) else jnp.arange(queries)
    t, s = queries[..., :, None], (queries if keys is None else keys)[..., None, :]
    visible = (s <= t) | ((t < relaxed) & (s < relaxed))
    visible = visible if window is None else visible & (t - s < window)
    return visible[None, None] if visible.ndim == 2 else visible[:, None]


def attention_logits(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None = None,
    *,
    scale: float | jax.Array | None = None,
    logits_soft_cap: float | None = None,
) -> jax.Array:
    """Computes scaled products of queries and keys, before any mask: x = scale * query @ key^T + bias.

    Query [B, T, N, H] and key [B, S, K, H], with K dividing N, give [B, N, T, S] in float32 (float64 for float64
    inputs), to which `bias` and `scale` broadcast; the scale is 1 / sqrt(H) by default. With a soft cap c the result
    is c tanh(x / c).
    """
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    dtype = wide_dtype(query)
    if N == K:
        # On CPU the grouped einsum with a group of one is slower, and so is the backward pass of an einsum that leaves
        # the order of axes to XLA: it then transposes [B, N, T, S] arrays instead of these.
        query, key = query.transpose(0, 2, 1, 3), key.transpose(0, 2, 3, 1)
        logits = jnp.matmul(query, key, preferred_element_type=dtype)
    else:
        grouped = query.reshape(B, T, K, N // K, H)
        logits = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=dtype).reshape(B, N, T, S)
    logits *= jnp.asarray(max(H, 1) ** -0.5 if scale is None else scale, dtype)
    logits = logits if bias is None else logits + bias.astype(dtype)
    return logits if logits_soft_cap is None else logits_soft_cap * jnp.tanh(logits / logits_soft_cap)


def attention_weights(
    query: jax.Array, key: jax.Array, *, normalizer: Normalizer, mask: jax.Array | None = None, **options: Any
) -> jax.Array:
    """Computes the weights with which queries attend to keys: a normalizer of `attention_logits`.

    Other arguments and the result are as for `attention_logits`; the boolean `mask` (True keeps) broadcasts to it.
    """
    return apply_normalizer(normalizer, attention_logits(query, key, **options), mask)


def weighted_values(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Sums the values of all keys with the weights of each query.

    Weights [B, N, T, S] and value [B, S, K, H], with K dividing N, give [B, T, N, H] in the dtype of `value`.
    """
    B, N, T, S = weights.shape
    K, H = value.shape[2:]
    weights = weights.astype(value.dtype)
    # Straight to [B, T, N, H], XLA for CPU would transpose the weights, which are larger than the output.
    if N == K:
        return jnp.einsum("BNTS,BSNH->BNTH", weights, value).transpose(0, 2, 1, 3)
    grouped = weights.reshape(B, K, N // K, T, S)
    return jnp.einsum("BKGTS,BSKH->BKGTH", grouped, value).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def attend(inputs: AttentionInputs) -> jax.Array:
    """Computes attention by the whole matrix of weights: [B, T, N, V] in the dtype of `value`."""
    return _without_padding(weighted_values(all_weights(inputs), inputs.value), inputs.query_seq_lengths)


def all_weights(inputs: AttentionInputs, query_start: int | jax.Array = 0, key_start: int | jax.Array = 0) -> jax.Array:
    """Computes the weights of all queries, [B, N, T, S] in at least float32; the starts are as for `visible_keys`."""
    (B, T), S, given = inputs.query.shape[:2], inputs.key.shape[1], vars(inputs)
    hiding = ("mask", "is_causal", "query_seq_lengths", "key_value_seq_lengths", "segment_ids", "local_window_size")
    starts: Any = {"query_start": query_start, "key_start": key_start}
    visible = visible_keys(B, T, S, **starts | {name: given[name] for name in hiding})
    options = {name: given[name] for name in ("bias", "normalizer", "scale", "logits_soft_cap")}
    return attention_weights(inputs.query, inputs.key, mask=visible, **options)


def _without_padding(output: jax.Array, query_seq_lengths: jax.Array | None) -> jax.Array:
    """Zeroes padded queries: `softmax` spreads their weight over all keys, jax.nn zeroes their output."""
    if query_seq_lengths is None:
        return output
    padding = jnp.arange(output.shape[1])[None, :, None, None] >= query_seq_lengths[:, None, None, None]
    return jnp.where(padding, 0, output)


# One chunk of queries at a time, in memory linear in the length: the backward pass recomputes the weights of a chunk. A
# chunk takes the keys that causality and a local window leave it, as far as shapes known when tracing can say.


def attend_chunked(inputs: AttentionInputs) -> jax.Array:
    """Computes attention chunk by chunk: [B, T, N, V] in the dtype of `value`."""
    B, T, N, _ = inputs.query.shape
    size = _queries_per_chunk(inputs)
    chunks = -(-T // size)
    queries = {"query": _split(inputs.query, size, chunks, 1), "start": size * jnp.arange(chunks)}
    for name in _SHAPED_AS_LOGITS:
        array = getattr(inputs, name)
        if isinstance(array, jax.Array) and array.shape[2] > 1:  # sliced as given: never broadcast to [B, N, T, S]
            queries[name] = _split(array, size, chunks, 2)
    if inputs.segment_ids is not None:
        queries["segments"] = _split(inputs.segment_ids[0], size, chunks, 1)
    outputs = []
    for run in _runs(inputs, size, chunks):
        part = {name: array[run.first : run.last] for name, array in queries.items()}
        outputs.append(_attend_run(inputs, run, part))
    output = jnp.moveaxis(jnp.concatenate(outputs), 0, 1).reshape(B, chunks * size, N, -1)[:, :T]
    return _without_padding(output, inputs.query_seq_lengths)


def unchunkable(inputs: AttentionInputs) -> str:
    """Returns why queries cannot be split into chunks, or ""."""
    lengths = inputs.query.shape[1], inputs.key.shape[1]
    return "" if all(isinstance(n, int) for n in lengths) else f"chunks need known lengths, got {lengths}"


def _queries_per_chunk(inputs: AttentionInputs) -> int:
    B, T, N, _ = inputs.query.shape
    row = known(B) * N * inputs.key.shape[1] * wide_dtype(inputs.query).itemsize
    platform = jax.default_backend()
    queries = CHUNK_BYTES.get(platform, 2**28) // row
    if inputs.is_causal and inputs.local_window_size is None and platform in CAUSAL_CHUNK_BYTES:
        queries = min(CAUSAL_CHUNK_BYTES[platform] // row, -(-T // _CAUSAL_RUNS))
    chunks = -(-T // max(queries, FEWEST_QUERIES))
    return -(-T // chunks)  # chunks of nearly equal size: little padding


class _Run(NamedTuple):
    """Consecutive chunks of queries that take equally many keys."""

    first: int  # chunks first..last - 1
    last: int
    keys: int  # how many keys each takes
    left: int | None  # keys begin this far before the chunk's first query, clipped to those there are; None: at key 0


def _runs(inputs: AttentionInputs, size: int, chunks: int) -> list[_Run]:
    T, S = inputs.query.shape[1], inputs.key.shape[1]
    everything, window = [_Run(0, chunks, S, None)], known_window(inputs.local_window_size)
    if isinstance(inputs.normalizer, str) and inputs.normalizer == "softmax":
        # It spreads a row that sees nothing over all keys, so no key may be left out if there may be such a row.
        left, right = window or ((T, 0) if inputs.local_window_size is None else (-1, -1))
        others = inputs.segment_ids is not None and inputs.segment_ids[0] is not inputs.segment_ids[1]
        hides = others or inputs.mask is not None or inputs.key_value_seq_lengths is not None
        if hides or T - left > S or min(left, right) < 0:
            return everything
    if window is not None:
        left, right = window
        keys = max(left + size + (min(right, 0) if inputs.is_causal else right), 1)
        if keys < S:
            return [_Run(0, chunks, keys, left)]
    if not inputs.is_causal:
        return everything
    runs = min(_CAUSAL_RUNS, chunks)
    ends = [chunks * run // runs for run in range(runs + 1)]
    return [_Run(first, last, min(last * size, S), None) for first, last in itertools.pairwise(ends)]


def _split(array: jax.Array, size: int, chunks: int, axis: int) -> jax.Array:
    """Splits [..., T, ...] into [chunks, ..., size, ...], the last chunk padded with zeros."""
    missing = chunks * size - array.shape[axis]
    if missing:
        array = jnp.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
    return jnp.moveaxis(array.reshape(*array.shape[:axis], chunks, size, *array.shape[axis + 1 :]), axis, 0)


def _keys(array: jax.Array, start: int | jax.Array, number: int, axis: int) -> jax.Array:
    if array.shape[axis] in (1, number):  # 1: a bias or mask that is the same for all keys
        return array
    return lax.dynamic_slice_in_dim(array, start, number, axis)


def _attend_run(inputs: AttentionInputs, run: _Run, queries: dict[str, jax.Array]) -> jax.Array:
    """Computes attention of the chunks of one run, [chunks of the run, B, size, N, H]; `queries` are their parts."""
    # Every chunk adds to the gradients of what all chunks share: summed in float32, as in one product.
    shared = {name: getattr(inputs, name) for name in ("key", "value", *_SHAPED_AS_LOGITS, "normalizer")}
    summed = [name for name, a in shared.items() if isinstance(a, jax.Array) and a.dtype != jnp.bool_]
    shared |= {name: at_least_float32(shared[name]) for name in summed}
    dtypes = {"key": inputs.key.dtype, "value": inputs.value.dtype}
    if run.left is None:
        shared |= {name: _keys(shared[name], 0, run.keys, 1) for name in dtypes}

    @functools.partial(jax.checkpoint, prevent_cse=False)  # in a loop nothing can be merged with the recomputation
    def attend_chunk(chunk: dict[str, jax.Array]) -> jax.Array:
        first = 0 if run.left is None else jnp.clip(chunk["start"] - run.left, 0, inputs.key.shape[1] - run.keys)
        part: dict[str, Any] = {name: _keys(shared[name], first, run.keys, 1).astype(dtypes[name]) for name in dtypes}
        for name in _SHAPED_AS_LOGITS:
            array = chunk.get(name, shared[name])
            part[name] = _keys(array, first, run.keys, 3) if isinstance(array, jax.Array) else array
        part |= {"query": chunk["query"], "normalizer": shared["normalizer"]}
        if inputs.segment_ids is not None:
            part["segment_ids"] = chunk["segments"], _keys(inputs.segment_ids[1], first, run.keys, 1)
        weights = all_weights(dataclasses.replace(inputs, **part), chunk["start"], first)
        return weighted_values(weights, part["value"])

    return lax.map(attend_chunk, queries)
