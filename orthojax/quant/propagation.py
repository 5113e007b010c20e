"""Where rounding does its damage: the error of every linear layer, split into what it inherits and what it adds."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.ops.statistics import at_least_float32, norm
from orthojax.quant.linear import rounded_model
from orthojax.quant.settings import QuantizationSetting

if TYPE_CHECKING:
    from orthojax.model import Transformer


class LinearError(NamedTuple):
    """Signal to quantisation noise of the outputs of one linear layer, in dB."""

    layer: int | None  # its block; None for the head
    whole: float
    inherited: float
    added: float
    added_by_token: float  # with the mean over tokens of the ratio, in which a massive token is one of many


class RoundingError(NamedTuple):
    """What rounding does to a model, as `rounding_error` defines it."""

    last_state: float
    linear: dict[str, LinearError]  # by path, such as layers_0/attention/query


def rounding_error(model: "Transformer", params: Any, setting: QuantizationSetting, tokens: ArrayLike) -> RoundingError:
    r"""Compares a float model with its `rounded_model` on the same tokens, layer by layer.

    With a linear layer's function f and its rounded function g, its input x in the float model and z in the rounded
    one, the signal-to-quantisation-noise ratios over all tokens and outputs are, in dB,

        whole = 10 log10(||f(x)||^2 / ||g(z) - f(x)||^2)
        inherited = 10 log10(||f(x)||^2 / ||f(z) - f(x)||^2), of what layers before have done
        added = 10 log10(||f(x)||^2 / ||g(z) - f(z)||^2), of the layer's own rounding

    and infinite without an error, as for the head, which stays float. Rounded keys and values are part of what the
    output of attention inherits. `last_state` is ||h' - h||_2 / ||h||_2, mean over tokens, for the last block's
    outputs h before the final norm: R_L of arXiv 2509.23500. Definition here: the split, with the noise of f(z).

    Args:
      model: The float model; scanned layers are unrolled.
      params: Its parameters.
      setting: What is rounded; activation scales come from these tokens.
      tokens: int [B, T].
    """
    from orthojax.model import unstack_layers  # here, as in `linear`

    params = unstack_layers(params) if model.config.scan_layers else params
    # Without rematerialisation: what is kept here would not leave its trace.
    config = dataclasses.replace(model.config, scan_layers=False, remat=False)
    rounded = rounded_model(config, setting)

    def squares(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(at_least_float32(x)))

    def run(params: Any, tokens: jax.Array) -> tuple[dict[str, tuple[jax.Array, ...]], jax.Array]:
        outputs: dict[str, jax.Array] = {}
        powers: dict[str, tuple[jax.Array, ...]] = {}

        def plain(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
            outputs[path] = model.linear(x, kernel, bias, path)
            return outputs[path]

        def compared(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
            expected, y = outputs[path], rounded.linear(x, kernel, bias, path)
            without = model.linear(x, kernel, bias, path)
            noises = squares(y - expected), squares(without - expected), squares(y - without)
            powers[path] = squares(expected), *noises, jnp.mean(jnp.square(norm(y - without) / norm(expected)))
            return y

        states = []
        for linear, reader in ((plain, model), (compared, rounded)):
            reader = reader.clone(config=config, linear=linear, linear_head=True)
            seen: Any = reader.apply({"params": params}, tokens, observe=lambda taps: at_least_float32(taps.residual))
            states.append(seen[1][-1])
        h, other = states
        return powers, jnp.mean(norm(other - h) / norm(h))

    powers, error = jax.device_get(jax.jit(run)(params, jnp.asarray(tokens)))
    linear = {}
    for path, (signal, *noises, by_token) in powers.items():
        with np.errstate(divide="ignore"):
            pairs = (*((signal, noise) for noise in noises), (1.0, by_token))
            ratios = [float(10 * np.log10(np.float64(a) / np.float64(b))) for a, b in pairs]
        block = re.match(r"layers_(\d+)/", path)
        linear[path] = LinearError(int(block[1]) if block else None, *ratios)
    return RoundingError(float(error), linear)
