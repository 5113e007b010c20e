"""Post-training quantisation on integers: kernels quantised ahead, products of int8 accumulated in int32.

With q_x = x / s_x and q_w = w / s_w whole numbers, the output o of a layer is

    y_o = s_x s_w[o] sum_i q_x[i] q_w[i, o],

whose sum is an integer product. That holds if the scale s_x of an input does not depend on the feature i; it is then
what `quantized_linear` simulates.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from orthojax.errors import UserError
from orthojax.ops.products import is_head
from orthojax.ops.quantize import Quantized, dequantize, quantize
from orthojax.ops.statistics import at_least_float32
from orthojax.quant.linear import fake_quantize, input_axes
from orthojax.quant.settings import KERNELS_BUT_HEAD, QuantizationSetting, map_kernels

if TYPE_CHECKING:
    from orthojax.model import LinearFunction


def require_integers(setting: QuantizationSetting) -> None:
    """Raises a UserError with the reason if a setting does not run on integers."""
    if setting.inputs == "feature":
        raise UserError(
            "a scale for each input feature cannot be pulled out of the sum over input features: no integer product",
            allowed="inputs='token' or 'tensor', or None",
            hint="int8_fine_per_token is the form of int8_fine that runs on integers",
        )
    if setting.group_size is not None or setting.float_features:
        problem = f"group_size={setting.group_size}, float_features={setting.float_features}: simulation only"
        raise UserError(problem, allowed="neither in integer products")
    if setting.inputs is not None and setting.scheme != "absmax":
        raise UserError(f"scheme={setting.scheme!r} of inputs: simulation only", allowed="'absmax', or inputs=None")
    if max(setting.bits, setting.input_bits) > 8:
        raise UserError(
            f"bits={setting.bits}, activation_bits={setting.input_bits}: integer products have operands of 8 bits",
            allowed="2 to 8",
        )


def integer_params(params: Any, setting: QuantizationSetting, include: str = KERNELS_BUT_HEAD) -> Any:
    """Quantises the kernels of a tree of parameters, for a model whose linear layers are `integer_linear`.

    Args:
      params: Any tree of arrays; kernels are [..., in, out], leading axes stack kernels.
      setting: One that runs on integers, or leaves activations float.
      include: Regular expression searched in each path (keys joined by `/`); exactly its matches are quantised.

    Returns:
      The same tree with an `orthojax.ops.quantize.Quantized` for each match, with scales [..., 1, 1] or [..., 1, out].

    Raises:
      UserError: If the setting does not run on integers, nothing matches, or a match is no matrix.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT4_ZEROPOINT
    >>> q = integer_params({"kernel": jnp.array([[15.0], [7.4], [0.0], [1.0]])}, INT4_ZEROPOINT)["kernel"]
    >>> q.qvalue.dtype.name, q.scale.tolist(), q.reshape(-1).tolist()
    ('int8', [[1.0]], [15.0, 7.0, 0.0, 1.0])
    """
    require_integers(setting)
    axes = (-2, -1) if setting.weights == "tensor" else -2
    quantize_kernel = jax.jit(lambda kernel: quantize(at_least_float32(kernel), setting.scheme, setting.bits, axes))
    return map_kernels(params, include, lambda kernel, path: quantize_kernel(kernel))


@functools.cache  # the same function for the same setting, so that jit compiles a model with it once
def integer_linear(setting: QuantizationSetting) -> "LinearFunction":
    """Makes a linear layer on the kernels of `integer_params`, for a model that lets its linear layers be replaced.

    Inputs are quantised as they come and multiplied as integers; bias and outputs as in `quantized_linear`. It equals
    `quantized_linear` of the same setting up to the rounding of floats: 1e-6 of the largest output in float32. If the
    setting leaves inputs float, there is no integer product: the kernel is dequantised, then multiplied.

    Returns:
      `linear(x, kernel, bias, path)` with x [..., in], bias [out] or None, giving [..., out] in the dtype of x, as
      `quantized_linear`; a kernel that is an array is multiplied as it is.

    Raises:
      UserError: If the setting does not run on integers.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT8_MODERATE
    >>> kernel = integer_params({"kernel": jnp.array([[127.0], [1.0]])}, INT8_MODERATE)["kernel"]
    >>> float(integer_linear(INT8_MODERATE)(jnp.array([[127.0, 0.4]]), kernel, None, "mlp/input")[0, 0])
    16129.0
    """
    from orthojax.model import linear as float_linear  # here, so that flax is not needed for `integer_params`

    require_integers(setting)

    def linear(x: jax.Array, kernel: Any, bias: jax.Array | None, path: str) -> jax.Array:
        if not isinstance(kernel, Quantized):
            return float_linear(x, kernel, bias, path)
        wide = at_least_float32(x)
        bias = None if bias is None else bias.astype(wide.dtype)
        if setting.inputs is None:
            y = float_linear(wide, dequantize(kernel), bias, path)
        else:
            q = quantize(wide, setting.scheme, setting.input_bits, input_axes(wide, setting))
            contracted = (((x.ndim - 1,), (0,)), ((), ()))
            sums = jax.lax.dot_general(q.qvalue, kernel.qvalue, contracted, preferred_element_type=jnp.int32)
            row = (1,) * (x.ndim - 1) + (-1,)
            y = sums.astype(wide.dtype) * kernel.scale.reshape(row) * q.scale
            y = y if bias is None else y + bias.reshape(row)
        if setting.outputs is not None:
            y = fake_quantize(y, setting, setting.input_bits, None)
        return y if is_head(path) else y.astype(x.dtype)

    return linear
