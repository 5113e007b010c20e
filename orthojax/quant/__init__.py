"""Post-training quantisation of linear layers, simulated in floats (From Attention to Activation, arXiv 2410.17174)."""

from orthojax.quant.ptq import ALL_BUT_HEAD, quantize_params, quantized_linear
from orthojax.quant.settings import (
    INT4_ZEROPOINT,
    INT8_COARSE,
    INT8_FINE,
    INT8_FINE_PER_TOKEN,
    INT8_MODERATE,
    SETTINGS,
    QuantizationSetting,
)

__all__ = [
    "ALL_BUT_HEAD",
    "INT4_ZEROPOINT",
    "INT8_COARSE",
    "INT8_FINE",
    "INT8_FINE_PER_TOKEN",
    "INT8_MODERATE",
    "SETTINGS",
    "QuantizationSetting",
    "quantize_params",
    "quantized_linear",
]
