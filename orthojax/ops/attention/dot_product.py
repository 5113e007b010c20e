"""`dot_product_attention`: the entry, and the choice of an implementation."""

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer

from orthojax.ops.attention import xla
from orthojax.ops.attention.inputs import AttentionInputs, prepare_inputs
from orthojax.ops.normalizers import Normalizer

Implementation = Literal["xla", "xla_chunked", "cudnn", "splash"]


_KERNELS = {"gpu": "cudnn", "tpu": "splash"}
# From this size of float32 [B, N, T, S] weights on, one chunk of queries at a time. The reason is memory: the backward
# pass then takes 1.2 to 1.3 of the time on a CPU. Under a causal mask it takes 0.7 to 0.8, since keys are left out.
_CHUNKED_FROM_BYTES = {"cpu": 2**26}
_CAUSAL_CHUNKED_FROM_BYTES = {"cpu": 2**23}


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    normalizer: Normalizer = "softmax1",
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes attention with the layout and argument meanings of `jax.nn.dot_product_attention`, and any normalizer.

    weights = normalizer(scale * query @ key^T + bias), output = weights @ value. Logits and weights are computed in at
    least float32; the weights are rounded to the dtype of `value` for the second product.

    Args:
      query: [B, T, N, H], or [T, N, H] for one sequence.
      key: [B, S, K, H] or [S, K, H]; K divides N (grouped-query attention).
      value: [B, S, K, H] or [S, K, H].
      bias: Added to the logits; [B or 1, N or 1, T or 1, S or 1], missing leading axes are 1.
      mask: Boolean, True keeps; [B or 1, N or 1, T or 1, S or 1], missing leading axes are 1.
      normalizer: "softmax1" | "softmax" | "relu" | "gelu" | "sigmoid", a number n (softmax_n), an array [N] of learned
        sink logits, one per query head, or a `ClippedSoftmax`. See `orthojax.ops.normalizers`.
      scale: Factor of the logits; 1 / sqrt(H) if None.
      is_causal: Query t sees keys 0..t.
      query_seq_lengths: int32 [B]; the output of queries from this position on is zero.
      key_value_seq_lengths: int32 [B]; keys from this position on are hidden; they must be finite all the same.
      local_window_size: Query t sees keys t - left .. t + right; an int means both sides.
      implementation: None picks by platform, dtype and shape. "xla" materialises the whole matrix of weights, on any
        platform; "xla_chunked" does so for one chunk of queries at a time, in memory linear in T; "cudnn" is the
        kernel for NVIDIA GPUs, "splash" the one for TPUs. A named implementation never falls back to another; None
        warns if the platform has a kernel that cannot be used.
        The two kernels have a first derivative in reverse mode only.

    Returns:
      Shape of `query`, dtype of `value`; zeros without keys. Of a query whose keys are all hidden, softmax gives the
      mean of the values (the kernels may not), the other normalizers zeros. Batch and, for "xla", lengths may be
      symbolic dimensions of `jax.export`, with which None never picks a kernel.

    Raises:
      ValueError: For shapes or dtypes that do not fit, a mask that is not boolean, an unknown normalizer or
        implementation.
      NotImplementedError: If the named implementation does not support the arguments; the message says which.

    >>> import jax, jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (1, 5, 2, 8)
    """
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    options: Any = {"normalizer": normalizer, "scale": scale, "is_causal": is_causal, **lengths}
    inputs = prepare_inputs(query, key, value, bias, mask, local_window_size=local_window_size, **options)
    attend = _choose(inputs, implementation)
    if 0 in inputs.query.shape or 0 in inputs.key.shape:
        return jnp.zeros(jnp.shape(query), inputs.value.dtype)
    return attend(inputs).reshape(jnp.shape(query))


def _kernel(name: str) -> ModuleType:
    return importlib.import_module(f"orthojax.ops.attention.{name}")  # may take a second, so only where it is used


def _warn(kernel: str, reason: str) -> None:
    # At the line that calls `dot_product_attention`.
    warnings.warn(f"attention falls back from {kernel!r} to plain XLA, which is slower: {reason}", stacklevel=4)


def _platform(array: jax.Array) -> str:
    """Returns the platform of the attention, as far as tracing can know: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(array, Tracer):
        device = next(iter(array.devices()))
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _symbolic(inputs: AttentionInputs) -> str:
    """Returns why a kernel cannot be compiled for the shapes, or ""."""
    shapes = inputs.query.shape, inputs.key.shape
    known = all(isinstance(n, int) for shape in shapes for n in shape)
    return "" if known else f"kernels are compiled for known shapes, got {shapes[0]} and {shapes[1]}"


def _choose(inputs: AttentionInputs, implementation: str | None) -> Callable[[AttentionInputs], jax.Array]:
    """Returns the function for the attention; a program traced on a GPU to be lowered for a CPU must say "xla"."""
    platform = _platform(inputs.query)
    if implementation is None:
        kernel = _KERNELS.get(platform)
        if kernel is not None and inputs.query.shape[1] not in (0, 1):  # one is a matrix-vector product
            module = _kernel(kernel)
            problem = _symbolic(inputs) or module.unsupported(inputs) or module.unavailable()
            if not problem:
                return module.attend
            _warn(kernel, problem)
        (B, T, N, _), S = inputs.query.shape, inputs.key.shape[1]
        if xla.unchunkable(inputs):
            return xla.attend
        limits = _CAUSAL_CHUNKED_FROM_BYTES if inputs.is_causal else _CHUNKED_FROM_BYTES
        large = 4 * xla.known(B) * N * T * S >= limits.get(platform, 2**30)
        return xla.attend_chunked if large else xla.attend
    if implementation not in get_args(Implementation):
        allowed = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"unknown implementation {implementation!r}; allowed: None, {allowed}")
    if implementation in ("xla", "xla_chunked"):
        if implementation == "xla_chunked" and (problem := xla.unchunkable(inputs)):
            raise NotImplementedError(f"attention with implementation='xla_chunked': {problem}")
        return xla.attend if implementation == "xla" else xla.attend_chunked
    module = _kernel(implementation)
    problem = _symbolic(inputs) or module.unsupported(inputs)
    if not isinstance(inputs.query, Tracer) and _KERNELS.get(platform) != implementation:
        problem = problem or f"the kernel does not run on the arrays' platform, {platform!r}; allowed: 'xla', or None"
    elif implementation == "cudnn" and platform == "gpu":
        problem = problem or module.unavailable()  # clearer than the error of the vendor's stack
    if problem:
        raise NotImplementedError(f"attention with implementation={implementation!r}: {problem}")
    return module.attend
