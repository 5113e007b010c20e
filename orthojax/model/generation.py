"""Text written token by token, and the loss on long texts, through a rolling cache.

Letters: B batch, T tokens of the prompt, V vocabulary.
"""

import math
import numbers
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from orthojax.errors import UserError
from orthojax.model.cache import KVCache, init_cache
from orthojax.model.loaded import LoadedModel
from orthojax.model.transformer import Transformer
from orthojax.ops.statistics import real_array

_SIZES = 64  # caches have a multiple of this many slots, so that prompts of similar lengths share a program


def generate(
    loaded: LoadedModel, prompt_ids: ArrayLike | Sequence[Sequence[int]], steps: int, **options: Any
) -> np.ndarray:
    """Generates tokens after a prompt, as `stream` does with the same arguments: int32 [steps] or [B, steps].

    Prompts of different lengths, a list of lists or of arrays, are continued in one batch: all rows begin at position
    0, and those with a longer prompt keep reading while others generate. Each row gets what it would get by itself, up
    to rounding.
    """
    given: Any = prompt_ids
    if not isinstance(given, list | tuple) or len({np.shape(row) for row in given}) < 2:
        return np.stack(list(stream(loaded, given, steps, **options)), -1)
    if any(np.ndim(row) != 1 for row in given):
        raise UserError(
            f"prompts of shapes {[np.shape(row) for row in given]}"[:200], allowed="[T] each, or one [B, T]"
        )
    rows = [_token_ids(loaded, row)[0] for row in given]
    sizes = np.array([len(row) for row in rows])
    padded = np.zeros((len(rows), max(sizes)), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    options = {"temperature": 0.0, "top_p": 1.0, "seed": 0, "window": None, "sinks": 0} | options
    check_options(steps, **options)
    _require_whole_prefix(loaded, min(sizes))
    window, sinks = options.pop("window"), options.pop("sinks")
    cache = _cache(loaded, len(rows), max(sizes), max(sizes) + steps - 1, window, sinks)
    columns = np.stack(list(_written(loaded, jnp.asarray(padded), cache, steps, **options, lengths=sizes)), -1)
    first = sizes - min(sizes)
    return np.stack([row[at : at + steps] for row, at in zip(columns, first, strict=True)])


def stream(
    loaded: LoadedModel,
    prompt_ids: ArrayLike,
    steps: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    window: int | None = None,
    sinks: int = 0,
) -> Iterator[np.ndarray]:
    """Generates tokens after a prompt, one by one; arguments are checked before the first token is requested.

    Args:
      loaded: The model.
      prompt_ids: int [T] or [B, T]; rows do not influence each other.
      steps: How many tokens.
      temperature: Divides the logits; 0 takes the largest one (the first of several).
      top_p: Draws from the fewest most probable tokens that together have this probability, in (0, 1] (nucleus
        sampling, arXiv 1904.09751).
      seed: Seed of the draws: token t of row b depends only on (seed, b, t) and the row.
      window: How many of the latest tokens the model sees; None means all. Positions then count only the tokens that
        are left (StreamingLLM, arXiv 2309.17453).
      sinks: How many of the first tokens it sees as well.

    Returns:
      An iterator of int32 [] or [B].

    Raises:
      ValueError: For tokens that the model does not have, other values outside their ranges, more tokens than learned
        positions, or fewer than `relaxed_causal_tokens`.
    """
    check_options(steps, temperature, top_p, seed, window, sinks)
    prompt = _token_ids(loaded, prompt_ids)
    length = prompt.shape[1]
    _require_whole_prefix(loaded, length)
    cache = _cache(loaded, len(prompt), length, length + steps - 1, window, sinks)
    tokens = _written(loaded, jnp.asarray(prompt), cache, steps, temperature, top_p, seed)
    return (np.asarray(column if np.ndim(prompt_ids) > 1 else column[0]) for column in tokens)


def _require_whole_prefix(loaded: LoadedModel, length: int) -> None:
    relaxed = loaded.model.config.relaxed_causal_tokens
    if relaxed > 1 and length < relaxed:
        raise UserError(
            f"a prompt of {length} tokens for a model whose first {relaxed} tokens see each other",
            allowed=f"a prompt of at least {relaxed} tokens: it has not learned to predict those",
        )


_LEAST_TEMPERATURE = 1e-6  # logits over less may not be finite


def check_options(
    steps: int, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, window: int | None = None, sinks: int = 0
) -> None:
    """Refuses values that no model allows; arguments are as for `stream`."""
    for name, number in {"steps": steps, "temperature": temperature, "top_p": top_p, "seed": seed}.items():
        whole = name in ("steps", "seed")
        if np.ndim(real_array(number, name)) or (whole and not isinstance(number, numbers.Integral)):
            raise UserError(f"{name}={number!r}", allowed="an integer" if whole else "a number")
    warm = f"{_LEAST_TEMPERATURE:g} or more and finite; or 0, which takes the most probable token"
    is_warm = temperature == 0 or _LEAST_TEMPERATURE <= temperature < math.inf
    for name, value, allowed, is_allowed in (
        ("steps", steps, "at least 1", steps >= 1),
        ("temperature", temperature, warm, is_warm),
        ("top_p", top_p, "above 0, 1 at most", 0 < top_p <= 1),
        ("seed", seed, "0 to 2**32 - 1", 0 <= seed < 2**32),
        ("window", window, "at least 1", window is None or window >= 1),
        ("sinks", sinks, "0 or more, with a window", sinks == 0 or (sinks > 0 and window is not None)),
    ):
        if not is_allowed:
            raise UserError(f"{name}={value}", allowed=allowed)


def stream_loss_nats(loaded: LoadedModel, tokens: ArrayLike, window: int | None = None, sinks: int = 0) -> np.ndarray:
    """Computes the negative log likelihood of each token of a long text, read one by one through a rolling cache.

    The predictions of softmax models fail as soon as the first tokens leave the window, and hold with some of them as
    sinks: StreamingLLM, arXiv 2309.17453, Table 1. Tokens are int [T + 1] or [B, T + 1]; the first is only read;
    `window` and `sinks` are those of `stream`.

    Returns:
      float32 [T] or [B, T], in nats.

    Raises:
      ValueError: As for `stream`; also for a model whose first tokens see each other, and so the tokens that they
        predict.
    """
    check_options(1, window=window, sinks=sinks)
    ids = _token_ids(loaded, tokens, fewest=2)
    if loaded.model.config.relaxed_causal_tokens > 1:
        raise UserError("a model with relaxed_causal_tokens reads no text token by token", allowed="a causal mask")
    cache = _cache(loaded, len(ids), 1, ids.shape[1] - 1, window, sinks)
    losses = np.asarray(_losses(loaded.model, loaded.params, jnp.asarray(ids), cache))
    return losses if np.ndim(tokens) > 1 else losses[0]


def sampling_logits(logits: jax.Array, temperature: jax.Array | float, top_p: jax.Array | float) -> jax.Array:
    """Computes logits [..., V] of the distribution that tokens are drawn from: -inf outside the nucleus.

    Among equally probable tokens, lower ids come first.
    """
    logits = logits / temperature
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probability = jnp.take_along_axis(jax.nn.softmax(logits, -1), order, -1)
    before = jnp.cumsum(probability, -1) - probability
    # The first is always kept: before it there is nothing, and top_p is positive.
    kept = jnp.take_along_axis(before < top_p, jnp.argsort(order, axis=-1), -1)
    return jnp.where(kept, logits, -jnp.inf)


def _token_ids(loaded: LoadedModel, ids: ArrayLike, fewest: int = 1) -> np.ndarray:
    array, vocabulary = np.asarray(ids), loaded.model.config.vocab_size
    if array.ndim not in (1, 2) or array.shape[-1] < fewest or not len(array):
        raise UserError(f"token ids have shape {array.shape}", allowed=f"[T] or [B, T], at least {fewest} in a row")
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"token ids are {array.dtype}", allowed="integers")
    if array.min() < 0 or array.max() >= vocabulary:
        wrong = array.min() if array.min() < 0 else array.max()
        raise UserError(f"the model has no token {wrong}", allowed=f"ids of 0 to {vocabulary - 1}")
    return np.atleast_2d(array).astype(np.int32)


def _cache(loaded: LoadedModel, batch: int, prompt: int, total: int, window: int | None, sinks: int) -> KVCache:
    """Makes an empty cache for a text of `total` tokens that starts with a prompt."""
    c = loaded.model.config
    if window is not None:
        return init_cache(c, batch, window + sinks, sinks=sinks)
    size = -(-total // _SIZES) * _SIZES
    if c.position == "learned":
        if total > c.max_length:
            what = (
                f"a prompt of {prompt} tokens and what follows are {total} positions"
                if prompt > 1
                else f"a text of {total} positions"
            )
            fewer = f"{c.max_length - prompt} more tokens or fewer, or " if prompt < c.max_length else ""
            allowed = f"{fewer}a window of {c.max_length}, which keeps the latest tokens"
            raise UserError(f"{what}, and the model has {c.max_length}", allowed=allowed)
        size = min(size, c.max_length)
    return init_cache(c, batch, size)


def _written(
    loaded: LoadedModel,
    prompt: jax.Array,
    cache: KVCache,
    steps: int,
    temperature: float,
    top_p: float,
    seed: int,
    lengths: np.ndarray | None = None,
) -> Iterator[jax.Array]:
    """Yields the columns [B] after the shortest prompt; `lengths` are those of prompts that only partly fill rows."""
    model, params = loaded.model, loaded.params
    lengths = np.full(len(prompt), prompt.shape[1]) if lengths is None else lengths
    shortest, last = int(min(lengths)), int(max(lengths)) + steps
    cache = _read(model, params, prompt[:, :shortest], cache)
    # The last token is read once more, for its logits: those of a whole prompt would take more memory than the model.
    cache = cache._replace(length=cache.length - 1)
    key, token = jax.random.key(seed), prompt[:, shortest - 1]
    boundary, text = _boundary(model), [prompt[:, :shortest]]
    for place in range(shortest, last):
        if boundary is not None and place - 1 == boundary and shortest <= boundary < cache.size:
            cache = _read(model, params, jnp.concatenate(text, 1), cache._replace(length=jnp.int32(0)))
            cache = cache._replace(length=cache.length - 1)
        logits, cache = _step(model, params, token, cache)
        if temperature == 0.0:
            token = jnp.argmax(logits, -1).astype(jnp.int32)
        else:
            own_steps = jnp.asarray(np.maximum(place - lengths, 0))
            token = _draw(logits, key, own_steps, temperature, top_p, cut=top_p < 1)
        if place < max(lengths):  # of rows that still read
            token = jnp.where(place < lengths, prompt[:, place], token)
        if boundary is not None:
            text.append(token[:, None])
        yield token


def _boundary(model: Transformer) -> int | None:
    """Returns the position from which on the whole text has longrope's other frequencies; None without longrope.

    What the cache holds then belongs to a shorter text, and the text is read once more, as transformers does for Phi-3.
    """
    ropes = [rope for _, rope in map(model.config.layer_rope, range(model.config.num_layers)) if rope is not None]
    return next((rope.original_length for rope in ropes if rope.scaling == "longrope"), None)


def _apply(model: Transformer, params: Any, tokens: jax.Array, cache: KVCache, *, head: bool = True) -> Any:
    return model.apply({"params": params}, tokens, cache=cache, head=head)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _step(model: Transformer, params: Any, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """Maps tokens [B] to logits [B, V] of the next ones."""
    logits, cache = _apply(model, params, tokens[:, None], cache)
    return logits[:, 0], cache


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _read(model: Transformer, params: Any, tokens: jax.Array, cache: KVCache) -> KVCache:
    """Reads tokens [B, T] into a cache: as many at once as it has slots, the others one by one."""
    _, cache = _apply(model, params, tokens[:, : cache.size], cache, head=False)

    def read(cache: KVCache, token: jax.Array) -> tuple[KVCache, None]:
        return _apply(model, params, token[:, None], cache, head=False)[1], None

    rest = tokens[:, cache.size :].T
    return jax.lax.scan(read, cache, rest)[0] if len(rest) else cache


@partial(jax.jit, static_argnames="cut")
def _draw(
    logits: jax.Array, key: jax.Array, steps: jax.Array, temperature: float, top_p: float, *, cut: bool
) -> jax.Array:
    """Draws one token for each row of logits [B, V], with a separate key for its step in `steps` [B]."""
    logits = sampling_logits(logits, temperature, top_p) if cut else logits / temperature
    keys = jax.vmap(partial(jax.random.fold_in, key))(steps)
    keys = jax.vmap(jax.random.fold_in)(keys, jnp.arange(len(logits)))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


@partial(jax.jit, static_argnums=0)
def _losses(model: Transformer, params: Any, tokens: jax.Array, cache: KVCache) -> jax.Array:
    """Maps tokens [B, T + 1] to losses [B, T]."""

    def read(cache: KVCache, pair: tuple[jax.Array, jax.Array]) -> tuple[KVCache, jax.Array]:
        token, target = pair
        logits, cache = _apply(model, params, token[:, None], cache)
        log_probabilities = jax.nn.log_softmax(logits[:, 0])
        return cache, -jnp.take_along_axis(log_probabilities, target[:, None], -1)[:, 0]

    return jax.lax.scan(read, cache, (tokens[:, :-1].T, tokens[:, 1:].T))[1].T
