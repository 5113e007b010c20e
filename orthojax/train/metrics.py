"""The log of a run: metrics.jsonl, one JSON object per line, and its mirrors in TensorBoard and Weights & Biases."""

import contextlib
import importlib
import io
import itertools
import math
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from orthojax import analysis
from orthojax.config import Config, flatten
from orthojax.errors import NonFiniteError, UserError
from orthojax.files import exists, is_remote, json_line, read_json_lines, write_text
from orthojax.formatting import number
from orthojax.ops.cross_entropy import perplexity
from orthojax.train.estimates import entry, model_flops_per_token, model_flops_utilization
from orthojax.train.evaluation import Probed, probe_metrics
from orthojax.train.step import StepMetrics


class DivergedError(NonFiniteError):
    """The run cannot continue, because a loss, a gradient or the parameters are not finite."""


def require_finite(what: str, step: int, value: float) -> None:
    """Raises DivergedError if a value, measured at a step, is not finite."""
    if not math.isfinite(value):
        hint = "what was saved before is kept; try a lower optim.learning_rate or a longer warm-up elsewhere"
        raise DivergedError(f"the {what} is not finite at step {step}: {value}", hint=hint)


class MetricLog:
    """The log of one run; metrics come one dispatch late, so that no device waits for the host."""

    def __init__(
        self,
        config: Config,
        path: Path | None,
        step: int,
        *,
        mirrors: Sequence["Mirror"] = (),
        on_step: Callable[[int, float], None] = lambda step, loss: None,
        on_line: Callable[[dict[str, Any]], None] = lambda line: None,
    ):
        """Opens the file, dropping the lines of steps that will be repeated, and starts the clock of tokens per second.

        Without a path it writes nothing. Mirrors get the same lines, starting with those that stay.
        """
        self._train, self._on_step, self._on_line, self._mirrors = config.train, on_step, on_line, mirrors
        self._device_count = math.prod(config.mesh_sizes(jax.device_count()))
        self._flops_per_token = model_flops_per_token(config.model, config.data.sequence_length)
        self._tokens_read = config.train.batch_size * config.data.sequence_length  # in a step, targets or not
        self._pending: tuple[range, StepMetrics, Probed | None] | None = None
        self._arrived = time.monotonic()  # when the metrics of the last dispatch came
        self._clock = (self._arrived, step)  # of the last line
        self.param_norm = 0.0  # of the parameters after the last step that was handled
        self._file = None
        if path is not None:
            lines = [line for line in read_metrics(path) if line["step"] <= step > 0]
            # Not in place: a kill in between would lose the lines of the steps that are not repeated.
            write_text(path, "".join(map(json_line, lines)))
            self._file = _Uploaded(path) if is_remote(path) else path.open("a", encoding="utf-8", buffering=1)
            for mirror, line in itertools.product(mirrors, lines):
                mirror.write(line)

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()
        for mirror in self._mirrors:
            mirror.close()

    def write(self, values: dict[str, Any]) -> None:
        """Writes one line, unbuffered; non-finite numbers, which JSON does not have, are left out."""
        if self._file is None:
            return
        values = {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}
        try:
            self._file.write(json_line(values))
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error
        for mirror in self._mirrors:
            mirror.write(values)
        self._on_line(values)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time inside from tokens per second and MFU."""
        began = time.monotonic()
        yield
        taken, (before, step) = time.monotonic() - began, self._clock
        self._arrived, self._clock = self._arrived + taken, (before + taken, step)

    def put(self, steps: range, metrics: StepMetrics, probed: Probed | None = None) -> None:
        """Takes the metrics of a dispatch and of the probe after it, on the device; logs those of the previous one."""
        self.flush()
        self._pending = (steps, metrics, probed)

    def flush(self) -> None:
        """Logs what is pending, and raises DivergedError if its loss or gradient is not finite."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        steps, metrics, probed = pending
        metrics, probed = jax.device_get((metrics, probed))
        before, self._arrived = self._arrived, time.monotonic()
        for i, (step, *values) in enumerate(
            zip(steps, *(column.tolist() for column in metrics if column is not None), strict=False), 1
        ):
            # The steps of a dispatch share its time evenly.
            self._handle(step, StepMetrics(*values), before + (self._arrived - before) * i / len(steps))
        if probed is not None:
            self.write({"step": steps[-1]} | probe_metrics(probed))

    def _handle(self, step: int, metrics: StepMetrics, now: float) -> None:
        loss, grad_norm = float(metrics.loss_sum_nats) / float(metrics.target_tokens), float(metrics.grad_norm)
        self.param_norm = float(metrics.param_norm)
        require_finite("loss", step, loss)
        require_finite("norm of the gradient", step, grad_norm)
        if step % self._train.log_every_steps == 0 or step in (1, self._train.steps):
            self.write(self._line(step, loss, grad_norm, metrics, now))
        self._on_step(step, loss)

    def _line(self, step: int, loss: float, grad_norm: float, metrics: StepMetrics, now: float) -> dict[str, Any]:
        before, at = self._clock
        self._clock = (now, step)
        tokens, update_norm = int(metrics.target_tokens), float(metrics.update_norm)
        rate = (step - at) * tokens / max(now - before, 1e-9)
        read = rate * (self._tokens_read / tokens)
        mfu = model_flops_utilization(read, self._flops_per_token, device_count=self._device_count)
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
        if metrics.activation_penalty is not None:
            line |= {"activation_penalty": float(metrics.activation_penalty)}
        return line if mfu is None else line | {"mfu": round(mfu, 4)}


class _Uploaded(io.StringIO):
    """A text file on an object store, which cannot be appended to: written whole, every half minute and at the end."""

    def __init__(self, path: Any):
        super().__init__()
        self._path, self._at, self.name = path, time.monotonic(), str(path)
        super().write(path.read_text())

    def write(self, text: str) -> int:
        count = super().write(text)
        if time.monotonic() - self._at > 30:
            self._at = time.monotonic()
            self._path.write_text(self.getvalue())
        return count

    def close(self) -> None:
        if not self.closed:
            self._path.write_text(self.getvalue())
        super().close()


class Mirror(NamedTuple):
    """A library that shows the lines of metrics.jsonl."""

    write: Callable[[dict[str, Any]], None]
    close: Callable[[], None]


def _library(extra: str, package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        problem = f"train.{extra}=true needs the package {package}: {error}"
        allowed = "false, or an installation with it"
        raise UserError(problem, allowed=allowed, hint=f"pip install 'orthojax[{extra}]'") from None


def open_mirrors(config: Config, workdir: Path) -> list[Mirror]:
    """Opens the mirrors that a config asks for; TensorBoard's events under `tensorboard/` start over.

    Weights & Biases has one run for each workdir, which a resumed run continues, and keeps what a resume drops from
    metrics.jsonl. WANDB_MODE=offline keeps it under the workdir, WANDB_PROJECT names the project.
    """
    mirrors = []
    if is_remote(workdir) and (config.train.tensorboard or config.train.wandb):
        problem = f"train.tensorboard and train.wandb keep files in the workdir, and {workdir} is not on this machine"
        raise UserError(problem, allowed="a workdir on this machine, or neither of them")
    if config.train.tensorboard:
        mirrors.append(_tensorboard(_library("tensorboard", "tensorboardX"), workdir / "tensorboard"))
    if config.train.wandb:
        mirrors.append(_wandb(_library("wandb", "wandb"), workdir.absolute(), flatten(config)))
    return mirrors


def _tensorboard(library: Any, folder: Path) -> Mirror:
    for path in folder.glob("events.out.tfevents.*"):  # else every point of an earlier call would be there twice
        path.unlink()
    writer = library.SummaryWriter(str(folder))

    def write(line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name != "step":
                writer.add_scalar(name, value, line["step"])

    return Mirror(write, writer.close)


def _wandb(library: Any, workdir: Path, config: dict[str, Any]) -> Mirror:
    path = workdir / "wandb_id"
    if not path.is_file():
        write_text(path, secrets.token_hex(4) + "\n")
    run = library.init(
        project=os.environ.get("WANDB_PROJECT", "orthojax"),
        name=workdir.name,
        config=config,
        id=path.read_text(encoding="ascii").strip(),
        dir=str(workdir),
        resume="allow",
        allow_val_change=True,  # the mesh and the cadence may differ
    )

    def write(line: dict[str, Any]) -> None:
        if line["step"] >= run.step:  # a step is logged once
            run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    return Mirror(write, run.finish)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns all lines of a metrics file except those that a kill or a bad disk corrupted; [] if there is no file.

    Raises UserError if something other than a file is in its place.
    """
    lines = read_json_lines(path, "metrics file") if exists(path) else []
    return [line for line in lines if isinstance(line.get("step"), int)]


_ON_CONSOLE = ("loss_nats", "learning_rate", "tokens_per_second", "mfu", "validation_loss_nats", "kurtosis_first")
_ON_CONSOLE += ("kurtosis_rest",)


def describe_line(line: dict[str, Any], steps: int) -> str:
    """Returns a readable line of metrics.jsonl, for a run of this many steps.

    >>> describe_line({"step": 40, "loss_nats": 4.2, "learning_rate": 3e-4, "tokens_per_second": 51234.5}, 800)
    'step 40/800: loss (nats) 4.2, learning rate 0.0003, tokens per second 51,234'
    """
    shown = [f"{analysis.label(name)} {analysis.show(name, line[name])}" for name in _ON_CONSOLE if name in line]
    return f"step {line['step']}/{steps}: {', '.join(shown)}"


def closing(workdir: Path, evaluate: Sequence[str]) -> list[str]:
    """Returns lines about a run that has ended: the last losses that were logged, and the command that evaluates it."""
    path, last = workdir / "metrics.jsonl", dict[str, Any]()
    for line in read_metrics(path):
        last |= line
    parts = [f"step {last['step']:,}"] if last else []
    if "loss_nats" in last:
        parts.append(f"loss {number(last['loss_nats'])}")
    if (loss := last.get("validation_loss_nats")) is not None:
        parts.append(f"validation loss {number(loss)}, perplexity {number(perplexity(loss))}")
    following = {"metrics": path, "checkpoints": workdir / "checkpoints", "evaluate": shlex.join(evaluate)}
    return [f"done: {', '.join(parts)}", *(entry(name, str(what)) for name, what in following.items())]
