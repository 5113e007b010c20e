"""Activations on scales that are fixed beforehand, from a text for calibration.

Static scales save the search for the largest value of every batch; what is larger than all of the calibration is cut.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.errors import UserError
from orthojax.ops.products import is_head
from orthojax.ops.statistics import at_least_float32
from orthojax.quant.ptq import ALL_BUT_HEAD, QuantizationSetting, compile_pattern, fake_quantize_kernel

if TYPE_CHECKING:
    from orthojax.model import LinearFunction, Transformer


class Calibration(NamedTuple):
    """The largest |value| that each linear layer met, float32 [], by path.

    Attributes:
      inputs: Of x.
      outputs: Of x @ kernel + bias.
    """

    inputs: Mapping[str, jax.Array]
    outputs: Mapping[str, jax.Array]


def calibrate(model: "Transformer", params: Any, tokens: ArrayLike) -> Calibration:
    """Runs a float model on a text and keeps the largest values.

    Args:
      model: With `scan_layers=False` (see `unstack_layers`): layers that are scanned share a path.
      params: Its parameters.
      tokens: int [B, T].

    Raises:
      UserError: For a model with scanned layers.
    """
    from orthojax.model import Transformer  # here, as in `ptq`, so that flax is not needed for `quantize_params`
    from orthojax.model import linear as float_linear

    if model.config.scan_layers:
        raise UserError("static scales for scanned layers", allowed="scan_layers=False, with unstack_layers(params)")

    def run(params: Any, tokens: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        inputs: dict[str, jax.Array] = {}
        outputs: dict[str, jax.Array] = {}

        def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
            y = float_linear(x, kernel, bias, path)
            inputs[path], outputs[path] = (jnp.max(jnp.abs(at_least_float32(values))) for values in (x, y))
            return y

        # Without rematerialisation: what is kept here would not leave its trace.
        config = dataclasses.replace(model.config, remat=False)
        Transformer(config, linear=linear, linear_head=True).apply({"params": params}, tokens)
        return inputs, outputs

    return Calibration(*jax.jit(run)(params, jnp.asarray(tokens)))


def static_linear(
    setting: QuantizationSetting, calibration: Calibration, include: str = ALL_BUT_HEAD
) -> "LinearFunction":
    """`quantized_linear` with the scales of activations from a calibration.

    step = peak / (2^(bits-1) - 1) with the peak of the calibration, y = clip(round(x / step)) * step. Simulation in
    float32 or wider.

    Args:
      setting: With scheme `absmax` and one scale for a tensor of inputs, such as `INT8_MODERATE` and `INT8_COARSE`.
      calibration: From `calibrate`, of the same model.
      include: As of `quantized_linear`.

    Raises:
      UserError: For a setting that has no static scales, or from the layer for a path that was not calibrated.
    """
    from orthojax.model import linear as float_linear

    if (setting.scheme, setting.inputs, setting.float_features) != ("absmax", "tensor", 0):
        raise UserError(f"static scales for {setting}", allowed="scheme='absmax', inputs='tensor', float_features=0")
    pattern = compile_pattern(include)

    def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        if pattern.search(path) is None:
            return float_linear(x, kernel, bias, path)
        if path not in calibration.inputs:
            raise UserError(f"no scale of {path}", allowed="the calibration of the same model")
        a = _on_scale(at_least_float32(x), calibration.inputs[path], setting.input_bits)
        w = fake_quantize_kernel(at_least_float32(kernel), setting, path)
        y = float_linear(a, w, None if bias is None else bias.astype(a.dtype), path)
        if setting.outputs is not None:
            y = _on_scale(y, calibration.outputs[path], setting.input_bits)
        return y if is_head(path) else y.astype(x.dtype)

    return linear


def _on_scale(x: jax.Array, peak: jax.Array, bits: int) -> jax.Array:
    """Of x: multiples of peak / largest integer, rounded and cut; x itself where the peak is 0."""
    largest = 2 ** (bits - 1) - 1
    step = jnp.where(peak > 0, peak, 1.0).astype(x.dtype) / largest
    return jnp.where(peak > 0, jnp.clip(jnp.round(x / step), -largest, largest) * step, x)
