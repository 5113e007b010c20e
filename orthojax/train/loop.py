"""The training loop: batches in, metrics.jsonl and checkpoints out, exact resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from orthojax.config import Config
from orthojax.errors import Interrupted
from orthojax.train.bad_steps import RollBack
from orthojax.train.checkpoint import Checkpoints, read_config, require_same_data
from orthojax.train.evaluation import validation_loss_nats
from orthojax.train.inputs import Inputs
from orthojax.train.metric_writer import ROLLED_BACK, MetricWriter
from orthojax.train.pretrained import initial_params
from orthojax.train.probe import Probe
from orthojax.train.recorder import Recorder
from orthojax.train.roll_back import Position, read_position, step_before
from orthojax.train.signals import stop_on_signals
from orthojax.train.step import TrainState, init_state, make_train_step
from orthojax.train.tensorboard import TensorBoard
from orthojax.train.workdir import prepare_workdir, require_same_config


def _beginning(config: Config, inputs: Inputs) -> TrainState:
    """The state before the first step."""
    state = init_state(config)
    if not config.train.init_from:
        return state
    given = initial_params(config, inputs.provenance)
    return state._replace(params=jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), given, state.params))


def _newest_state(checkpoints: Checkpoints, config: Config, inputs: Inputs) -> tuple[TrainState, Position]:
    """The newest whole checkpoint of the run with its place in the data, or the beginning."""

    def accept(folder: Path) -> None:
        require_same_config(config, read_config(folder), str(folder))
        require_same_data(folder, inputs.provenance)

    saved = checkpoints.restore_newest(init_state(config), accept)
    if saved is None:
        return _beginning(config, inputs), Position()
    return saved, read_position(checkpoints.directory / str(int(saved.step)))


def _open_checkpoints(config: Config, workdir: Path) -> Checkpoints:
    train = config.train
    keep = {"keep": train.keep_checkpoints, "keep_every_steps": train.keep_every_steps, "keep_best": train.keep_best}
    return Checkpoints(workdir / "checkpoints", **keep)


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
      UserError: Where the workdir, a checkpoint or the disk does not allow it.
      DivergedError: At a bad step that ends the run; see `train.on_bad_step`.
      Interrupted: On SIGINT, SIGTERM or a preemption notice, when the state is saved.
    """
    tensorboard = TensorBoard(workdir / "tensorboard") if config.train.tensorboard else None
    prepare_workdir(workdir, config)
    steps, every = config.train.steps, config.train
    with _open_checkpoints(config, workdir) as checkpoints:
        state, position = _newest_state(checkpoints, config, inputs)
        step = int(state.step)
        on_start(step)
        if step >= steps:
            return state
        train_step, probe = make_train_step(config), Probe(config, inputs)
        lines = MetricWriter(workdir / "metrics.jsonl", step, tensorboard=tensorboard, on_line=on_line)
        with lines as writer, stop_on_signals() as stop:
            recorder = Recorder(config, writer, on_step)
            recorder.start(step)
            while step < steps:
                step += 1
                state, metrics = train_step(state, jax.device_put(inputs.batch(position.batch(step))))
                checkpoints.check()
                stopping = stop.at(step)  # asked once: a later signal belongs to the next step
                try:
                    recorder.put(step, metrics, probe(step, state.params))
                    if every.eval_every_steps and (step % every.eval_every_steps == 0 or step == steps):
                        recorder.flush()
                        loss = validation_loss_nats(config, state.params, inputs)
                        recorder.require_finite("validation loss", step, loss)
                        writer.write({"step": step, "validation_loss_nats": loss})
                        checkpoints.validated(step, loss)
                    scheduled = step % every.checkpoint_every_steps == 0 or step == steps
                    if scheduled or stopping is not None:
                        recorder.flush()
                        # The loss was that of the parameters before this step; what is saved must be good too.
                        recorder.require_finite("norm of the parameters", step, recorder.param_norm)
                        position = position._replace(roll_backs=0) if scheduled else position
                        checkpoints.save(state, config, inputs.provenance | position.to_json())
                except RollBack as bad:
                    checkpoints.wait()
                    del state, metrics  # their memory is needed
                    state, position, step = _go_back(bad, position, checkpoints, config, inputs, writer)
                    recorder.start(step)
                    continue
                if stopping is not None:
                    checkpoints.wait()
                    raise Interrupted(stopping, step)
        checkpoints.wait()
        if stop.signum is not None:
            raise Interrupted(stop.signum, steps)
    return state


def _go_back(
    bad: RollBack, position: Position, checkpoints: Checkpoints, config: Config, inputs: Inputs, writer: MetricWriter
) -> tuple[TrainState, Position, int]:
    """The state, place in the data and step that a run goes on from after a bad step."""
    newest, every = checkpoints.latest_step(), config.train.checkpoint_every_steps
    origin = step_before(bad.step, every, checkpoints.directory, newest)
    step = origin or 0
    position = position.after(bad, step)
    checkpoints.forget_after(step)  # what a signal saved since, on the way to the bad step
    state = _beginning(config, inputs) if origin is None else checkpoints.restore(init_state(config), origin)
    writer.roll_back(step)
    # Under the step that comes next, so that a resumed run drops it with what it will do again.
    told = {"step": step + 1, "event": ROLLED_BACK, "why": bad.why, "to_step": step}
    writer.write(told | position.to_json())
    return state, position, step
