"""The steps of a run on the host: logs their metrics, and ends the run, skips or rolls back after a bad one."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from orthojax.config import Config
from orthojax.errors import SharedError
from orthojax.train.estimates import model_flops_per_token, model_flops_utilization
from orthojax.train.metrics import MetricWriter
from orthojax.train.optimizer import BadSteps
from orthojax.train.probe import Probed, probe_metrics
from orthojax.train.step import StepMetrics

MOST_IN_A_ROW = 10  # of skipped steps, or of roll-backs to the same checkpoint


class DivergedError(SharedError):
    """The run cannot continue: its loss is not finite, or spikes, and does so again and again where that is allowed."""


class RollBack(Exception):
    """The loop has to go back to a checkpoint before the bad `step`; `why` says what was bad."""

    def __init__(self, step: int, why: str):
        super().__init__(why)
        self.step, self.why = step, why


def _diverged(why: str) -> DivergedError:
    hint = "the last good checkpoint is kept; try a lower optim.learning_rate or a longer warm-up elsewhere"
    return DivergedError(why, hint=hint)


class Position(NamedTuple):
    """Where a run is in its data, beside the step: part of every checkpoint's `data` item unless all is zero.

    Attributes:
      left_out_batches: By roll-backs, so far; step s trains on batch s - 1 + left_out_batches.
      roll_backs: Since the last checkpoint of the schedule.
    """

    left_out_batches: int = 0
    roll_backs: int = 0

    def after(self, bad: RollBack, step: int) -> "Position":
        """The position after rolling back to a step: past the bad batch; raises DivergedError at too many in a row."""
        if self.roll_backs + 1 >= MOST_IN_A_ROW:
            raise _diverged(f"rolled back {self.roll_backs} times to step {step} without getting further; {bad.why}")
        return Position(self.left_out_batches + bad.step - step, self.roll_backs + 1)

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return self._asdict() if any(self) else {}


def step_before(bad_step: int, every_steps: int, directory: Path, newest: int | None) -> int | None:
    """The step of the checkpoint to roll back to from a bad step; None for the beginning of the run.

    It is the last one of the schedule, every `every_steps`, so that a run once stopped by a signal, which has one more,
    goes back to the same place. The newest only where that one was not retained.
    """
    step = (bad_step - 1) // every_steps * every_steps
    if step == 0:
        return None
    return step if (directory / str(step)).is_dir() else newest


class StepLogger:
    """Logs step metrics and applies the bad-step policy, one step late, so that the device never waits for the host.

    Attributes:
      param_norm: Norm of the parameters after the last step that was handled.
    """

    def __init__(
        self, config: Config, writer: MetricWriter, on_step: Callable[[int, float], None], device_count: int = 1
    ):
        self._train, self._writer, self._on_step, self._device_count = config.train, writer, on_step, device_count
        self._flops_per_token = model_flops_per_token(config.model, config.data.sequence_length)
        self.param_norm = 0.0

    def start(self, step: int) -> None:
        """Begins after so many steps, with nothing pending, and starts the clock of tokens per second."""
        self._pending: tuple[int, StepMetrics, Probed | None] | None = None
        self._clock = (time.monotonic(), step)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time inside out of tokens per second and MFU."""
        began = time.monotonic()
        yield
        before, step = self._clock
        self._clock = (before + time.monotonic() - began, step)

    def put(self, step: int, metrics: StepMetrics, probed: Probed | None = None) -> None:
        """Takes the metrics of `step` and of the probe after it, and handles those of the step before.

        Raises:
          DivergedError: Where the step before ends the run.
          RollBack: Where the run goes back to before it.
        """
        self.flush()
        self._pending = (step, metrics, probed)

    def flush(self) -> None:
        """Handles what is pending; raises as `put`."""
        previous, self._pending = self._pending, None
        if previous:
            self._handle(*previous)

    def require_finite(self, what: str, step: int, value: float) -> None:
        """Raises as `put` where another number of a step is not finite; it cannot be skipped any more."""
        if not math.isfinite(value):
            raise self._refusal(step, f"the {what} is not finite at step {step}: {value}")

    def _refusal(self, step: int, why: str) -> DivergedError | RollBack:
        return RollBack(step, why) if self._train.on_bad_step == "roll_back" else _diverged(why)

    def _handle(self, step: int, metrics: StepMetrics, probed: Probed | None) -> None:
        metrics, probed = jax.device_get((metrics, probed))
        loss, grad_norm = float(metrics.loss_sum_nats) / float(metrics.target_tokens), float(metrics.grad_norm)
        self.param_norm = float(metrics.param_norm)
        why = self._why_bad(step, loss, grad_norm, metrics.bad_steps)
        if why and (self._train.on_bad_step != "skip" or metrics.bad_steps is None):
            raise self._refusal(step, why)
        if why:
            self._skipped(step, why, metrics.bad_steps)
        elif step % self._train.log_every_steps == 0 or step in (1, self._train.steps):
            self._writer.write(self._line(step, loss, grad_norm, metrics))
        if probed is not None:
            self._writer.write({"step": step} | probe_metrics(probed))
        self._on_step(step, loss)

    def _why_bad(self, step: int, loss_nats: float, grad_norm: float, seen: BadSteps | None) -> str:
        """What was bad about a step; '' for a good one."""
        for what, value in (("loss", loss_nats), ("norm of the gradient", grad_norm)):
            if not math.isfinite(value):
                return f"the {what} is not finite at step {step}: {value}"
        if seen is None or seen.in_a_row == 0:
            return ""
        spike, mean = self._train.spike_nats, float(seen.loss_mean_nats)
        return f"the loss at step {step} is {loss_nats:.4g} nats, more than {spike:g} above its mean {mean:.4g}"

    def _skipped(self, step: int, why: str, seen: Any) -> None:
        skipped, in_a_row = int(seen.skipped_steps), int(seen.in_a_row)
        self._writer.write({"step": step, "event": "skipped", "why": why, "skipped_steps": skipped})
        if in_a_row >= MOST_IN_A_ROW:
            raise _diverged(f"{in_a_row} steps in a row were skipped, {skipped} in all; {why}")

    def _line(self, step: int, loss: float, grad_norm: float, metrics: StepMetrics) -> dict[str, Any]:
        now, (before, at) = time.monotonic(), self._clock
        self._clock = (now, step)
        tokens, update_norm = int(metrics.target_tokens), float(metrics.update_norm)
        rate = (step - at) * tokens / max(now - before, 1e-9)
        line = {
            "step": step,
            "tokens": step * tokens,
            "loss_nats": loss,
            "learning_rate": float(metrics.learning_rate),
            "grad_norm": grad_norm,
            "update_norm": update_norm,
            "param_norm": self.param_norm,
            "update_to_param_ratio": update_norm / self.param_norm if self.param_norm else math.inf,
            "tokens_per_second": round(rate, 1),
        }
        mfu = model_flops_utilization(rate, self._flops_per_token, device_count=self._device_count)
        if mfu is not None:
            line["mfu"] = round(mfu, 4)
        if self._train.on_bad_step == "skip" and metrics.bad_steps is not None:
            line["skipped_steps"] = int(metrics.bad_steps.skipped_steps)
        return line
