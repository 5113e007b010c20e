"""One JSON item of a checkpoint, and what is said of a checkpoint that is damaged."""

import json
from pathlib import Path
from typing import Any

from orthojax.errors import UserError


class DamagedError(UserError):
    """A checkpoint is not what was written; training goes on from the one before it.

    Attributes:
      reason: What was found, in a few words.
    """

    def __init__(self, folder: Path, error: Exception | str, *, problem: str = "cannot read the checkpoint {}: {}"):
        """Names what else is there.

        Args:
          folder: Of the step, or of one of its items.
          error: What was found.
          problem: The first line, of the folder and the reason.
        """
        self.reason = error if isinstance(error, str) else first_line(error)
        step_folder = folder if folder.name.isdigit() else folder.parent
        others = [step for step in steps_in(step_folder.parent) if str(step) != step_folder.name]
        super().__init__(
            problem.format(folder, self.reason),
            allowed="a complete checkpoint of the same model and optimizer",
            hint=f"also in {step_folder.parent}: {', '.join(map(str, reversed(others)))}" if others else "",
        )


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; of a long one 200 characters, since the cause stands at its end.

    >>> first_line(ValueError("writing " + "x" * 300 + ": No space left on device"))[-30:]
    'xxxxx: No space left on device'
    """
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 200 else f"{text[:97]} ... {text[-98:]}"


def steps_in(folder: Path) -> list[int]:
    """The steps that a `checkpoints` folder holds, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and path.is_dir())


def read_json_item(step_folder: Path, item: str, file: str = "metadata") -> dict[str, Any]:
    """A JSON item of one step: `config`, `data`, `checksums`, or `validation` where there is one.

    Raises:
      DamagedError: Where it is missing or no JSON object.
    """
    try:
        values = json.loads((step_folder / item / file).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        problem = "{} is not a complete orthojax checkpoint: {}"
        raise DamagedError(step_folder, f"item {item!r}: {reason}", problem=problem) from None
    return values
