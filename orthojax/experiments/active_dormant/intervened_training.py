"""Training of what no `Config` can say: interventions that follow from parameters and tokens, or rows of its own."""

from collections.abc import Callable, Mapping, Sequence
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


def untouched(params: Any) -> Intervene:
    """For `train`: no interventions."""
    return lambda params, tokens: Interventions()


def train(
    config: Config,
    make: Callable[[Any], Intervene],
    look: Callable[[Any, Intervene], Mapping[str, Any]],
    shown: Sequence[int],
    batch: Callable[[int], np.ndarray] | None = None,
) -> dict[int, dict[str, float]]:
    """A run of `config` with interventions in every forward pass; gradients pass through them.

    In float32 also where float64 is enabled. Parameters, optimizer, and batches of Bigram-Backcopy are those of the
    same config elsewhere.

    Args:
      config: What it says of evaluation is not read, nor are its steps, or without Bigram-Backcopy its data.
      make: Initial parameters -> the interventions of the run.
      look: (parameters, those) -> scalars by name.
      shown: Steps after which to look, ascending; the last one ends the run.
      batch: Step -> int32 [B, T + 1]; None draws from Bigram-Backcopy.

    Returns:
      Step -> what `look` found, as floats.
    """
    with jax.enable_x64(False):
        batch_at = batch or _drawn(config)
        model, schedule = Transformer(config.model), learning_rate_schedule(config.seeded_optim, shown[-1])
        state = init_state(config)
        intervene = make(state.params)

        def loss_sum(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            inputs, targets = split_tokens(tokens)
            logits, _ = model.apply({"params": params}, inputs, interventions=intervene(params, inputs))
            return jnp.sum(cross_entropy_nats(logits, targets)), jnp.asarray(targets.size)

        optimizer = optax.with_extra_args_support(make_optimizer(config.seeded_optim, schedule=schedule))
        step, found = jit_train_step(loss_sum, optimizer, schedule), {}
        for done in range(shown[-1] + 1):
            if done in shown:
                found[done] = {name: float(value) for name, value in look(state.params, intervene).items()}
            if done < shown[-1]:
                state, _ = step(state, jnp.asarray(batch_at(done)))
        return found


def _drawn(config: Config) -> Callable[[int], np.ndarray]:
    task, _ = require_task(config)
    return lambda step: np.asarray(
        task.batch(step, config.train.batch_size, config.data.sequence_length, config.data.seed)
    )
