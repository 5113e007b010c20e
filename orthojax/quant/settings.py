"""Quantisation settings as data: those of From Attention to Activation (arXiv 2410.17174, section 5.2), and more."""

import dataclasses
from typing import Literal

from orthojax.config import added
from orthojax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class QuantizationSetting:
    """What a linear layer y = x @ kernel + bias rounds, and which values share a step.

    Attributes:
      bits: Width of the integers of weights, and of all others where `activation_bits` is not given.
      scheme: `absmax` (symmetric) or `zeropoint` (from smallest to largest value).
      weights: One step for each output channel (column of the kernel), or one for the whole kernel.
      inputs: Steps of x: one for each input feature over all tokens of the batch, one for each token over its features,
        one for each token and group of `group_size` features, one for the whole batch, or None for inputs that stay
        float. One for each feature cannot be pulled out of an integer product: it can be simulated, not run on
        integers.
      outputs: One step for all of y, bias included, or None for outputs that stay float.
      activation_bits: Width of the integers of inputs and outputs, where it is another.
      group_size: So many neighbouring input features of one output channel share a step; it must divide the input
        features of every layer. None: all of them do.
    """

    bits: int
    scheme: Literal["absmax", "zeropoint"]
    weights: Literal["output_channel", "tensor"]
    inputs: Literal["feature", "token", "group", "tensor"] | None = None
    outputs: Literal["tensor"] | None = None
    activation_bits: int | None = added(None)
    group_size: int | None = added(None)

    def __post_init__(self):
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
"""Per-channel steps for weights and input activations, the paper's words."""

INT8_FINE_PER_TOKEN = QuantizationSetting(8, "absmax", "output_channel", inputs="token")
"""The form of `INT8_FINE` that runs on integers: input activations have a step for each token."""

INT8_MODERATE = QuantizationSetting(8, "absmax", "tensor", inputs="tensor")
"""One step for a kernel, one for its input activations."""

INT8_COARSE = QuantizationSetting(8, "absmax", "tensor", inputs="tensor", outputs="tensor")
"""`INT8_MODERATE`, and output activations too."""

INT4_ZEROPOINT = QuantizationSetting(4, "zeropoint", "output_channel")
"""Weights only, asymmetric, a step for each output channel."""

SETTINGS = {
    "int8_fine": INT8_FINE,
    "int8_fine_per_token": INT8_FINE_PER_TOKEN,
    "int8_moderate": INT8_MODERATE,
    "int8_coarse": INT8_COARSE,
    "int4_zeropoint": INT4_ZEROPOINT,
}
"""The settings by the name that their metric `perplexity_<name>` carries."""


def _per_token(
    bits: int, activation_bits: int, group_size: int | None, inputs: Literal["token", "group"] = "token"
) -> QuantizationSetting:
    return QuantizationSetting(
        bits, "absmax", "output_channel", inputs=inputs, activation_bits=activation_bits, group_size=group_size
    )


MORE_SETTINGS = {
    "w8a8_group64": _per_token(8, 8, 64),
    "w8a8_group128": _per_token(8, 8, 128),
    "w4a8": _per_token(4, 8, None),
    "w4a8_group64": _per_token(4, 8, 64),
    "w4a8_group128": _per_token(4, 8, 128),
    "w4a8_group64_both": _per_token(4, 8, 64, "group"),
    "w4a8_group128_both": _per_token(4, 8, 128, "group"),
    "w4a4": _per_token(4, 4, None),
    "w4a4_group64": _per_token(4, 4, 64),
    "w4a4_group128": _per_token(4, 4, 128),
    "w4a4_group64_both": _per_token(4, 4, 64, "group"),
    "w4a4_group128_both": _per_token(4, 4, 128, "group"),
    "int4_zeropoint_group64": QuantizationSetting(4, "zeropoint", "output_channel", group_size=64),
    "int4_zeropoint_group128": QuantizationSetting(4, "zeropoint", "output_channel", group_size=128),
}
"""Settings beyond the paper's, evaluated where they are asked for: wXaY has weights of X bits, a step for each output
channel (and group), and inputs of Y bits, a step for each token; with `_both`, for each token and group."""


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
