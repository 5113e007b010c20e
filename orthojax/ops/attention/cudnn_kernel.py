"""cuDNN's fused softmax attention on one device, forward and backward, with the statistics between them.

JAX keeps the two primitives in a private module; `jax.nn.dot_product_attention` is built on them, but does not let the
statistics be changed. `cudnn_partition.py` makes them take vmap and a mesh.
"""

import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Settings(NamedTuple):
    """What is fixed when attention is compiled."""

    scale: float
    is_causal: bool
    left_window: int | None  # query t sees keys t - left_window .. t; None: no window
    bias_gradient: bool = False


class Operands(NamedTuple):
    """The arrays of the forward kernel; all of `query`, `key`, `value` and `bias` have one half-precision dtype."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array  # [B, S, K, H]
    bias: jax.Array | None  # [B or 1, N or 1, T, S]
    query_lengths: jax.Array | None  # int32 [B]; both lengths or none
    key_lengths: jax.Array | None  # int32 [B]


class Statistics(NamedTuple):
    """What the backward kernel needs besides."""

    lse: jax.Array  # [B, N, T] float32: log sum_j exp(logit_j)
    output: jax.Array  # [B, T, N, H]
    cotangent: jax.Array  # [B, T, N, H], of the output


# JAX's private module.


@functools.cache
def private_module() -> ModuleType | None:
    """The module with the two primitives, or None where this JAX has none that work the way they are used here.

    They are lowered for CUDA to find out, which needs no GPU: shapes, parameters and their names are all exercised.
    """
    try:
        module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        outside_of_traces(lambda: _lower_once(module))
    except Exception:  # whatever a future JAX raises, the public function is left
        return None
    return module


def outside_of_traces(function: Callable[[], Any]) -> Any:
    """Calls a function where no transformation, mesh or default device of the caller's is in force: in a thread."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = function()
        except BaseException as error:  # raised again where it was asked for
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _lower_once(module: ModuleType) -> None:
    q = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((1, 1, 8), jnp.float32)
    settings = Settings(1.0, True, None)

    def both(q, lse):
        operands = Operands(q, q, q, None, None, None)
        output, new_lse = bind(module, settings, operands, None)
        assert (output.shape, output.dtype, new_lse.shape, new_lse.dtype) == (q.shape, q.dtype, lse.shape, lse.dtype)
        return bind(module, settings, operands, Statistics(lse, output, output))

    gradients = jax.eval_shape(both, q, lse)
    assert [(g.shape, g.dtype) for g in gradients] == [(q.shape, q.dtype)] * 3
    jax.jit(both).trace(q, lse).lower(lowering_platforms=("cuda",))


def bind(module: Any, settings: Settings, operands: Operands, statistics: Statistics | None) -> tuple[jax.Array, ...]:
    """One call of the vendor's forward primitive, or with statistics of its backward one, on one device's arrays.

    Args:
      module: What `private_module` found.
      settings: What is fixed.
      operands: The inputs of attention.
      statistics: For the backward kernel, whose weights are exp(logits - lse) whatever lse it is given.

    Returns:
      Forward: the output [B, T, N, H] in the dtype of the query, and lse [B, N, T] in float32. Backward: the gradients
      of query, key and value, and of the bias where `settings.bias_gradient`.
    """
    query, key, value, bias, query_lengths, key_lengths = operands
    unused = jnp.zeros(0, query.dtype)
    padded = query_lengths is not None
    masks = module.MaskType
    mask_type = {
        (False, False): masks.NO_MASK,
        (False, True): masks.CAUSAL,
        (True, False): masks.PADDING,
        (True, True): masks.PADDING_CAUSAL,
    }[padded, settings.is_causal]
    parameters = {
        "scale": settings.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, settings.bias_gradient),
        "mask_type": mask_type,
        "layout": module.AttentionLayout.BTNH.value,
        # The kernel counts the query's own position as part of the window.
        "sliding_window_length": None if settings.left_window is None else settings.left_window + 1,
    }
    if "score_mod" in inspect.signature(module._dot_product_attention_fwd).parameters:  # from jax 0.12 on
        parameters["score_mod"] = None
    lengths = (query_lengths, key_lengths) if padded else (unused, unused)
    arrays = (query, key, value, unused if bias is None else bias, *lengths, unused, unused, unused, unused)
    if statistics is None:
        return tuple(module._dot_product_attention_fwd_p_wrapper.bind(*arrays, **parameters, is_training=True))
    return tuple(module._dot_product_attention_bwd_p_wrapper.bind(*arrays, *statistics, **parameters))
