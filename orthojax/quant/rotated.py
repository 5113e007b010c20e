"""Rotation of a trained model that keeps its logits and removes its outliers (QuaRot, arXiv 2404.00456)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from orthojax.config import ModelConfig
from orthojax.errors import UserError
from orthojax.ops.orthogonal import fixed_transform, hash_signs
from orthojax.ops.statistics import at_least_float32

if TYPE_CHECKING:
    from orthojax.model import LinearFunction

Rotate = Callable[[jax.Array, int], jax.Array]


def rotate_after_training(
    params: Any, config: ModelConfig, seed: int = 0
) -> tuple[Any, ModelConfig, "Callable[[LinearFunction], LinearFunction]"]:
    """Rotates a trained model without changing its logits, so that no channel stands out when it is rounded.

    Norm scales are folded into the linear layers that read them. With one orthogonal matrix Q, a Hadamard transform
    after random signs (`orthojax.ops.orthogonal`), kernels that read from the residual stream x become Q W and kernels
    that write to it W Q^T, so that the stream is Q x. Values are transformed head by head in the kernel of the values,
    and back in the kernel of the output, unless a gate multiplies each of their channels. The hidden units of the MLP
    are transformed while the model runs, by the linear function that the third result makes from another one, and the
    output kernel of the MLP undoes that. Unlike this function, QuaRot (arXiv 2404.00456) also transforms across heads,
    and queries and keys after their positions.

    Rotation helps inputs. If one channel is most of the norm of x but its row of a kernel is small, kernels of few bits
    can get worse: when rounded, that row loses little, while after a rotation all rows meet the channel.

    Args:
      params: Parameters of the model, scanned or not.
      config: Config of the model: without a layernorm, whose centring does not commute with a rotation, and with norms
        before the parts, since the scale of a norm after a part cannot be folded; no latent attention, no experts.
      seed: Seed of the signs, 0 to 2**32 - 1.

    Returns:
      The parameters, float32; the config, in which tied embeddings are untied if the final norm has a scale for each
      channel; and the wrapper of linear functions.

    >>> from orthojax.model import Transformer
    >>> from orthojax.quant import rounded_model, setting_named
    >>> def rounded(params, config):
    ...     params, config, wrap = rotate_after_training(params, config)
    ...     model = rounded_model(config, setting_named("w4a4"))
    ...     return model.clone(linear=wrap(model.linear)), params
    """
    _require_rotatable(params, config)
    params = jax.tree.map(at_least_float32, params)
    signs = hash_signs(seed, (0,), config.d_model)[0]

    def rotate(x: jax.Array, axis: int) -> jax.Array:
        axis %= x.ndim
        return fixed_transform(x, axis, signs=signs.reshape((1,) * axis + (-1,) + (1,) * (x.ndim - axis - 1)))

    new = dict(params)
    for name, part in params.items():
        if name.startswith("layers"):
            new[name] = _rotated_layer(part, config, rotate)
        elif name in ("token_embedding", "position_embedding"):
            new[name] = {"embedding": rotate(part["embedding"], -1)}
    if not config.tie_embeddings or config.norm == "rmsnorm":
        kernel = params["token_embedding"]["embedding"].T if config.tie_embeddings else params["head"]["kernel"]
        new["final_norm"], scale = _without_scale(params.get("final_norm"), config)
        new["head"] = {"kernel": rotate(scale * kernel, -2)}
        config = dataclasses.replace(config, tie_embeddings=False)
    return {name: part for name, part in new.items() if part is not None}, config, online_hadamard


@functools.cache  # the same result for the same function, so that jit compiles a model with it once
def online_hadamard(function: "LinearFunction") -> "LinearFunction":
    """Makes a linear function that transforms the hidden units of an MLP before its output layer, in float32."""

    @functools.wraps(function)  # with the mark of a plain product, since the head is left alone
    def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        if path.endswith("mlp/output"):
            x = fixed_transform(at_least_float32(x), x.ndim - 1).astype(x.dtype)
        return function(x, kernel, bias, path)

    return linear


def _require_rotatable(params: Any, config: ModelConfig) -> None:
    def require(holds: bool, problem: str, allowed: str) -> None:
        if not holds:
            raise UserError(f"rotation after training of a model with {problem}", allowed=allowed)

    require(not config.norm.startswith("layernorm"), f"norm={config.norm!r}", "'rmsnorm', 'rmsnorm_single' or 'none'")
    require(config.block in ("pre_norm", "parallel"), f"block={config.block!r}", "'pre_norm' or 'parallel'")
    require(config.latent is None, "latent attention", "latent=None")
    require(not config.has_experts, "experts", "another mlp")
    projected = "embedding_projection=True"
    require(not config.embedding_projection, projected, "False, as after `orthojax.model.fold_embedding_projection`")


def _without_scale(norm: Any, config: ModelConfig) -> tuple[Any, jax.Array]:
    """Returns a norm whose scales are 1, and its scales as a factor of kernels, [..., D, 1] or []."""
    # One scale for all channels commutes with a rotation: it stays.
    if norm is None or config.norm != "rmsnorm":
        return norm, jnp.float32(1)
    return {"scale": jnp.ones_like(norm["scale"])}, norm["scale"][..., None]


def _rotated_layer(layer: Any, config: ModelConfig, rotate: Rotate) -> Any:
    new = dict(layer)
    for part in ("attention", "mlp"):
        if part not in layer:
            continue
        norm, scale = _without_scale(layer.get(f"{part}_norm"), config)
        if norm is not None:
            new[f"{part}_norm"] = norm
        kernels = {name: dict(of) for name, of in layer[part].items() if isinstance(of, dict) and "kernel" in of}
        output = kernels["output"]
        for of in kernels.values():
            if of is not output or len(kernels) == 1:  # for an MLP that is one linear layer
                of["kernel"] = rotate(scale * of["kernel"], -2)
        # A gate for each channel of a head does not commute with a transform of the channels.
        if part == "attention" and config.gated_attention != "elementwise":
            kernels["value"] |= {leaf: _by_head(x, config, -1) for leaf, x in kernels["value"].items()}
            output["kernel"] = _by_head(output["kernel"], config, -2)
        if part == "mlp":
            output["kernel"] = fixed_transform(output["kernel"], output["kernel"].ndim - 2)
        output |= {leaf: rotate(x, -1) for leaf, x in output.items()}
        new[part] = layer[part] | kernels
    return new


def _by_head(x: jax.Array, config: ModelConfig, axis: int) -> jax.Array:
    """Transforms the channels of each head along an axis of all heads."""
    axis %= x.ndim
    heads = x.reshape(*x.shape[:axis], -1, config.value_dim, *x.shape[axis + 1 :])
    return fixed_transform(heads, axis + 1).reshape(x.shape)
