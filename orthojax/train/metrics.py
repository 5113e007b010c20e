"""metrics.jsonl, one JSON object a line, its TensorBoard mirror, and the logging of steps with the bad-step policy."""

import contextlib
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from orthojax.analysis import Statistics
from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.files import write_text
from orthojax.train.estimates import model_flops_per_token, model_flops_utilization
from orthojax.train.evaluation import probe_metrics
from orthojax.train.optimizer import BadSteps
from orthojax.train.step import StepMetrics

ROLLED_BACK = "rolled_back"
MOST_IN_A_ROW = 10  # of skipped steps, or of roll-backs to the same checkpoint


class TensorBoard:
    """A mirror of metrics.jsonl: rebuilt whenever a run starts, resumes or rolls back, so that no point is double."""

    def __init__(self, folder: Path):
        """Imports the package; writes nothing yet.

        Args:
          folder: Where the events go; event files of earlier calls there are replaced.

        Raises:
          UserError: Without the extra `tensorboard`.
        """
        try:
            self._library: Any = importlib.import_module("tensorboardX")
        except ModuleNotFoundError as error:
            raise UserError(
                f"train.tensorboard=true needs the package tensorboardX: {error}",
                allowed="false, or an installation with it",
                hint="pip install 'orthojax[tensorboard]'",
            ) from None
        self._folder, self._writer = folder, None

    def restart(self, lines: list[dict[str, Any]]) -> None:
        """Replaces all events by those of the lines."""
        self.close()
        for path in self._folder.glob("events.out.tfevents.*"):
            path.unlink()
        self._writer = self._library.SummaryWriter(str(self._folder))
        for line in lines:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Adds every number of a line as a scalar of that name at the line's step."""
        assert self._writer is not None
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Flushes what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MetricWriter:
    """Appends to a metrics file; lines that a restored state does not know of are dropped first."""

    def __init__(
        self,
        path: Path | None,
        resume_step: int,
        *,
        tensorboard: TensorBoard | None = None,
        on_line: Callable[[dict[str, Any]], None] = lambda values: None,
    ):
        """Opens the file.

        Args:
          path: The metrics.jsonl; None writes nothing, as in all processes but one.
          resume_step: Optimizer steps that the restored state has taken; 0 starts afresh.
          tensorboard: Where the same values go, too.
          on_line: Called with every line that is written.
        """
        self._path, self._tensorboard, self._on_line, self._file = path, tensorboard, on_line, None
        if path is None:
            return
        lines, corrupt = _read(path)
        if corrupt:
            print(f"warning: {path} has {corrupt} corrupt lines, which are dropped", file=sys.stderr)
        self._rewrite(path, [line for line in lines if line["step"] <= resume_step])

    def roll_back(self, step: int) -> None:
        """Drops the lines of later steps, except those that report other roll-backs to this one."""
        if self._path is not None:
            lines = read_metrics(self._path)
            kept = [line for line in lines if line["step"] <= step or line.get("event") == ROLLED_BACK]
            self._rewrite(self._path, kept)

    def _rewrite(self, path: Path, lines: list[dict[str, Any]]) -> None:
        if self._file:
            self._file.close()
        # Not in place: a kill in between would lose the lines of the steps that are not repeated.
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if self._tensorboard:
            self._tensorboard.restart(lines)

    def write(self, values: dict[str, Any]) -> None:
        """Writes one line, unbuffered; numbers that are not finite, which JSON does not have, are left out.

        Raises:
          OSError: Where the disk refuses, with the name of the file.
        """
        if self._file is None:
            return
        values = {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}
        try:
            self._file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        if self._tensorboard:
            self._tensorboard.write(values)
        self._on_line(values)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()
        if self._tensorboard:
            self._tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics file, [] where there is none; those that a kill or a bad disk corrupted are left out."""
    return _read(path)[0]


def validation_losses(path: Path, last_step: int) -> dict[int, float]:
    """The validation losses in nats of a metrics file up to a step, by their steps."""
    lines = [line for line in read_metrics(path) if line["step"] <= last_step]
    return {line["step"]: line["validation_loss_nats"] for line in lines if "validation_loss_nats" in line}


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines, and how many are corrupt besides a last one that was cut off, which a resumed run writes again."""
    *whole, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    found = [_parse(line) for line in (*whole, last)]
    return [values for values in found if values is not None], found[:-1].count(None)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def describe_line(line: dict[str, Any], steps: int) -> str:
    """A line for people.

    Args:
      line: As in metrics.jsonl.
      steps: Of the whole run.

    >>> describe_line({"step": 40, "loss_nats": 4.2, "learning_rate": 3e-4, "tokens_per_second": 51234.5}, 800)
    'step 40/800 loss 4.2000 lr 3.00e-04 51.2k tokens/s'
    >>> describe_line({"step": 7, "event": "skipped", "why": "the loss is not finite at step 7: nan"}, 800)
    'step 7/800 skipped: the loss is not finite at step 7: nan'
    """
    parts = [f"step {line['step']}/{steps}"]
    if "event" in line:
        parts.append(f"{line['event'].replace('_', ' ')}: {line['why']}")
    for key, form in (
        ("loss_nats", "loss {:.4f}"),
        ("learning_rate", "lr {:.2e}"),
        ("tokens_per_second", "{}tokens/s"),
        ("mfu", "MFU {:.1%}"),
        ("validation_loss_nats", "validation loss {:.4f}"),
        ("kurtosis_first", "kurtosis {:.2f} first,"),
        ("kurtosis_rest", "{:.2f} rest"),
    ):
        if key in line:
            value = _short(line[key]) if key == "tokens_per_second" else line[key]
            parts.append(form.format(value))
    return " ".join(parts)


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter} "
    return f"{number:.0f} "


# The steps of a run.


class DivergedError(UserError):
    """The run cannot continue: its loss is not finite, or spikes, and does so again and again where that is allowed."""


class RollBack(Exception):
    """The loop has to go back to a checkpoint.

    Attributes:
      step: The bad step.
      why: What was bad.
    """

    def __init__(self, step: int, why: str):
        super().__init__(why)
        self.step, self.why = step, why


def diverged(why: str) -> DivergedError:
    """The error that ends a run."""
    return DivergedError(
        why, hint="the last good checkpoint is kept; try a lower optim.learning_rate or a longer warm-up elsewhere"
    )


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
        self.flush()
        self._pending = (step, metrics, probed)

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

    def _refusal(self, step: int, why: str) -> DivergedError | RollBack:
        return RollBack(step, why) if self._train.on_bad_step == "roll_back" else diverged(why)

    def _handle(self, step: int, metrics: StepMetrics, probed: Statistics | None) -> None:
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
            raise diverged(f"{in_a_row} steps in a row were skipped, {skipped} in all; {why}")

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
