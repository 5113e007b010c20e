"""What a run tells of its steps, and what it makes of a loss that is not finite."""

import math
import time
from collections.abc import Callable

import jax
import numpy as np

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.train.metric_writer import MetricWriter
from orthojax.train.optimizer import learning_rate_schedule
from orthojax.train.step import StepMetrics


class DivergedError(UserError):
    """The loss became NaN or infinite."""


def require_finite(what: str, step: int, value: float) -> None:
    """Raises DivergedError, naming the step, unless the value is finite."""
    if not math.isfinite(value):
        raise DivergedError(
            f"the {what} is not finite at step {step}: {value}",
            hint="the last good checkpoint is kept; try a lower optim.learning_rate or a longer warm-up elsewhere",
        )


class Recorder:
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
        require_finite("loss", step, loss)
        require_finite("norm of the gradient", step, grad_norm)
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
