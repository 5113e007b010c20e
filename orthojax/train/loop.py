"""The training loop: batches in, metrics.jsonl and checkpoints out, exact resume."""

from collections.abc import Callable
from pathlib import Path

import jax
import optax

from orthojax.config import Config
from orthojax.errors import Interrupted
from orthojax.train.checkpoint import Checkpoints, read_config, require_same_data
from orthojax.train.evaluation import validation_loss_nats
from orthojax.train.inputs import Inputs
from orthojax.train.metric_writer import MetricWriter
from orthojax.train.pretrained import initial_params
from orthojax.train.recorder import Recorder, require_finite
from orthojax.train.signals import stop_on_signals
from orthojax.train.step import TrainState, init_state, make_train_step
from orthojax.train.workdir import prepare_workdir, require_same_config


def _first_state(checkpoints: Checkpoints, config: Config, inputs: Inputs) -> TrainState:
    """The newest whole checkpoint of the run, or its beginning."""

    def accept(folder: Path) -> None:
        require_same_config(config, read_config(folder), str(folder))
        require_same_data(folder, inputs.provenance)

    state = init_state(config)
    saved = checkpoints.restore_newest(state, accept)
    if saved is None and config.train.init_from:
        given = initial_params(config, inputs.provenance)
        return state._replace(
            params=jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), given, state.params)
        )
    return state if saved is None else saved


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
) -> TrainState:
    """Trains to `train.steps`, going on from the newest checkpoint of the workdir where there is one.

    Writes `config.json`, `metrics.jsonl` and `checkpoints/` under the workdir. On the same machine a run that was
    stopped anywhere, by kill -9 too, ends with the same bits as one that was not.

    Args:
      config: The run.
      inputs: Its data, from `open_inputs`.
      workdir: Its folder.
      on_start: Called once with the number of steps already done.
      on_step: Called with (step, loss in nats) after every step.

    Returns:
      The final state.

    Raises:
      UserError: Where the workdir, a checkpoint or the disk does not allow it.
      DivergedError: Where the loss is not finite.
      Interrupted: On SIGINT, SIGTERM or a preemption notice, when the state is saved.
    """
    prepare_workdir(workdir, config)
    steps, every = config.train.steps, config.train
    with _open_checkpoints(config, workdir) as checkpoints:
        state = _first_state(checkpoints, config, inputs)
        start = int(state.step)
        on_start(start)
        if start >= steps:
            return state
        train_step = make_train_step(config)
        with MetricWriter(workdir / "metrics.jsonl", start) as writer, stop_on_signals() as stop:
            recorder = Recorder(config, writer, on_step)
            recorder.start(start)
            for step in range(start + 1, steps + 1):
                state, metrics = train_step(state, jax.device_put(inputs.batch(step - 1)))
                recorder.put(step, metrics)
                checkpoints.check()
                stopping = stop.at(step)  # asked once: a later signal belongs to the next step
                if every.eval_every_steps and (step % every.eval_every_steps == 0 or step == steps):
                    recorder.flush()
                    loss = validation_loss_nats(config, state.params, inputs)
                    require_finite("validation loss", step, loss)
                    writer.write({"step": step, "validation_loss_nats": loss})
                    checkpoints.validated(step, loss)
                if step % every.checkpoint_every_steps == 0 or step == steps or stopping is not None:
                    recorder.flush()
                    # The loss was that of the parameters before this step; what is saved must be good too.
                    require_finite("norm of the parameters", step, float(optax.tree.norm(state.params)))
                    checkpoints.save(state, config, inputs.provenance)
                if stopping is not None:
                    checkpoints.wait()
                    raise Interrupted(stopping, step)
        checkpoints.wait()
        if stop.signum is not None:
            raise Interrupted(stop.signum, steps)
    return state
