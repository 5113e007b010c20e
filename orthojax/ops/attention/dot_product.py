"""`dot_product_attention`: the entry, the choice of an implementation, and the form that flax takes."""

import functools
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer

from orthojax.ops.attention import xla
from orthojax.ops.attention.inputs import AttentionInputs, Window, prepare_inputs
from orthojax.ops.normalizers import Normalizer, check_normalizer

Implementation = Literal["xla", "xla_chunked", "cudnn", "splash"]

_KERNELS: dict[str, Implementation] = {"gpu": "cudnn", "tpu": "splash"}


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    normalizer: Normalizer = "softmax1",
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    local_window_size: int | jax.Array | Window | None = None,
    logits_soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes attention with the layout and argument meanings of `jax.nn.dot_product_attention`, and any normalizer.

    weights = normalizer(cap(scale * query @ key^T + bias)), output = weights @ value. Logits and weights are computed
    in at least float32; the weights are rounded to the dtype of `value` for the second product.

    Args:
      query: [B, T, N, H], or [T, N, H] for one sequence.
      key: [B, S, K, H] or [S, K, H]; K divides N (grouped-query attention).
      value: [B, S, K, V] or [S, K, V]; jax.nn wants V = H.
      bias: Added to the logits; [B or 1, N or 1, T or 1, S or 1], missing leading axes are 1. Floats or integers.
      mask: Boolean, True keeps; shaped as `bias`.
      normalizer: The name of a function in `orthojax.ops.normalizers`, such as "softmax1" or "softmax", a number n
        (softmax_n), or an array [N] of learned sink logits, one per query head.
      scale: Factor of the logits, a number or an array shaped as `bias`; 1 / sqrt(H) if None.
      is_causal: Query t sees keys 0..t.
      query_seq_lengths: int32 [B]; the output of queries from this position on is zero.
      key_value_seq_lengths: int32 [B]; keys from this position on are hidden; they must be finite all the same.
      segment_ids: int [B, T], for packed sequences: a query sees only keys of its own segment; or a pair, for queries
        [B, T] and for keys [B, S]. Normalizers that divide by the number of visible keys count those of the segment.
      local_window_size: (left, right), query t sees keys t - left .. t + right; an int means both sides. They may be
        negative, and traced integers, such as the window of each layer in a scan over layers.
      logits_soft_cap: c, for cap(x) = c tanh(x / c), as in Gemma 2; None caps nothing. The cap comes after the bias and
        before everything that hides keys, so with it a bias of -inf hides none.
      implementation: None picks by platform, dtype and shape, see `fastest`. "xla" materialises the whole matrix of
        weights, on any platform; "xla_chunked" does so for one chunk of queries at a time, in memory linear in T;
        "cudnn" is the kernel for NVIDIA GPUs, "splash" the one for TPUs. A named implementation never falls back to
        another; None warns if the platform has a kernel that cannot be used.
        The two kernels have a first derivative in reverse mode only. They need windows >= 0 that are known when
        tracing, and one scale, for cuDNN a number; cuDNN has no soft cap, splash neither bias nor mask.

    Returns:
      [B, T, N, V] or [T, N, V], dtype of `value`; zeros without keys. Of a query whose keys are all hidden, softmax
      gives the mean of the values (the kernels may not), the other normalizers zeros. Batch and, for "xla", lengths may
      be symbolic dimensions of `jax.export`, with which None never picks a kernel.

    Raises:
      ValueError: For shapes or dtypes that do not fit, or an unknown normalizer or implementation.
      NotImplementedError: If the named implementation does not support the arguments; the message says which.

    >>> import jax, jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (1, 5, 2, 8)
    """
    options: Any = {"normalizer": normalizer, "scale": scale, "is_causal": is_causal}
    options |= {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    options |= {"segment_ids": segment_ids, "local_window_size": local_window_size, "logits_soft_cap": logits_soft_cap}
    inputs = prepare_inputs(query, key, value, bias, mask, **options)
    attend = _choose(inputs, implementation)
    shape = (*jnp.shape(query)[:-1], inputs.value.shape[-1])
    if 0 in shape or inputs.key.shape[1] == 0:
        return jnp.zeros(shape, inputs.value.dtype)
    return attend(inputs).reshape(shape)


def _platform(array: jax.Array) -> str:
    """Returns the platform of the attention, as far as tracing can know: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(array, Tracer):
        device = next(iter(array.devices()))
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _symbolic(inputs: AttentionInputs) -> str:
    shapes = inputs.query.shape, inputs.key.shape
    known = all(isinstance(n, int) for shape in shapes for n in shape)
    return "" if known else f"kernels are compiled for known shapes, got {shapes[0]} and {shapes[1]}"


def fastest(
    platform: str, B: int, T: int, N: int, S: int, *, is_causal: bool = False, with_kernel: bool = True
) -> Implementation:
    """Returns what `implementation=None` tries for B sequences of T queries in N heads and S keys, by measured times.

    - The platform's kernel for more than one query. On an H200 (results/benchmarks.md: softmax-1, bfloat16, causal,
      both passes) cuDNN takes 0.86 ms at 32x1024x12x64 and 2.1 ms at 8x4096x12x64, plain XLA 4.4 and 16.6 ms. XLA has
      not been measured there below T = 1,024, and nothing has on a TPU.
    - Without a kernel all weights at once, or from a size on a chunk of queries at a time. The reason is memory: chunks
      take 1.2 to 1.3 of the time on a CPU, but 0.7 to 0.8 under a causal mask, since keys are left out.

    >>> fastest("gpu", 32, 1024, 12, 1024), fastest("gpu", 32, 1, 12, 1024), fastest("cpu", 1, 8192, 12, 8192)
    ('cudnn', 'xla', 'xla_chunked')
    """
    if with_kernel and platform in _KERNELS and T not in (0, 1):  # one query is a matrix-vector product
        return _KERNELS[platform]
    bytes_of_weights = 4 * math.prod(map(xla.known, (B, T, N, S)))
    limits = {"cpu": 2**23 if is_causal else 2**26}
    return "xla_chunked" if bytes_of_weights >= limits.get(platform, 2**30) else "xla"


def _check_implementation(name: str | None) -> None:
    if name is not None and not (isinstance(name, str) and name in get_args(Implementation)):
        allowed = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"unknown implementation {name!r}; allowed: None, {allowed}")


def _choose(inputs: AttentionInputs, implementation: str | None) -> Callable[[AttentionInputs], jax.Array]:
    """Returns the function for the attention; a program traced on a GPU to be lowered for a CPU must say "xla"."""
    platform, problem = _platform(inputs.query), ""
    (B, T, N, _), S = inputs.query.shape, inputs.key.shape[1]
    pick = functools.partial(fastest, platform, B, T, N, S, is_causal=inputs.is_causal)
    name = pick() if implementation is None else implementation
    _check_implementation(name)
    if name in _KERNELS.values():
        module = importlib.import_module(f"orthojax.ops.attention.{name}")  # may take a second, so only where used
        problem = _symbolic(inputs) or module.unsupported(inputs)
        if not isinstance(inputs.query, Tracer) and _KERNELS.get(platform) != name:
            problem = problem or f"the kernel does not run on {platform!r}, where the arrays are; allowed: 'xla', None"
        elif implementation is None or (name, platform) == ("cudnn", "gpu"):
            problem = problem or module.unavailable()  # clearer than the error of the vendor's stack
        if not problem:
            return module.attend
        if implementation is None:
            problem = f"attention falls back from {name!r} to plain XLA, which is slower: {problem}"
            warnings.warn(problem, stacklevel=3)  # at the line that calls `dot_product_attention`
            name = pick(with_kernel=False)
    if name == "xla_chunked":
        problem = xla.unchunkable(inputs)
    if problem and implementation is not None:
        raise NotImplementedError(f"attention with implementation={name!r}: {problem}")
    return xla.attend_chunked if name == "xla_chunked" and not problem else xla.attend


def attention_fn(
    normalizer: Normalizer = "softmax1", *, is_causal: bool = False, implementation: Implementation | None = None
) -> Callable[..., jax.Array]:
    """Makes the `attention_fn` of flax's MultiHeadAttention (linen and nnx), with another normalizer.

    Args:
      normalizer: As for `dot_product_attention`.
      is_causal: Query t sees keys 0..t: faster than a mask array, which splash does not take. A step of cached
        decoding, one query, brings its own mask instead.
      implementation: As for `dot_product_attention`.

    Returns:
      A function of query [..., T, N, H], key [..., S, K, H] and value [..., S, K, V], and flax's keyword arguments,
      `bias` and `mask` that broadcast to [..., N, T, S] (non-zero keeps), `dtype` to which query, key and value are
      cast. Weights [..., N, T, S] that are sown (`sow_weights`) or dropped make it take plain XLA; they are sown before
      dropout, in at least float32. It raises NotImplementedError for what it would otherwise ignore.

    >>> import flax.linen as nn
    >>> attention = nn.MultiHeadAttention(num_heads=4, attention_fn=attention_fn("softmax1", is_causal=True))
    """
    shape = getattr(normalizer, "shape", ())
    check_normalizer(normalizer, *(shape if len(shape) == 1 else ()))  # how many heads there are is not known yet
    _check_implementation(implementation)
    causal = is_causal

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        force_fp32_for_softmax: bool = True,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        del force_fp32_for_softmax  # statistics are float32 in any case
        needs_weights = (drops := dropout_rate > 0.0 and not deterministic) or module is not None
        unsupported = {
            "a precision": precision is not None,
            "einsums of the caller's own": bool(qk_attn_weights_einsum or attn_weights_value_einsum),
            f"weights to sow or drop by {implementation!r}": needs_weights and implementation not in (None, "xla"),
        }
        for what, is_asked in unsupported.items():
            if is_asked:
                raise NotImplementedError(f"orthojax's attention_fn does not support {what}")
        T, S, batch = query.shape[-3], key.shape[-3], query.shape[:-3]
        if (causal or is_causal) and T != S and (mask is None or T > 1):
            raise ValueError(f"causal attention of {T} queries to {S} keys; allowed: as many, or one query and a mask")
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        shape = (*query.shape[:-1], value.shape[-1])
        query, key, value = (a.astype(dtype).reshape(math.prod(batch), *a.shape[-3:]) for a in (query, key, value))
        bias = None if bias is None else _one_batch_axis(bias, batch)
        mask = None if mask is None else _one_batch_axis(jnp.asarray(mask).astype(bool), batch)
        options: Any = {"normalizer": normalizer, "is_causal": (causal or is_causal) and T == S}
        if not needs_weights:
            options["implementation"] = implementation
            return dot_product_attention(query, key, value, bias, mask, **options).reshape(shape)
        weights = xla.all_weights(prepare_inputs(query, key, value, bias, mask, **options))
        if module is not None:  # both of flax's libraries know the collection by this name
            module.sow("intermediates", "attention_weights", weights.reshape(*batch, *weights.shape[1:]))
        if drops:
            rows = (1, 1, *weights.shape[2:]) if broadcast_dropout else weights.shape
            kept = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, rows)
            weights = jnp.where(kept, weights / (1.0 - dropout_rate), 0.0)
        return xla.weighted_values(weights, value).reshape(shape)

    return attend


def _one_batch_axis(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Reshapes an array that broadcasts to [*batch, N, T, S], so that it broadcasts to [prod(batch), N, T, S]."""
    if len(batch) <= 1 or array.ndim <= 3:
        return array
    return jnp.broadcast_to(array, (*batch, *array.shape[-3:])).reshape(math.prod(batch), *array.shape[-3:])
