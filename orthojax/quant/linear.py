"""Post-training quantisation, simulated in floats: linear layers, and trees of parameters for them.

Linear layers are rounded, and in a `rounded_model` keys and values if the setting says so; embeddings, norms and
softmax stay float, and by default so does the output head. `quantized_linear(setting, include="")` rounds the head as
well: an untied kernel, and tied embeddings in a `Transformer(linear_head=True)`, whose token table is then the kernel
of the head; for the lookup it stays float.

Activation scales are dynamic: they come from the current batch, so the result of an evaluation depends on its batches.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.errors import UserError
from orthojax.ops.products import is_head
from orthojax.ops.quantize import FORMATS, Axes, zeropoint
from orthojax.ops.statistics import at_least_float32
from orthojax.quant.settings import ALL_BUT_HEAD, QuantizationSetting, compile_pattern, map_kernels

if TYPE_CHECKING:
    from orthojax.config import ModelConfig
    from orthojax.model import LinearFunction, Transformer
    from orthojax.model.cache import KVCache


def _fake_quantize(x: jax.Array, setting: QuantizationSetting, bits: int, axes: Axes) -> jax.Array:
    slices: Any = FORMATS[setting.scheme].slices
    return slices(x, bits, axes)


def _in_blocks(x: jax.Array, setting: QuantizationSetting, axes: tuple[int, ...]) -> jax.Array:
    blocks: Any = FORMATS[setting.scheme].blocks
    return blocks(x, axes)


def _fake_quantize_activations(x: jax.Array, setting: QuantizationSetting, scales: str) -> jax.Array:
    """Rounds inputs or outputs [..., features] with one scale for each feature, for each token, or for all."""
    axes: dict[str, Axes] = {"feature": tuple(range(x.ndim - 1)), "token": -1, "tensor": None}
    return _fake_quantize(x, setting, setting.input_bits, axes[scales])


def _fake_quantize_kernel(kernel: jax.Array, setting: QuantizationSetting, path: str) -> jax.Array:
    """Rounds a kernel [..., in, out]; UserError if the size of a group does not divide `in`."""
    # Any axes before the last two stack independent kernels.
    if setting.weights == "block":
        return _in_blocks(kernel, setting, (-2, -1))
    axes = (-2, -1) if setting.weights == "tensor" else -2
    *leading, features, outputs = kernel.shape
    size = setting.group_size or features
    if features and features % size:
        problem = f"group_size={size} does not divide the {features} input features of {path}"
        raise UserError(problem, allowed=f"a divisor of {features}")
    groups = kernel.reshape(*leading, -1, size, outputs) if setting.group_size else kernel
    return _fake_quantize(groups, setting, setting.bits, axes).reshape(kernel.shape)


@functools.cache  # the same function for the same setting, so that jit compiles a model with it once
def quantized_linear(setting: QuantizationSetting, include: str = ALL_BUT_HEAD) -> "LinearFunction":
    """Makes a linear layer that rounds its operands as `setting` says, for a model whose layers can be replaced.

    Operands are rounded, multiplied and rounded again in float32 or wider; the result has the dtype of x.

    Args:
      setting: One of `orthojax.quant.SETTINGS`, or your own.
      include: Regular expression searched in the layer's path; a layer without a match computes x @ kernel + bias.

    Returns:
      `linear(x, kernel, bias, path)` with x [..., in], kernel [in, out], bias [out] or None, and a path such as
      `layers/attention/query`; it gives [..., out].

    Raises:
      UserError: If `include` is not a regular expression; from `linear`, if a group does not divide `in`.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT8_MODERATE
    >>> linear = quantized_linear(INT8_MODERATE)
    >>> x, kernel = jnp.array([[127.0, 0.4]]), jnp.array([[127.0], [1.0]])
    >>> float(linear(x, kernel, None, "mlp/input")[0, 0]), float(linear(x, kernel, None, "head")[0, 0])
    (16129.0, 16129.400390625)
    """
    from orthojax.model import linear as float_linear  # here, so that flax is not needed for `quantize_params`

    pattern = compile_pattern(include)

    def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        if pattern.search(path) is None:
            return float_linear(x, kernel, bias, path)
        a, w = at_least_float32(x), at_least_float32(kernel)
        if setting.inputs == "block":
            a = _in_blocks(a, setting, (-1,))
        elif setting.inputs is not None:
            a = _fake_quantize_activations(a, setting, setting.inputs)
        w = _fake_quantize_kernel(w, setting, path)
        y = float_linear(a, w, None if bias is None else bias.astype(a.dtype), path)
        y = y if setting.outputs is None else _fake_quantize_activations(y, setting, setting.outputs)
        return y if is_head(path) else y.astype(x.dtype)

    return linear


def rounded_model(
    config: "ModelConfig",
    setting: QuantizationSetting,
    include: str = ALL_BUT_HEAD,
    *,
    linear_head: bool = False,
    float_tokens: int = 0,
) -> "Transformer":
    """Makes a model that rounds everything in a setting: its linear layers, and keys and values.

    Args:
      config: Config of the model.
      setting: One of `orthojax.quant.SETTINGS`, or your own.
      include: As for `quantized_linear`.
      linear_head: As for `Transformer`; with `include=""`, the logits of tied embeddings are also rounded.
      float_tokens: The first positions of every row that are computed in float, as `prefix_cache` computes a prefix:
        their activations are in no scale. For whole rows, without a cache.

    >>> from orthojax.model import llama2
    >>> from orthojax.quant import INT8_COARSE, setting_named
    >>> rounded_model(llama2("tiny"), INT8_COARSE).round_kv is None
    True
    >>> rounded_model(llama2("tiny"), setting_named("w4a4kv4")).round_kv is None
    False
    """
    from orthojax.model import Transformer  # here, so that flax is not needed for `quantize_params`

    linear, round_kv = quantized_linear(setting, include), _kv_rounding(setting.keys_and_values, float_tokens)
    linear = _float_first(linear, float_tokens) if float_tokens else linear
    return Transformer(config, linear=linear, linear_head=linear_head, round_kv=round_kv)


@functools.cache  # as `quantized_linear`
def _float_first(function: "LinearFunction", tokens: int) -> "LinearFunction":
    from orthojax.model import linear as float_linear

    def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        first, rest = float_linear(x[:, :tokens], kernel, bias, path), function(x[:, tokens:], kernel, bias, path)
        return jnp.concatenate([first, rest], axis=1)

    return linear


def rounded_cache(model: "Transformer", bits: int, float_tokens: int = 0) -> "Transformer":
    """Makes a model that rounds keys and values as a cache of few bits would, and otherwise computes what `model` does.

    Args:
      model: Any model.
      bits: Width of the integers, with a smallest value and a scale for each token and head, as in
        `QuantizationSetting.keys_and_values`.
      float_tokens: The first positions whose keys and values stay float, as KVQuant (arXiv 2401.18079) keeps the first:
        those that a sink reads with most of its weight. In a rolling cache they are the first slots: give it that many
        sinks.
    """
    if not (isinstance(bits, int) and isinstance(float_tokens, int) and 2 <= bits <= 16 and float_tokens >= 0):
        raise UserError(f"bits={bits}, float_tokens={float_tokens}", allowed="integers, 2 to 16 and 0 or more")
    return model.clone(round_kv=_kv_rounding(bits, float_tokens))


@functools.cache  # the same function for the same width, as in `quantized_linear`
def _kv_rounding(bits: int | None, float_tokens: int = 0) -> Callable[[jax.Array], jax.Array] | None:
    if bits is None:
        return None
    round_all = functools.partial(zeropoint, bits=bits, axes=-1)

    def round_later(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:, :float_tokens], round_all(x[:, float_tokens:])], axis=1)

    return round_later if float_tokens else round_all


def quantize_params(params: Any, setting: QuantizationSetting, include: str) -> Any:
    """Rounds the kernels of a tree of parameters, for models whose linear layers cannot be replaced.

    Args:
      params: Any tree of arrays; kernels are [..., in, out], leading axes stack kernels.
      setting: A setting that leaves activations float.
      include: Regular expression searched in each path (keys joined by `/`); exactly its matches are rounded, so it
        must not match embeddings or norms.

    Raises:
      UserError: If the setting rounds activations, nothing matches, a match is not a matrix, or a group does not divide
        its `in`.

    >>> import jax.numpy as jnp
    >>> from orthojax.quant import INT4_ZEROPOINT
    >>> params = {"dense": {"kernel": jnp.array([[15.0], [7.4], [0.0]]), "bias": jnp.array([0.3])}}
    >>> quantize_params(params, INT4_ZEROPOINT, "kernel$")["dense"]["kernel"].ravel().tolist()
    [15.0, 7.0, 0.0]
    """
    if any(part is not None for part in (setting.inputs, setting.outputs, setting.keys_and_values)):
        raise UserError(f"{setting} rounds activations, which parameters do not have", allowed="a weights-only setting")
    return map_kernels(params, include, lambda kernel, path: _fake_quantize_kernel(jnp.asarray(kernel), setting, path))


def require_tokens(tokens: ArrayLike, vocab_size: int, what: str) -> jax.Array:
    """Returns token ids, int32; UserError for numbers that are no ids of the model, which would silently be others."""
    array = np.asarray(tokens)
    integers = np.issubdtype(array.dtype, np.integer)
    if array.size and not (integers and 0 <= array.min() <= array.max() < vocab_size):
        shown = f"{array.min()} to {array.max()}, {array.dtype}"
        raise UserError(f"{what}: token ids {shown}", allowed=f"integers 0 to {vocab_size - 1}")
    return jnp.asarray(array, jnp.int32)


def prefix_cache(model: "Transformer", params: Any, prefix: ArrayLike, batch: int, length: int) -> "KVCache":
    """Reads a prefix with a float model, so that a rounded one finds its keys and values in the cache.

    A model trained with softmax attends mostly to its first token, whose activations stand out. If a token before each
    row takes this role and is computed once in float, these activations never pass a rounded layer. PrefixQuant (arXiv
    2410.05265) finds the tokens by their outliers and IntactKV (arXiv 2403.01241) keeps the keys and values of a begin
    token; here the prefix is given, not trained.

    Args:
      model: The float model.
      params: Its parameters.
      prefix: int [P], at least one token.
      batch: Rows of the batch that follows.
      length: Maximum number of tokens of a row that follow.

    Returns:
      A cache of P + `length` slots that holds the prefix, for `rounded.apply({"params": params}, tokens, cache=cache)`
      with tokens [batch, T] and the same parameters.

    Raises:
      UserError: For an empty prefix, ids that the model does not have, or more positions than it has learned.

    >>> from orthojax.model import llama2
    >>> from orthojax.quant import INT8_COARSE, rounded_model
    >>> config = llama2("tiny")
    >>> rounded = rounded_model(config, INT8_COARSE)
    >>> params = rounded.init(jax.random.key(0), jnp.zeros((1, 4), int))["params"]
    >>> cache = prefix_cache(rounded.clone(linear=type(rounded)(config).linear), params, [0], batch=2, length=4)
    >>> logits, cache = rounded.apply({"params": params}, jnp.ones((2, 4), int), cache=cache)
    >>> logits.shape[:2], int(cache.length)
    ((2, 4), 5)
    """
    from orthojax.model.cache import init_cache  # here, so that flax is not needed for `quantize_params`

    tokens = require_tokens(prefix, model.config.vocab_size, "prefix")
    if tokens.ndim != 1 or not tokens.size:
        raise UserError(f"a prefix of shape {tokens.shape}", allowed="one row of one token or more")
    cache = init_cache(model.config, batch, tokens.size + length)
    rows = jnp.broadcast_to(tokens, (batch, tokens.size))
    read = jax.jit(lambda params, rows, cache: model.apply({"params": params}, rows, cache=cache, head=False)[1])
    return read(params, rows, cache)
