"""What the residual stream says about the next token: the logit lens, and the contributions of each part to a logit.

Legend: L layers, B rows, T positions, N heads, D d_model, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis.observe import measure
from orthojax.config import ModelConfig, require
from orthojax.model import LoadedModel, Taps
from orthojax.ops.statistics import at_least_float32


def logit_lens(loaded: LoadedModel, states: ArrayLike) -> jax.Array:
    """Computes the logits of residual states as if they were the last: final norm and head of the model.

    States of the last block give the logits of the model (nostalgebraist, "interpreting GPT: the logit lens", 2020).

    Args:
      loaded: The model.
      states: [..., D], such as what `measure` returns for `lambda taps: taps.residual`, [L, B, T, D].

    Returns:
      [..., V], at least float32.

    Raises:
      UserError: For a model whose final norm has a gate, or whose head is not a plain product.
    """
    x = at_least_float32(states)
    scale, shift = _final_norm(loaded, x)
    normed = (x - _mean(loaded.config.model, x)) * scale + shift.reshape((1,) * (x.ndim - 1) + (-1,))
    return normed @ _head(loaded)


class Attribution(NamedTuple):
    """What each part adds to the logit of a token: `embedding`, `attention`, `mlp` and `bias` sum to it."""

    embedding: np.ndarray  # [B, T]
    attention: np.ndarray  # [L, B, T]
    heads: np.ndarray  # [L, N, B, T]; `attention` without the bias of its output
    mlp: np.ndarray  # [L, B, T]
    bias: np.ndarray  # [B, T], of the final norm


def logit_attribution(loaded: LoadedModel, tokens: ArrayLike) -> Attribution:
    """Splits the logit of each next token into what each head and MLP adds, with the final norm's divisor held fixed.

    With the final state x = sum_i x_i and its divisor s(x) held fixed, the logit is w . g (x - mean(x)) / s(x), linear
    in x: part i adds w . g (x_i - mean(x_i)) / s(x), where g is the norm's scale and w the token's column of the head
    (direct logit attribution: A Mathematical Framework for Transformer Circuits, 2021).

    Args:
      loaded: A model whose blocks add to the stream.
      tokens: int [B, T + 1]; position t is for the logit of token t + 1.

    Returns:
      NumPy arrays, float32.

    Raises:
      UserError: As for `logit_lens`; also for norms of the stream itself, or gated attention, whose heads do not add
        up.
    """
    config, tokens = loaded.config.model, jnp.asarray(tokens)
    plain = config.block in ("pre_norm", "parallel")
    require(plain, f"logit attribution of block={config.block!r}, which norms what parts add", "pre_norm or parallel")
    require(not config.gated_attention, "logit attribution with gated attention", "gated_attention=False")
    attends = all(map(config.layer_attention, range(config.num_layers)))
    require(attends, "logit attribution of layers without attention", "attention in every layer")
    seen = jax.tree.map(jnp.asarray, measure(loaded, [tokens[:, :-1]], _parts))
    first, last = seen["before"][0], seen["residual"][-1]
    scale, shift = _final_norm(loaded, last)
    columns = jnp.take(_head(loaded), tokens[:, 1:], axis=1)  # [D, B, T]
    directions = jnp.moveaxis(columns, 0, -1) * scale  # [B, T, D]

    def added(x: jax.Array) -> np.ndarray:
        x = at_least_float32(x)
        onto = directions.reshape((1,) * (x.ndim - directions.ndim) + directions.shape)
        return np.asarray(jnp.sum((x - _mean(config, x)) * onto, axis=-1))

    kernel = _stacked(loaded, "output").reshape(config.num_layers, config.num_heads, config.value_dim, -1)
    heads = jnp.einsum("LBTNH,LNHD->LNBTD", at_least_float32(seen["heads"]), kernel)
    bias = np.asarray(jnp.einsum("DBT,D->BT", columns, shift))
    return Attribution(added(first), added(seen["attention"]), added(heads), added(seen["mlp"]), bias)


def _parts(taps: Taps) -> dict[str, jax.Array]:
    weights, values = at_least_float32(taps.attention_weights), at_least_float32(taps.values)
    values = jnp.repeat(values, weights.shape[1] // values.shape[2], axis=2)
    heads = jnp.einsum("BNTS,BSNH->BTNH", weights, values)
    return {"before": taps.residual_before, "residual": taps.residual, "attention": taps.attention_output,
            "mlp": taps.mlp_output, "heads": heads}  # fmt: skip


def _stacked(loaded: LoadedModel, name: str) -> jax.Array:
    params, L = loaded.params, loaded.config.model.num_layers
    if "layers" in params:
        return params["layers"]["attention"][name]["kernel"]
    return jnp.stack([params[f"layers_{i}"]["attention"][name]["kernel"] for i in range(L)])


def _head(loaded: LoadedModel) -> jax.Array:
    found = loaded.model.head_kernel(loaded.params)
    plain = found is not None and not loaded.config.model.fixed_rotation
    allowed = "a float head, fixed_rotation=False, final_soft_cap=None"
    require(plain, "the logit lens of a head that is no plain product", allowed)
    kernel, axis = found  # pyright: ignore[reportGeneralTypeIssues]
    kernel = jnp.moveaxis(kernel, axis, -1)
    if loaded.config.model.embedding_projection:
        kernel = loaded.params["head_input"]["kernel"] @ kernel
    return kernel


def _mean(config: ModelConfig, x: jax.Array) -> jax.Array:
    centred = config.norm.startswith("layernorm") and config.block != "post_norm"
    return jnp.mean(x, axis=-1, keepdims=True) if centred else jnp.zeros_like(x[..., :1])


def _final_norm(loaded: LoadedModel, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factor of the centred state [..., D or 1], and what the norm adds, [D]."""
    config, params = loaded.config.model, loaded.params.get("final_norm", {})
    require(not config.gated_norm_rank, f"the logit lens with gated_norm_rank={config.gated_norm_rank}", "0")
    shift = jnp.zeros(config.d_model) + params.get("bias", 0.0)
    if config.norm == "none" or config.block == "post_norm":
        return jnp.ones_like(x[..., :1]), shift
    x = x - _mean(config, x)
    divisor = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + config.norm_eps)
    return divisor * jnp.asarray(params.get("scale", 1.0)).reshape((1,) * (x.ndim - 1) + (-1,)), shift
