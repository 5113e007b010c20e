"""Cross-entropy of next tokens."""

import jax
import jax.numpy as jnp


def cross_entropy_nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] for every position, in nats.

    Args:
      logits: [..., V].
      targets: int [...].

    Returns:
      [...], float32 at least.

    >>> import jax.numpy as jnp
    >>> round(float(cross_entropy_nats(jnp.zeros((1, 4)), jnp.array([2]))[0]), 4)  # ln 4
    1.3863
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target
