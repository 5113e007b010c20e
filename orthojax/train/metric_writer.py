"""metrics.jsonl: one JSON object a line, the truth about a run."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orthojax.files import write_text
from orthojax.train.tensorboard import TensorBoard

ROLLED_BACK = "rolled_back"


class MetricWriter:
    """Appends to a metrics file; what a restored state does not know of is dropped first."""

    def __init__(
        self,
        path: Path,
        resume_step: int,
        *,
        tensorboard: TensorBoard | None = None,
        on_line: Callable[[dict[str, Any]], None] = lambda values: None,
    ):
        """Opens the file.

        Args:
          path: The metrics.jsonl.
          resume_step: Optimizer steps that the restored state has taken; 0 starts afresh.
          tensorboard: Where the same values go, too.
          on_line: Called with every line that is written.
        """
        self._path, self._tensorboard, self._on_line = path, tensorboard, on_line
        lines, spoilt = _read(path)
        if spoilt:
            print(f"warning: {path} has {spoilt} spoilt lines, which are dropped", file=sys.stderr)
        self._keep([line for line in lines if line["step"] <= resume_step])

    def roll_back(self, step: int) -> None:
        """Drops the lines of later steps, but for those that tell of other roll-backs to this one."""
        self._file.close()
        lines = read_metrics(self._path)
        self._keep([line for line in lines if line["step"] <= step or line.get("event") == ROLLED_BACK])

    def _keep(self, lines: list[dict[str, Any]]) -> None:
        # Not in place: a kill in between would lose the lines of the steps that are not repeated.
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        if self._tensorboard:
            self._tensorboard.restart(lines)

    def write(self, values: dict[str, Any]) -> None:
        """Writes one line, at once; numbers that are not finite, which JSON does not have, are left out.

        Raises:
          OSError: Where the disk refuses, with the name of the file.
        """
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
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()


class NoWriter(MetricWriter):
    """Writes nothing: of several processes one does."""

    def __init__(self):
        pass

    def write(self, values: dict[str, Any]) -> None:
        """Drops them."""

    def roll_back(self, step: int) -> None:
        """There is nothing to drop."""

    def __exit__(self, *_: object) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics file, [] where there is none; those that a kill or a bad disk spoilt are left out."""
    return _read(path)[0]


def validation_losses(path: Path, last_step: int) -> dict[int, float]:
    """The validation losses in nats of a metrics file up to a step, by their steps."""
    lines = [line for line in read_metrics(path) if line["step"] <= last_step]
    return {line["step"]: line["validation_loss_nats"] for line in lines if "validation_loss_nats" in line}


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines, and how many are spoilt besides a last one that was cut off, which is made again on resume."""
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
