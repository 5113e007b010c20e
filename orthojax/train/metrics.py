"""What a run logs: metrics.jsonl, one JSON object a line, and its mirrors in TensorBoard and Weights & Biases."""

import contextlib
import importlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from orthojax import analysis
from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.files import parse_json, require_file, write_text
from orthojax.train.estimates import model_flops_per_token, model_flops_utilization
from orthojax.train.probe import Probed, probe_metrics
from orthojax.train.step import StepMetrics


class DivergedError(UserError):
    """The run cannot continue, because a loss, a gradient or the parameters are not finite."""


class StepLogger:
    """Logs the metrics of every step one step late, so that the device never waits for the host.

    Attributes:
      param_norm: Norm of the parameters after the last step that was handled.
    """

    def __init__(
        self,
        config: Config,
        step: int,
        write: Callable[[dict[str, Any]], None],
        on_step: Callable[[int, float], None] = lambda step, loss: None,
        device_count: int = 1,
    ):
        """Starts the clock of tokens per second.

        Args:
          config: The run.
          step: Optimizer steps that are done.
          write: Takes a line of metrics.jsonl.
          on_step: Called with every step and its loss in nats.
          device_count: Devices of the mesh.
        """
        self._train, self._write, self._on_step, self._device_count = config.train, write, on_step, device_count
        self._flops_per_token = model_flops_per_token(config.model, config.data.sequence_length)
        self._pending: tuple[int, StepMetrics, Probed | None] | None = None
        self._clock = (time.monotonic(), step)
        self.param_norm = 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time inside out of tokens per second and MFU."""
        began = time.monotonic()
        yield
        before, step = self._clock
        self._clock = (before + time.monotonic() - began, step)

    def put(self, step: int, metrics: StepMetrics, probed: Probed | None = None) -> None:
        """Takes the metrics of `step` and of the probe after it, on the device, and logs those of the step before.

        Raises:
          DivergedError: If the loss or the gradient of the step before is not finite.
        """
        self.flush()
        self._pending = (step, metrics, probed)

    def flush(self) -> None:
        """Logs what is pending; raises as `put`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, metrics, probed = pending
        metrics, probed = jax.device_get((metrics, probed))
        loss, grad_norm = float(metrics.loss_sum_nats) / float(metrics.target_tokens), float(metrics.grad_norm)
        self.param_norm = float(metrics.param_norm)
        require_finite("loss", step, loss)
        require_finite("norm of the gradient", step, grad_norm)
        if step % self._train.log_every_steps == 0 or step in (1, self._train.steps):
            self._write(self._line(step, loss, grad_norm, metrics))
        if probed is not None:
            self._write({"step": step} | probe_metrics(probed))
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
        return line if mfu is None else line | {"mfu": round(mfu, 4)}


def require_finite(what: str, step: int, value: float) -> None:
    """Ends a run that has diverged.

    Raises:
      DivergedError: If the value, measured at a step, is not finite.
    """
    if not math.isfinite(value):
        hint = "the last good checkpoint is kept; try a lower optim.learning_rate or a longer warm-up elsewhere"
        raise DivergedError(f"the {what} is not finite at step {step}: {value}", hint=hint)


class MetricWriter:
    """Appends to a metrics file; lines of later steps than the restored state's are dropped first."""

    def __init__(
        self,
        path: Path | None,
        resume_step: int,
        *,
        mirrors: Sequence["TensorBoard | WandB"] = (),
        on_line: Callable[[dict[str, Any]], None] = lambda values: None,
    ):
        """Opens the file.

        Args:
          path: The metrics.jsonl; None writes nothing, as in all processes but one.
          resume_step: Optimizer steps that the restored state has taken.
          mirrors: Get the same values.
          on_line: Called with every line that is written.
        """
        self._path, self._mirrors, self._on_line, self._file = path, mirrors, on_line, None
        if path is None:
            return
        lines = [line for line in read_metrics(path) if line["step"] <= resume_step > 0]
        # Not in place: a kill in between would lose the lines of the steps that are not repeated.
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = path.open("a", encoding="utf-8", buffering=1)
        for mirror in self._mirrors:
            mirror.start(lines)

    def write(self, values: dict[str, Any]) -> None:
        """Writes one line, unbuffered; numbers that are not finite, which JSON does not have, are left out.

        Raises:
          OSError: If the disk refuses, with the name of the file.
        """
        if self._file is None:
            return
        values = {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}
        try:
            self._file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        for mirror in self._mirrors:
            mirror.write(values)
        self._on_line(values)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()
        for mirror in self._mirrors:
            mirror.close()


# Mirrors.


def _library(extra: str, package: str) -> Any:
    """Imports the package of the mirror that `train.EXTRA` asks for."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(
            f"train.{extra}=true needs the package {package}: {error}",
            allowed="false, or an installation with it",
            hint=f"pip install 'orthojax[{extra}]'",
        ) from None


class TensorBoard:
    """A mirror of metrics.jsonl: rebuilt whenever a run starts or resumes, so that no point is double."""

    def __init__(self, folder: Path):
        """Imports the package; event files of earlier calls in the folder are replaced later.

        Raises:
          UserError: Without the extra `tensorboard`.
        """
        self._library = _library("tensorboard", "tensorboardX")
        self._folder, self._writer = folder, None

    def start(self, lines: list[dict[str, Any]]) -> None:
        """Replaces all events by those of the lines."""
        for path in self._folder.glob("events.out.tfevents.*"):
            path.unlink()
        self._writer = self._library.SummaryWriter(str(self._folder))
        for line in lines:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Adds every number of a line as a scalar at the line's step."""
        assert self._writer is not None
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Flushes what is still in memory."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A mirror of metrics.jsonl in Weights & Biases: one run for each workdir, which a resumed run continues.

    Steps are logged once: what a resume drops from metrics.jsonl stays visible there. wandb's own environment says
    where it goes: WANDB_MODE=offline keeps it under the workdir, WANDB_PROJECT names the project.
    """

    def __init__(self, workdir: Path, config: dict[str, Any]):
        """Imports the package.

        Raises:
          UserError: Without the extra `wandb`.
        """
        self._library = _library("wandb", "wandb")
        self._workdir, self._config, self._run = workdir.absolute(), config, None

    def start(self, lines: list[dict[str, Any]]) -> None:
        """Opens the run of this workdir, whose id is drawn once, and logs the lines that it does not have."""
        path = self._workdir / "wandb_id"
        if not os.path.lexists(path):
            write_text(path, secrets.token_hex(4) + "\n")
        require_file(path, "id of the wandb run")
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", "orthojax"), name=self._workdir.name, config=self._config,
            id=path.read_text(encoding="ascii").strip(), resume="allow", dir=str(self._workdir),
            allow_val_change=True,  # the mesh and the cadence may differ when a run resumes
        )  # fmt: skip
        for line in lines:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Logs every number of a line at the line's step, unless the run is beyond it."""
        assert self._run is not None
        if line["step"] >= self._run.step:
            self._run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    def close(self) -> None:
        """Uploads what is left."""
        if self._run is not None:
            self._run.finish()


# Reading.


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns all lines of a metrics file, [] if there is none; those that a kill or a bad disk corrupted are left out.

    Raises:
      UserError: If something else than a file is in its place.
    """
    if not os.path.lexists(path):
        return []
    require_file(path, "metrics file")
    found = [_parse(line) for line in path.read_bytes().split(b"\n")]
    return [values for values in found if values is not None]


def validation_losses(path: Path) -> dict[int, float]:
    """Returns the validation losses in nats of a metrics file, by their steps."""
    found = {line["step"]: line.get("validation_loss_nats") for line in read_metrics(path)}
    return {step: loss for step, loss in found.items() if isinstance(loss, int | float)}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        values = parse_json(line, "line")
    except UserError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


_ON_CONSOLE = ("loss_nats", "learning_rate", "tokens_per_second", "mfu", "validation_loss_nats", "kurtosis_first")
_ON_CONSOLE += ("kurtosis_rest",)


def describe_line(line: dict[str, Any], steps: int) -> str:
    """Returns a line of metrics.jsonl for people, of a run of so many steps.

    >>> describe_line({"step": 40, "loss_nats": 4.2, "learning_rate": 3e-4, "tokens_per_second": 51234.5}, 800)
    'step 40/800: loss (nats) 4.2, learning rate 0.0003, tokens per second 51,234'
    """
    shown = [f"{analysis.label(name)} {analysis.show(name, line[name])}" for name in _ON_CONSOLE if name in line]
    return f"step {line['step']}/{steps}: {', '.join(shown)}"
