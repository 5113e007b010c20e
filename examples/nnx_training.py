"""A byte-level language model in flax nnx; `python examples/nnx_training.py adamw` trains it without OrthoAdam."""

import inspect
import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import orthojax

WIDTH, CONTEXT, BATCH, STEPS = 64, 32, 32, 60


class Norm(nnx.Module):  # one scale for all channels: with one for each the outliers return
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x * self.scale[...] / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


class Block(nnx.Module):  # no biases
    def __init__(self, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = Norm(), Norm()
        attend = {"attention_fn": orthojax.ops.attention_fn("softmax1"), "use_bias": False, "decode": False}
        self.attention = nnx.MultiHeadAttention(4, WIDTH, **attend, rngs=rngs)
        shapes = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        self.up, self.down = (nnx.Linear(*shape, use_bias=False, rngs=rngs) for shape in shapes)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


def main(name: str = "orthoadam") -> None:
    embed, head = nnx.Embed(128, WIDTH, rngs=nnx.Rngs(0)), nnx.Linear(WIDTH, 128, use_bias=False, rngs=nnx.Rngs(1))
    model = nnx.Sequential(embed, Block(nnx.Rngs(2)), Norm(), head)
    tx = {"orthoadam": orthojax.orthoadam, "adamw": optax.adamw}[name](3e-3, weight_decay=1e-4)  # <- the swap
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
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
