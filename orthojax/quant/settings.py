"""Settings of post-training quantisation by name, and quantised copies of the parameters that a path rule selects."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from orthojax.config import check_types
from orthojax.errors import UserError, nearest
from orthojax.ops.quantize import FORMATS

ALL_BUT_HEAD = r"^(?!(.*/)?head(/|$))"
"""Every path in which no component is called head."""

KERNELS_BUT_HEAD = r"^(?!(.*/)?head/)(.*/)?kernel$"
"""Every parameter called kernel, but those of a component called head."""


@dataclasses.dataclass(frozen=True)
class QuantizationSetting:
    """The values that a linear layer y = x @ kernel + bias rounds, and which of them share a scale.

    Attributes:
      bits: Width of the numbers of weights, and of all others if `activation_bits` is not given.
      scheme: A name of `orthojax.ops.quantize.FORMATS`: `absmax` (symmetric) or `zeropoint` (from smallest to largest
        value) for integers, or that of a float format with its `bits`.
      weights: One scale for each output channel (column of the kernel), one for the whole kernel, or one for each
        `block` of a float format, the last of which may be smaller: neighbouring input features of an output channel,
        for `e4m3` of as many output channels.
      inputs: Scales of x: one for each input feature over all tokens of the batch, one for each token over its
        features, one for the whole batch, one for each `block` of neighbouring features of a token, or None for inputs
        that stay float. One for each feature cannot be pulled out of a product of integers.
      outputs: One scale for all of y, bias included, one for each token, or None for outputs that stay float.
      activation_bits: Width of the integers of inputs and outputs, if it differs from `bits`.
      group_size: Neighbouring input features of one output channel that share a scale; it must divide the input
        features of every layer. None: all of them share one.
      keys_and_values: Width of the integers of the keys and values in a cache, with the scheme `zeropoint` and a scale
        for each token and head over its channels, as in QuaRot (arXiv 2404.00456) with groups of the head's width; None
        for float ones. `rounded_model` rounds them; with latent attention, whole keys and values are rounded, though a
        cache could hold the latent.
    """

    bits: int
    scheme: str
    weights: Literal["output_channel", "tensor", "block"]
    inputs: Literal["feature", "token", "tensor", "block"] | None = None
    outputs: Literal["token", "tensor"] | None = None
    activation_bits: int | None = None
    group_size: int | None = None
    keys_and_values: int | None = None

    def __post_init__(self):
        check_types(self, "QuantizationSetting")
        if self.activation_bits is not None and self.inputs is None and self.outputs is None:
            problem = f"activation_bits={self.activation_bits} without rounded activations"
            raise UserError(problem, allowed="inputs or outputs")
        widths = {"bits": self.bits, "activation_bits": self.input_bits, "keys_and_values": self.keys_and_values}
        for name, bits in widths.items():
            if bits is not None and not 2 <= bits <= 16:
                raise UserError(f"{name}={bits} cannot be simulated", allowed="2 to 16")
        if self.group_size is not None and (self.group_size < 1 or self.weights != "output_channel"):
            problem = f"group_size={self.group_size} with weights={self.weights!r}"
            raise UserError(problem, allowed="1 or more, with weights='output_channel'")
        self._check_format()

    def _check_format(self):
        if self.scheme not in FORMATS:
            problem, hint = f"QuantizationSetting.scheme={self.scheme!r} is not valid", nearest(self.scheme, FORMATS)
            raise UserError(problem, allowed=", ".join(map(repr, FORMATS)), hint=hint)
        bits, slices, blocks, _ = FORMATS[self.scheme]
        problem = f"scheme={self.scheme!r} with weights={self.weights!r}, inputs={self.inputs!r}"
        if blocks is None and "block" in (self.weights, self.inputs):
            raise UserError(problem, allowed="'block' with a float format, group_size with integers")
        if slices is None and (self.weights != "block" or self.inputs not in ("block", None) or self.outputs):
            raise UserError(f"{problem}, outputs={self.outputs!r}", allowed="'block', 'block' or None, None")
        if bits is None:
            return
        if self.bits != bits or self.activation_bits is not None or self.group_size is not None:
            rest = f"activation_bits={self.activation_bits}, group_size={self.group_size}"
            problem = f"scheme={self.scheme!r} with bits={self.bits}, {rest}"
            raise UserError(problem, allowed=f"bits={bits}, none of the others")

    @property
    def input_bits(self) -> int:
        """Bits of the integers of activations."""
        return self.bits if self.activation_bits is None else self.activation_bits


INT8_FINE = QuantizationSetting(8, "absmax", "output_channel", inputs="feature")
"""Per-channel scales for weights and input activations, the paper's words."""

INT8_FINE_PER_TOKEN = QuantizationSetting(8, "absmax", "output_channel", inputs="token")
"""The form of `INT8_FINE` that hardware can multiply as integers: input activations have a scale for each token."""

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


def _of_float_format(name: str, bits: int) -> dict[str, QuantizationSetting]:
    """Returns the settings that round weights and inputs to a float format: with one scale each, then in blocks."""
    _, slices, blocks, block = FORMATS[name]
    settings = {f"fp{bits}_{name}": QuantizationSetting(bits, name, "tensor", inputs="tensor")} if slices else {}
    if blocks:
        in_blocks = f"fp{bits}_{name}_block{block}" if slices else name
        settings[in_blocks] = QuantizationSetting(bits, name, "block", inputs="block")
    return settings


_FLOATS = [_of_float_format(name, number.bits) for name, number in FORMATS.items() if number.bits]
MORE_SETTINGS = {
    "w8a8_group64": _per_token(8, group_size=64),
    "w4a8": _per_token(4, activation_bits=8),
    "w4a8_group64": _per_token(4, activation_bits=8, group_size=64),
    "w4a4": _per_token(4),
    "w4a4_group64": _per_token(4, group_size=64),
    "w4a4kv4": _per_token(4, keys_and_values=4),
    "int4_group128": QuantizationSetting(4, "absmax", "output_channel", group_size=128),
    **{name: setting for of_format in _FLOATS for name, setting in of_format.items()},
}
"""Settings beyond the paper's, evaluated on request: wXaY has weights of X bits with a scale for each output channel
(and group of 64 input features), and inputs of Y bits with a scale for each token; kvZ has keys and values of Z bits.
`int4_group128` rounds weights only. The floats are those of `orthojax.ops.quantize`: `fp8_e4m3` and `fp8_e5m2` have one
scale for a kernel and one for its inputs, the others have blocks."""

FLOATS = tuple(next(iter(of_format)) for of_format in _FLOATS)
"""One setting of each float format: with the scale of a tensor where it has one."""


def setting_named(name: str) -> QuantizationSetting:
    """Returns a setting of `SETTINGS` or `MORE_SETTINGS`; UserError for another name.

    >>> setting_named("w4a8_group64").group_size
    64
    """
    settings = SETTINGS | MORE_SETTINGS
    if name not in settings:
        problem = f"unknown quantisation setting {name!r}"
        raise UserError(problem, allowed=", ".join(settings), hint=nearest(name, settings))
    return settings[name]


def compile_pattern(include: str) -> re.Pattern[str]:
    """Compiles a regular expression; UserError if it is not one."""
    try:
        return re.compile(include)
    except re.error as error:
        raise UserError(f"include={include!r} is not a regular expression: {error}") from None


def map_kernels(params: Any, include: str, function: Callable[[Any, str], Any]) -> Any:
    """Replaces every leaf whose path matches by `function(kernel, path)`; UserError if none does, or for no matrix."""
    pattern, matched = compile_pattern(include), []

    def visit(key_path: Any, leaf: Any) -> Any:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if pattern.search(path) is None:
            return leaf
        matched.append(path)
        if jnp.ndim(leaf) < 2:
            problem = f"include={include!r} matches {path}, which has shape {jnp.shape(leaf)}"
            raise UserError(problem, allowed="[..., in, out]")
        return function(leaf, path)

    mapped = jax.tree_util.tree_map_with_path(visit, params)
    if not matched:
        raise UserError(f"include={include!r} matches no parameter")
    return mapped
