"""Post-training quantisation of linear layers (From Attention to Activation, arXiv 2410.17174).

`settings` says what is rounded, `linear` simulates it in floats, with scales of activations from the batch or from a
text for calibration, `integer` computes it on integers if that is possible.
"""

from orthojax.quant.integer import integer_linear, integer_params, require_integers
from orthojax.quant.linear import Calibration, calibrate, quantize_params, quantized_linear, static_linear
from orthojax.quant.settings import (
    ALL_BUT_HEAD,
    INT4_ZEROPOINT,
    INT8_COARSE,
    INT8_FINE,
    INT8_FINE_PER_TOKEN,
    INT8_MODERATE,
    KERNELS_BUT_HEAD,
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
    "Calibration",
    "QuantizationSetting",
    "calibrate",
    "integer_linear",
    "integer_params",
    "quantize_params",
    "quantized_linear",
    "require_integers",
    "setting_named",
    "static_linear",
]
