"""Float keys and values of massive tokens, before rows that are rounded."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.errors import UserError

if TYPE_CHECKING:
    from orthojax.model import Transformer
    from orthojax.model.cache import KVCache


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
