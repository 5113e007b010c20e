"""The pure training step, its state, and the program of a run: built once from its config, then only objects."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from orthojax.config import Config, ModelConfig, OptimConfig
from orthojax.data import BigramBackcopy
from orthojax.errors import UserError
from orthojax.model import Interventions, LinearFunction, Taps, Transformer, parameter_shapes, segment_positions
from orthojax.ops import chunked_cross_entropy_sum_nats, cross_entropy_nats, positions_at_once
from orthojax.optim import layout_of, state_shardings
from orthojax.train.low_precision import training_linear
from orthojax.train.mesh import (
    ROWS,
    constrain,
    make_mesh,
    moment_shardings,
    on_rows,
    parameter_shardings,
    traced_in_mesh,
)
from orthojax.train.optimizer import learning_rate_schedule, make_optimizer


class TrainState(NamedTuple):
    """The state that a step changes."""

    step: jax.Array  # shape=(), dtype=int32: optimizer steps taken
    params: Any  # float32
    opt_state: Any


class StepMetrics(NamedTuple):
    """The metrics of one step, all shape=(), or of several; norms are over all parameters together."""

    loss_sum_nats: jax.Array
    target_tokens: jax.Array
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    update_norm: jax.Array  # of what was added to the parameters
    param_norm: jax.Array  # of the parameters after it
    activation_penalty: jax.Array | None = None  # the term that was added to the mean loss, if there is one


ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)
# (params, tokens) -> (loss sum, target count), and third a penalty times the count that is added to the loss sum
LossSum = Callable[[Any, jax.Array], tuple[jax.Array, ...]]
Draw = Callable[[jax.Array], jax.Array]  # uint32 [2], (seed, number of the batch) -> tokens
TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]  # of tokens int32 [B, T + 1]
# (state, tokens int32 [B, K, T + 1] or uint32 [K, 2] from which they are drawn, number n of steps up to K) ->
# (state, metrics [K], of which n count)
TrainSteps = Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, StepMetrics]]


def split_tokens(tokens: ArrayT, model: ModelConfig) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Splits rows into inputs [B, T], targets [B, T], and bool [1, T], whether they count.

    Targets of rows [B, T + 1] are the next tokens; those that a relaxed mask shows do not count.
    """
    xp: Any = jnp if isinstance(tokens, jax.Array) else np
    counted = xp.arange(tokens.shape[1] - 1) >= model.relaxed_causal_tokens - 1
    return tokens[:, :-1], tokens[:, 1:], counted[None]


def loss_sum_nats(
    model: Transformer,
    params: Any,
    tokens: jax.Array,  # int [B, T + 1]
    chunk_positions: int | None = None,  # of every sequence, whose logits are materialised at a time
    interventions: Interventions | None = None,
    logits_dtype: DTypeLike | None = None,  # to which logits are rounded, except those of a quantised head
    penalty: float = 0.0,
    observe: Callable[[Taps], Any] | None = None,
    packed: bool = False,  # tokens are then int [B, 2 (T + 1)], see `orthojax.data.PackedBatches`
    head_params: Any = None,  # in place of `params` for the head
) -> tuple[Any, ...]:
    """Computes the summed loss and the number of target tokens, of positions that count: see `split_tokens`.

    By default 256 MB of logits are materialised on a CPU and 512 MB on another device; a quantised head needs all
    positions. The third result, if there is one, is with `penalty`, a factor of the mean of `activation_penalty` over
    layers, their product times the number of target tokens, else what `observe` returns in each layer [L, ...].
    """
    segment_ids = None
    if packed:
        tokens, segments = jnp.split(tokens, 2, axis=1)
        segment_ids, next_ids = segments[:, :-1], segments[:, 1:]
    inputs, targets, counted = split_tokens(tokens, model.config)
    if segment_ids is not None:  # the last token of a segment predicts nothing, nor does padding
        counted = (segment_ids > 0) & (segment_ids == next_ids)
        counted &= segment_positions(segment_ids) >= model.config.relaxed_causal_tokens - 1
    B, T = inputs.shape
    count = jnp.sum(jnp.broadcast_to(counted, targets.shape))
    positions = positions_at_once(B, T, model.config.vocab_size, chunk_positions, logits_dtype or jnp.float32)
    head = model.head_kernel(head_params or params)
    whole = head is None or (positions == T and logits_dtype is None)
    observe = (lambda taps: activation_penalty(taps.residual)) if penalty else observe
    options: Any = {"interventions": interventions, "observe": observe, "head": whole, "segment_ids": segment_ids}
    output, seen = cast(Any, model.apply({"params": params}, inputs, **options))
    if head is None or whole:
        total = jnp.sum(jnp.where(counted, cross_entropy_nats(output, targets), 0.0))
    else:
        options: Any = {"positions": positions, "vocab_axis": head[1], "logits_dtype": logits_dtype}
        total = chunked_cross_entropy_sum_nats(output, head[0], targets, counted, **options)
    if penalty:
        return total, count, penalty * jnp.mean(seen) * count
    return (total, count) if observe is None else (total, count, seen)


def activation_penalty(x: jax.Array) -> jax.Array:
    r"""Computes TWEO's term of one block, shape=() float32: the mean of :math:`(|x| / (\tau + \epsilon))^p`.

    x is what the block leaves in the residual stream, :math:`\tau = 3`, :math:`p = 4`, :math:`\epsilon = 10^{-6}`: an
    entry of 3 adds about 1, one of 30 adds 10,000, and ordinary ones add almost nothing. The mean is over all tokens
    and channels. The paper's optional decay of the term's factor is left out.

    Reference:
      TWEO, `arXiv 2511.23225 <https://arxiv.org/abs/2511.23225>`_, 2025; the equation was read in notes on the paper.

    >>> round(float(activation_penalty(jnp.array([3.0, 30.0, 0.0, 0.0]))), 1)
    2500.2
    """
    return jnp.mean(jnp.square(jnp.square(x.astype(jnp.float32) / (3.0 + 1e-6))))


def training_logits_dtype(config: Config) -> str | None:
    """Returns the dtype of the logits that a run trains on, None for float32; see `train.logits_dtype`."""
    asked, model = config.train.logits_dtype, config.model.dtype
    if asked == "auto" and jax.default_backend() != "cpu":
        asked = model
    return asked if asked == "bfloat16" else None


def _sum_over_parts(sums: Callable[[Any, jax.Array], Any], params: Any, tokens: jax.Array, parts: int) -> Any:
    """Adds `sums(params, part)` over parts of the rows, one after the other.

    Part i takes the rows i, i + parts, ..., so that each part has rows of every device and no row is sent. Devices with
    copies of the parameters add up their own sums, which meet once, after the last part; where parameters are split,
    gradients are as well, and meet in each part: whole ones need not fit.
    """

    def local(params: Any, tokens: jax.Array) -> Any:
        rows = tokens.reshape(-1, parts, tokens.shape[-1]).swapaxes(0, 1)
        rows = constrain(rows, PartitionSpec(None, *ROWS))

        def add(total: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, sums(params, part)), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums, params, rows[0]))
        return jax.lax.scan(add, zeros, rows)[0]

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["data"] < mesh.size:
        return local(params, tokens)
    mapped = jax.shard_map(
        lambda *arrays: jax.tree.map(lambda x: x[None], local(*arrays)),
        in_specs=(PartitionSpec(), ROWS),
        out_specs=ROWS,
        check_vma=False,  # else every gradient of what is alike on all devices would be summed over them at once
    )
    return jax.tree.map(lambda x: x.sum(0), mapped(params, tokens))


def make_pure_step(
    loss_sum: LossSum,
    optimizer: optax.GradientTransformation,  # a named chain with a part `learning_rate`
    schedule: optax.Schedule,  # the learning rate, for the metrics
    *,
    accumulation_steps: int = 1,  # parts of a batch that go through the model one after the other
    mesh: Mesh | None = None,
    shardings: TrainState | None = None,  # of the state, on the mesh
) -> TrainStep:
    """Makes the step (state, tokens int32 [B, T + 1]) -> (state, metrics), to be jitted, for the loss a target."""

    def like_params(grads):
        # Otherwise the compiler spreads the moments' layout over the backward pass, and moves activations.
        return grads if shardings is None else jax.lax.with_sharding_constraint(grads, shardings.params)

    def minimised(params, tokens):
        total, *others = loss_sum(params, tokens)
        return sum(others[1:], total), (total, *others)

    def mean_loss(params, tokens):
        total, found = minimised(params, tokens)
        return total / found[1], found

    def sums(params, tokens):
        (_, found), grads = jax.value_and_grad(minimised, has_aux=True)(params, tokens)
        return found, like_params(grads)

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, StepMetrics]:
        with traced_in_mesh(mesh):
            if accumulation_steps == 1:
                (_, found), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params, tokens)
                grads = like_params(grads)
            else:
                found, grads = _sum_over_parts(sums, state.params, tokens, accumulation_steps)
                grads = jax.tree.map(lambda g: g / found[1], grads)
            total, count, *penalty = found
            opt_state: Any
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics = StepMetrics(
                loss_sum_nats=total,
                target_tokens=count,
                grad_norm=_norm(grads),
                learning_rate=jnp.asarray(schedule(state.opt_state["learning_rate"].count)),
                update_norm=_norm(updates),
                param_norm=_norm(params),
                activation_penalty=penalty[0] / count if penalty else None,
            )
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


def _jit(
    function: Callable[..., Any],
    mesh: Mesh | None,
    shardings: TrainState | None,
    *specs: PartitionSpec,
    compiler_options: Mapping[str, str | bool] | None = None,
) -> Any:
    """Jits (state, *arrays) -> (state, metrics), whose state is donated; `specs` are those of the arrays."""
    options: Any = {"donate_argnums": 0, "compiler_options": dict(compiler_options) if compiler_options else None}
    if mesh is None:
        return jax.jit(function, **options)
    whole, arrays = NamedSharding(mesh, PartitionSpec()), (NamedSharding(mesh, spec) for spec in specs)
    return jax.jit(function, **options, in_shardings=(shardings, *arrays), out_shardings=(shardings, whole))


def _compiler_options(given: Sequence[str]) -> dict[str, str | bool]:
    """Returns options of XLA by name; UserError for one that is not NAME=VALUE, or that XLA does not take."""
    options: dict[str, str | bool] = {}
    for text in given:
        name, _, value = text.partition("=")
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
        try:
            jax.jit(lambda: 0, compiler_options={name: options[name]}).lower().compile()
        except Exception as error:  # of a private type
            problem = f"train.compiler_options: {text!r}: {str(error).splitlines()[0]:.200}"
            raise UserError(problem, allowed="NAME=VALUE of this XLA, as in XLA_FLAGS without --") from None
    return options


def jit_train_step(
    loss_sum: LossSum,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    mesh: Mesh | None = None,
    shardings: TrainState | None = None,
    **options: Any,
) -> TrainStep:
    """Builds the jitted `make_pure_step` with the same arguments; the state is donated."""
    step = make_pure_step(loss_sum, optimizer, schedule, mesh=mesh, shardings=shardings, **options)
    return _jit(step, mesh, shardings, ROWS)


def jit_train_steps(
    step: TrainStep,
    *,
    mesh: Mesh | None = None,
    shardings: TrainState | None = None,
    draw: Draw | None = None,
    compiler_options: Mapping[str, str | bool] | None = None,
) -> TrainSteps:
    """Builds the jitted loop over a step of `make_pure_step`; the state is donated.

    The number of steps is an argument, so that one program serves all numbers of steps, with the same bits. With
    `draw`, (seed, number of the batch) -> tokens, no tokens are given.
    """

    def train_steps(state: TrainState, batches: jax.Array, count: jax.Array) -> tuple[TrainState, StepMetrics]:
        if draw is not None:
            with traced_in_mesh(mesh):  # all batches at once: a draw goes from position to position
                batches = constrain(jax.vmap(draw, out_axes=1)(batches), ROWS)
        if batches.shape[1] == 1 and jax.default_backend() != "cpu":
            # A GPU asks the host whether a loop continues, so the host could not run ahead of it.
            state, metrics = step(state, batches[:, 0])
            return state, jax.tree.map(lambda x: x[None], metrics)

        def body(i: jax.Array, carry: tuple[TrainState, StepMetrics]) -> tuple[TrainState, StepMetrics]:
            state, metrics = once(carry[0], jax.lax.dynamic_index_in_dim(batches, i, axis=1, keepdims=False))
            return state, jax.tree.map(lambda all_steps, x: all_steps.at[i].set(x), carry[1], metrics)

        once: Any = jax.jit(step)  # traced once, for shapes and loop
        _, shapes = jax.eval_shape(once, state, batches[:, 0])
        empty = jax.tree.map(lambda x: jnp.zeros((batches.shape[1], *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(0, count, body, (state, empty))

    specs = (ROWS if draw is None else PartitionSpec(), PartitionSpec())
    return _jit(train_steps, mesh, shardings, *specs, compiler_options=compiler_options)


class Program(NamedTuple):
    """The jitted functions of a run, and where their arrays are."""

    mesh: Mesh | None
    optimizer: optax.GradientTransformation
    shardings: TrainState | None  # of NamedSharding, on a mesh
    init: Callable[[jax.Array], TrainState]  # jitted: key -> the state before the first step, on the mesh
    step: TrainStep  # jitted
    steps: TrainSteps  # jitted


def require_attention(model: ModelConfig) -> None:
    """Refuses the fused attention of another platform before anything is read or compiled."""
    asked, platform = model.attention_implementation, jax.default_backend()
    if {"cudnn": "gpu", "splash": "tpu"}.get(asked, platform) != platform:
        raise UserError(f"model.attention_implementation={asked!r} on a {platform}", allowed="auto | xla | xla_chunked")


def build(config: Config, task: BigramBackcopy | None = None) -> Program:
    """Builds a run's model, optimizer and jitted functions; runs that agree in what matters share them.

    Given a task, `steps` draws its batches from the task, by (seed, number of the batch); otherwise it takes tokens.
    Raises UserError as for `make_mesh`.
    """
    train = config.train
    return _build(
        make_mesh(config),
        config.model,
        config.seeded_optim,
        length=config.data.sequence_length,
        steps=train.steps,
        accumulation_steps=train.accumulation_steps,
        logits_dtype=training_logits_dtype(config),
        penalty=train.activation_penalty,
        packed=config.data.pack,
        drawn=None if task is None else (task, train.batch_size),
        gather_table=config.mesh.gather_table,
        products=training_linear(train),
        compiler_options=train.compiler_options,
    )


@functools.lru_cache(maxsize=32)
def _build(
    mesh: Mesh | None,
    model_config: ModelConfig,
    optim: OptimConfig,
    *,
    length: int,
    steps: int,
    accumulation_steps: int,
    logits_dtype: str | None,
    penalty: float,
    packed: bool,
    drawn: tuple[BigramBackcopy, int] | None,
    gather_table: bool,
    products: LinearFunction,
    compiler_options: tuple[str, ...],
) -> Program:
    model, schedule = Transformer(model_config), learning_rate_schedule(optim, steps)
    trained = Transformer(model_config, linear=products if mesh is None else on_rows(products))
    if mesh is None:
        optimizer, shardings, table_at = make_optimizer(optim, schedule=schedule), None, None
    else:
        shapes = parameter_shapes(model_config)
        params = parameter_shardings(model_config, shapes, mesh)
        moments = moment_shardings(optim, shapes, params)
        # The moments' layout moves with the mesh, the bases of the rotation do not.
        optimizer = make_optimizer(optim, schedule=schedule, layout=layout_of(moments))
        whole: Any = NamedSharding(mesh, PartitionSpec())
        table_at = params["token_embedding"]["embedding"].spec
        shardings = TrainState(whole, params, state_shardings(optimizer, shapes, moments))

    def init(key: jax.Array) -> TrainState:
        with traced_in_mesh(mesh):
            params = model.init(key, jnp.zeros((1, length), jnp.int32))["params"]
            return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    def loss_sum(params: Any, tokens: jax.Array) -> tuple[jax.Array, ...]:
        options: Any = {"logits_dtype": logits_dtype, "penalty": penalty, "packed": packed}
        if table_at is not None:
            dtype = model_config.dtype if gather_table else None
            tables: Any = _for_look_up_and_head(dtype, table_at, params["token_embedding"]["embedding"])
            of_look_up, of_head = ({"token_embedding": {"embedding": table}} for table in tables)
            params, options["head_params"] = params | of_look_up, params | of_head
        return loss_sum_nats(trained, params, tokens, **options)

    def draw(seed_and_number: jax.Array) -> jax.Array:
        assert drawn is not None
        (task, batch_size), (seed, number) = drawn, seed_and_number
        return task.batch(number, batch_size, length, seed)

    placed: Any = {"mesh": mesh, "shardings": shardings}
    compiled: Any = {"compiler_options": _compiler_options(compiler_options)}
    step = make_pure_step(loss_sum, optimizer, schedule, accumulation_steps=accumulation_steps, **placed)
    steps_of = jit_train_steps(step, **placed, draw=draw if drawn else None, **compiled)
    # With out_shardings the state is never whole on one device.
    jitted_init = jax.jit(init) if mesh is None else jax.jit(init, out_shardings=shardings)
    return Program(mesh, optimizer, shardings, jitted_init, _jit(step, mesh, shardings, ROWS, **compiled), steps_of)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _for_look_up_and_head(
    dtype: DTypeLike | None, spec: PartitionSpec, table: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a table of token embeddings twice; with a dtype, gathered over `fsdp` once, in that dtype.

    `spec` is the table's. So split, each gradient is summed over devices before the other is added: XLA would scatter
    that of look-ups into that of the head, and gather it for this.
    """
    if dtype is not None:
        table = jax.lax.optimization_barrier(table.astype(dtype))  # else XLA gathers float32 and then casts
        table = constrain(table, PartitionSpec("tensor"))
    return table, table


def _of_table(dtype: DTypeLike | None, spec: PartitionSpec, table: jax.Array) -> tuple[Any, jax.Array]:
    return _for_look_up_and_head(dtype, spec, table), jnp.zeros((), table.dtype)


def _gradient_of_table(dtype: Any, spec: PartitionSpec, like: jax.Array, gradients: tuple[jax.Array, ...]) -> Any:
    del dtype
    of_look_up, of_head = (constrain(g, spec).astype(like.dtype) for g in gradients)
    return (of_look_up + of_head,)


_for_look_up_and_head.defvjp(_of_table, _gradient_of_table)


def state_shapes(config: Config) -> TrainState:
    """Returns the state of a run as jax.ShapeDtypeStruct with shardings; nothing is computed."""
    return shapes_of(build(config))


def shapes_of(program: Program) -> TrainState:
    """Returns `state_shapes` of a built run."""
    shapes, here = jax.eval_shape(program.init, jax.random.key(0)), SingleDeviceSharding(jax.devices()[0])
    places = program.shardings or jax.tree.map(lambda _: here, shapes)
    return jax.tree.map(lambda x, at: x.update(sharding=at), shapes, places)


def init_state(config: Config) -> TrainState:
    """Returns the state before the first step, on the mesh; parameters depend only on `train.seed` and the model."""
    return build(config).init(jax.random.key(config.train.seed))


def make_train_step(config: Config) -> TrainStep:
    """Returns the jitted step of a run, from `jit_train_step`; on a mesh its tokens come from `place_rows`."""
    return build(config).step


def _norm(tree: Any) -> jax.Array:
    """Computes the norm of all leaves; the barrier keeps XLA from adding them up before their sums over devices."""
    squares = jax.lax.optimization_barrier([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)])
    return jnp.sqrt(sum(squares))
