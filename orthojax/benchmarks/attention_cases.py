"""Which attentions are compared, on which shapes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from orthojax.ops.attention import Implementation, dot_product_attention
from orthojax.ops.attention.cudnn import with_sink_key
from orthojax.ops.attention.dot_product import prepare_inputs

# (query, key, value [B, T, N, H], sink logits float32 [N]) -> [B, T, N, H]; causal. All but one ignore the sink.
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

Shape = tuple[int, int, int, int]
_ACCELERATOR_SHAPES: tuple[Shape, ...] = ((32, 1024, 12, 64), (8, 4096, 12, 64), (128, 256, 12, 64), (8, 2048, 16, 128))
_CPU_SHAPES: tuple[Shape, ...] = ((4, 256, 12, 64), (2, 1024, 12, 64), (1, 2048, 12, 64))
_CPU_LONG_SHAPES: tuple[Shape, ...] = ((1, 4096, 4, 64),)
_TINY_SHAPES: tuple[Shape, ...] = ((1, 128, 2, 16),)


@dataclasses.dataclass(frozen=True)
class Case:
    """Attentions of one shape by one kind of kernel.

    Attributes:
      shape: (B, T, N, H).
      implementation: The kind of kernel.
      backward: Forward and backward, or forward alone.
      dtype: Of query, key and value.
      reference: Softmax by this kind of kernel.
      contenders: What is compared with it, by name.
    """

    shape: Shape
    implementation: str
    backward: bool
    dtype: Any
    reference: Attend
    contenders: dict[str, Attend]

    @property
    def name(self) -> str:
        """As it stands in rows."""
        shape = "x".join(map(str, self.shape))
        passes = "forward + backward" if self.backward else "forward"
        return f"{self.implementation} {shape} {jnp.dtype(self.dtype).name} {passes}"


def ours(implementation: Implementation, normalizer: str) -> Attend:
    """Our attention with a normalizer by name, or with the sink logits as "learned sink"."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, sink: jax.Array) -> jax.Array:
        chosen: Any = sink if normalizer == "learned sink" else normalizer
        return dot_product_attention(
            query, key, value, normalizer=chosen, is_causal=True, implementation=implementation
        )

    return attend


def vendor_softmax(implementation: str) -> Attend:
    """Softmax by `jax.nn`, without any code of ours."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, sink: jax.Array) -> jax.Array:
        del sink
        chosen: Any = implementation
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=chosen)

    return attend


def zero_row(implementation: str) -> Attend:
    """softmax-1 from `jax.nn` alone: what ours is where JAX's private cuDNN module is not as expected."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, sink: jax.Array) -> jax.Array:
        del sink
        inputs = prepare_inputs(query, key, value, normalizer="softmax1", is_causal=True)
        return with_sink_key(inputs, implementation)

    return attend


def cases(platform: str, tiny: bool) -> list[Case]:
    """What is measured on a platform, the most important first.

    The reference is softmax by the same kind of kernel: that of `jax.nn` on cuDNN, else our own.

    Args:
      platform: As `jax.default_backend()` says it.
      tiny: One shape that takes no time.
    """
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    shapes = _TINY_SHAPES if tiny else _CPU_SHAPES if platform == "cpu" else _ACCELERATOR_SHAPES
    long_shapes = _TINY_SHAPES if tiny else _CPU_LONG_SHAPES
    kernels: dict[str, tuple[Implementation, Implementation]] = {"gpu": ("cudnn", "xla"), "tpu": ("splash", "xla")}
    return [
        _case(shape, implementation, backward, dtype)
        for implementation in kernels.get(platform, ("xla", "xla_chunked"))
        for shape in (long_shapes if implementation == "xla_chunked" else shapes)
        for backward in (True, False)
    ]


def _case(shape: Shape, implementation: Implementation, backward: bool, dtype: Any) -> Case:
    contenders = {name: ours(implementation, name) for name in ("softmax1", "learned sink")}
    if implementation == "cudnn":
        contenders["softmax1 by a zero row"] = zero_row("cudnn")
    if implementation == "xla":
        contenders["softmax of jax.nn"] = vendor_softmax("xla")
    # jax.nn's own kernel where it is a kernel; its plain XLA is slower than ours, which would flatter.
    reference = vendor_softmax("cudnn") if implementation == "cudnn" else ours(implementation, "softmax")
    return Case(shape, implementation, backward, dtype, reference, contenders)
