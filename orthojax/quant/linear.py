"""Post-training quantisation, simulated in floats: linear layers that round their operands, and rounded trees.

Only linear layers round anything; embeddings, norms and softmax stay float, and by default so does the output head.
`quantized_linear(setting, include="")` rounds the head as well: an untied kernel, and tied embeddings in a
`Transformer(linear_head=True)`, whose token table [V, D], transposed, is then the kernel of the head (its output
channels are the tokens); for the lookup of tokens it stays float.

Activation scales are dynamic: they come from the batch that passes through, so the batches of an evaluation belong to
its result. `static_linear` has fixed ones, from a text for calibration: they save the search for the largest value of
every batch, and what is larger than all of the calibration is cut.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.errors import UserError
from orthojax.ops.products import is_head
from orthojax.ops.quantize import Axes, absmax, zeropoint
from orthojax.ops.statistics import at_least_float32
from orthojax.quant.settings import ALL_BUT_HEAD, QuantizationSetting, compile_pattern, map_kernels

if TYPE_CHECKING:
    from orthojax.model import LinearFunction, Transformer

Rounding = Callable[[jax.Array, str], jax.Array]


def fake_quantize(x: jax.Array, setting: QuantizationSetting, bits: int, axes: Axes) -> jax.Array:
    """Rounds x by `absmax` or `zeropoint`."""
    return {"absmax": absmax, "zeropoint": zeropoint}[setting.scheme](x, bits, axes)


def input_axes(x: jax.Array, setting: QuantizationSetting) -> Axes:
    """Returns the axes of x [..., in] that share one scale."""
    return {"feature": tuple(range(x.ndim - 1)), "token": -1, "tensor": None}[setting.inputs or "tensor"]


def fake_quantize_kernel(kernel: jax.Array, setting: QuantizationSetting, path: str) -> jax.Array:
    """Rounds a kernel [..., in, out]; UserError if the size of a group does not divide `in`."""
    # Any axes before the last two stack kernels that know nothing of each other.
    axes = (-2, -1) if setting.weights == "tensor" else -2
    *leading, features, outputs = kernel.shape
    size = setting.group_size or features
    if features and features % size:
        raise UserError(
            f"group_size={size} does not divide the {features} input features of {path}",
            allowed=f"a divisor of {features}",
        )
    groups = kernel.reshape(*leading, -1, size, outputs) if setting.group_size else kernel
    return fake_quantize(groups, setting, setting.bits, axes).reshape(kernel.shape)


def _largest_features(x: jax.Array, count: int) -> jax.Array:
    """Marks the features of x [..., F] with the largest |x|, [F] bool."""
    size = jnp.max(jnp.abs(x), axis=tuple(range(x.ndim - 1)))
    return jnp.zeros(size.shape, bool).at[jax.lax.top_k(size, min(count, size.size))[1]].set(True)


@functools.cache  # the same function for the same setting, so that jit compiles a model with it once
def quantized_linear(setting: QuantizationSetting, include: str = ALL_BUT_HEAD) -> "LinearFunction":
    """Makes a linear layer that rounds its operands as `setting` says, for a model whose layers can be replaced.

    Definition: linear layers only; embeddings, head, norms and softmax stay float (`include=""` adds the head).
    Operands are rounded, multiplied and rounded again in float32 or wider; the result has the dtype of x.

    Args:
      setting: One of `orthojax.quant.SETTINGS`, or another.
      include: Regular expression searched in the layer's path; a layer without a match computes x @ kernel + bias.

    Returns:
      `linear(x, kernel, bias, path)` with x [..., in], kernel [in, out], bias [out] or None, and a path such as
      `layers/attention/query`; it gives [..., out].

    Raises:
      UserError: If `include` is no regular expression; from `linear`, if a group does not divide `in`.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT8_MODERATE
    >>> linear = quantized_linear(INT8_MODERATE)
    >>> x, kernel = jnp.array([[127.0, 0.4]]), jnp.array([[127.0], [1.0]])
    >>> float(linear(x, kernel, None, "mlp/input")[0, 0]), float(linear(x, kernel, None, "head")[0, 0])
    (16129.0, 16129.400390625)
    """

    def on_batch(x: jax.Array, axes: Axes) -> jax.Array:
        return fake_quantize(x, setting, setting.input_bits, axes)

    def round_outputs(y: jax.Array, path: str) -> jax.Array:
        kept = _largest_features(y, setting.float_features) if setting.float_features else False
        return jnp.where(kept, y, on_batch(jnp.where(kept, 0, y), None))

    return _rounding(setting, include, lambda x, path: on_batch(x, input_axes(x, setting)), round_outputs)


def _rounding(
    setting: QuantizationSetting, include: str, round_inputs: Rounding, round_outputs: Rounding
) -> "LinearFunction":
    """Makes a linear layer of rounded operands; `round_inputs` and `round_outputs` are functions of (values, path)."""
    from orthojax.model import linear as float_linear  # here, so that flax is not needed for `quantize_params`

    pattern = compile_pattern(include)

    def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        if pattern.search(path) is None:
            return float_linear(x, kernel, bias, path)
        a, w = at_least_float32(x), at_least_float32(kernel)
        floats = 0.0
        if setting.float_features:
            kept = _largest_features(a, setting.float_features)
            floats = float_linear(jnp.where(kept, a, 0), w, None, path)
            a, w = jnp.where(kept, 0, a), jnp.where(kept[:, None], 0, w)
        a = a if setting.inputs is None else round_inputs(a, path)
        w = fake_quantize_kernel(w, setting, path)
        y = float_linear(a, w, None if bias is None else bias.astype(a.dtype), path) + floats
        y = y if setting.outputs is None else round_outputs(y, path)
        return y if is_head(path) else y.astype(x.dtype)

    return linear


def quantize_params(params: Any, setting: QuantizationSetting, include: str) -> Any:
    """Rounds the kernels of a tree of parameters, for models whose linear layers cannot be replaced.

    Args:
      params: Any tree of arrays; kernels are [..., in, out], leading axes stack kernels.
      setting: A setting that leaves activations float.
      include: Regular expression searched in each path (keys joined by `/`); exactly its matches are rounded, so it
        must not match embeddings or norms.

    Returns:
      The same tree, same shapes and dtypes.

    Raises:
      UserError: If the setting rounds activations, nothing matches, a match is no matrix, or a group does not divide
        its `in`.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT4_ZEROPOINT
    >>> params = {"dense": {"kernel": jnp.array([[15.0], [7.4], [0.0]]), "bias": jnp.array([0.3])}}
    >>> quantize_params(params, INT4_ZEROPOINT, "kernel$")["dense"]["kernel"].ravel().tolist()
    [15.0, 7.0, 0.0]
    """
    if setting.inputs is not None or setting.outputs is not None:
        raise UserError(f"{setting} rounds activations, which parameters do not have", allowed="a weights-only setting")
    return map_kernels(params, include, lambda kernel, path: fake_quantize_kernel(jnp.asarray(kernel), setting, path))


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
    from orthojax.model import Transformer  # here, so that flax is not needed for `quantize_params`
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
    """Makes a linear layer as `quantized_linear`, with the scales of activations from a calibration.

    step = peak / (2^(bits-1) - 1) with the peak of the calibration, y = clip(round(x / step)) * step. Simulation in
    float32 or wider.

    Args:
      setting: With scheme `absmax` and one scale for a tensor of inputs, such as `INT8_MODERATE` and `INT8_COARSE`.
      calibration: From `calibrate`, of the same model.
      include: As of `quantized_linear`.

    Raises:
      UserError: For a setting that has no static scales, or from the layer for a path that was not calibrated.
    """
    if (setting.scheme, setting.inputs, setting.float_features) != ("absmax", "tensor", 0):
        raise UserError(f"static scales for {setting}", allowed="scheme='absmax', inputs='tensor', float_features=0")

    def on(peaks: Mapping[str, jax.Array]) -> Rounding:
        def rounded(x: jax.Array, path: str) -> jax.Array:
            if path not in peaks:
                raise UserError(f"no scale of {path}", allowed="the calibration of the same model")
            return _on_scale(x, peaks[path], setting.input_bits)

        return rounded

    return _rounding(setting, include, on(calibration.inputs), on(calibration.outputs))


def _on_scale(x: jax.Array, peak: jax.Array, bits: int) -> jax.Array:
    """Rounds and cuts x to multiples of peak / largest integer; returns x itself if the peak is 0."""
    largest = 2 ** (bits - 1) - 1
    step = jnp.where(peak > 0, peak, 1.0).astype(x.dtype) / largest
    return jnp.where(peak > 0, jnp.clip(jnp.round(x / step), -largest, largest) * step, x)
