"""Times whole training steps: cured against vanilla, and both against plain flax: python benchmarks/training.py.

Vanilla is softmax and AdamW, cured softmax-1 and OrthoAdam. The plain model is the same GPT-2 from flax's own layers,
trained with optax, as one would write it without orthojax.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparing import compare, parsed_arguments, show

from orthojax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from orthojax.model import gpt2
from orthojax.train import init_state, make_train_step, model_flops_per_token, model_flops_utilization

# 50,257 tokens padded to a multiple of 128, as is usual: unaligned, the largest matrix product of all is slow.
VOCAB_SIZE = 50_304
TINY = {"d_model": 16, "d_mlp": 32, "num_heads": 2, "num_layers": 1, "vocab_size": 64, "max_length": 16}


class PlainGPT2(nn.Module):
    """GPT-2 from flax's own layers, with the sizes and the dtype of a `ModelConfig`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens int32 [B, T] to logits [B, T, vocab_size]."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        embed = nn.Embed(c.vocab_size, c.d_model, dtype=dtype)
        x = embed(tokens) + nn.Embed(c.max_length, c.d_model, dtype=dtype)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(c.num_layers):
            attend = nn.MultiHeadDotProductAttention(num_heads=c.num_heads, dtype=dtype)
            x += attend(nn.LayerNorm(dtype=dtype)(x), mask=mask)
            hidden = nn.gelu(nn.Dense(c.d_mlp, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)))
            x += nn.Dense(c.d_model, dtype=dtype)(hidden)
        return embed.attend(nn.LayerNorm(dtype=dtype)(x))


def plain_training(config: ModelConfig) -> tuple[Any, Callable[[Any, jax.Array], tuple[Any, jax.Array]]]:
    """Returns a new state of the plain model and its jitted step: (state, tokens) -> (state, loss in nats)."""
    model = PlainGPT2(config)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))  # as `OptimConfig`
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))

    def mean_loss_nats(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
        return losses.mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(mean_loss_nats)(params, tokens)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, jax.jit(optimizer.init)(params)), step


def plain_step(config: ModelConfig, tokens: jax.Array) -> Callable[[], Any]:
    """Returns a function that trains the plain model for one step at each call."""
    state, step = plain_training(config)

    def call() -> Any:
        nonlocal state
        state, loss = step(state, tokens)
        return loss

    return call


def our_step(model: ModelConfig, cured: bool, tokens: jax.Array) -> Callable[[], Any]:
    """Returns a function that trains our model for one step at each call."""
    config = Config(
        model=dataclasses.replace(model, normalizer="softmax1" if cured else "softmax"),
        optim=OptimConfig(optimizer="orthoadam" if cured else "adam", weight_decay=0.1),
        data=DataConfig(sequence_length=tokens.shape[1] - 1),
        train=TrainConfig(steps=10_000, batch_size=tokens.shape[0]),
    )
    step, state = make_train_step(config), init_state(config)

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, tokens)
        return metrics

    return call


def cases(tiny: bool) -> list[tuple[str, ModelConfig, int, int]]:
    """Returns (name, model, sequences of a batch, length) of each measurement."""
    if tiny:
        return [("tiny", gpt2("tiny", **TINY), 2, 16)]
    if jax.default_backend() == "cpu":  # unrolled, as flax's own layers are
        sizes = {"num_layers": 6, "d_model": 256, "num_heads": 4, "d_mlp": 1024, "vocab_size": 16_384}
        return [("9m", gpt2("tiny", **sizes, max_length=256, scan_layers=False), 4, 256)]
    shapes = (("60m", 128, 256), ("130m", 128, 256), ("130m", 32, 1024))
    models = {size: gpt2(size, vocab_size=VOCAB_SIZE, dtype="bfloat16") for size, _, _ in shapes}
    return [(size, models[size], rows, length) for size, rows, length in shapes]


def main() -> None:
    arguments, table = parsed_arguments(__doc__ or ""), []
    for name, model, rows, length in cases(arguments.tiny):
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.vocab_size, (rows, length + 1)), jnp.int32)
        steps = {
            "vanilla": our_step(model, False, tokens),
            "cured": our_step(model, True, tokens),
            "plain flax + optax": plain_step(model, tokens),
        }
        for step, measured in compare(steps, arguments.repeats).items():
            speed = rows * length / measured["seconds"]
            mfu = model_flops_utilization(speed, model_flops_per_token(model, length), device_count=1)
            of = {"model": f"gpt2 {name}", "batch": f"{rows} x {length}", "step": step}
            table.append(of | measured | {"tokens_per_second": speed, "mfu": "unknown" if mfu is None else mfu})
    show("Training steps against softmax and AdamW (vanilla): median ratio, quartiles", table, arguments.json)


if __name__ == "__main__":
    main()
