"""Training under interventions that follow from the model's own parameters and tokens, which no `Config` can say."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.config import Config
from orthojax.model import Interventions, Transformer
from orthojax.ops import cross_entropy_nats
from orthojax.train import init_state, learning_rate_schedule, make_optimizer, require_task
from orthojax.train.step import jit_train_step, split_tokens

Intervene = Callable[[Any, jax.Array], Interventions]  # (parameters, inputs [B, T]) -> what the model does otherwise
Look = Callable[[Any, Intervene], dict[str, jax.Array]]  # of the parameters; jitted here


def train(config: Config, make: Callable[[Any], Intervene], look: Look, shown: Sequence[int]) -> dict[int, dict]:
    """A run of `config` in which every forward pass is intervened; gradients pass through the interventions.

    In float32 also where float64 is enabled. Parameters, batches and optimizer are those of the same config elsewhere.

    Args:
      config: Of Bigram-Backcopy; its steps, and what it says of evaluation, are not read.
      make: Initial parameters -> the interventions of the run.
      look: What is measured.
      shown: Steps after which it is, ascending; the last one ends the run.

    Returns:
      Step -> what `look` found, as floats.
    """
    with jax.enable_x64(False):
        task, _ = require_task(config)
        model, schedule = Transformer(config.model), learning_rate_schedule(config.seeded_optim, shown[-1])
        state = init_state(config)
        intervene = make(state.params)

        def loss_sum(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            inputs, targets = split_tokens(tokens)
            logits, _ = model.apply({"params": params}, inputs, interventions=intervene(params, inputs))
            return jnp.sum(cross_entropy_nats(logits, targets)), jnp.asarray(targets.size)

        def draw(seed_and_number: jax.Array) -> jax.Array:
            seed, number = seed_and_number
            return task.batch(number, config.train.batch_size, config.data.sequence_length, seed)

        optimizer = optax.with_extra_args_support(make_optimizer(config.seeded_optim, schedule=schedule))
        step = jit_train_step(loss_sum, optimizer, schedule, draw=draw)
        measure, found = jax.jit(lambda params: look(params, intervene)), {}
        for done in range(shown[-1] + 1):
            if done in shown:
                found[done] = {name: float(value) for name, value in measure(state.params).items()}
            if done < shown[-1]:
                state, _ = step(state, jnp.asarray(np.array([config.data.seed, done], np.uint32)))
        return found
