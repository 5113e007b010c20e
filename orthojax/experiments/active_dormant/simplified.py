r"""The simplified models of Active-Dormant Attention Heads (arXiv 2410.13835): one layer, and the middle one of three.

Attention is written with the parameters that matter on Bigram-Backcopy and no others. Token v is the one-hot
:math:`e_v`, its value :math:`\xi_v e_v`, the value of <s> a vector :math:`\beta`. A query of token v has one free
logit: :math:`\alpha_v` on <s> if v is no trigger, :math:`\lambda_v` on the token before it if it is one; all
other visible keys have the logit 0. With :math:`n_i` the sum of :math:`\xi_{x_j} e_{x_j}` over :math:`1 \le j \le i`,

.. math::
  o_i = \frac{e^{\alpha_v} \beta + n_i}{e^{\alpha_v} + i} \text{ (no trigger)}, \qquad
  o_i = \frac{\beta + n_i + (e^{\lambda_v} - 1) \xi_{x_{i-1}} e_{x_{i-1}}}{e^{\lambda_v} + i} \text{ (trigger)}

and the logits are :math:`o_i + W_2^T \mathrm{relu}(W_1^T e_v)`: nothing is added from the residual stream, nothing is
normalised. Legend: B batch, T positions, V vocabulary, H hidden units. Parameters are dicts of arrays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HIDDEN = 128
LAYER_NORM_EPS = 1e-5

Params = dict[str, Any]


class Attended(NamedTuple):
    """Output and weights of the simplified attention.

    Attributes:
      output: [B, T, V].
      bos_weight: The weight on <s>, [B, T].
    """

    output: jax.Array
    bos_weight: jax.Array


def init(key: jax.Array, vocab_size: int, dtype: Any = jnp.float32) -> Params:
    """Draws parameters of the one-layer model: logits and values N(0, 1), matrices uniform by fan-in, as published.

    Args:
      key: Random key.
      vocab_size: V.
      dtype: Of all of them.

    Returns:
      `sink_logit`, `previous_logit`, `value` and `bos_value` [V], `bos_output` [V, V], `mlp_in` [V, H] and `mlp_out`
      [H, V]. The value of <s> is `bos_value @ bos_output`.
    """
    keys = iter(jax.random.split(key, 7))
    names = ("sink_logit", "previous_logit", "value", "bos_value")
    params = {name: jax.random.normal(next(keys), (vocab_size,), dtype) for name in names}
    shapes = {
        "bos_output": (vocab_size, vocab_size),
        "mlp_in": (vocab_size, HIDDEN),
        "mlp_out": (HIDDEN, vocab_size),
    }
    return params | {name: _uniform(next(keys), shape, dtype) for name, shape in shapes.items()}


def _uniform(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    limit = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -limit, limit)


def bos_value(params: Params) -> jax.Array:
    """Computes the value of <s> after the output projection, beta [V]."""
    return params["bos_value"] @ params["bos_output"]


def attend(
    sink_logit: jax.Array,
    previous_logit: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    tokens: jax.Array,
    trigger: jax.Array,
) -> Attended:
    """Computes the simplified attention.

    Args:
      sink_logit: alpha, [V].
      previous_logit: lambda, [V].
      value: xi, [V].
      beta: Value of <s>, [V].
      tokens: int [B, T], <s> first.
      trigger: Whether an id is a trigger, bool [V].
    """
    length = tokens.shape[1]
    one_hot = jax.nn.one_hot(tokens, len(value), dtype=value.dtype)
    counts = jnp.einsum("ts,bsv->btv", jnp.tri(length, dtype=value.dtype), one_hot.at[:, 0].set(0.0))
    is_trigger = trigger[tokens]
    own = jnp.where(is_trigger, previous_logit[tokens], sink_logit[tokens])
    own = own.at[:, 0].set(0.0)  # <s> sees itself alone, whatever its logit
    top = jnp.maximum(own, 0.0)  # all weights are times exp(-top), so that none overflows
    free, other = jnp.exp(own - top), jnp.exp(-top)
    on_bos = jnp.where(is_trigger, other, free)
    more_on_previous = jnp.where(is_trigger, free - other, 0.0)
    total = on_bos + other * jnp.arange(length)[None] + more_on_previous
    on_previous = more_on_previous * value[jnp.roll(tokens, 1, axis=1)]
    output = on_bos[..., None] * beta[None, None] + other[..., None] * counts * value[None, None]
    output += on_previous[..., None] * jnp.roll(one_hot, 1, axis=1)
    return Attended(output / total[..., None], on_bos / total)


def mlp_table(params: Params) -> jax.Array:
    """Computes what the MLP adds to the logits after each token, [V, V]; it sees the token alone."""
    return jax.nn.relu(params["mlp_in"]) @ params["mlp_out"]


def apply(params: Params, tokens: jax.Array, trigger: jax.Array) -> tuple[jax.Array, Attended]:
    """Computes the one-layer model.

    Args:
      params: Of `init`.
      tokens: int [B, T], <s> first.
      trigger: Whether an id is a trigger, bool [V].

    Returns:
      (logits [B, T, V], its attention).
    """
    attended = attend(
        params["sink_logit"], params["previous_logit"], params["value"], bos_value(params), tokens, trigger
    )
    return attended.output + mlp_table(params)[tokens], attended


# Three layers: a minimal layer below and one above, which act on the residual stream of <s> alone.


def init_three_layers(key: jax.Array, vocab_size: int) -> Params:
    """Draws parameters of the three-layer model.

    Returns:
      `below` and `above`: `value` and `output` [V, V], `mlp_in` [V, H], `mlp_out` [H, V]; `copy`: those of `init`;
      `readout` [V, V]; `direction` [V], N(0, 1) / V, which stays as it is.
    """
    below, above, copy, readout, direction = jax.random.split(key, 5)

    def minimal(key: jax.Array) -> Params:
        shapes = {"value": (vocab_size, vocab_size), "output": (vocab_size, vocab_size)}
        shapes |= {"mlp_in": (vocab_size, HIDDEN), "mlp_out": (HIDDEN, vocab_size)}
        keys = jax.random.split(key, len(shapes))
        return {name: _uniform(k, shape, jnp.float32) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    return {
        "below": minimal(below),
        "copy": init(copy, vocab_size),
        "above": minimal(above),
        "readout": _uniform(readout, (vocab_size, vocab_size), jnp.float32),
        "direction": jax.random.normal(direction, (vocab_size,), jnp.float32) / vocab_size,
    }


def layer_norm(x: jax.Array) -> jax.Array:
    """Computes LayerNorm of one vector without gain and bias."""
    centred = x - jnp.mean(x)
    return centred / jnp.sqrt(jnp.mean(jnp.square(centred)) + LAYER_NORM_EPS)


def minimal_layer(params: Params, residual: jax.Array) -> jax.Array:
    r"""Computes a layer at <s>, which sees only itself: :math:`r + a + \mathrm{MLP}(LN(r + a))`, :math:`a = W LN(r)`.

    Args:
      params: Of one minimal layer.
      residual: r, [V].
    """
    residual = residual + layer_norm(residual) @ params["value"] @ params["output"]
    return residual + jax.nn.relu(layer_norm(residual) @ params["mlp_in"]) @ params["mlp_out"]


def apply_three_layers(
    params: Params, tokens: jax.Array, trigger: jax.Array
) -> tuple[jax.Array, Attended, tuple[jax.Array, jax.Array, jax.Array]]:
    r"""Computes the three-layer model: a minimal layer, the layer of the one-layer model, a minimal layer.

    Every logit on <s> is :math:`\alpha_v \langle LN(h), d \rangle` with h the residual stream of <s> after the first
    layer and d the fixed `direction`; so the first layer serves attention only by turning h towards d. The token after
    <s> is predicted from the residual stream after the third layer, by a linear read-out after LayerNorm; all other
    positions as in the one-layer model.

    Returns:
      (logits [B, T, V], attention of the middle layer, residual streams of <s> after each layer, [V] each).
    """
    copy, bos = params["copy"], tokens[0, 0]
    after_first = minimal_layer(params["below"], jax.nn.one_hot(bos, len(trigger), dtype=copy["value"].dtype))
    key = layer_norm(after_first) @ jax.lax.stop_gradient(params["direction"])
    logits, attended = apply(copy | {"sink_logit": copy["sink_logit"] * key}, tokens, trigger)
    after_second = after_first + logits[0, 0]
    after_third = minimal_layer(params["above"], after_second)
    logits = logits.at[:, 0].set(layer_norm(after_third) @ params["readout"])
    return logits, attended, (after_first, after_second, after_third)
