"""Post-training quantisation of linear layers (From Attention to Activation, arXiv 2410.17174).

`ptq` says what is rounded and simulates it in floats, `static` the same with fixed scales of activations, `integer`
computes it on integers where that is possible.
"""

from orthojax.quant.integer import KERNELS_BUT_HEAD as KERNELS_BUT_HEAD
from orthojax.quant.integer import integer_linear as integer_linear
from orthojax.quant.integer import integer_params as integer_params
from orthojax.quant.integer import integer_product as integer_product
from orthojax.quant.integer import require_integers as require_integers
from orthojax.quant.ptq import ALL_BUT_HEAD as ALL_BUT_HEAD
from orthojax.quant.ptq import INT4_ZEROPOINT as INT4_ZEROPOINT
from orthojax.quant.ptq import INT8_COARSE as INT8_COARSE
from orthojax.quant.ptq import INT8_FINE as INT8_FINE
from orthojax.quant.ptq import INT8_FINE_PER_TOKEN as INT8_FINE_PER_TOKEN
from orthojax.quant.ptq import INT8_MODERATE as INT8_MODERATE
from orthojax.quant.ptq import MORE_SETTINGS as MORE_SETTINGS
from orthojax.quant.ptq import SETTINGS as SETTINGS
from orthojax.quant.ptq import QuantizationSetting as QuantizationSetting
from orthojax.quant.ptq import quantize_params as quantize_params
from orthojax.quant.ptq import quantized_linear as quantized_linear
from orthojax.quant.ptq import setting_named as setting_named
from orthojax.quant.static import Calibration as Calibration
from orthojax.quant.static import calibrate as calibrate
from orthojax.quant.static import static_linear as static_linear
