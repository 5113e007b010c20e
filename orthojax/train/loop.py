"""The training loop: batches in, metrics.jsonl and checkpoints out, exact resume."""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import Config, flatten, to_json
from orthojax.errors import Interrupted
from orthojax.train.checkpoint import Checkpoints, DamagedError, read_config, read_json_item, require_same_data
from orthojax.train.distributed import (
    StopRequest,
    ending_with_peers,
    from_primary,
    is_primary,
    stop_on_signals,
    sync_start,
)
from orthojax.train.evaluation import validation_loss_nats
from orthojax.train.loading import find_model, initial_params
from orthojax.train.mesh import place_rows, place_tree, place_whole
from orthojax.train.metrics import ROLLED_BACK, MetricWriter, TensorBoard, WandB, validation_losses
from orthojax.train.probe import Probe, probe_metrics
from orthojax.train.step import Program, TrainState, build, shapes_of
from orthojax.train.step_logger import Position, RollBack, StepLogger, step_before
from orthojax.train.workdir import (
    Inputs,
    check_workdir,
    claimed,
    keep_tokenizer,
    prefetched,
    require_same_config,
    start_of,
)


def train(
    config: Config,
    inputs: Inputs,
    workdir: Path,
    *,
    on_start: Callable[[int], None] = lambda step: None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    on_line: Callable[[dict[str, Any]], None] = lambda line: None,
) -> TrainState:
    """Trains to `train.steps`, resuming from the newest checkpoint of the workdir where there is one.

    Writes `config.json`, `tokenizer.json`, `metrics.jsonl` and `checkpoints/` under the workdir, and `init_from.json`,
    which says which checkpoint `train.init_from` was. On the same machine a run that was stopped anywhere, by kill -9
    too, ends with the same bits as one that was not, whatever bad steps it met.

    Runs on the mesh of `config.mesh`, and may resume on another one. With several processes every one calls this, with
    a workdir that all of them see; process 0 alone writes the config and the metrics. Where one of them is killed, or
    has an error of its own, it and the others end with exit code 1 or 2, without an exception that could be caught.

    Args:
      config: The run.
      inputs: Its data, from `open_inputs`.
      workdir: Its folder.
      on_start: Called once with the number of steps already done.
      on_step: Called with (step, loss in nats) after every step; after a roll-back with the same steps again.
      on_line: Called with every line of metrics.jsonl.

    Returns:
      The final state.

    Raises:
      UserError: Where the workdir, a checkpoint, the disk or the number of devices does not allow it.
      DivergedError: At a bad step that ends the run; see `train.on_bad_step`.
      Interrupted: On SIGINT, SIGTERM or a preemption notice, when the state is saved.
    """
    program, settings = build(config, inputs.task), config.train
    mirrors: list[TensorBoard | WandB] = []
    if is_primary() and settings.tensorboard:
        mirrors.append(TensorBoard(workdir / "tensorboard"))
    if is_primary() and settings.wandb:
        mirrors.append(WandB(workdir, flatten(config)))
    retention = {"keep_every_steps": settings.keep_every_steps, "keep_best": settings.keep_best}
    if settings.on_bad_step == "roll_back":
        retention["scheduled_every_steps"] = settings.checkpoint_every_steps
    with (
        _started(config, inputs, workdir),
        Checkpoints(workdir / "checkpoints", keep=settings.keep_checkpoints, **retention) as checkpoints,
        ending_with_peers(),
    ):
        run = _Run(config, inputs, program, checkpoints, workdir)
        state, position = run.newest_state()
        if is_primary():
            keep_tokenizer(workdir, inputs.tokenizer_path)
        step, path = int(state.step), workdir / "metrics.jsonl"
        checkpoints.validated_before(dict(from_primary(lambda: [*validation_losses(path, step).items()])))
        on_start(step)
        if step >= settings.steps and not run.validation_pending(step):
            return state
        writer = MetricWriter(path if is_primary() else None, step, mirrors=mirrors, on_line=on_line)
        with writer, stop_on_signals() as stop:
            logger = StepLogger(config, writer, on_step, 1 if program.mesh is None else program.mesh.size)
            state = run.train(state, step, position, writer, logger, stop)
        checkpoints.wait()
        if stop.signum is not None:
            raise Interrupted(stop.signum, settings.steps)
    return state


@contextlib.contextmanager
def _started(config: Config, inputs: Inputs, workdir: Path) -> Iterator[None]:
    """All processes start the same run, in a folder that no other call uses."""
    with contextlib.ExitStack() as held:

        def prepare() -> None:
            check_workdir(workdir, config)
            if is_primary():
                held.enter_context(claimed(workdir, config))

        sync_start(prepare, {"config": to_json(config), "data": json.dumps(inputs.provenance, sort_keys=True)})
        yield


class _Stopping(Exception):
    """A signal came during a validation."""


class _Run:
    """The states, batches and steps of a run, and what follows each step: validation, a checkpoint, a roll-back."""

    def __init__(self, config: Config, inputs: Inputs, program: Program, checkpoints: Checkpoints, workdir: Path):
        self._config, self._inputs, self._program, self._checkpoints = config, inputs, program, checkpoints
        self._workdir = workdir
        self._settings = config.train

    def _wanted(self) -> TrainState:
        """What a checkpoint is read into: shapes, dtypes and places, since a second state may not fit into memory."""
        shapes = shapes_of(self._program)
        if self._program.shardings is not None:
            return shapes
        here = jnp.zeros(()).sharding
        return jax.tree.map(lambda x: x.update(sharding=here), shapes)

    def _initial_state(self) -> TrainState:
        state = self._program.init(jax.random.key(self._settings.seed))
        if not self._settings.init_from:
            return state
        init_from = self._settings.init_from
        path = from_primary(lambda: start_of(self._workdir, init_from, lambda name: find_model(name)[0]))
        params = place_tree(initial_params(self._config, self._inputs.provenance, path), state.params)
        state = state._replace(params=params)
        if not self._config.optim.sink_anneal_steps:
            return state
        # Annealing keeps in its state what the sinks start from.
        shardings = jax.tree.map(lambda x: x.sharding, state.opt_state)
        return state._replace(opt_state=jax.jit(self._program.optimizer.init, out_shardings=shardings)(params))

    def newest_state(self) -> tuple[TrainState, Position]:
        """The newest intact checkpoint with its position in the data, or the initial state."""

        def accept(folder: Path) -> None:
            require_same_config(self._config, read_config(folder), str(folder))
            require_same_data(folder, self._inputs.provenance)

        saved = self._checkpoints.restore_newest(self._wanted(), accept)
        if saved is None:
            return self._initial_state(), Position()
        data = read_json_item(self._checkpoints.directory / str(int(saved.step)), "data")
        return saved, Position(*(data.get(name, 0) for name in Position._fields))

    def train(
        self,
        state: TrainState,
        step: int,
        position: Position,
        writer: MetricWriter,
        logger: StepLogger,
        stop: StopRequest,
    ) -> TrainState:
        """Trains from a step to the last."""
        self._writer, self._logger, self._stop = writer, logger, stop
        probe = Probe(self._config, self._inputs, self._program.mesh, self._workdir / "probes")
        if step == 0 and (start := probe(0, state.params)):
            writer.write({"step": 0} | probe_metrics(jax.device_get(start)))
        owed = self.validation_pending(step)
        while True:
            logger.start(step)
            try:
                with contextlib.closing(self._batches(step, position)) as batches:
                    stopping = self._validate(step, state) if owed else None
                    while stopping is None and step < self._settings.steps:
                        step += 1
                        probe.before(step, state.params)
                        state, metrics = self._program.step(state, next(batches))
                        self._checkpoints.check()
                        stopping = stop.at(step)
                        logger.put(step, metrics, probe(step, state.params))
                        stopping = stopping or self._validate(step, state)
                        position = self._save(step, state, position, stopping=stopping is not None)
            except RollBack as bad:
                del state  # its memory is needed
                state, position, step = self._go_back(bad, position)
                probe.forget()
                owed = False
                continue
            if stopping is None:
                return state
            self._checkpoints.wait()
            raise Interrupted(stopping, step)

    def _batches(self, step: int, position: Position) -> Generator[jax.Array, None, None]:
        """The batches of the steps after this one, prefetched; of a task, what it draws them from."""
        mesh, seed = self._program.mesh, self._config.data.seed

        def read(step: int) -> jax.Array:
            batch = step - 1 + position.left_out_batches
            if self._inputs.task is not None:
                return place_whole(mesh, np.array([seed, batch], np.uint32))
            return place_rows(mesh, self._settings.batch_size, functools.partial(self._inputs.batch_rows, batch))

        return prefetched(read, step + 1, self._settings.steps + 1)

    def _validates(self, step: int) -> bool:
        every = self._settings.eval_every_steps
        return bool(every) and (step % every == 0 or step == self._settings.steps)

    def validation_pending(self, step: int) -> bool:
        """Whether the run was stopped after this step before it had validated, so that it does that first."""
        return step > 0 and self._validates(step) and not self._checkpoints.is_validated(step)

    def _validate(self, step: int, state: TrainState) -> int | None:
        """Validates where the schedule asks for it; returns the signal that cut it off, for the resumed run to redo."""
        if not self._validates(step):
            return None
        self._logger.flush()

        def leave() -> None:
            if self._stop.at(step) is not None:
                raise _Stopping

        try:
            with self._logger.pause():
                loss = validation_loss_nats(self._config, state.params, self._inputs, leave)
        except _Stopping:
            return self._stop.signum
        self._logger.require_finite("validation loss", step, loss)
        self._writer.write({"step": step, "validation_loss_nats": loss})
        self._checkpoints.validated(step, loss)
        return None

    def _save(self, step: int, state: TrainState, position: Position, *, stopping: bool) -> Position:
        scheduled = step % self._settings.checkpoint_every_steps == 0 or step == self._settings.steps
        if not scheduled and not stopping:
            return position
        self._logger.flush()
        # The loss was that of the parameters before this step; those that are saved must be finite too.
        self._logger.require_finite("norm of the parameters", step, self._logger.param_norm)
        position = position._replace(roll_backs=0) if scheduled else position
        self._checkpoints.save(state, self._config, self._inputs.provenance | position.to_json())
        return position

    def _go_back(self, bad: RollBack, position: Position) -> tuple[TrainState, Position, int]:
        """The state, position in the data and step that the run resumes from after a bad step."""
        checkpoints = self._checkpoints
        checkpoints.wait()
        every, newest = self._settings.checkpoint_every_steps, checkpoints.latest_step()
        origin, state = step_before(bad.step, every, checkpoints.directory, newest), None
        if origin is not None:
            try:
                state = checkpoints.restore(self._wanted(), origin)
            except DamagedError as error:
                print(f"warning: {error}; rolling back to the newest intact checkpoint", file=sys.stderr)
                checkpoints.forget_after(bad.step - 1)
                state = checkpoints.restore_newest(self._wanted())
        if state is None:
            state = self._initial_state()
        step = int(state.step)
        position = position.after(bad, step)
        checkpoints.forget_after(step)  # what a signal saved since, on the way to the bad step
        self._writer.roll_back(step)
        # Logged under the next step, so that a resumed run that will roll back again drops it.
        event = {"step": step + 1, "event": ROLLED_BACK, "why": bad.why, "to_step": step}
        self._writer.write(event | position.to_json())
        return state, position, step
