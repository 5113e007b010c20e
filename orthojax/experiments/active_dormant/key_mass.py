"""A measure of the keys that hold the attention of late queries: the first one, a token, all triggers.

Late queries are those of the second half of a sequence, which see every key of the first half.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.data.bigram_backcopy import BigramBackcopy
from orthojax.experiments.measures import Measure, Measured, Say, by_layer
from orthojax.model import LoadedModel, Taps
from orthojax.train import Inputs


def key_mass(
    weights: jax.Array,
    value_norms: jax.Array,
    tokens: jax.Array,
    trigger: jax.Array,
    is_trigger: jax.Array,
    delimiter: int | None = None,
) -> dict[str, jax.Array]:
    """Computes where one layer attends, mean over heads and late queries of a kind.

    Args:
      weights: [B, N, T, T].
      value_norms: ||W_o v||, [B, N, T].
      tokens: int [B, T].
      trigger: Whether an id is a trigger, bool [V].
      is_trigger: Whether the token at a position is one, bool [B, T]; after a delimiter none is.
      delimiter: Its id, if there is one.

    Returns:
      Scalars of non-trigger queries: `first_key`; `trigger_keys`, the mass on triggers; `largest_token`, the mass on the
      token that has most above its `largest_token_equal`, what equal weights would give it by its occurrences;
      `token_value_ratio`, the value norm of that token's keys over that of all; with a delimiter `delimiter_key`. Of
      trigger queries `active_first_key` and `active_trigger_keys`, and with a delimiter `delimiter_key_triggers` of
      queries whose token is a trigger elsewhere.
    """
    T, V = tokens.shape[1], len(trigger)
    late = jnp.arange(T) >= T // 2
    mean_weights = jnp.mean(weights, axis=1)
    one_hot = jax.nn.one_hot(tokens, V, dtype=weights.dtype)

    def mean(values: jax.Array, queries: jax.Array) -> jax.Array:
        where = queries & late[None]
        return jnp.einsum("btx,bt->x", values, where.astype(values.dtype)) / jnp.sum(where)

    by_token = jnp.einsum("bts,bsv->btv", mean_weights, one_hot)
    token = mean(by_token, ~is_trigger)
    seen = jnp.cumsum(one_hot, axis=1) / (1 + jnp.arange(T, dtype=weights.dtype))[None, :, None]
    equal = mean(seen, ~is_trigger)
    most = jnp.argmax(token - equal)
    norms = jnp.mean(value_norms, axis=1)
    of_delimiter = {}
    if delimiter is not None:
        at_triggers = mean(by_token[..., delimiter, None], trigger[tokens])[0]
        of_delimiter = {"delimiter_key": token[delimiter], "delimiter_key_triggers": at_triggers}
    return of_delimiter | {
        "first_key": mean(mean_weights[..., :1], ~is_trigger)[0],
        "largest_token": token[most],
        "largest_token_equal": equal[most],
        "token_value_ratio": jnp.mean(norms, where=tokens == most) / jnp.mean(norms),
        "trigger_keys": jnp.sum(token, where=trigger),
        "active_first_key": mean(mean_weights[..., :1], is_trigger)[0],
        "active_trigger_keys": jnp.sum(mean(by_token, is_trigger), where=trigger),
    }


def trigger_ids(task: BigramBackcopy) -> np.ndarray:
    """Returns whether an id is a trigger, bool [V]."""
    return np.isin(np.arange(task.vocab_size), task.triggers)


@functools.lru_cache(maxsize=8)
def _observing(task: BigramBackcopy) -> Callable[..., dict[str, jax.Array]]:
    def observe(taps: Taps, tokens: jax.Array) -> dict[str, jax.Array]:
        of, is_trigger = jnp.asarray(trigger_ids(task)), task.is_trigger(tokens)
        return key_mass(taps.attention_weights, taps.value_norms, tokens, of, is_trigger, task.delimiter_id)

    return observe


def _measure(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    assert inputs.task is not None
    tokens = inputs.evaluation[:, :-1]
    seen = analysis.measure(loaded, [(tokens, tokens)], _observing(inputs.task))
    say("keys")
    metrics: dict[str, float] = {}
    for name, layers in seen.items():
        metrics |= by_layer(name, np.asarray(layers))
    return Measured(metrics)


KEY_MASS = Measure("keys", _measure)
