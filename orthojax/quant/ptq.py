"""Post-training quantisation, simulated: what is rounded as data, and the linear layers and trees that it gives.

Only linear layers round anything; embeddings, norms and softmax stay float, and by default the output head does too.
`quantized_linear(setting, include="")` rounds the head as well: an untied kernel, and tied embeddings in a
`Transformer(linear_head=True)`, whose token table [V, D], transposed, is then the kernel of the head (its output
channels are the tokens); where tokens are looked up it stays float.

Activation scales are dynamic: they come from the batch that passes through, so the batches of an evaluation belong to
its result.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from orthojax.config import added, check_types
from orthojax.errors import UserError, nearest
from orthojax.ops.products import is_head
from orthojax.ops.quantize import Axes, absmax, zeropoint
from orthojax.ops.statistics import at_least_float32

if TYPE_CHECKING:
    from orthojax.model import LinearFunction

ALL_BUT_HEAD = r"^(?!(.*/)?head(/|$))"
"""Every path in which no component is called head."""


@dataclasses.dataclass(frozen=True)
class QuantizationSetting:
    """What a linear layer y = x @ kernel + bias rounds, and which values share a scale.

    Attributes:
      bits: Width of the integers of weights, and of all others where `activation_bits` is not given.
      scheme: `absmax` (symmetric) or `zeropoint` (from smallest to largest value).
      weights: One scale for each output channel (column of the kernel), or one for the whole kernel.
      inputs: Scales of x: one for each input feature over all tokens of the batch, one for each token over its
        features, one for each token and group of `group_size` features, one for the whole batch, or None for inputs
        that stay float. One for each feature cannot be pulled out of an integer product: simulation only.
      outputs: One scale for all of y, bias included, or None for outputs that stay float.
      activation_bits: Width of the integers of inputs and outputs, where it differs.
      group_size: Neighbouring input features of one output channel that share a scale; it must divide the input
        features of every layer. None: all of them do.
      float_features: How many input features, those with the largest |x| in the batch, stay float, with their rows of
        the kernel, and as many output features where outputs are rounded: which channels do the damage. Simulation
        only; LLM.int8 (arXiv 2208.07339) takes a threshold instead of a number.

    Raises:
      UserError: For values of another type, unknown names, or a combination that says nothing.
    """

    bits: int
    scheme: Literal["absmax", "zeropoint"]
    weights: Literal["output_channel", "tensor"]
    inputs: Literal["feature", "token", "group", "tensor"] | None = None
    outputs: Literal["tensor"] | None = None
    activation_bits: int | None = added(None)
    group_size: int | None = added(None)
    float_features: int = added(0)

    def __post_init__(self):
        check_types(self, "QuantizationSetting")
        if self.float_features < 0:
            raise UserError(f"float_features={self.float_features}", allowed="0 or more")
        if self.float_features and self.scheme == "zeropoint":  # what is left out is 0, which would widen the range
            raise UserError(f"float_features={self.float_features} with scheme='zeropoint'", allowed="scheme='absmax'")
        if self.activation_bits is not None and self.inputs is None and self.outputs is None:
            raise UserError(
                f"activation_bits={self.activation_bits} where no activations are rounded says nothing",
                allowed="inputs or outputs",
            )
        for name, bits in (("bits", self.bits), ("activation_bits", self.input_bits)):
            if not 2 <= bits <= 16:
                raise UserError(f"{name}={bits} cannot be simulated", allowed="2 to 16")
        if self.group_size is not None and (self.group_size < 1 or self.weights == "tensor"):
            raise UserError(
                f"group_size={self.group_size} with weights={self.weights!r} says nothing",
                allowed="1 or more, with weights='output_channel'",
            )
        if self.inputs == "group" and self.group_size is None:
            raise UserError("inputs='group' without group_size", allowed="group_size=N, or inputs='token'")

    @property
    def input_bits(self) -> int:
        """Width of the integers of activations."""
        return self.bits if self.activation_bits is None else self.activation_bits


INT8_FINE = QuantizationSetting(8, "absmax", "output_channel", inputs="feature")
"""Per-channel scales for weights and input activations, the paper's words."""

INT8_FINE_PER_TOKEN = QuantizationSetting(8, "absmax", "output_channel", inputs="token")
"""The form of `INT8_FINE` that runs on integers: input activations have a scale for each token."""

INT8_MODERATE = QuantizationSetting(8, "absmax", "tensor", inputs="tensor")
"""One scale for a kernel, one for its input activations."""

INT8_COARSE = QuantizationSetting(8, "absmax", "tensor", inputs="tensor", outputs="tensor")
"""`INT8_MODERATE`, and output activations too."""

INT4_ZEROPOINT = QuantizationSetting(4, "zeropoint", "output_channel")
"""Weights only, asymmetric, a scale for each output channel."""

SETTINGS = {
    "int8_fine": INT8_FINE,
    "int8_fine_per_token": INT8_FINE_PER_TOKEN,
    "int8_moderate": INT8_MODERATE,
    "int8_coarse": INT8_COARSE,
    "int4_zeropoint": INT4_ZEROPOINT,
}
"""The settings by the name that their metric `perplexity_<name>` carries."""

_per_token = functools.partial(QuantizationSetting, scheme="absmax", weights="output_channel", inputs="token")

MORE_SETTINGS = {
    "w8a8_group64": _per_token(8, activation_bits=8, group_size=64),
    "w8a8_group128": _per_token(8, activation_bits=8, group_size=128),
    "w4a8": _per_token(4, activation_bits=8),
    "w4a8_group64": _per_token(4, activation_bits=8, group_size=64),
    "w4a8_group128": _per_token(4, activation_bits=8, group_size=128),
    "w4a8_group64_both": _per_token(4, activation_bits=8, group_size=64, inputs="group"),
    "w4a8_group128_both": _per_token(4, activation_bits=8, group_size=128, inputs="group"),
    "w4a4": _per_token(4, activation_bits=4),
    "w4a4_group64": _per_token(4, activation_bits=4, group_size=64),
    "w4a4_group128": _per_token(4, activation_bits=4, group_size=128),
    "w4a4_group64_both": _per_token(4, activation_bits=4, group_size=64, inputs="group"),
    "w4a4_group128_both": _per_token(4, activation_bits=4, group_size=128, inputs="group"),
    "int4_zeropoint_group64": QuantizationSetting(4, "zeropoint", "output_channel", group_size=64),
    "int4_zeropoint_group128": QuantizationSetting(4, "zeropoint", "output_channel", group_size=128),
}
"""Settings beyond the paper's, evaluated where they are asked for: wXaY has weights of X bits, a scale for each output
channel (and group), and inputs of Y bits, a scale for each token; with `_both`, for each token and group."""


def setting_named(name: str) -> QuantizationSetting:
    """A setting of `SETTINGS` or `MORE_SETTINGS`.

    Raises:
      UserError: For another name.

    >>> setting_named("w4a8_group64").group_size
    64
    """
    settings = SETTINGS | MORE_SETTINGS
    if name not in settings:
        raise UserError(
            f"unknown quantisation setting {name!r}", allowed=", ".join(settings), hint=nearest(name, settings)
        )
    return settings[name]


def compile_pattern(include: str) -> re.Pattern[str]:
    """The regular expression.

    Raises:
      UserError: Where it is none.
    """
    try:
        return re.compile(include)
    except re.error as error:
        raise UserError(f"include={include!r} is not a regular expression: {error}") from None


def fake_quantize(x: jax.Array, setting: QuantizationSetting, bits: int, axes: Axes) -> jax.Array:
    """`absmax` or `zeropoint` of x."""
    return {"absmax": absmax, "zeropoint": zeropoint}[setting.scheme](x, bits, axes)


def group_inputs(x: jax.Array, setting: QuantizationSetting) -> tuple[jax.Array, Axes]:
    """(x, the axes that share one scale): [..., in], or [..., groups, in / groups] where each group has its own."""
    if setting.inputs == "group":
        return x.reshape(*x.shape[:-1], -1, setting.group_size), -1
    return x, tuple(range(x.ndim - 1)) if setting.inputs == "feature" else -1 if setting.inputs == "token" else None


def group_kernel(kernel: jax.Array, setting: QuantizationSetting, path: str) -> tuple[jax.Array, Axes]:
    """(kernel, the axes that share one scale): [..., in, out], or [..., groups, in / groups, out] with groups.

    Raises:
      UserError: Where the size of a group does not divide `in`.
    """
    # Any axes before the last two stack kernels that know nothing of each other.
    axes = (-2, -1) if setting.weights == "tensor" else -2
    size = setting.group_size
    if size is None:
        return kernel, axes
    *leading, features, outputs = kernel.shape
    if features % size:
        raise UserError(
            f"group_size={size} does not divide the {features} input features of {path}",
            allowed=f"a divisor of {features}",
        )
    return kernel.reshape(*leading, features // size, size, outputs), axes


def fake_quantize_kernel(kernel: jax.Array, setting: QuantizationSetting, path: str) -> jax.Array:
    """The kernel [..., in, out] rounded; errors as `group_kernel`."""
    groups, axes = group_kernel(kernel, setting, path)
    return fake_quantize(groups, setting, setting.bits, axes).reshape(kernel.shape)


def _largest_features(x: jax.Array, count: int) -> jax.Array:
    """Which of the features of x [..., F] have the largest |x|, [F] bool."""
    size = jnp.max(jnp.abs(x), axis=tuple(range(x.ndim - 1)))
    return jnp.zeros(size.shape, bool).at[jax.lax.top_k(size, min(count, size.size))[1]].set(True)


@functools.cache  # the same function for the same setting, so that jit compiles a model with it once
def quantized_linear(setting: QuantizationSetting, include: str = ALL_BUT_HEAD) -> "LinearFunction":
    """A linear layer that rounds its operands as `setting` says, for a model that lets its linear layers be replaced.

    Definition: linear layers only; embeddings, head, norms and softmax stay float (`include=""` adds the head).
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
        a, w = at_least_float32(x), at_least_float32(kernel)
        floats = 0.0
        if setting.float_features:
            kept = _largest_features(a, setting.float_features)
            floats = float_linear(jnp.where(kept, a, 0), w, None, path)
            a, w = jnp.where(kept, 0, a), jnp.where(kept[:, None], 0, w)
        w = fake_quantize_kernel(w, setting, path)
        if setting.inputs is not None:
            groups, axes = group_inputs(a, setting)
            a = fake_quantize(groups, setting, setting.input_bits, axes).reshape(a.shape)
        y = float_linear(a, w, None if bias is None else bias.astype(a.dtype), path) + floats
        if setting.outputs is not None:
            kept = _largest_features(y, setting.float_features) if setting.float_features else False
            rounded = fake_quantize(jnp.where(kept, 0, y), setting, setting.input_bits, None)
            y = jnp.where(kept, y, rounded)
        return y if is_head(path) else y.astype(x.dtype)

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
    return map_kernels(params, include, lambda kernel, path: fake_quantize_kernel(jnp.asarray(kernel), setting, path))


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
