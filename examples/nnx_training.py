"""A byte-level language model in flax nnx; `python examples/nnx_training.py adamw` trains it without OrthoAdam."""

import inspect
import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import orthojax

WIDTH, CONTEXT, BATCH, STEPS = 64, 32, 32, 60


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(x)))


def main(name: str = "orthoadam") -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Embed(128, WIDTH, rngs=rngs), Block(rngs), nnx.Linear(WIDTH, 128, rngs=rngs))
    adamw = optax.adamw(3e-3, weight_decay=1e-4)
    orthoadam = orthojax.orthoadam(3e-3, weight_decay=1e-4, rotation=orthojax.Rotation(axes=WIDTH))
    tx = {"adamw": adamw, "orthoadam": orthoadam}[name]  # <- the swap
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    text = np.frombuffer(inspect.getsource(inspect).encode("ascii", "ignore"), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - CONTEXT, (STEPS, BATCH, 1)) + np.arange(CONTEXT + 1)
    losses = [float(step(model, optimizer, jnp.asarray(text[rows], jnp.int32))) for rows in starts]
    print(f"{name}: {losses[0]:.2f} -> {np.mean(losses[-5:]):.2f} nats per byte")


if __name__ == "__main__":
    main(*sys.argv[1:])
