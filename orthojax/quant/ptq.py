"""Post-training quantisation, simulated: by a function in place of x @ kernel + bias, or on a tree of weights.

Only linear layers round anything; embeddings, norms and softmax stay float. Activation steps are dynamic: they come
from the batch that passes through, so the batches of an evaluation belong to its result.
"""

import functools
import re
from collections.abc import Callable
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


def compile_pattern(include: str) -> re.Pattern[str]:
    """The rule of paths, or a UserError."""
    try:
        return re.compile(include)
    except re.error as error:
        raise UserError(f"include={include!r} is not a regular expression: {error}") from None


def fake_quantize(x: jax.Array, setting: QuantizationSetting, bits: int, axes: Axes) -> jax.Array:
    """`absmax` or `zeropoint` of x."""
    return {"absmax": absmax, "zeropoint": zeropoint}[setting.scheme](x, bits, axes)


def input_axes(x: jax.Array, setting: QuantizationSetting) -> Axes:
    """The axes of x that share one step, of inputs [..., in] whose groups are split off."""
    assert setting.inputs is not None
    return {"feature": tuple(range(x.ndim - 1)), "token": -1, "group": -1, "tensor": None}[setting.inputs]


def split_input_groups(x: jax.Array, setting: QuantizationSetting) -> jax.Array:
    """[..., in] -> [..., groups, in / groups] where a token has a step for each group; else x."""
    return x.reshape(*x.shape[:-1], -1, setting.group_size) if setting.inputs == "group" else x


def weight_axes(setting: QuantizationSetting) -> Axes:
    """The axes that share one step, of kernels [..., in, out] whose groups are split off."""
    # Any axes before the last two stack kernels that know nothing of each other.
    return {"output_channel": -2, "tensor": (-2, -1)}[setting.weights]


def split_groups(kernel: jax.Array, setting: QuantizationSetting, path: str) -> jax.Array:
    """[..., in, out] -> [..., groups, in / groups, out]; without groups, the kernel.

    Raises:
      UserError: Where the size of a group does not divide `in`.
    """
    size = setting.group_size
    if size is None:
        return kernel
    *leading, features, outputs = kernel.shape
    if features % size:
        raise UserError(
            f"group_size={size} does not divide the {features} input features of {path}",
            allowed=f"a divisor of {features}",
        )
    return kernel.reshape(*leading, features // size, size, outputs)


def _fake_quantize_kernel(kernel: jax.Array, setting: QuantizationSetting, path: str) -> jax.Array:
    groups = split_groups(kernel, setting, path)
    return fake_quantize(groups, setting, setting.bits, weight_axes(setting)).reshape(kernel.shape)


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
      UserError: Where `include` is no regular expression; from `linear`, where a group does not divide `in`.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT8_MODERATE
    >>> linear = quantized_linear(INT8_MODERATE)
    >>> x, kernel = jnp.array([[127.0, 0.4]]), jnp.array([[127.0], [1.0]])
    >>> float(linear(x, kernel, None, "mlp/input")[0, 0]), float(linear(x, kernel, None, "head")[0, 0])
    (16129.0, 16129.400390625)
    """
    from orthojax.model import linear as float_linear  # here, so that flax is not needed for `quantize_params`

    pattern = compile_pattern(include)

    def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        if pattern.search(path) is None:
            return float_linear(x, kernel, bias, path)
        a, w = at_least_float32(x), _fake_quantize_kernel(at_least_float32(kernel), setting, path)
        if setting.inputs is not None:
            groups = split_input_groups(a, setting)
            groups = fake_quantize(groups, setting, setting.input_bits, input_axes(groups, setting))
            a = groups.reshape(a.shape)
        y = float_linear(a, w, bias, path)
        if setting.outputs is not None:
            y = fake_quantize(y, setting, setting.input_bits, None)
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
      UserError: Where the setting rounds activations, nothing matches, a match is no matrix, or a group does not divide
        its `in`.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT4_ZEROPOINT
    >>> params = {"dense": {"kernel": jnp.array([[15.0], [7.4], [0.0]]), "bias": jnp.array([0.3])}}
    >>> quantize_params(params, INT4_ZEROPOINT, "kernel$")["dense"]["kernel"].ravel().tolist()
    [15.0, 7.0, 0.0]
    """
    if setting.inputs is not None or setting.outputs is not None:
        raise UserError(f"{setting} rounds activations, which parameters do not have", allowed="a weights-only setting")
    return map_kernels(params, include, lambda kernel, path: _fake_quantize_kernel(jnp.asarray(kernel), setting, path))


def map_kernels(params: Any, include: str, function: Callable[[Any, str], Any]) -> Any:
    """The tree with `function(kernel, path)` in place of every leaf whose path matches.

    Raises:
      UserError: Where nothing matches, or a match is no matrix.
    """
    pattern, matched = compile_pattern(include), []

    def visit(key_path: Any, leaf: Any) -> Any:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if pattern.search(path) is None:
            return leaf
        matched.append(path)
        if jnp.ndim(leaf) < 2:
            raise UserError(
                f"include={include!r} matches {path}, which has shape {jnp.shape(leaf)}", allowed="[..., in, out]"
            )
        return function(leaf, path)

    mapped = jax.tree_util.tree_map_with_path(visit, params)
    if not matched:
        raise UserError(f"include={include!r} matches no parameter")
    return mapped
