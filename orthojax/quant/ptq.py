"""Post-training quantisation, simulated: by a function in place of x @ kernel + bias, or on a tree of weights.

Only linear layers round anything; embeddings, norms and softmax stay float. Activation steps are dynamic: they come
from the batch that passes through, so the batches of an evaluation belong to its result.
"""

import functools
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from orthojax.errors import UserError
from orthojax.ops.quantize import Axes, absmax, zeropoint
from orthojax.ops.statistics import at_least_float32
from orthojax.quant.settings import QuantizationSetting

if TYPE_CHECKING:
    from orthojax.model import LinearFunction

ALL_BUT_HEAD = r"^(?!(.*/)?head(/|$))"
"""Every path in which no component is called head."""


def _pattern(include: str) -> re.Pattern[str]:
    try:
        return re.compile(include)
    except re.error as error:
        raise UserError(f"include={include!r} is not a regular expression: {error}") from None


def _fake_quantize(x: jax.Array, setting: QuantizationSetting, axes: Axes) -> jax.Array:
    return {"absmax": absmax, "zeropoint": zeropoint}[setting.scheme](x, setting.bits, axes)


def _quantize_kernel(kernel: jax.Array, setting: QuantizationSetting) -> jax.Array:
    # The last two axes are [in, out]; any axes before them stack kernels that know nothing of each other.
    return _fake_quantize(kernel, setting, {"output_channel": -2, "tensor": (-2, -1)}[setting.weights])


@functools.cache  # the same function for the same setting, so that jit compiles a model with it once
def quantized_linear(setting: QuantizationSetting, include: str = ALL_BUT_HEAD) -> "LinearFunction":
    """A linear layer that rounds its operands as `setting` says, for a model that lets its linear layers be replaced.

    Definition: linear layers only; embeddings, head, norms and softmax stay float (`include=""` adds an untied head).
    Operands are rounded, multiplied and rounded again in float32 or wider; the result has the dtype of x.

    Args:
      setting: One of `orthojax.quant.SETTINGS`, or another.
      include: Regular expression searched in the layer's path; a layer without a match computes x @ kernel + bias.

    Returns:
      `linear(x, kernel, bias, path)` with x [..., in], kernel [in, out], bias [out] or None, and a path such as
      `layers/attention/query`; it gives [..., out].

    Raises:
      UserError: Where `include` is no regular expression.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT8_MODERATE
    >>> linear = quantized_linear(INT8_MODERATE)
    >>> x, kernel = jnp.array([[127.0, 0.4]]), jnp.array([[127.0], [1.0]])
    >>> float(linear(x, kernel, None, "mlp/input")[0, 0]), float(linear(x, kernel, None, "head")[0, 0])
    (16129.0, 16129.400390625)
    """
    from orthojax.model import linear as float_linear  # here, so that flax is not needed for `quantize_params`

    pattern = _pattern(include)

    def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        if pattern.search(path) is None:
            return float_linear(x, kernel, bias, path)
        a, w = at_least_float32(x), _quantize_kernel(at_least_float32(kernel), setting)
        if setting.inputs is not None:
            input_axes = {"feature": tuple(range(x.ndim - 1)), "token": -1, "tensor": None}[setting.inputs]
            a = _fake_quantize(a, setting, input_axes)
        y = float_linear(a, w, bias, path)
        if setting.outputs is not None:
            y = _fake_quantize(y, setting, None)
        return y if path == "head" else y.astype(x.dtype)

    return linear


def quantize_params(params: Any, setting: QuantizationSetting, include: str) -> Any:
    """A tree of parameters with its kernels rounded, for models whose linear layers cannot be replaced.

    Args:
      params: Any tree of arrays; kernels are [..., in, out], leading axes stack kernels.
      setting: A setting that leaves activations float.
      include: Regular expression searched in each path (keys joined by `/`); exactly its matches are rounded, so it
        must not match embeddings or norms.

    Returns:
      The same tree, same shapes and dtypes.

    Raises:
      UserError: Where the setting rounds activations, nothing matches, or a match is no matrix.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT4_ZEROPOINT
    >>> params = {"dense": {"kernel": jnp.array([[15.0], [7.4], [0.0]]), "bias": jnp.array([0.3])}}
    >>> quantize_params(params, INT4_ZEROPOINT, "kernel$")["dense"]["kernel"].ravel().tolist()
    [15.0, 7.0, 0.0]
    """
    if setting.inputs is not None or setting.outputs is not None:
        raise UserError(f"{setting} rounds activations, which parameters do not have", allowed="a weights-only setting")
    pattern, matched = _pattern(include), []

    def visit(key_path: Any, leaf: Any) -> Any:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if pattern.search(path) is None:
            return leaf
        matched.append(path)
        if jnp.ndim(leaf) < 2:
            raise UserError(
                f"include={include!r} matches {path}, which has shape {jnp.shape(leaf)}", allowed="[..., in, out]"
            )
        return _quantize_kernel(jnp.asarray(leaf), setting)

    quantized = jax.tree_util.tree_map_with_path(visit, params)
    if not matched:
        raise UserError(f"include={include!r} matches no parameter")
    return quantized
