"""The training loop: batches in, metrics.jsonl and checkpoints out, exact resume."""

import math
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from orthojax.config import Config
from orthojax.errors import Interrupted, UserError
from orthojax.fields import changed_fields, from_json, to_json
from orthojax.train.checkpoint import Checkpoints, read_config, require_same_data
from orthojax.train.evaluation import validation_loss_nats
from orthojax.train.files import make_folder, write_text
from orthojax.train.inputs import Inputs
from orthojax.train.metric_writer import MetricWriter
from orthojax.train.optimizer import learning_rate_schedule
from orthojax.train.pretrained import initial_params
from orthojax.train.step import StepMetrics, TrainState, init_state, make_train_step


class DivergedError(UserError):
    """The loss became NaN or infinite."""


def _require_finite(what: str, step: int, value: float) -> None:
    if not math.isfinite(value):
        raise DivergedError(
            f"the {what} is not finite at step {step}: {value}",
            hint="the last good checkpoint is kept; try a lower optim.learning_rate or a longer warm-up elsewhere",
        )


class _StopRequest:
    signum: int | None = None


@contextmanager
def _stop_on_signals():
    """Turns the first SIGINT or SIGTERM into a request; a second one has its usual effect."""
    request = _StopRequest()
    previous: dict[int, Any] = {}

    def restore():
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    def note(signum, _):
        request.signum = signum
        restore()

    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            previous[signum] = signal.signal(signum, note)
    except ValueError:  # not in the main thread: the caller's own handlers apply
        previous.clear()
    try:
        yield request
    finally:
        restore()


def check_workdir(workdir: Path, config: Config) -> None:
    """Looks whether a run of this config may go there; writes nothing.

    Raises:
      UserError: Where the path is a file, or already holds a run of another config.
    """
    path = workdir / "config.json"
    if any(part.is_file() for part in (workdir, *workdir.parents)):
        raise UserError(f"workdir {workdir} is a file", allowed="a folder, new or of an earlier call")
    if path.exists():
        try:
            before = from_json(Config, path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: {error}", hint="another --workdir, or the right config.json") from error
        _require_same(config, before, str(workdir))


def prepare_workdir(workdir: Path, config: Config) -> None:
    """Creates the folder of a run and writes its config.json.

    Raises:
      UserError: As `check_workdir`.
    """
    check_workdir(workdir, config)
    make_folder(workdir, "workdir")
    if not (workdir / "config.json").exists():
        write_text(workdir / "config.json", to_json(config) + "\n")


def _require_same(config: Config, before: Config, where: str) -> None:
    changed = changed_fields(before, config)
    if changed:
        raise UserError(
            f"{where} holds a run with another config: {', '.join(sorted(changed))} differ",
            allowed="the config of that run, or another --workdir",
        )


def _first_state(checkpoints: Checkpoints, config: Config, inputs: Inputs) -> TrainState:
    """The newest checkpoint of the run, or its beginning."""
    state, step = init_state(config), checkpoints.latest_step()
    if step is None and config.train.init_from:
        given = initial_params(config, inputs.provenance)
        return state._replace(
            params=jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), given, state.params)
        )
    if step is None:
        return state
    folder = checkpoints.directory / str(step)
    _require_same(config, read_config(folder), str(folder))
    require_same_data(folder, inputs.provenance)
    return checkpoints.restore(state, step)


class _Recorder:
    """Fetches metrics one step late, so that the device never waits for the host; stops on a non-finite loss."""

    def __init__(self, config: Config, writer: MetricWriter, on_step: Callable[[int, float], None]):
        self._config, self._writer, self._on_step = config, writer, on_step
        self._schedule = learning_rate_schedule(config.optim, config.train.steps)
        self._pending: tuple[int, StepMetrics] | None = None
        self._clock = (time.monotonic(), 0)

    def put(self, step: int, metrics: StepMetrics) -> None:
        """Takes the metrics of `step` and handles those of the step before."""
        previous, self._pending = self._pending, (step, metrics)
        if previous:
            self._handle(*previous)

    def flush(self) -> None:
        """Handles what is pending."""
        if self._pending:
            self._handle(*self._pending)
            self._pending = None

    def _handle(self, step: int, metrics: StepMetrics) -> None:
        total, tokens, grad_norm = (float(value) for value in jax.device_get(metrics))
        loss = total / tokens
        _require_finite("loss", step, loss)
        _require_finite("norm of the gradient", step, grad_norm)
        every = self._config.train.log_every_steps
        if step % every == 0 or step in (1, self._config.train.steps):
            now, (before, at) = time.monotonic(), self._clock
            self._clock = (now, step)
            rate = (step - at) * tokens / (now - before)
            self._writer.write(
                {
                    "step": step,
                    "tokens": step * int(tokens),
                    "loss_nats": loss,
                    "learning_rate": float(np.asarray(self._schedule(step - 1))),
                    "grad_norm": grad_norm,
                    "tokens_per_second": round(rate, 1),
                }
            )
        self._on_step(step, loss)

    def start(self, step: int) -> None:
        """Starts the clock of tokens per second."""
        self._clock = (time.monotonic(), step)


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
      Interrupted: On SIGINT or SIGTERM, when the state is saved.
    """
    prepare_workdir(workdir, config)
    steps, every = config.train.steps, config.train
    with Checkpoints(workdir / "checkpoints", keep=config.train.keep_checkpoints) as checkpoints:
        state = _first_state(checkpoints, config, inputs)
        start = int(state.step)
        on_start(start)
        if start >= steps:
            return state
        train_step = make_train_step(config)
        with MetricWriter(workdir / "metrics.jsonl", start) as writer, _stop_on_signals() as stop:
            recorder = _Recorder(config, writer, on_step)
            recorder.start(start)
            for step in range(start + 1, steps + 1):
                state, metrics = train_step(state, jax.device_put(inputs.batch(step - 1)))
                recorder.put(step, metrics)
                stopping = stop.signum  # looked at once: a later signal belongs to the next step
                if every.eval_every_steps and (step % every.eval_every_steps == 0 or step == steps):
                    recorder.flush()
                    loss = validation_loss_nats(config, state.params, inputs)
                    _require_finite("validation loss", step, loss)
                    writer.write({"step": step, "validation_loss_nats": loss})
                if step % every.checkpoint_every_steps == 0 or step == steps or stopping is not None:
                    recorder.flush()
                    # The loss was that of the parameters before this step; what is saved must be good too.
                    _require_finite("norm of the parameters", step, float(optax.tree.norm(state.params)))
                    checkpoints.save(state, config, inputs.provenance)
                if stopping is not None:
                    checkpoints.wait()
                    raise Interrupted(stopping, step)
        checkpoints.wait()
        if stop.signum is not None:
            raise Interrupted(stop.signum, steps)
    return state
