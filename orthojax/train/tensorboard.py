"""metrics.jsonl as TensorBoard events; needs the extra `tensorboard`."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orthojax.errors import UserError


class TensorBoard:
    """A mirror of metrics.jsonl: made anew whenever a run starts, resumes or rolls back, so that no point is double."""

    def __init__(self, folder: Path):
        """Looks for the package; writes nothing yet.

        Args:
          folder: Where the events go; files of earlier calls there are replaced.

        Raises:
          UserError: Without the extra.
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

    def restart(self, lines: Iterable[dict[str, Any]]) -> None:
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
        """Writes out what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
