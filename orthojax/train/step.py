"""The pure training step and its state."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from orthojax.config import Config, ModelConfig
from orthojax.fields import replace
from orthojax.model import Transformer
from orthojax.ops.chunked_cross_entropy import chunked_cross_entropy_sum_nats, positions_at_once
from orthojax.ops.losses import cross_entropy_nats
from orthojax.train.bad_steps import STATE_NAME, BadSteps
from orthojax.train.optimizer import learning_rate_schedule, run_optimizer


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: jax.Array  # shape=(), dtype=int32: optimizer steps taken
    params: Any  # float32
    opt_state: Any


class StepMetrics(NamedTuple):
    """What one step tells, all shape=(); norms are those of all parameters together."""

    loss_sum_nats: jax.Array
    target_tokens: jax.Array
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    update_norm: jax.Array  # of what was added to the parameters
    param_norm: jax.Array  # of the parameters after it
    bad_steps: BadSteps | None  # where the run watches for them


def split_tokens(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows [B, T + 1] -> inputs [B, T] and the next tokens [B, T]."""
    return tokens[:, :-1], tokens[:, 1:]


def loss_positions(config: ModelConfig, length: int) -> jax.Array:
    """Which of `length` positions enter the loss: all but those whose target a relaxed causal mask shows.

    Returns:
      Boolean [1, length].
    """
    return (jnp.arange(length) >= config.relaxed_causal_tokens - 1)[None]


def loss_sum_nats(
    model: Transformer, params: Any, tokens: jax.Array, chunk_positions: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Summed next-token loss and number of target tokens.

    Args:
      model: The transformer.
      params: Its parameters.
      tokens: int [B, T + 1].
      chunk_positions: `train.loss_chunk_positions`; all logits exist at once where a quantised head wants it so.
    """
    inputs, targets = split_tokens(tokens)
    B, T = inputs.shape
    counted = loss_positions(model.config, T)
    count = jnp.sum(jnp.broadcast_to(counted, targets.shape))
    positions = positions_at_once(B, T, model.config.vocab_size, chunk_positions)
    head = model.head_kernel(params)
    if head is None or positions == T:
        logits, _ = model.apply({"params": params}, inputs)
        return jnp.sum(jnp.where(counted, cross_entropy_nats(logits, targets), 0.0)), count
    hidden: Any = model.apply({"params": params}, inputs, head=False)
    kernel, axis = head
    loss = chunked_cross_entropy_sum_nats(hidden[0], kernel, targets, counted, positions=positions, vocab_axis=axis)
    return loss, count


def _init_params(config: Config, key: jax.Array) -> Any:
    tokens = jnp.zeros((1, config.data.sequence_length), jnp.int32)
    return Transformer(config.model).init(key, tokens)["params"]


def parameter_shapes(config: Config) -> Any:
    """The parameters that the model of a config has, as jax.ShapeDtypeStruct."""
    return jax.eval_shape(lambda: _init_params(config, jax.random.key(0)))


def optimizer_state_bytes(config: Config) -> int:
    """Bytes of the optimizer state of a run; nothing is computed."""
    optimizer = run_optimizer(config)
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, parameter_shapes(config)))
    )


# Runs that differ in their seeds or their start alone, as those of a study, share their compiled programs.


def _program(config: Config) -> Config:
    """What the compiled programs of a run depend on."""
    return replace(
        config, {"train.seed": 0, "data.seed": 0, "train.init_from": "", "train.allow_normalizer_change": False}
    )


@functools.lru_cache(maxsize=32)
def _jitted_init(config: Config) -> Callable[[jax.Array], TrainState]:
    optimizer = run_optimizer(config)

    @jax.jit
    def init(key):
        params = _init_params(config, key)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return init


@functools.lru_cache(maxsize=32)
def _jitted_train_step(config: Config) -> Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]:
    model = Transformer(config.model)
    optimizer = run_optimizer(config)
    schedule = learning_rate_schedule(config.optim, config.train.steps)

    def mean_loss(params, tokens):
        total, count = loss_sum_nats(model, params, tokens, config.train.loss_chunk_positions)
        return total / count, (total, count)

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, StepMetrics]:
        (loss, (total, count)), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params, tokens)
        opt_state: Any
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(
            loss_sum_nats=total,
            target_tokens=count,
            grad_norm=optax.tree.norm(grads),
            learning_rate=jnp.asarray(schedule(state.opt_state["learning_rate"].count)),
            update_norm=optax.tree.norm(updates),
            param_norm=optax.tree.norm(params),
            bad_steps=opt_state.get(STATE_NAME),
        )
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(train_step, donate_argnums=0)


def init_state(config: Config) -> TrainState:
    """The state before the first step; parameters depend on `train.seed` and the model only."""
    return _jitted_init(_program(config))(jax.random.key(config.train.seed))


def make_train_step(config: Config) -> Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]:
    """The jitted step (state, tokens int32 [B, T + 1]) -> (state, metrics); it takes over the state's memory."""
    return _jitted_train_step(_program(config))
