"""Inside a forward pass: `Taps` show the intermediates of a block, `Interventions` change them by layer and head.

Letters: L layers, B batch, T query positions, S key positions (T without a cache), N query heads, K key-value heads,
H head width, V width of a head's values, D d_model, F hidden units of an MLP.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from orthojax.config import ModelConfig
from orthojax.errors import UserError
from orthojax.ops.statistics import real_array


class Taps(NamedTuple):
    """The intermediates of one block. An `observe` function reduces them; what it does not read is never computed."""

    attention_logits: jax.Array  # [B, N, T, S] float32, scaled and capped, before bias and mask
    attention_weights: jax.Array  # [B, N, T, S] float32
    visible: jax.Array  # [1 or B, 1, T, S] bool: which keys each query sees; none in a layer without attention
    queries: jax.Array  # [B, T, N, H], rotated if positions are
    keys: jax.Array  # [B, S, K, H], as queries
    values: jax.Array  # [B, S, K, V]
    head_outputs: jax.Array  # [B, T, N, V]: sum_j A_ij v_j, gated if heads are, before W_o
    value_norms: jax.Array  # [B, N, S] float32: ||W_o^h v_j||_2, the value as head h writes it to the residual stream
    head_norms: jax.Array  # [B, N, T] float32: ||W_o^h sum_j A_ij v_j||_2, what head h writes, before `attention_scale`
    residual_before: jax.Array  # [B, T, D] residual stream that the block gets
    attention_output: jax.Array  # [B, T, D]
    mlp_output: jax.Array  # [B, T, D]
    post_attention: jax.Array  # [B, T, D] residual stream after attention
    residual: jax.Array  # [B, T, D] residual stream after the block: the paper's hidden state


Observe = Callable[[Taps], Any]


class Interventions(NamedTuple):
    """Changes to a forward pass, an argument of `Transformer` and of `analysis.measure`. None changes nothing.

    Arrays rather than hooks: they are traced, so one compiled program serves every layer and head, and gradients pass
    through them. Each axis except the layers' may have length 1, which then stands for all. Taps show the activations
    after the intervention. A share s in [0, 1] replaces x by (1 - s) x + s y.

    Attributes:
      head_scale: [L, N]. Factor of each head's output; 0 acts as if the head's rows of the output kernel were removed.
      attention_scale: [L]. Factor of what attention adds to the residual stream, bias included.
      mlp_scale: [L]. Factor of what the MLP adds to the residual stream, bias included.
      mlp_unit_scale: [L, F]. Factor of each hidden unit of the MLPs, which must not be linear or of experts.
      first_value_scale: [L, K]. Factor of the value vectors of position 0.
      first_attention_scale: [L]. Factor of what attention adds at position 0.
      first_mlp_scale: [L]. Factor of what the MLP adds at position 0.
      attention_bias: Added to the scaled logits before the normalizer; a large negative number hides a key: [T, S] or
        [B, T, S] for all layers and heads, or [L, B, N, T, S]. `Taps.attention_weights` include it; `attention_logits`
        come before it and before the mask, so means over keys stay meaningful. Kernels that add no bias (cuDNN's adds
        one, splash none) give way to plain XLA, or refuse if named; so do all kernels if the model caps its logits,
        since the cap must not apply to the bias.
      forced_weights: Attention weights to use instead of the model's: [T, S] or [B, T, S] for all layers and heads, or
        [L, B, N, T, S], like `Taps.attention_weights` of another run. They are neither masked nor normalised.
        `attention_pattern` makes some.
      forced_share: [L, N] or, by query, [L, N, T]. Share with which forced weights replace the model's, which costs the
        whole matrix of weights; all other fields except `attention_bias` keep fused attention kernels in use.
      queries: [L, B, T, N, H]. Replaces queries, as `Taps.queries` of another run.
      queries_share: [L, N] or [L, N, T]. Share of that replacement.
      keys: [L, B, T, K, H]. Replaces keys, as `Taps.keys`.
      keys_share: [L, K] or [L, K, T]. Share of that replacement.
      values: [L, B, T, K, V]. Replaces values, as `Taps.values`.
      values_share: [L, K] or [L, K, T]. Share of that replacement.
      head_outputs: [L, B, T, N, V]. Replaces what heads have read, as `Taps.head_outputs`, after `head_scale`.
      head_outputs_share: [L, N] or [L, N, T]. Share of that replacement.
      attention_output: [L, B, T, D]. Replaces what attention adds to the residual stream, after all scales.
      attention_output_share: [L], [L, T] or [L, B, T]. Share of that replacement.
      mlp_output: [L, B, T, D]. Replaces what the MLP adds, after all scales.
      mlp_output_share: [L], [L, T] or [L, B, T]. Share of that replacement.
      residual: [L, B, T, D]. Replaces the residual stream after a block.
      residual_share: [L], [L, T] or [L, B, T]. Share of that replacement.

    To remove head 2 of layer 1, and then every head in turn, all with one compilation:

    >>> scale = jnp.ones((2, 4)).at[1, 2].set(0.0)
    >>> without_one_head = Interventions(head_scale=scale)
    >>> every = 1.0 - jnp.eye(2 * 4).reshape(-1, 2, 4)  # for jax.lax.map, or a loop over a jitted function
    """

    head_scale: jax.Array | None = None
    attention_scale: jax.Array | None = None
    mlp_scale: jax.Array | None = None
    mlp_unit_scale: jax.Array | None = None
    first_value_scale: jax.Array | None = None
    first_attention_scale: jax.Array | None = None
    first_mlp_scale: jax.Array | None = None
    attention_bias: jax.Array | None = None
    forced_weights: jax.Array | None = None
    forced_share: jax.Array | None = None
    queries: jax.Array | None = None
    queries_share: jax.Array | None = None
    keys: jax.Array | None = None
    keys_share: jax.Array | None = None
    values: jax.Array | None = None
    values_share: jax.Array | None = None
    head_outputs: jax.Array | None = None
    head_outputs_share: jax.Array | None = None
    attention_output: jax.Array | None = None
    attention_output_share: jax.Array | None = None
    mlp_output: jax.Array | None = None
    mlp_output_share: jax.Array | None = None
    residual: jax.Array | None = None
    residual_share: jax.Array | None = None


_SHAPES = {
    "head_scale": ("LN",),
    **dict.fromkeys(("attention_scale", "mlp_scale", "first_attention_scale", "first_mlp_scale"), ("L",)),
    "first_value_scale": ("LK",),
    "mlp_unit_scale": ("LF",),
    "queries": ("LBTNH",),
    "keys": ("LBTKH",),
    "values": ("LBTKV",),
    "head_outputs": ("LBTNV",),
    **dict.fromkeys(("queries_share", "head_outputs_share"), ("LN", "LNT")),
    **dict.fromkeys(("keys_share", "values_share"), ("LK", "LKT")),
    **dict.fromkeys(("attention_bias", "forced_weights"), ("TS", "BTS", "LBNTS")),
    "forced_share": ("LN", "LNT"),
    **dict.fromkeys(("attention_output", "mlp_output", "residual"), ("LBTD",)),
    **dict.fromkeys(("attention_output_share", "mlp_output_share", "residual_share"), ("L", "LT", "LBT")),
}
_OF_HEADS = ("queries", "keys", "values", "head_outputs")
_PAIRS = {"forced_weights": "forced_share"} | {
    name: f"{name}_share" for name in (*_OF_HEADS, "attention_output", "mlp_output", "residual")
}


def attention_pattern(kind: Literal["identity", "first", "previous"], length: int) -> jax.Array:
    """Puts attention weights [T, S] of 1 on one key: each query's own, the first, or the previous (0 for query 0).

    Raises ValueError for an unknown kind.

    >>> attention_pattern("previous", 3).tolist()
    [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    t = jnp.arange(length)
    keys = {"identity": t, "first": jnp.zeros_like(t), "previous": jnp.maximum(t - 1, 0)}
    if kind not in keys:
        raise UserError(f"unknown attention pattern {kind!r}", allowed=" | ".join(keys))
    return jax.nn.one_hot(keys[kind], length)


def split_layers(
    interventions: Interventions | None, config: ModelConfig, batch: int, length: int
) -> tuple[Interventions, Interventions]:
    """Checks interventions; splits them into arrays [L, ...] by layer, and those [B or 1, 1, T, S] that layers share.

    Raises ValueError for a shape that is not allowed, or only one of two fields that belong together.
    """
    given = Interventions() if interventions is None else interventions
    if not isinstance(given, Interventions):
        raise UserError(f"interventions of type {type(given).__name__}", allowed="orthojax.Interventions, or None")
    c, arrays = config, {}
    sizes = {"L": ("num_layers", c.num_layers), "N": ("num_heads", c.num_heads), "K": ("num_kv_heads", c.kv_heads)}
    sizes |= {"B": ("batch", batch), "T": ("length", length), "S": ("length", length), "D": ("d_model", c.d_model)}
    sizes |= {"H": ("head_dim", c.head_dim), "V": ("value_dim", c.value_dim), "F": ("d_mlp", c.d_mlp)}
    kinds = {"linear", "experts"}.intersection(map(c.layer_mlp, range(c.num_layers)))
    if given.mlp_unit_scale is not None and kinds:
        raise UserError(f"interventions.mlp_unit_scale with mlp={min(kinds)!r}", allowed="MLPs with hidden units")
    for name, array in given._asdict().items():
        if array is not None:
            arrays[name] = _checked(name, real_array(array, f"interventions.{name}"), sizes)
    for values, share in _PAIRS.items():
        for one, other in ((values, share), (share, values)):
            if one in arrays and other not in arrays:
                raise UserError(f"interventions.{one} without interventions.{other}", allowed="both, or neither")
    shared = {name: a for name, a in arrays.items() if _SHAPES[name][-1] == "LBNTS" and a.ndim < len("LBNTS")}
    by_layer = {name: a for name, a in arrays.items() if name not in shared}
    shared = {name: jnp.expand_dims(a, (0, 1) if a.ndim == len("TS") else 1) for name, a in shared.items()}
    return Interventions(**by_layer), Interventions(**shared)


def _checked(name: str, array: jax.Array, sizes: dict[str, tuple[str, int]]) -> jax.Array:
    for axes in _SHAPES[name]:
        lengths = [sizes[axis][1] for axis in axes]
        if array.ndim == len(axes) and all(
            a == b or (a == 1 and axis != "L") for a, b, axis in zip(array.shape, lengths, axes, strict=True)
        ):
            return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)
    forms = (f"[{', '.join('{} {}'.format(*sizes[axis]) for axis in axes)}]" for axes in _SHAPES[name])
    raise UserError(f"interventions.{name} has shape {array.shape}", allowed=" or ".join(forms))


# Within one layer, with its slice of the arrays.


def blend(x: jax.Array, y: jax.Array, share: jax.Array) -> jax.Array:
    """Computes (1 - share) x + share y in the dtype of `x`: exactly x or y at a share of 0 or 1, if finite."""
    share = share.astype(x.dtype)
    return (1 - share) * x + share * y.astype(x.dtype)


def scale_first(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies position 0 of [B, T, ...] by a factor whose shape is that of the axes after T, or 1s."""
    first = (jnp.arange(x.shape[1]) == 0).reshape(1, -1, *[1] * (x.ndim - 2))
    return x * jnp.where(first, factor.reshape(1, 1, *factor.shape).astype(x.dtype), 1)


def force_weights(weights: jax.Array, interventions: Interventions) -> jax.Array:
    """Replaces the model's attention weights [B, N, T, S] by the forced ones."""
    if interventions.forced_weights is None or interventions.forced_share is None:
        return weights
    share = interventions.forced_share
    return blend(weights, interventions.forced_weights, share.reshape(1, share.shape[0], -1, 1))


def intervene(x: jax.Array, interventions: Interventions, part: Literal["attention", "mlp"]) -> jax.Array:
    """Scales, then replaces what a part adds to the residual stream, [B, T, D]."""
    scale, first = getattr(interventions, f"{part}_scale"), getattr(interventions, f"first_{part}_scale")
    if scale is not None:
        x = x * scale.astype(x.dtype)
    if first is not None:
        x = scale_first(x, first.reshape(1))
    return replace(x, getattr(interventions, f"{part}_output"), getattr(interventions, f"{part}_output_share"))


def replace_heads(x: jax.Array, given: Interventions, name: str) -> jax.Array:
    """Replaces [B, T, N, H] by the intervention `name`, with a share [N] or [N, T]."""
    values, share = getattr(given, name), getattr(given, f"{name}_share")
    if values is None or share is None:
        return x
    return blend(x, values, share.reshape(share.shape[0], -1).T[None, :, :, None])


def replace(x: jax.Array, values: jax.Array | None, share: jax.Array | None) -> jax.Array:
    """Replaces [B, T, D] by values [B, T, D], with a share [], [T] or [B, T]."""
    if values is None or share is None:
        return x
    return blend(x, values, share.reshape((1,) * (2 - share.ndim) + share.shape + (1,)))
