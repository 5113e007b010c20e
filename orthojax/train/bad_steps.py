"""Steps that must not enter the parameters: what counts as one, and how the device leaves it out.

A step is bad where its loss or gradient norm is not finite, or where its loss lies `spike_nats` above the running
mean. `train.on_bad_step` says what follows. The device decides for itself, so that no step waits for the host: with
`skip`, `roll_back` or `spike_nats` the optimizer is wrapped in `leave_out_bad_steps`, whose state is part of the
checkpoint. The host hears of it one step late.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from orthojax.errors import UserError

STATE_NAME = "bad_steps"  # beside the parts of the optimizer: opt_state/bad_steps/...
MEAN_OF_STEPS = 100
MOST_IN_A_ROW = 10  # of skipped steps, or of roll-backs to the same checkpoint


class DivergedError(UserError):
    """The run cannot go on: its loss is not finite, or spikes, or goes on doing so."""


class RollBack(Exception):
    """The loop is to go back to a checkpoint.

    Attributes:
      step: The bad step.
      why: What was bad.
    """

    def __init__(self, step: int, why: str):
        super().__init__(why)
        self.step, self.why = step, why


class BadSteps(NamedTuple):
    """What is remembered of the steps so far, all shape=()."""

    loss_mean_nats: jax.Array  # float32: running mean of the losses of the good steps
    good_steps: jax.Array  # int32
    skipped_steps: jax.Array  # int32
    in_a_row: jax.Array  # int32: skipped ones since the last good one


def leave_out_bad_steps(
    optimizer: optax.GradientTransformation, spike_nats: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """An optimizer for which a bad step has not happened: parameters, its own state and its counts stay as they were.

    The running mean m of the losses l_1, l_2, ... of the good steps is m += (l_t - m) / min(t, 100): their mean at
    first, then an exponential one of decay 0.99. A loss above m + `spike_nats` is a spike; the first has nothing to be
    compared with.

    Args:
      optimizer: A named chain, whose state is a dict.
      spike_nats: How far above the mean a loss may lie; None: only losses and gradients that are not finite are bad.

    Returns:
      A transformation whose `update` wants `value=` the loss in nats, and whose state has `bad_steps` beside the names
      of the chain. The updates of a bad step are -0.0, which leaves every bit of a parameter as it is.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> Any:
        zero = jnp.zeros((), jnp.int32)
        state: Any = inner.init(params)
        return state | {STATE_NAME: BadSteps(jnp.zeros((), jnp.float32), zero, zero, zero)}

    def update(updates: Any, state: Any, params: Any = None, *, value: jax.Array, **extra: Any) -> Any:
        seen: BadSteps = state[STATE_NAME]
        bad = ~(jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(updates)))
        if spike_nats is not None:
            bad |= (seen.good_steps > 0) & (value > seen.loss_mean_nats + spike_nats)
        before = type(state)((name, part) for name, part in state.items() if name != STATE_NAME)
        updates, after = inner.update(updates, before, params, value=value, **extra)
        updates = jax.tree.map(lambda u: jnp.where(bad, jnp.asarray(-0.0, u.dtype), u), updates)
        after: Any = jax.tree.map(lambda new, old: jnp.where(bad, old, new), after, before)
        return updates, after | {STATE_NAME: _count(seen, bad, value)}

    update_with_loss: Any = update  # optax's type does not know of arguments by name
    return optax.GradientTransformationExtraArgs(init, update_with_loss)


def _count(seen: BadSteps, bad: jax.Array, loss: jax.Array) -> BadSteps:
    good_steps = seen.good_steps + 1
    mean = seen.loss_mean_nats + (loss - seen.loss_mean_nats) / jnp.minimum(good_steps, MEAN_OF_STEPS)
    return BadSteps(
        jnp.where(bad, seen.loss_mean_nats, mean),
        jnp.where(bad, seen.good_steps, good_steps),
        seen.skipped_steps + bad,
        jnp.where(bad, seen.in_a_row + 1, 0),
    )


def why_bad(
    step: int, loss_nats: float, grad_norm: float, seen: BadSteps | None = None, spike_nats: float | None = None
) -> str | None:
    """What was bad about a step, in words; None for a good one.

    Args:
      step: Its number.
      loss_nats: Its loss.
      grad_norm: Its gradient norm.
      seen: What the device says after it, where the optimizer watches.
      spike_nats: As configured.
    """
    for what, value in (("loss", loss_nats), ("norm of the gradient", grad_norm)):
        if not math.isfinite(value):
            return f"the {what} is not finite at step {step}: {value}"
    if seen is not None and seen.in_a_row > 0:
        mean = float(seen.loss_mean_nats)
        return f"the loss at step {step} is {loss_nats:.4g} nats, more than {spike_nats:g} above its mean {mean:.4g}"
    return None


def diverged(why: str) -> DivergedError:
    """The error that ends a run."""
    return DivergedError(
        why, hint="the last good checkpoint is kept; try a lower optim.learning_rate or a longer warm-up elsewhere"
    )
