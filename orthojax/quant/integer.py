"""Post-training quantisation on integers: kernels quantised ahead, products of int8 accumulated in int32.

Per output o, with K input features in groups g, x = (q_x + z_x) s_x and w = (q_w + z_w) s_w,

    y_o = s_x sum_g s_w[g, o] (sum_i q_x q_w + z_w sum_i q_x + z_x sum_i q_w + |g| z_x z_w),

where i runs over the group: the first sum is an integer product, and what follows it is rank one. Inputs with a scale
for each group have s_x and z_x of the group, within the outer sum. That holds wherever the scale of an input does not
depend on the feature within a group; it is then what `quantized_linear` simulates.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from orthojax.errors import UserError
from orthojax.ops.products import is_head
from orthojax.ops.quantize import Quantized, dequantize, pack, quantize, unpack
from orthojax.ops.statistics import at_least_float32
from orthojax.quant.ptq import QuantizationSetting, fake_quantize, group_inputs, group_kernel, map_kernels

if TYPE_CHECKING:
    from orthojax.model import LinearFunction

KERNELS_BUT_HEAD = r"^(?!(.*/)?head/)(.*/)?kernel$"
"""Every parameter called kernel, but those of a component called head."""


def require_integers(setting: QuantizationSetting) -> None:
    """Refuses what does not run on integers.

    Raises:
      UserError: With the reason.
    """
    if setting.inputs == "feature":
        raise UserError(
            "a scale for each input feature cannot be pulled out of the sum over input features: no integer product",
            allowed="inputs='token', 'group' or 'tensor', or None",
            hint="int8_fine_per_token is the form of int8_fine that runs on integers",
        )
    if setting.float_features:
        problem = f"float_features={setting.float_features}: integer products have no float features"
        raise UserError(problem, allowed="float_features=0")
    if max(setting.bits, setting.input_bits) > 8:
        raise UserError(
            f"bits={setting.bits}, activation_bits={setting.input_bits}: integer products have operands of 8 bits",
            allowed="2 to 8",
        )


def _quantize_kernel(kernel: Any, setting: QuantizationSetting, path: str) -> Quantized:
    groups, axes = group_kernel(at_least_float32(kernel), setting, path)
    q, size = quantize(groups, setting.scheme, setting.bits, axes), groups.shape[-2]
    # Sums of the widest integers must stay within int32.
    longest = 2 ** (31 - (setting.bits - 1) - (setting.input_bits - 1)) - 1
    if size > longest:
        raise UserError(
            f"{path} has {size} input features in one sum, which int32 may not hold",
            allowed=f"at most {longest}; group_size makes shorter sums",
        )
    qvalue = q.qvalue.reshape(jnp.shape(kernel))
    if setting.bits <= 4 and size % 2 == 0:
        qvalue = pack(qvalue)
    # The scale of a group takes the place of its input features.
    squeeze = (lambda s: s) if setting.group_size is None else (lambda s: s.squeeze(-2))
    return Quantized(qvalue, squeeze(q.scale), jax.tree.map(squeeze, q.zero_point))


def integer_params(params: Any, setting: QuantizationSetting, include: str = KERNELS_BUT_HEAD) -> Any:
    """A tree of parameters with its kernels quantised once, for a model whose linear layers are `integer_linear`.

    Args:
      params: Any tree of arrays; kernels are [..., in, out], leading axes stack kernels.
      setting: Which runs on integers, or leaves activations float.
      include: Regular expression searched in each path (keys joined by `/`); exactly its matches are quantised.

    Returns:
      The same tree with an `orthojax.ops.quantize.Quantized` for each match, int8 integers, or two of at most 4 bits in
      a byte where the input features (of a group) are even in number. Its scales are [..., 1, 1], [..., 1, out] or
      [..., groups, out].

    Raises:
      UserError: Where the setting does not run on integers, nothing matches, a match is no matrix, or a group does not
        divide its `in`.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT4_ZEROPOINT
    >>> q = integer_params({"kernel": jnp.array([[15.0], [7.4], [0.0], [1.0]])}, INT4_ZEROPOINT)["kernel"]
    >>> q.qvalue.shape, q.scale.tolist(), q.reshape(-1).tolist()
    ((2, 1), [[1.0]], [15.0, 7.0, 0.0, 1.0])
    """
    require_integers(setting)
    quantize_kernel = jax.jit(_quantize_kernel, static_argnums=(1, 2))
    return map_kernels(params, include, lambda kernel, path: quantize_kernel(kernel, setting, path))


def integer_product(x: Quantized, kernel: Quantized) -> jax.Array:
    """The product x @ kernel on integers: int8 operands, int32 sums, one for each group of input features.

    Args:
      x: [..., in] with one scale for each token, for each token and group of the kernel ([..., groups]), or for all.
      kernel: [in, out] with scales [1, 1], [1, out] or [groups, out].

    Returns:
      [..., out] in the dtype of the scales.

    Raises:
      ValueError: For other shapes.
    """
    if len(kernel.shape) != 2 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(f"x {x.shape} and a kernel {kernel.shape}; allowed: [..., in] and [in, out]")
    groups, dtype = kernel.scale.shape[0], kernel.scale.dtype
    if x.scale.shape[-1] not in (1, groups):
        raise ValueError(
            f"x has scales {x.scale.shape}; allowed: 1 in the last axis, or {groups} as the kernel's groups"
        )

    def group_product(
        q_x: jax.Array, q_w: jax.Array, scale: jax.Array, z_w: jax.Array | None, z_x: jax.Array | None
    ) -> jax.Array:
        q_w = unpack(q_w) if kernel.is_packed else q_w
        contracted = ((q_x.ndim - 1,), (0,))
        sums = jax.lax.dot_general(q_x, q_w, (contracted, ((), ())), preferred_element_type=jnp.int32)
        row = (1,) * (q_x.ndim - 1) + (-1,)
        y = sums.astype(dtype)
        if z_w is not None:
            y += z_w.reshape(row) * jnp.sum(q_x, -1, dtype=jnp.int32, keepdims=True).astype(dtype)
        if z_x is not None:
            columns = jnp.sum(q_w, 0, dtype=jnp.int32).astype(dtype)
            y += z_x * (columns if z_w is None else columns + q_w.shape[0] * z_w).reshape(row)
        return y * scale.reshape(row)

    if groups == 1:
        first = None if kernel.zero_point is None else kernel.zero_point[0]
        return group_product(x.qvalue, kernel.qvalue, kernel.scale[0], first, x.zero_point) * x.scale

    def by_group(values: jax.Array) -> jax.Array:
        return jnp.moveaxis(values.reshape(*values.shape[:-1], groups, -1), -2, 0)

    def add(total: jax.Array, group: Any) -> tuple[jax.Array, None]:
        q_x, q_w, scale, z_w, own = group
        if own is None:
            return total + group_product(q_x, q_w, scale, z_w, x.zero_point), None
        return total + group_product(q_x, q_w, scale, z_w, own.zero_point) * own.scale, None

    # One after the other: XLA has no fast batched integer product on a CPU, and one [groups, ..., out] would be large.
    kernels = kernel.qvalue.reshape(groups, -1, kernel.qvalue.shape[-1]), kernel.scale, kernel.zero_point
    own = jax.tree.map(by_group, x) if x.scale.shape[-1] == groups else None  # with a scale for each group
    total = jnp.zeros((*x.qvalue.shape[:-1], kernel.scale.shape[-1]), dtype)
    total, _ = jax.lax.scan(add, total, (by_group(x.qvalue), *kernels, own))
    return total if own is not None else total * x.scale


def _quantize_inputs(x: jax.Array, setting: QuantizationSetting) -> Quantized:
    groups, axes = group_inputs(x, setting)
    q = quantize(groups, setting.scheme, setting.input_bits, axes)
    if setting.inputs != "group":
        return q
    return Quantized(q.qvalue.reshape(x.shape), *jax.tree.map(lambda s: s[..., 0], (q.scale, q.zero_point)))


@functools.cache  # the same function for the same setting, so that jit compiles a model with it once
def integer_linear(setting: QuantizationSetting) -> "LinearFunction":
    """A linear layer on the kernels of `integer_params`, for a model that lets its linear layers be replaced.

    Inputs are quantised as they come and multiplied as integers; bias and outputs as in `quantized_linear`. It equals
    `quantized_linear` of the same setting up to the rounding of floats: 1e-6 of the largest output in float32. Where
    the setting leaves inputs float there is no integer product: the kernel is dequantised, then multiplied.

    Returns:
      `linear(x, kernel, bias, path)` with x [..., in], bias [out] or None, giving [..., out] in the dtype of x, as
      `quantized_linear`; a kernel that is an array is multiplied as it is.

    Raises:
      UserError: Where the setting does not run on integers.

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
            y = integer_product(_quantize_inputs(wide, setting), kernel)
            y = y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
        if setting.outputs is not None:
            y = fake_quantize(y, setting, setting.input_bits, None)
        return y if is_head(path) else y.astype(x.dtype)

    return linear
