"""metrics.jsonl: one JSON object a line, the truth about a run."""

import json
from pathlib import Path
from typing import Any

from orthojax.train.files import write_text


class MetricWriter:
    """Appends to a metrics file; on resume, lines past the restored step are dropped first."""

    def __init__(self, path: Path, resume_step: int):
        """Opens the file.

        Args:
          path: The metrics.jsonl.
          resume_step: Optimizer steps that the restored state has taken; 0 starts afresh.
        """
        kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
        # Not in place: a kill in between would lose the lines of the steps that are not repeated.
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, values: dict[str, Any]) -> None:
        """Writes one line, at once.

        Raises:
          OSError: Where the disk refuses, with the name of the file.
        """
        try:
            self._file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class NoWriter(MetricWriter):
    """Writes nothing: of several processes one does."""

    def __init__(self):
        pass

    def write(self, values: dict[str, Any]) -> None:
        """Drops them."""

    def __exit__(self, *_: object) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics file, [] where there is none; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # killed while writing; what follows is rewritten on resume
    return lines
