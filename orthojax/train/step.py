"""The pure training step and its state."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orthojax.config import Config, ModelConfig, TrainConfig
from orthojax.fields import replace
from orthojax.model import Transformer, linear
from orthojax.ops import chunked_cross_entropy_sum_nats, cross_entropy_nats, positions_at_once
from orthojax.optim import layout_of, state_shardings
from orthojax.train.bad_steps import STATE_NAME, BadSteps
from orthojax.train.mesh import ROWS, constrain, make_mesh, traced_in_mesh
from orthojax.train.optimizer import learning_rate_schedule, run_optimizer
from orthojax.train.sharding import linear_on_rows, moment_shardings, parameter_shardings


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


class Layout(NamedTuple):
    """Where the state and the tokens of a run are; on one device nothing but the optimizer is said."""

    mesh: Mesh | None
    optimizer: optax.GradientTransformationExtraArgs
    state: TrainState | None  # of NamedSharding


# Runs that differ in what no program reads, as the seeds of a study, share their compiled programs.
_NOT_COMPILED = {
    f"train.{name}": getattr(TrainConfig(), name)
    for name in (
        "seed",
        "init_from",
        "allow_normalizer_change",
        "log_every_steps",
        "probe_every_steps",
        "probe_sequences",
        "tensorboard",
        "eval_every_steps",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "keep_every_steps",
        "keep_best",
    )
} | {"data.seed": 0, "data.verify": False}


def _program(config: Config) -> Config:
    """What the compiled programs of a run depend on."""
    return replace(config, _NOT_COMPILED)


@functools.lru_cache(maxsize=32)
def _layout(config: Config) -> Layout:
    mesh = make_mesh(config)
    if mesh is None:
        return Layout(None, run_optimizer(config), None)
    shapes = parameter_shapes(config)
    params = parameter_shardings(config.model, shapes, mesh)
    moments = moment_shardings(config, shapes, params)
    # The moments' layout moves with the mesh, the bases of the rotation do not.
    optimizer = run_optimizer(config, layout_of(moments))
    opt_state = state_shardings(optimizer, shapes, moments)
    whole: Any = NamedSharding(mesh, PartitionSpec())
    return Layout(mesh, optimizer, TrainState(whole, params, opt_state))


@functools.lru_cache(maxsize=32)
def _jitted_init(config: Config) -> Callable[[jax.Array], TrainState]:
    layout = _layout(config)

    def init(key):
        with traced_in_mesh(layout.mesh):
            params = _init_params(config, key)
            return TrainState(jnp.zeros((), jnp.int32), params, layout.optimizer.init(params))

    # With out_shardings the state is never whole on one device.
    return jax.jit(init) if layout.state is None else jax.jit(init, out_shardings=layout.state)


def _sums_of_parts(sums: Callable[[Any, jax.Array], Any], params: Any, tokens: jax.Array, parts: int) -> Any:
    """Adds `sums(params, part)` over parts of the rows, one after the other.

    Part i takes the rows i, i + parts, ...: so each part has rows of every device, and none travels.
    """
    rows = tokens.reshape(-1, parts, tokens.shape[-1]).swapaxes(0, 1)
    rows = constrain(rows, PartitionSpec(None, *ROWS))

    def add(total: Any, part: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, sums(params, part)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums, params, rows[0]))
    return jax.lax.scan(add, zeros, rows)[0]


@functools.lru_cache(maxsize=32)
def _jitted_train_step(config: Config) -> Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]:
    layout, parts = _layout(config), config.train.accumulation_steps
    model = Transformer(config.model, linear=linear if layout.mesh is None else linear_on_rows)
    schedule = learning_rate_schedule(config.optim, config.train.steps)

    def mean_loss(params, tokens):
        total, count = loss_sum_nats(model, params, tokens, config.train.loss_chunk_positions)
        return total / count, (total, count)

    def where_params_are(grads):
        # Or else the compiler would spread the moments' layout over the backward pass, and move activations.
        return grads if layout.state is None else jax.lax.with_sharding_constraint(grads, layout.state.params)

    def sums(params, tokens):
        def loss_sum(params):
            return loss_sum_nats(model, params, tokens, config.train.loss_chunk_positions)

        (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(params)
        return total, count, where_params_are(grads)

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, StepMetrics]:
        with traced_in_mesh(layout.mesh):
            if parts == 1:
                (loss, (total, count)), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params, tokens)
                grads = where_params_are(grads)
            else:
                total, count, grads = _sums_of_parts(sums, state.params, tokens, parts)
                loss, grads = total / count, jax.tree.map(lambda g: g / count, grads)
            opt_state: Any
            updates, opt_state = layout.optimizer.update(grads, state.opt_state, state.params, value=loss)
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

    if layout.mesh is None:
        return jax.jit(train_step, donate_argnums=0)
    whole = NamedSharding(layout.mesh, PartitionSpec())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(layout.state, NamedSharding(layout.mesh, ROWS)),
        out_shardings=(layout.state, whole),
    )


def state_shapes(config: Config) -> TrainState:
    """The state of a run as jax.ShapeDtypeStruct, on a mesh with its shardings; nothing is computed.

    Raises:
      UserError: As `init_state`.
    """
    program = _program(config)
    shapes, shardings = jax.eval_shape(_jitted_init(program), jax.random.key(0)), _layout(program).state
    if shardings is None:
        return shapes
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)


def init_state(config: Config) -> TrainState:
    """The state before the first step, on the mesh of the config; parameters depend on `train.seed` and the model only.

    Raises:
      UserError: Where the devices are too few for the mesh, or a batch does not divide over it.
    """
    return _jitted_init(_program(config))(jax.random.key(config.train.seed))


def make_train_step(config: Config) -> Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]:
    """The jitted step (state, tokens int32 [B, T + 1]) -> (state, metrics); it takes over the state's memory.

    On a mesh the state is where `init_state` puts it, and the tokens where `place_rows` does.
    """
    return _jitted_train_step(_program(config))
