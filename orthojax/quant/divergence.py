"""How far the predictions of a rounded model are from those of the float one."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from orthojax.ops.products import kernel_product

if TYPE_CHECKING:
    from orthojax.model import Transformer

_LOGITS_BYTES = 2**26  # of the positions whose logits are compared at a time


class Divergence(NamedTuple):
    """The predictions of one model beside those of another: means over the counted positions of each row, float [B]."""

    float_loss_nats: Any  # of the model
    loss_nats: Any  # of the other model
    kl_nats: Any  # sum over tokens of p log(p / q), with p of the model and q of the other
    agreement: Any  # fraction of positions at which both find the same token likeliest


@functools.partial(jax.jit, static_argnums=(0, 2))
def divergence(
    model: "Transformer", params: Any, other: "Transformer", other_params: Any, tokens: jax.Array, targets: jax.Array,
    counted: jax.Array, states: jax.Array | None = None,
) -> Divergence:  # fmt: skip
    """Compares the predictions of `other`, such as a `rounded_model`, with those of `model` on the same rows.

    The KL divergence needs far fewer rows than the loss to tell two formats apart: the targets' noise is not in it.

    Args:
      model: The model to compare with.
      params: Its parameters.
      other: The other one.
      other_params: Its parameters.
      tokens: int [B, T].
      targets: The next tokens, int [B, T].
      counted: Which positions count, bool [1 or B, T].
      states: What `model.apply(..., head=False)` returns for these tokens, if it is known.
    """
    inputs, logits = _readout(model, params, tokens, states)
    others, other_logits = _readout(other, other_params, tokens, None)
    B, T = tokens.shape

    def of_position(at: tuple[jax.Array, ...]) -> jax.Array:
        x, y, target = at
        p, q = jax.nn.log_softmax(logits(x)), jax.nn.log_softmax(other_logits(y))
        losses = [-jnp.take_along_axis(x, target[:, None], axis=-1)[:, 0] for x in (p, q)]
        same = jnp.where(jnp.isnan(losses[1]), jnp.nan, jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1))
        return jnp.stack([*losses, jnp.sum(jnp.exp(p) * (p - q), axis=-1), same])

    by_position = tuple(jnp.moveaxis(x, 1, 0) for x in (inputs, others, targets))
    size = max(1, _LOGITS_BYTES // (4 * B * model.config.vocab_size))
    found = jnp.moveaxis(jax.lax.map(of_position, by_position, batch_size=min(size, T)), 0, -1)  # [4, B, T]
    counted = jnp.broadcast_to(counted, (1, B, T))
    return Divergence(*jnp.sum(jnp.where(counted, found, 0.0), axis=-1) / jnp.sum(counted, axis=-1))


def _readout(model: "Transformer", params: Any, tokens: jax.Array, states: jax.Array | None) -> tuple[jax.Array, Any]:
    """Returns an array [B, T, ...], and the function that makes float32 logits [B, V] of one of its positions."""
    head = model.head_kernel(params)
    if head is None:
        return model.apply({"params": params}, tokens)[0], lambda x: x  # pyright: ignore[reportReturnType]
    kernel, vocab_axis = head
    if states is None:
        states = model.apply({"params": params}, tokens, head=False)[0]  # pyright: ignore[reportAssignmentType]
    product = functools.partial(kernel_product, contract=1 - vocab_axis, preferred_element_type=jnp.float32)
    return states, lambda x: product(x, kernel.astype(x.dtype))  # pyright: ignore[reportReturnType]
