"""What a user would write without orthojax: GPT-2 from flax's own layers, trained with optax."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from orthojax.config import ModelConfig


class PlainGPT2(nn.Module):
    """GPT-2 as flax's documentation would have it, with the sizes of a `ModelConfig`; every layer is unrolled."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Int [B, T] -> logits [B, T, vocab_size]."""
        c = self.config
        embed = nn.Embed(c.vocab_size, c.d_model)
        x = embed(tokens) + nn.Embed(c.max_length, c.d_model)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(c.num_layers):
            x += nn.MultiHeadDotProductAttention(num_heads=c.num_heads)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(c.d_model)(nn.gelu(nn.Dense(c.d_mlp)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


def plain_state(config: ModelConfig) -> Any:
    """(params, opt_state) of a fresh model."""
    params = PlainGPT2(config).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    return params, _OPTIMIZER.init(params)


def plain_step(config: ModelConfig) -> Any:
    """The jitted training step: (state, tokens int32 [B, T + 1]) -> (state, mean loss in nats); donates the state."""
    model = PlainGPT2(config)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = _OPTIMIZER.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return jax.jit(step, donate_argnums=0)


_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))  # as `OptimConfig`
