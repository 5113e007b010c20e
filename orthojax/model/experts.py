"""A mixture of experts as the MLP of a block. Letters: B batch, T positions, E routed experts, D d_model."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from orthojax.config import ModelConfig
from orthojax.model.layers import Feedforward, Linear, Part, kernel_initializer


class Experts(Part):
    """Routed experts, weighted by their probabilities, and shared ones: the mixture of DeepSeek-V2.

    Definition: y = sum_e w_e(x) f_e(x) + sum_s f_s(x), f swiglu MLPs, w of `routing`. It is for measuring: every expert
    is computed for every token, as one wide MLP whose hidden units are multiplied by w, so that it costs
    E / experts_per_token times what a grouped product would. Gradients reach the router through the chosen
    probabilities alone; there is no auxiliary loss for balance. The hidden units of expert e are the e-th of E equal
    parts of those of `experts`; quantised, all experts have one scale for an output channel of `experts/output`.

    Reference:
      DeepSeekMoE, `arXiv 2401.06066 <https://arxiv.org/abs/2401.06066>`_, 2024; DeepSeek-V2,
      `arXiv 2405.04434 <https://arxiv.org/abs/2405.04434>`_, 2024, section 2.2.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        c = self.config
        logits = Linear(c.num_experts, False, kernel_initializer(c), jnp.float32, self.linear, name="router")(x)
        factor = jnp.repeat(routing(logits, c), c.expert_dim, axis=-1)
        y = Feedforward(c, self.linear, "swiglu", c.num_experts * c.expert_dim, name="experts")(x, factor)
        if c.num_shared_experts:
            y += Feedforward(c, self.linear, "swiglu", c.num_shared_experts * c.expert_dim, name="shared")(x)
        return y


def routing(logits: jax.Array, config: ModelConfig) -> jax.Array:
    """The weights of routed experts: softmax of the router's logits times `expert_scale`, 0 for those not chosen.

    Chosen are the `experts_per_token` likeliest, with groups from the `expert_groups_per_token` groups whose likeliest
    expert is likeliest. Weights are not normalised again.

    Args:
      logits: [..., E] float32.
      config: Of the model.

    Returns:
      [..., E].
    """
    c = config
    scores = jax.nn.softmax(logits, axis=-1)
    if c.expert_groups_per_token < c.expert_groups:
        by_group = scores.reshape(*scores.shape[:-1], c.expert_groups, -1)
        kept = _largest(jnp.max(by_group, axis=-1), c.expert_groups_per_token)
        scores = (by_group * kept[..., None]).reshape(scores.shape)
    return scores * _largest(scores, c.experts_per_token) * c.expert_scale


def _largest(x: jax.Array, count: int) -> jax.Array:
    """1 for the `count` largest along the last axis, the first of equal ones, and 0 for the others."""
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(x), count)
    return jnp.sum(jax.nn.one_hot(chosen, x.shape[-1], dtype=x.dtype), axis=-2)
