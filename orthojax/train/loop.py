"""The training loop: batches in, metrics.jsonl and checkpoints out, exact resume."""

import math
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from orthojax.config import Config, Interrupted, UserError, changed_fields, from_json, to_json
from orthojax.train.checkpoint import Checkpoints, read_json_item
from orthojax.train.evaluation import validation_loss_nats
from orthojax.train.inputs import Inputs
from orthojax.train.metric_writer import MetricWriter
from orthojax.train.optimizer import learning_rate_schedule
from orthojax.train.step import StepMetrics, TrainState, init_state, make_train_step


class DivergedError(UserError):
    """The loss became NaN or infinite."""


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


def prepare_workdir(workdir: Path, config: Config) -> None:
    """Creates the folder of a run and writes its config.json.

    Raises:
      UserError: Where the path is a file, cannot be written, or already holds a run of another config.
    """
    path = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if path.exists():
            before = from_json(Config, path.read_text(encoding="utf-8"))
            changed = changed_fields(before, config)
            if changed:
                raise UserError(
                    f"{workdir} holds a run with another config: {', '.join(sorted(changed))} differ",
                    allowed="the config of that run, or another --workdir",
                )
            return
        write_text(path, to_json(config) + "\n")
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"workdir {workdir} is a file", allowed="a folder, new or of an earlier call") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file that is either whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _restore(checkpoints: Checkpoints, state: TrainState, inputs: Inputs) -> TrainState:
    step = checkpoints.latest_step()
    if step is None:
        return state
    saved = read_json_item(checkpoints.directory / str(step), "data")
    for name, value in inputs.provenance.items():
        if saved.get(name) != value:
            raise UserError(
                f"the data differs from that of the checkpoint of step {step}: {name} is {value!r}, not {saved.get(name)!r}",
                allowed="the data that the run began with, or another --workdir",
            )
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
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise DivergedError(
                f"the loss or its gradient is not finite at step {step} (loss {loss}, gradient norm {grad_norm})",
                hint="the last good checkpoint is kept; a lower optim.learning_rate or a longer warm-up may help",
            )
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
                    "learning_rate": float(self._schedule(step - 1)),
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
        state = _restore(checkpoints, init_state(config), inputs)
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
                last = step == steps or stop.signum is not None
                if every.eval_every_steps and (step % every.eval_every_steps == 0 or step == steps):
                    recorder.flush()
                    loss = validation_loss_nats(config, state.params, inputs)
                    writer.write({"step": step, "validation_loss_nats": loss})
                if step % every.checkpoint_every_steps == 0 or last:
                    recorder.flush()  # a state is saved only when its loss is known to be finite
                    checkpoints.save(state, config, inputs.provenance)
                if stop.signum is not None:
                    checkpoints.wait()
                    raise Interrupted(stop.signum, step)
        checkpoints.wait()
    return state
