"""Which keys hold the attention of late queries: the first, one of the first ten, any other position, or a token.

Late queries are those of the second half of a sequence, which see every key of the first half. Equal weights would give
a position 1 / (t + 1) of query t, and a token as much as its occurrences.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.data.bigram_backcopy import BigramBackcopy
from orthojax.experiments.measures import Measure, Measured, by_layer
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
    """Where one layer attends, mean over heads and late queries of a kind.

    Args:
      weights: [B, N, T, T], T at least 20.
      value_norms: ||W_o v||, [B, N, T].
      tokens: int [B, T].
      trigger: Whether an id is a trigger, bool [V].
      is_trigger: Whether the token at a position is one, bool [B, T]; after a delimiter none is.
      delimiter: Its id, where there is one.

    Returns:
      Scalars. `first_key`, `first_ten` (mass on keys 0 to 9), `largest_position` of the first half and `at_position`,
      `trigger_keys` (mass on triggers) and `trigger_keys_equal` (what equal weights give), and where there is a
      delimiter `delimiter_key`, of non-trigger queries, and `delimiter_key_triggers` of queries whose token is a
      trigger elsewhere; `largest_token`, the mass on the token that has most above its `largest_token_equal`, its id
      `at_token`, and `token_value_ratio`, the value norm of its keys over that of all; `active_first_key` and
      `active_trigger_keys` of trigger queries.
    """
    T, V = tokens.shape[1], len(trigger)
    late, half = jnp.arange(T) >= T // 2, T // 2
    mean_weights = jnp.mean(weights, axis=1)
    one_hot = jax.nn.one_hot(tokens, V, dtype=weights.dtype)

    def mean(values: jax.Array, queries: jax.Array) -> jax.Array:
        where = queries & late[None]
        return jnp.einsum("btx,bt->x", values, where.astype(values.dtype)) / jnp.sum(where)

    position = mean(mean_weights[..., :half], ~is_trigger)
    by_token = jnp.einsum("bts,bsv->btv", mean_weights, one_hot)
    token = mean(by_token, ~is_trigger)
    seen = jnp.cumsum(one_hot, axis=1) / (1 + jnp.arange(T, dtype=weights.dtype))[None, :, None]
    equal = mean(seen, ~is_trigger)
    most = jnp.argmax(token - equal)
    norms = jnp.mean(value_norms, axis=1)
    is_most = tokens == most
    of_delimiter = {}
    if delimiter is not None:
        at_triggers = mean(by_token[..., delimiter, None], trigger[tokens])[0]
        of_delimiter = {"delimiter_key": token[delimiter], "delimiter_key_triggers": at_triggers}
    return of_delimiter | {
        "first_key": position[0],
        "first_ten": jnp.sum(position[:10]),
        "largest_position": jnp.max(position),
        "at_position": jnp.argmax(position),
        "largest_token": token[most],
        "largest_token_equal": equal[most],
        "at_token": most,
        "token_value_ratio": jnp.mean(norms, where=is_most) / jnp.mean(norms),
        "trigger_keys": jnp.sum(token, where=trigger),
        "trigger_keys_equal": jnp.sum(equal, where=trigger),
        "active_first_key": mean(mean_weights[..., :1], is_trigger)[0],
        "active_trigger_keys": jnp.sum(mean(by_token, is_trigger), where=trigger),
    }


@functools.lru_cache(maxsize=8)
def _observing(task: BigramBackcopy) -> Callable[..., dict[str, jax.Array]]:
    trigger = np.isin(np.arange(task.vocab_size), task.triggers)

    def observe(taps: Taps, tokens: jax.Array) -> dict[str, jax.Array]:
        is_trigger = task.is_trigger(tokens)
        return key_mass(
            taps.attention_weights, taps.value_norms, tokens, jnp.asarray(trigger), is_trigger, task.delimiter_id
        )

    return observe


def _measure(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    assert inputs.task is not None
    tokens = inputs.evaluation[:, :-1]
    seen = analysis.measure(loaded, [(tokens, tokens)], _observing(inputs.task))
    on_progress("keys")
    metrics: dict[str, float] = {}
    for name, layers in seen.items():
        metrics |= by_layer(name, np.asarray(layers))
    return Measured(metrics, {})


KEY_MASS = Measure("keys", _measure)
