"""Work cut into parts that are kept: what an earlier call measured is read instead."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orthojax.experiments.measures import parse_arrays
from orthojax.files import read_again, write_atomically
from orthojax.model import LoadedModel
from orthojax.progress import Progress
from orthojax.published import model_files

_DEFINITIONS = 2  # of what is measured: another number, and nothing of before is used
_PARTS = 32  # into which one pass over the text is cut at most


class Part(NamedTuple):
    """One part of the work.

    Attributes:
      name: Of its file.
      key: What its result depends on, beside the model; JSON values.
      work: How long it takes, in rows that pass through the model.
      measure: Computes its arrays; takes a function that counts work.
    """

    name: str
    key: list[Any]
    work: float
    measure: Callable[[Callable[[float], None]], dict[str, np.ndarray]]


class Kept:
    """The folder of what is measured of one model."""

    def __init__(self, folder: Path, loaded: LoadedModel, progress: Progress, label: str):
        self._folder, self._identity = folder, identity(loaded)
        self._progress, self._label = progress, label
        self.measured = 0  # parts that this call measured

    def get(self, part: Part) -> dict[str, np.ndarray]:
        """The arrays of a part, measured unless an earlier call did."""
        key = json.dumps([_DEFINITIONS, self._identity, part.name, part.key], sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        path = self._folder / f"{_file_name(part.name)}-{digest}.npz"
        found = read_again(path, "measurement", parse_arrays, self._progress.say)
        message = f"{self._label}: {part.name}"
        if found is not None:
            self._progress.skip(part.work)
            return found
        done = 0.0

        def count(work: float) -> None:
            nonlocal done
            done += work
            self._progress.advance(work, message)

        arrays = part.measure(count)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: np.savez_compressed(file, **arrays))  # pyright: ignore[reportArgumentType]
        self.measured += 1
        self._progress.advance(part.work - done, message)
        return arrays


def spans(rows: int, batch: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the rows of each part of one pass over a text: whole batches, at most 32 parts.

    >>> list(spans(10, 4))
    [(0, 4), (4, 8), (8, 10)]
    """
    step = -(-rows // (batch * _PARTS)) * batch
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def identity(loaded: LoadedModel) -> list[Any]:
    """What identifies a model: its files with sizes and times, and its config."""
    source = loaded.source.resolve()
    key = json.dumps([model_files(source), repr(loaded.config.model)])
    return [str(source), hashlib.sha256(key.encode()).hexdigest()]


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_.-" else "_" for c in name)[:80]
