"""The training loop: batches in, metrics.jsonl and checkpoints out, exact resume."""

import contextlib
import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from orthojax.config import Config
from orthojax.errors import Interrupted
from orthojax.fields import to_json
from orthojax.train.bad_steps import RollBack
from orthojax.train.checkpoint import Checkpoints, read_config, require_same_data
from orthojax.train.evaluation import validation_loss_nats
from orthojax.train.inputs import Inputs
from orthojax.train.mesh import make_mesh, place_rows, place_tree
from orthojax.train.metric_writer import ROLLED_BACK, MetricWriter, NoWriter, validation_losses
from orthojax.train.multihost import begin_together, from_primary, is_primary
from orthojax.train.prefetch import prefetched
from orthojax.train.pretrained import initial_params
from orthojax.train.probe import Probe
from orthojax.train.recorder import Recorder
from orthojax.train.roll_back import Position, read_position, step_before
from orthojax.train.signals import StopRequest, stop_on_signals
from orthojax.train.step import TrainState, init_state, make_train_step
from orthojax.train.tensorboard import TensorBoard
from orthojax.train.workdir import alone_in, check_workdir, prepare_workdir, require_same_config


def train(
    config: Config,
    inputs: Inputs,
    workdir: Path,
    *,
    on_start: Callable[[int], None] = lambda step: None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    on_line: Callable[[dict[str, Any]], None] = lambda line: None,
) -> TrainState:
    """Trains to `train.steps`, going on from the newest checkpoint of the workdir where there is one.

    Writes `config.json`, `metrics.jsonl` and `checkpoints/` under the workdir. On the same machine a run that was
    stopped anywhere, by kill -9 too, ends with the same bits as one that was not, whatever bad steps it met.

    Runs on the mesh of `config.mesh`, and may go on on another one. With several processes every one calls this, with a
    workdir that all of them see; process 0 alone writes the config and the metrics.

    Args:
      config: The run.
      inputs: Its data, from `open_inputs`.
      workdir: Its folder.
      on_start: Called once with the number of steps already done.
      on_step: Called with (step, loss in nats) after every step; a step that a run goes back to comes again.
      on_line: Called with every line of metrics.jsonl.

    Returns:
      The final state.

    Raises:
      UserError: Where the workdir, a checkpoint, the disk or the number of devices does not allow it.
      DivergedError: At a bad step that ends the run; see `train.on_bad_step`.
      Interrupted: On SIGINT, SIGTERM or a preemption notice, when the state is saved.
    """
    mesh, settings = make_mesh(config), config.train
    tensorboard = TensorBoard(workdir / "tensorboard") if settings.tensorboard and is_primary() else None
    kept = (settings.keep_checkpoints, settings.keep_every_steps, settings.keep_best)
    keep = dict(zip(("keep", "keep_every_steps", "keep_best"), kept, strict=True))
    with _begun(config, inputs, workdir), Checkpoints(workdir / "checkpoints", **keep) as checkpoints:
        state, position = newest_state(checkpoints, config, inputs)
        step, path = int(state.step), workdir / "metrics.jsonl"
        checkpoints.validated_before(dict(from_primary(lambda: [*validation_losses(path, step).items()])))
        on_start(step)
        if step >= settings.steps and not _owes_validation(config, checkpoints, step):
            return state
        lines = MetricWriter(path, step, tensorboard=tensorboard, on_line=on_line) if is_primary() else NoWriter()
        with lines as writer, stop_on_signals() as stop, contextlib.ExitStack() as at_the_end:
            recorder = Recorder(config, writer, on_step, 1 if mesh is None else mesh.size)
            run = _Run(config, inputs, mesh, checkpoints, writer, recorder)
            at_the_end.callback(run.close)
            state = run.train(state, step, position, stop)
        checkpoints.wait()
        if stop.signum is not None:
            raise Interrupted(stop.signum, settings.steps)
    return state


@contextlib.contextmanager
def _begun(config: Config, inputs: Inputs, workdir: Path) -> Iterator[None]:
    """All processes at one run, in a folder that no other run is in."""
    with contextlib.ExitStack() as held:

        def prepare() -> None:
            check_workdir(workdir, config)
            if is_primary():
                held.enter_context(alone_in(workdir))
                prepare_workdir(workdir, config)

        begin_together(prepare, {"config": to_json(config), "data": json.dumps(inputs.provenance, sort_keys=True)})
        yield


def _beginning(config: Config, inputs: Inputs) -> TrainState:
    """The state before the first step."""
    state = init_state(config)
    if not config.train.init_from:
        return state
    return state._replace(params=place_tree(initial_params(config, inputs.provenance), state.params))


def newest_state(checkpoints: Checkpoints, config: Config, inputs: Inputs) -> tuple[TrainState, Position]:
    """The newest whole checkpoint of the run with its place in the data, or the beginning."""

    def accept(folder: Path) -> None:
        require_same_config(config, read_config(folder), str(folder))
        require_same_data(folder, inputs.provenance)

    saved = checkpoints.restore_newest(init_state(config), accept)
    if saved is None:
        return _beginning(config, inputs), Position()
    return saved, read_position(checkpoints.directory / str(int(saved.step)))


def _validates(config: Config, step: int) -> bool:
    every = config.train.eval_every_steps
    return bool(every) and (step % every == 0 or step == config.train.steps)


def _owes_validation(config: Config, checkpoints: Checkpoints, step: int) -> bool:
    """Whether the run was stopped after this step before it had validated, and so does that first."""
    return step > 0 and _validates(config, step) and not checkpoints.is_validated(step)


class _Stopping(Exception):
    """A signal came during a validation."""


class _Run:
    """The steps of a run, and what follows each of them."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        mesh: Mesh | None,
        checkpoints: Checkpoints,
        writer: MetricWriter,
        recorder: Recorder,
    ):
        self._config, self._inputs, self._mesh = config, inputs, mesh
        self._checkpoints, self._writer, self._recorder = checkpoints, writer, recorder
        self._batches: Generator[jax.Array, None, None] | None = None

    def close(self) -> None:
        """Waits for the batch that is being read."""
        if self._batches is not None:
            self._batches.close()

    def _start(self, step: int, position: Position) -> Generator[jax.Array, None, None]:
        """The batches of the steps after this one, read ahead."""
        self.close()
        self._recorder.start(step)

        def read(step: int) -> jax.Array:
            def rows(first: int, last: int):
                return self._inputs.batch_rows(position.batch(step), first, last)

            return place_rows(self._mesh, self._config.train.batch_size, rows)

        self._batches = prefetched(read, step + 1, self._config.train.steps + 1)
        return self._batches

    def train(self, state: TrainState, step: int, position: Position, stop: StopRequest) -> TrainState:
        """Trains from a step on to the last."""
        train_step, probe = make_train_step(self._config), Probe(self._config, self._inputs, self._mesh)
        batches, owed = self._start(step, position), _owes_validation(self._config, self._checkpoints, step)
        while owed or step < self._config.train.steps:
            try:
                if owed:
                    stopping = self._validate(step, state, stop)
                else:
                    step += 1
                    state, metrics = train_step(state, next(batches))
                    self._checkpoints.check()
                    stopping = stop.at(step)
                    self._recorder.put(step, metrics, probe(step, state.params))
                    stopping = stopping or self._validate(step, state, stop)
                    position = self._save(step, state, position, stopping=stopping is not None)
            except RollBack as bad:
                del state  # its memory is needed
                state, position, step = self._go_back(bad, position)
                batches, owed = self._start(step, position), False
                continue
            if stopping is not None:
                self._checkpoints.wait()
                raise Interrupted(stopping, step)
            owed = False
        return state

    def _validate(self, step: int, state: TrainState, stop: StopRequest) -> int | None:
        """Validates where the schedule asks for it; gives the signal that came meanwhile and cut it off.

        It may take longer than whoever stops the run waits: what is left out is done first when the run goes on.
        """
        if not _validates(self._config, step):
            return None
        self._recorder.flush()

        def leave() -> None:
            if stop.at(step) is not None:
                raise _Stopping

        try:
            with self._recorder.pause():
                loss = validation_loss_nats(self._config, state.params, self._inputs, leave)
        except _Stopping:
            return stop.signum
        self._recorder.require_finite("validation loss", step, loss)
        self._writer.write({"step": step, "validation_loss_nats": loss})
        self._checkpoints.validated(step, loss)
        return None

    def _save(self, step: int, state: TrainState, position: Position, *, stopping: bool) -> Position:
        scheduled = step % self._config.train.checkpoint_every_steps == 0 or step == self._config.train.steps
        if not scheduled and not stopping:
            return position
        self._recorder.flush()
        # The loss was that of the parameters before this step; what is saved must be good too.
        self._recorder.require_finite("norm of the parameters", step, self._recorder.param_norm)
        position = position._replace(roll_backs=0) if scheduled else position
        self._checkpoints.save(state, self._config, self._inputs.provenance | position.to_json())
        return position

    def _go_back(self, bad: RollBack, position: Position) -> tuple[TrainState, Position, int]:
        """The state, place in the data and step that the run goes on from after a bad step."""
        checkpoints = self._checkpoints
        checkpoints.wait()
        every, newest = self._config.train.checkpoint_every_steps, checkpoints.latest_step()
        origin = step_before(bad.step, every, checkpoints.directory, newest)
        step = origin or 0
        position = position.after(bad, step)
        checkpoints.forget_after(step)  # what a signal saved since, on the way to the bad step
        if origin is None:
            state = _beginning(self._config, self._inputs)
        else:
            state = checkpoints.restore(init_state(self._config), origin)
        self._writer.roll_back(step)
        # Under the step that comes next, so that a resumed run drops it with what it will do again.
        told = {"step": step + 1, "event": ROLLED_BACK, "why": bad.why, "to_step": step}
        self._writer.write(told | position.to_json())
        return state, position, step
