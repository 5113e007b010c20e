"""`dot_product_attention`: the entry, its arguments checked once, and the choice of an implementation."""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from orthojax.ops.attention import xla
from orthojax.ops.normalizers import Normalizer, check_normalizer

Implementation = Literal["xla", "xla_chunked", "cudnn", "splash"]

# Vendor kernels save their output and statistics under this name: with a remat policy that keeps it, such as
# jax.checkpoint_policies.save_only_these_names(ATTENTION_NAME), the forward kernel runs once.
ATTENTION_NAME = "attn_out"

_KERNELS = {"gpu": "cudnn", "tpu": "splash"}
# From this size of float32 [B, N, T, S] weights on, one chunk of queries at a time. The reason is memory: the backward
# pass then takes 1.2 to 1.3 of the time on a CPU. Under a causal mask it takes 0.7 to 0.8, since keys are left out.
_CHUNKED_FROM_BYTES = {"cpu": 2**26}
_CAUSAL_CHUNKED_FROM_BYTES = {"cpu": 2**23}

_fallback_forbidden = contextvars.ContextVar("_fallback_forbidden", default=False)


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The arguments of `dot_product_attention`, checked, with a batch axis and without defaults left to fill in."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]; K divides N
    value: jax.Array  # [B, S, K, H]
    bias: jax.Array | None  # [B or 1, N or 1, T or 1, S or 1]
    mask: jax.Array | None  # boolean, shaped likewise
    normalizer: Normalizer
    scale: float
    is_causal: bool = False
    query_seq_lengths: jax.Array | None = None  # int [B]
    key_value_seq_lengths: jax.Array | None = None  # int [B]
    local_window_size: tuple[int, int] | None = None  # (left, right)


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
    """Attention with the layout and argument meanings of `jax.nn.dot_product_attention`, and any normalizer.

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
        kernel for NVIDIA GPUs, "splash" the one for TPUs. A named implementation never falls back to another.
        The two kernels have a first derivative in reverse mode only.

    Returns:
      Shape of `query`, dtype of `value`; zeros without keys. Of a query whose keys are all hidden, softmax gives the
      mean of the values ("cudnn" may give nan), the other normalizers zeros. Batch and, for "xla", lengths may be
      symbolic dimensions of `jax.export`, with which None never picks a kernel.

    Raises:
      ValueError: For shapes or dtypes that do not fit, a mask that is not boolean, an unknown normalizer or
        implementation.
      NotImplementedError: If the named implementation does not support the arguments (the message says which), or if
        None would have to fall back within `forbid_fallback`.

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


# Arguments.


def prepare_inputs(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, normalizer: Normalizer, **options: Any
) -> AttentionInputs:
    """Checks the arguments of `dot_product_attention`, of which it has all others, and gives arrays a batch axis.

    Raises:
      ValueError: For shapes or dtypes that do not fit, a mask that is not boolean, or an unknown normalizer.
    """
    if not 3 <= jnp.ndim(query) <= 4:
        shape = jnp.shape(query)
        raise ValueError(f"query must be [batch, length, heads, width] or [length, heads, width]; got {shape}")
    query, key, value = _at_least_4d(query), _at_least_4d(key), _at_least_4d(value)
    bias, mask = (None if array is None else _at_least_4d(array) for array in (bias, mask))
    lengths = {name: options.get(name) for name in ("query_seq_lengths", "key_value_seq_lengths")}
    lengths = {name: None if array is None else jnp.asarray(array) for name, array in lengths.items()}
    _check_queries_and_keys(query, key, value)
    _check_masking(query.shape[:3] + key.shape[1:2], bias, mask, lengths)
    for name, array in {"query": query, "key": key, "value": value, "bias": bias}.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be of a floating dtype, got {array.dtype}")
    scale, window = options.get("scale"), options.get("local_window_size")
    is_number = isinstance(scale, int | float | np.number | np.ndarray | jax.Array) and not np.ndim(scale)
    if not (scale is None or is_number):
        raise ValueError(f"scale must be a number, got {scale!r}")
    check_normalizer(normalizer, query.shape[2])
    options |= {"scale": max(query.shape[-1], 1) ** -0.5 if scale is None else scale, **lengths}
    options["local_window_size"] = None if window is None else xla.window_sides(window)
    return AttentionInputs(query, key, value, bias, mask, normalizer, **options)


def _at_least_4d(array: jax.Array) -> jax.Array:
    array = jnp.asarray(array)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _check_queries_and_keys(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query and key must be [batch, length, heads, width]; got {query.shape} and {key.shape}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have the same shape; got {key.shape} and {value.shape}")
    (B, _, N, H), K = query.shape, key.shape[2]
    if key.shape[0] != B or key.shape[3] != H:
        raise ValueError(f"query {query.shape} and key {key.shape} differ in batch or head width")
    if K == 0 or N % K:
        raise ValueError(f"the number of query heads ({N}) must be a multiple of the key-value heads ({K})")


def _check_masking(shape: tuple[int, ...], bias: Any, mask: Any, lengths: dict[str, Any]) -> None:
    B, T, N, S = shape
    for name, array in (("bias", bias), ("mask", mask)):
        if array is None:
            continue
        if array.ndim != 4 or any(a not in (1, b) for a, b in zip(array.shape, (B, N, T, S), strict=True)):
            raise ValueError(f"{name} has shape {array.shape}, which does not broadcast to {(B, N, T, S)}")
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean (True keeps), got {mask.dtype}; an additive mask is a bias")
    for name, array in lengths.items():
        if array is not None and (array.shape != (B,) or not jnp.issubdtype(array.dtype, jnp.integer)):
            raise ValueError(f"{name} must be integers of shape {(B,)}, got {array.dtype} of shape {array.shape}")


# Implementations.


@contextlib.contextmanager
def forbid_fallback() -> Iterator[None]:
    """Within it, `implementation=None` means the vendor's kernel or an error, on a platform that has one.

    For benchmarks. It holds while functions are traced; programs compiled earlier are unaffected.

    >>> with forbid_fallback():
    ...     pass
    """
    token = _fallback_forbidden.set(True)
    try:
        yield
    finally:
        _fallback_forbidden.reset(token)


def _kernel(name: str) -> ModuleType:
    return importlib.import_module(f"orthojax.ops.attention.{name}")  # may take a second, so only where it is used


@functools.cache  # one warning per reason
def _warn(kernel: str, reason: str) -> None:
    # At the line that calls `dot_product_attention`.
    warnings.warn(f"attention falls back from {kernel!r} to plain XLA, which is slower: {reason}", stacklevel=4)


def _platform(array: jax.Array) -> str:
    """Where the attention will run, as far as tracing can know: "cpu", "gpu" or "tpu"."""
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


def _choose(inputs: AttentionInputs, implementation: str | None) -> Callable[[AttentionInputs], jax.Array]:
    """The function that computes the attention; a program traced on a GPU to be lowered for a CPU must say "xla"."""
    platform = _platform(inputs.query)
    if implementation is None:
        kernel = _KERNELS.get(platform)
        if kernel is not None and inputs.query.shape[1] not in (0, 1):  # one is a matrix-vector product
            module = _kernel(kernel)
            problem = _symbolic(inputs) or module.unsupported(inputs) or module.unavailable()
            if not problem:
                return module.attend
            if _fallback_forbidden.get():
                raise NotImplementedError(f"attention may not fall back from {kernel!r} here: {problem}")
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
    if implementation == "cudnn" and platform == "gpu":
        problem = problem or module.unavailable()  # clearer than the error of the vendor's stack
    if problem:
        raise NotImplementedError(f"attention with implementation={implementation!r}: {problem}")
    return module.attend


# A kernel traces on any machine, so that it can be lowered for an accelerator without one. Compiled for the wrong
# platform, JAX itself would only say that a translation rule is missing.

_compiled_for_p = Primitive("orthojax_compiled_for")
_compiled_for_p.def_abstract_eval(lambda x, **_: x)
_compiled_for_p.def_impl(lambda x, **parameters: _jitted(**parameters)(x))
batching.defvectorized(_compiled_for_p)


@functools.cache
def _jitted(**parameters: str) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: _compiled_for_p.bind(x, **parameters))  # kept: each new function is compiled anew


def compiled_for(array: jax.Array, implementation: str, platform: str) -> jax.Array:
    """The array itself; NotImplementedError if the program is lowered for another platform than "cuda" or "tpu".

    For use inside a derivative rule: differentiated, it says that there is no second derivative.
    """
    return _compiled_for_p.bind(array, implementation=implementation, platform=platform)


def _lower(ctx: mlir.LoweringRuleContext, x: Any, *, implementation: str, platform: str) -> list[Any]:
    platforms = ctx.module_context.platforms
    if set(platforms) != {platform}:
        hardware = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}[platform]
        raise NotImplementedError(
            f"attention with implementation={implementation!r} needs {hardware}, and this program is "
            f"compiled for {' and '.join(map(repr, platforms))}; 'xla' runs everywhere, None picks by the device"
        )
    return [x]


def _no_second_derivative(primals: Any, tangents: Any, *, implementation: str, platform: str) -> Any:
    del primals, tangents, platform
    raise NotImplementedError(
        f"attention by {implementation!r} has no second derivative and no forward-mode one; implementation='xla' has"
    )


ad.primitive_jvps[_compiled_for_p] = _no_second_derivative
mlir.register_lowering(_compiled_for_p, _lower)
