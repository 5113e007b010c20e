"""Post-training quantisation of linear layers, simulated or on integers (From Attention to Activation, 2410.17174).

`settings` says what is rounded, `ptq` simulates it in floats, `integer` runs it on integers where it can be.
"""

from orthojax.quant.integer import KERNELS_BUT_HEAD, integer_linear, integer_params, integer_product, require_integers
from orthojax.quant.ptq import ALL_BUT_HEAD, quantize_params, quantized_linear
from orthojax.quant.settings import (
    INT4_ZEROPOINT,
    INT8_COARSE,
    INT8_FINE,
    INT8_FINE_PER_TOKEN,
    INT8_MODERATE,
    MORE_SETTINGS,
    SETTINGS,
    QuantizationSetting,
    setting_named,
)

__all__ = [
    "ALL_BUT_HEAD",
    "INT4_ZEROPOINT",
    "INT8_COARSE",
    "INT8_FINE",
    "INT8_FINE_PER_TOKEN",
    "INT8_MODERATE",
    "KERNELS_BUT_HEAD",
    "MORE_SETTINGS",
    "SETTINGS",
    "QuantizationSetting",
    "integer_linear",
    "integer_params",
    "integer_product",
    "quantize_params",
    "quantized_linear",
    "require_integers",
    "setting_named",
]
