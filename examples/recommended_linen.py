"""The recipe in flax linen: learned sinks, one scale in each norm, no biases. `recommended_linen.py FOLDER` resumes."""

import functools
import inspect
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import orthojax

WIDTH, HEADS, VOCAB, CONTEXT, BATCH, STEPS = 64, 4, 128, 32, 32, 60
Norm = functools.partial(nn.RMSNorm, feature_axes=())  # one scale for all channels: with one for each outliers return


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        sink = self.param("sink", nn.initializers.zeros, (HEADS,))  # the logit of attending to nothing
        attend = orthojax.attention_fn(sink, is_causal=True)
        x += nn.MultiHeadAttention(HEADS, use_bias=False, attention_fn=attend)(Norm()(x))
        return x + nn.Dense(WIDTH, use_bias=False)(nn.gelu(nn.Dense(4 * WIDTH, use_bias=False)(Norm()(x))))


rate = optax.warmup_cosine_decay_schedule(0.0, 6e-3, STEPS // 10, STEPS)
# Or the optimizer that you have, with a mask: scales and sinks do not decay.
tx = optax.chain(optax.clip_by_global_norm(1.0), orthojax.muon_orthoadam(rate, weight_decay=0.1))
model = nn.Sequential([nn.Embed(VOCAB, WIDTH), Block(), Norm(), nn.Dense(VOCAB, use_bias=False, name="head")])
params = model.init(jax.random.key(0), np.zeros((1, CONTEXT), np.int32))["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def loss(params, tokens):
    logits: jax.Array = model.apply({"params": params}, tokens[:, :-1])  # pyright: ignore
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=0)
def step(state, tokens):
    value, grads = jax.value_and_grad(loss)(state.params, tokens)
    return state.apply_gradients(grads=grads), value


text = np.frombuffer(inspect.getsource(inspect).encode("ascii", "ignore"), np.uint8).astype(np.int32)
starts = np.random.default_rng(0).integers(0, len(text) - CONTEXT, (STEPS, BATCH, 1)) + np.arange(CONTEXT + 1)
with ocp.CheckpointManager(Path(sys.argv[1]).absolute()) as checkpoints:
    if last := checkpoints.latest_step():
        state = checkpoints.restore(last, args=ocp.args.StandardRestore(state))
    for i in range(last or 0, STEPS):
        state, value = step(state, text[starts[i]])
        if (i + 1) % 20 == 0:
            checkpoints.save(i + 1, args=ocp.args.StandardSave(state))
            print(f"step {i + 1}: {value:.3f} nats per byte")
