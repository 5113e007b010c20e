"""Which implementation computes an attention."""

import contextlib
import contextvars
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Literal, get_args

import jax
from jax.core import Tracer

from orthojax.ops.attention.inputs import AttentionInputs

Implementation = Literal["xla", "xla_chunked", "cudnn", "splash"]

_KERNELS = {"gpu": "cudnn", "tpu": "splash"}
# From this size on of [B, N, T, S] weights in float32, they are made one chunk of queries at a time. On CPU, both
# passes take 0.6 of the time then where a causal mask leaves keys out, and about the same time elsewhere; on a GPU or
# TPU the reason is memory alone.
_LARGEST_WEIGHTS_BYTES = {"cpu": 2**26}

_fallback_forbidden = contextvars.ContextVar("_fallback_forbidden", default=False)


@contextlib.contextmanager
def forbid_fallback() -> Iterator[None]:
    """Within it, `implementation=None` is the vendor's kernel or an error, on a platform that has one.

    For benchmarks. It holds while functions are traced; what was compiled before stays as it is.

    >>> with forbid_fallback():
    ...     pass
    """
    token = _fallback_forbidden.set(True)
    try:
        yield
    finally:
        _fallback_forbidden.reset(token)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"orthojax.ops.attention.{name}")  # a kernel's module may take a second to import


@functools.cache  # one warning for each reason
def _warn(kernel: str, reason: str) -> None:
    # In the line that calls `dot_product_attention`.
    warnings.warn(f"attention falls back from {kernel!r} to plain XLA, which is slower: {reason}", stacklevel=4)


def _platform(array: jax.Array) -> str:
    """Where the attention will run, as far as tracing can tell: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(array, Tracer):
        device = next(iter(array.devices()))
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def choose(inputs: AttentionInputs, implementation: Implementation | None) -> Callable[[AttentionInputs], jax.Array]:
    """The function that computes the attention.

    Args:
      inputs: What is asked.
      implementation: A name, or None to pick by platform, dtype, shape and options. The platform is that of the
        query's device, of `jax.default_device` while tracing, or the default one: a program that is traced on a GPU's
        machine to be lowered for a CPU must say "xla".

    Raises:
      ValueError: For an unknown name.
      NotImplementedError: Where the named implementation cannot do it; where None would have to fall back within
        `forbid_fallback`.
    """
    if implementation is not None:
        if implementation not in get_args(Implementation):
            allowed = ", ".join(map(repr, get_args(Implementation)))
            raise ValueError(f"unknown implementation {implementation!r}; allowed: None, {allowed}")
        module = _module(implementation)
        problem = module.unsupported(inputs)
        if implementation == "cudnn" and not problem and _platform(inputs.query) == "gpu":
            problem = module.unavailable()  # rather than what the vendor's stack would say of it
        if problem:
            raise NotImplementedError(f"attention with implementation={implementation!r}: {problem}")
        return module.attend
    platform = _platform(inputs.query)
    kernel = _KERNELS.get(platform)
    if kernel is not None and inputs.query.shape[1] > 1:  # one query is a matrix-vector product: nothing to fuse
        module = _module(kernel)
        problem = module.unsupported(inputs) or module.unavailable()
        if not problem:
            return module.attend
        if _fallback_forbidden.get():
            raise NotImplementedError(f"attention may not fall back from {kernel!r} here: {problem}")
        _warn(kernel, problem)
    B, T, N, _ = inputs.query.shape
    large = 4 * B * N * T * inputs.key.shape[1] > _LARGEST_WEIGHTS_BYTES.get(platform, 2**30)
    return _module("xla_chunked" if large else "xla").attend
