"""Post-training quantisation of linear layers (From Attention to Activation, arXiv 2410.17174).

`settings` says what is rounded; `linear` simulates it in floats.
`divergence` says what it costs, `propagation` where the error comes from, `rescue` which layers to keep in float,
`rotated` makes a trained model easier to round.
"""

from orthojax.quant.divergence import Divergence as Divergence
from orthojax.quant.divergence import divergence as divergence
from orthojax.quant.linear import prefix_cache as prefix_cache
from orthojax.quant.linear import quantize_params as quantize_params
from orthojax.quant.linear import quantized_linear as quantized_linear
from orthojax.quant.linear import rounded_cache as rounded_cache
from orthojax.quant.linear import rounded_model as rounded_model
from orthojax.quant.propagation import LinearError as LinearError
from orthojax.quant.propagation import RoundingError as RoundingError
from orthojax.quant.propagation import rounding_error as rounding_error
from orthojax.quant.rescue import linear_layers as linear_layers
from orthojax.quant.rescue import rescue as rescue
from orthojax.quant.rescue import switched_params as switched_params
from orthojax.quant.rescue import switching as switching
from orthojax.quant.rotated import online_hadamard as online_hadamard
from orthojax.quant.rotated import rotate_after_training as rotate_after_training
from orthojax.quant.settings import ALL_BUT_HEAD as ALL_BUT_HEAD
from orthojax.quant.settings import FLOATS as FLOATS
from orthojax.quant.settings import INT4_ZEROPOINT as INT4_ZEROPOINT
from orthojax.quant.settings import INT8_COARSE as INT8_COARSE
from orthojax.quant.settings import INT8_FINE as INT8_FINE
from orthojax.quant.settings import INT8_FINE_PER_TOKEN as INT8_FINE_PER_TOKEN
from orthojax.quant.settings import INT8_MODERATE as INT8_MODERATE
from orthojax.quant.settings import KERNELS_BUT_HEAD as KERNELS_BUT_HEAD
from orthojax.quant.settings import MORE_SETTINGS as MORE_SETTINGS
from orthojax.quant.settings import SETTINGS as SETTINGS
from orthojax.quant.settings import QuantizationSetting as QuantizationSetting
from orthojax.quant.settings import setting_named as setting_named
