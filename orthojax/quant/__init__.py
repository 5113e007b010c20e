"""Post-training quantisation of linear layers (From Attention to Activation, arXiv 2410.17174).

`ptq` says what is rounded and simulates it in floats, `static` the same with fixed scales of activations, `integer`
computes it on integers where that is possible.
"""

from orthojax.quant.integer import KERNELS_BUT_HEAD, integer_linear, integer_params, integer_product, require_integers
from orthojax.quant.ptq import (
    ALL_BUT_HEAD,
    INT4_ZEROPOINT,
    INT8_COARSE,
    INT8_FINE,
    INT8_FINE_PER_TOKEN,
    INT8_MODERATE,
    MORE_SETTINGS,
    SETTINGS,
    QuantizationSetting,
    quantize_params,
    quantized_linear,
    setting_named,
)
from orthojax.quant.static import Calibration, calibrate, static_linear

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
    "integer_product",
    "quantize_params",
    "quantized_linear",
    "require_integers",
    "setting_named",
    "static_linear",
]
