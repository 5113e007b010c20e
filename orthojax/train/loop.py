"""The training loop: batches in, metrics.jsonl and checkpoints out, exact resume."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax

from orthojax.config import Config
from orthojax.errors import Interrupted
from orthojax.train.checkpoint import Checkpoints, read_config, require_same_data
from orthojax.train.evaluation import validation_loss_nats
from orthojax.train.inputs import Inputs
from orthojax.train.mesh import make_mesh, place_rows, place_tree
from orthojax.train.metric_writer import MetricWriter, NoWriter
from orthojax.train.multihost import is_primary
from orthojax.train.prefetch import prefetched
from orthojax.train.pretrained import initial_params
from orthojax.train.recorder import Recorder, require_finite
from orthojax.train.signals import stop_on_signals
from orthojax.train.step import TrainState, init_state, make_train_step
from orthojax.train.workdir import check_workdir, prepare_workdir, require_same_config


def _first_state(checkpoints: Checkpoints, config: Config, inputs: Inputs) -> TrainState:
    """The newest checkpoint of the run, or its beginning."""
    state, step = init_state(config), checkpoints.latest_step()
    if step is None and config.train.init_from:
        given = initial_params(config, inputs.provenance)
        return state._replace(params=place_tree(given, state.params))
    if step is None:
        return state
    folder = checkpoints.directory / str(step)
    require_same_config(config, read_config(folder), str(folder))
    require_same_data(folder, inputs.provenance)
    return checkpoints.restore(state, step)


def _read_rows(inputs: Inputs, step: int, start: int, stop: int) -> np.ndarray:
    """Rows start to stop of one batch."""
    return inputs.batch(step)[start:stop]


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

    Runs on the mesh of `config.mesh`, and may go on on another one. With several processes every one calls this, with a
    workdir that all of them see; process 0 alone writes the config and the metrics.

    Args:
      config: The run.
      inputs: Its data, from `open_inputs`.
      workdir: Its folder.
      on_start: Called once with the number of steps already done.
      on_step: Called with (step, loss in nats) after every step.

    Returns:
      The final state.

    Raises:
      UserError: Where the workdir, a checkpoint, the disk or the number of devices does not allow it.
      DivergedError: Where the loss is not finite.
      Interrupted: On SIGINT or SIGTERM, when the state is saved.
    """
    mesh = make_mesh(config)
    (prepare_workdir if is_primary() else check_workdir)(workdir, config)
    steps, every = config.train.steps, config.train
    with Checkpoints(workdir / "checkpoints", keep=config.train.keep_checkpoints) as checkpoints:
        state = _first_state(checkpoints, config, inputs)
        start = int(state.step)
        on_start(start)
        if start >= steps:
            return state
        train_step = make_train_step(config)

        def batch(step: int) -> jax.Array:
            return place_rows(mesh, every.batch_size, lambda first, last: _read_rows(inputs, step, first, last))

        with (
            MetricWriter(workdir / "metrics.jsonl", start) if is_primary() else NoWriter() as writer,
            stop_on_signals() as stop,
            contextlib.closing(prefetched(batch, start, steps)) as batches,
        ):
            recorder = Recorder(config, writer, on_step)
            recorder.start(start)
            for step, tokens in enumerate(batches, start + 1):
                state, metrics = train_step(state, tokens)
                recorder.put(step, metrics)
                stopping = stop.signum  # looked at once: a later signal belongs to the next step
                if every.eval_every_steps and (step % every.eval_every_steps == 0 or step == steps):
                    recorder.flush()
                    loss = validation_loss_nats(config, state.params, inputs)
                    require_finite("validation loss", step, loss)
                    writer.write({"step": step, "validation_loss_nats": loss})
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
