"""A byte-level language model in equinox; `python examples/equinox_training.py adamw` trains it without OrthoAdam."""

import inspect
import sys

import equinox as eqx
import jax
import numpy as np
import optax

import orthojax

WIDTH, CONTEXT, BATCH, STEPS = 64, 32, 32, 60


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embedding, self.head = eqx.nn.Embedding(128, WIDTH, key=keys[0]), eqx.nn.Linear(WIDTH, 128, key=keys[3])
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[1])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[2])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        x = x + self.attention(x, x, x, mask=np.tri(len(x), dtype=bool))
        return jax.vmap(self.head)(x + jax.vmap(self.mlp)(x))


def main(name: str = "orthoadam") -> None:
    model = Model(jax.random.key(0))
    adamw = optax.adamw(3e-3, weight_decay=1e-4)
    orthoadam = orthojax.orthoadam(3e-3, weight_decay=1e-4, rotation=orthojax.Rotation(axes=WIDTH))
    tx = {"adamw": adamw, "orthoadam": orthoadam}[name]  # <- the swap

    def loss(model, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(tokens[:, :-1]), tokens[:, 1:]).mean()

    @eqx.filter_jit
    def step(model, state, tokens):
        value, grads = eqx.filter_value_and_grad(loss)(model, tokens)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    text = np.frombuffer(inspect.getsource(inspect).encode("ascii", "ignore"), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - CONTEXT, (STEPS, BATCH, 1)) + np.arange(CONTEXT + 1)
    state, losses = tx.init(eqx.filter(model, eqx.is_inexact_array)), []
    for tokens in text[starts].astype(np.int32):
        model, state, value = step(model, state, tokens)
        losses.append(float(value))
    print(f"{name}: {losses[0]:.2f} -> {np.mean(losses[-5:]):.2f} nats per byte")


if __name__ == "__main__":
    main(*sys.argv[1:])
