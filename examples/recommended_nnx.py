"""The recipe in flax nnx: learned sinks, one scale in each norm, no biases. `recommended_nnx.py FOLDER` resumes."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import orthojax

WIDTH, HEADS, KV_HEADS, VOCAB, STEPS = 64, 4, 2, 128, 60


class Block(nnx.Module):
    def __init__(self, rngs):
        heads, options = (HEADS, KV_HEADS, KV_HEADS), {"use_bias": False, "rngs": rngs}  # of query, key, value
        self.sink = nnx.Param(jnp.zeros(HEADS))  # the logit of attending to nothing
        self.norms = nnx.List([nnx.RMSNorm(1, feature_axes=(), rngs=rngs) for _ in range(2)])
        self.attention = nnx.List([nnx.LinearGeneral(WIDTH, (n, 16), **options) for n in heads])
        self.out = nnx.LinearGeneral((HEADS, 16), WIDTH, axis=(-2, -1), **options)
        self.up, self.down = nnx.Linear(WIDTH, 256, **options), nnx.Linear(256, WIDTH, **options)

    def __call__(self, x):
        query, key, value = (project(self.norms[0](x)) for project in self.attention)
        x = x + self.out(orthojax.dot_product_attention(query, key, value, is_causal=True, normalizer=self.sink[...]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


rate = optax.warmup_cosine_decay_schedule(
    0.0, 6e-3, 6, STEPS
)  # below: or your optimizer; scales and sinks do not decay
tx = optax.chain(optax.clip_by_global_norm(1.0), orthojax.muon_orthoadam(rate, weight_decay=0.1))
embed, head = nnx.Embed(VOCAB, WIDTH, rngs=nnx.Rngs(0)), nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=nnx.Rngs(1))
model = nnx.Sequential(embed, Block(nnx.Rngs(2)), nnx.RMSNorm(1, feature_axes=(), rngs=nnx.Rngs(3)), head)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels
    value, grads = nnx.value_and_grad(lambda model: losses(model(tokens[:, :-1]), tokens[:, 1:]).mean())(model)
    optimizer.update(model, grads)
    return value


text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
starts = np.random.default_rng(0).integers(0, len(text) - 32, (STEPS, 32, 1)) + np.arange(33)
with ocp.CheckpointManager(Path(sys.argv[1]).absolute()) as checkpoints:
    if last := checkpoints.latest_step():
        state = ocp.args.StandardRestore(nnx.state((model, optimizer)))
        nnx.update((model, optimizer), checkpoints.restore(last, args=state))
    for i in range(last or 0, STEPS):
        value = step(model, optimizer, jnp.asarray(text[starts[i]]))
        if (i + 1) % 20 == 0:
            checkpoints.save(i + 1, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
            print(f"step {i + 1}: {value:.3f} nats per byte")
