"""What a run tells of its steps, and what it makes of the bad ones."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from orthojax.analysis import Statistics
from orthojax.config import Config
from orthojax.train.bad_steps import MOST_IN_A_ROW, DivergedError, RollBack, diverged, why_bad
from orthojax.train.metric_writer import MetricWriter
from orthojax.train.probe import probe_metrics
from orthojax.train.step import StepMetrics
from orthojax.train.utilization import model_flops_per_token, model_flops_utilization


class Recorder:
    """Fetches metrics one step late, so that the device never waits for the host; judges the steps by the run's policy.

    Attributes:
      param_norm: Norm of the parameters after the last step that was handled.
    """

    def __init__(
        self, config: Config, writer: MetricWriter, on_step: Callable[[int, float], None], device_count: int = 1
    ):
        self._config, self._writer, self._on_step, self._device_count = config, writer, on_step, device_count
        self._flops_per_token = model_flops_per_token(config.model, config.data.sequence_length)
        self.param_norm = 0.0

    def start(self, step: int) -> None:
        """Begins after so many steps, with nothing pending: sets the clock of tokens per second."""
        self._pending: tuple[int, StepMetrics, Statistics | None] | None = None
        self._clock = (time.monotonic(), step)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is not training: tokens per second, and MFU, do not count its time."""
        began = time.monotonic()
        yield
        before, step = self._clock
        self._clock = (before + time.monotonic() - began, step)

    def put(self, step: int, metrics: StepMetrics, probed: Statistics | None = None) -> None:
        """Takes the metrics of `step`, and what the probe saw after it, and handles those of the step before.

        Raises:
          DivergedError: Where the step before ends the run.
          RollBack: Where the run goes back to before it.
        """
        previous, self._pending = self._pending, (step, metrics, probed)
        if previous:
            self._handle(*previous)

    def flush(self) -> None:
        """Handles what is pending; raises as `put`."""
        previous, self._pending = self._pending, None
        if previous:
            self._handle(*previous)

    def require_finite(self, what: str, step: int, value: float) -> None:
        """Judges another number of a step: no step can be skipped for it, but the run can go back.

        Raises:
          DivergedError: Where it is not finite.
          RollBack: The same, where that is the policy.
        """
        if not math.isfinite(value):
            raise self._refusal(step, f"the {what} is not finite at step {step}: {value}")

    def _handle(self, step: int, metrics: StepMetrics, probed: Statistics | None) -> None:
        metrics, probed = jax.device_get((metrics, probed))
        loss, grad_norm = float(metrics.loss_sum_nats) / float(metrics.target_tokens), float(metrics.grad_norm)
        self.param_norm = float(metrics.param_norm)
        train = self._config.train
        why = why_bad(step, loss, grad_norm, metrics.bad_steps, train.spike_nats)
        if why and train.on_bad_step != "skip":
            raise self._refusal(step, why)
        if why:
            self._skipped(step, why, metrics)
        elif step % train.log_every_steps == 0 or step in (1, train.steps):
            self._writer.write(self._line(step, loss, grad_norm, metrics))
        if probed is not None:
            self._writer.write({"step": step} | probe_metrics(probed))
        self._on_step(step, loss)

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
        if self._config.train.on_bad_step == "skip" and metrics.bad_steps is not None:
            line["skipped_steps"] = int(metrics.bad_steps.skipped_steps)
        return line

    def _skipped(self, step: int, why: str, metrics: StepMetrics) -> None:
        assert metrics.bad_steps is not None
        skipped, in_a_row = int(metrics.bad_steps.skipped_steps), int(metrics.bad_steps.in_a_row)
        self._writer.write({"step": step, "event": "skipped", "why": why, "skipped_steps": skipped})
        if in_a_row >= MOST_IN_A_ROW:
            raise diverged(f"{in_a_row} steps in a row were skipped, {skipped} in all; {why}")

    def _refusal(self, step: int, why: str) -> DivergedError | RollBack:
        return RollBack(step, why) if self._config.train.on_bad_step == "roll_back" else diverged(why)
