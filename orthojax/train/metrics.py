"""metrics.jsonl, one JSON object a line, and its mirrors in TensorBoard and Weights & Biases."""

import hashlib
import importlib
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orthojax import analysis
from orthojax.errors import UserError
from orthojax.files import parse_json, require_file, write_text

ROLLED_BACK = "rolled_back"


def _library(extra: str, package: str) -> Any:
    """The package of the mirror that `train.EXTRA` asks for."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(
            f"train.{extra}=true needs the package {package}: {error}",
            allowed="false, or an installation with it",
            hint=f"pip install 'orthojax[{extra}]'",
        ) from None


class TensorBoard:
    """A mirror of metrics.jsonl: rebuilt whenever a run starts, resumes or rolls back, so that no point is double."""

    def __init__(self, folder: Path):
        """Imports the package; event files of earlier calls in the folder are replaced later.

        Raises:
          UserError: Without the extra `tensorboard`.
        """
        self._library = _library("tensorboard", "tensorboardX")
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
        """Adds every number of a line as a scalar at the line's step."""
        assert self._writer is not None
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Flushes what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """A mirror of metrics.jsonl in Weights & Biases: one run for each workdir, which a resumed run continues.

    What a roll-back or a resume drops from metrics.jsonl stays visible there: steps are logged once. wandb's own
    environment says where it goes: WANDB_MODE=offline keeps it under the workdir, WANDB_PROJECT names the project.
    """

    def __init__(self, workdir: Path, config: dict[str, Any]):
        """Imports the package.

        Raises:
          UserError: Without the extra `wandb`.
        """
        self._library = _library("wandb", "wandb")
        self._workdir, self._config, self._run = workdir.absolute(), config, None

    def restart(self, lines: list[dict[str, Any]]) -> None:
        """Opens the run, or keeps it open, and logs the lines that it does not have."""
        if self._run is None:
            self._run = self._library.init(
                project=os.environ.get("WANDB_PROJECT", "orthojax"), name=self._workdir.name, config=self._config,
                id=self._id(resumes=bool(lines)), resume="allow", dir=str(self._workdir),
                allow_val_change=True,  # the mesh and the cadence may differ when a run resumes
            )  # fmt: skip
        for line in lines:
            self.write(line)

    def _id(self, *, resumes: bool) -> str:
        """Of the run, drawn once for a workdir: a new run in a folder of the same path is another one.

        A run that began before there was this file resumes under the id that it had, a hash of the path.
        """
        path = self._workdir / "wandb_id"
        if not os.path.lexists(path):
            by_path = f"{hashlib.sha256(str(self._workdir).encode()).hexdigest()[:8]}-{self._config['train.seed']}"
            write_text(path, (by_path if resumes else secrets.token_hex(4)) + "\n")
        require_file(path, "id of the wandb run")
        return path.read_text(encoding="ascii").strip()

    def write(self, line: dict[str, Any]) -> None:
        """Logs every number of a line at the line's step, unless the run is beyond it."""
        assert self._run is not None
        numbers = {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
        if line["step"] >= self._run.step:
            self._run.log(numbers, step=line["step"])

    def close(self) -> None:
        """Uploads what is left."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class MetricWriter:
    """Appends to a metrics file; lines of later steps than the restored state's are dropped first."""

    def __init__(
        self,
        path: Path | None,
        resume_step: int,
        *,
        mirrors: Sequence[TensorBoard | WandB] = (),
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
        lines, corrupt = _read(path)
        if corrupt:
            print(f"warning: {path} has {corrupt} corrupt lines, which are dropped", file=sys.stderr)
        self._rewrite(path, [line for line in lines if line["step"] <= resume_step > 0])

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
        for mirror in self._mirrors:
            mirror.restart(lines)

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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics file, [] where there is none; those that a kill or a bad disk corrupted are left out.

    Raises:
      UserError: Where something else than a file is in its place.
    """
    return _read(path)[0]


def validation_losses(path: Path, last_step: float = math.inf) -> dict[int, float]:
    """The validation losses in nats of a metrics file up to a step, by their steps."""
    lines = [line for line in read_metrics(path) if line["step"] <= last_step]
    found = {line["step"]: line.get("validation_loss_nats") for line in lines}
    return {step: loss for step, loss in found.items() if isinstance(loss, int | float)}


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines, and how many are corrupt besides a last one that was cut off, which a resumed run writes again."""
    if not os.path.lexists(path):
        return [], 0
    require_file(path, "metrics file")
    *whole, last = path.read_bytes().split(b"\n")
    found = [_parse(line) for line in (*whole, last)]
    return [values for values in found if values is not None], found[:-1].count(None)


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
    >>> describe_line({"step": 7, "event": "skipped", "why": "the loss is not finite at step 7: nan"}, 800)
    'step 7/800: skipped, the loss is not finite at step 7: nan'
    """
    parts = [f"{line['event'].replace('_', ' ')}, {line['why']}"] if "event" in line else []
    parts += [f"{analysis.label(name)} {analysis.show(name, line[name])}" for name in _ON_CONSOLE if name in line]
    return f"step {line['step']}/{steps}: {', '.join(parts)}"
