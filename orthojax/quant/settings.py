"""The quantisation settings of From Attention to Activation (arXiv 2410.17174, section 5.2), as data."""

import dataclasses
from typing import Literal

from orthojax.errors import UserError


@dataclasses.dataclass(frozen=True)
class QuantizationSetting:
    """What a linear layer y = x @ kernel + bias rounds, and which values share a step.

    Attributes:
      bits: Width of all integers.
      scheme: `absmax` (symmetric) or `zeropoint` (from smallest to largest value).
      weights: One step for each output channel (column of the kernel), or one for the whole kernel.
      inputs: Steps of x: one for each input feature over all tokens of the batch, one for each token over its features,
        one for the whole batch, or None for inputs that stay float. One for each feature cannot be pulled out of an
        integer product: it can be simulated, not run on integers.
      outputs: One step for all of y, bias included, or None for outputs that stay float.
    """

    bits: int
    scheme: Literal["absmax", "zeropoint"]
    weights: Literal["output_channel", "tensor"]
    inputs: Literal["feature", "token", "tensor"] | None = None
    outputs: Literal["tensor"] | None = None

    def __post_init__(self):
        if not 2 <= self.bits <= 16:
            raise UserError(f"bits={self.bits} cannot be simulated", allowed="2 to 16")


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
