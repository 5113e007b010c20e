"""Going back to a checkpoint and on with other batches."""

from pathlib import Path
from typing import Any, NamedTuple

from orthojax.train.bad_steps import MOST_IN_A_ROW, RollBack, diverged
from orthojax.train.checkpoint import read_json_item


class Position(NamedTuple):
    """Where a run stands in its data, but for the step: part of every checkpoint's `data` item unless all is zero.

    Attributes:
      left_out_batches: By roll-backs, so far; step s trains on batch s - 1 + left_out_batches.
      roll_backs: Since the last checkpoint of the schedule.
    """

    left_out_batches: int = 0
    roll_backs: int = 0

    def batch(self, step: int) -> int:
        """The batch of a step.

        >>> Position(left_out_batches=3).batch(1)
        3
        """
        return step - 1 + self.left_out_batches

    def after(self, bad: RollBack, step: int) -> "Position":
        """Where it stands after going back from a bad step to another: past the batch of the bad one.

        Raises:
          DivergedError: Where it went back too often.
        """
        if self.roll_backs + 1 >= MOST_IN_A_ROW:
            raise diverged(f"rolled back {self.roll_backs} times to step {step} without getting further; {bad.why}")
        return Position(self.left_out_batches + bad.step - step, self.roll_backs + 1)

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return self._asdict() if any(self) else {}


def read_position(step_folder: Path) -> Position:
    """The position that a checkpoint was saved at."""
    data = read_json_item(step_folder, "data")
    return Position(*(data.get(name, 0) for name in Position._fields))


def step_before(bad_step: int, every_steps: int, directory: Path, newest: int | None) -> int | None:
    """Which checkpoint to go back to from a bad step.

    The last one that the schedule asks for, not the newest: a run that was once stopped by a signal has one more, and
    goes back to the same place all the same. The newest only where that one is kept no more.

    Args:
      bad_step: The step.
      every_steps: Steps between checkpoints.
      directory: Of the checkpoints.
      newest: The newest checkpoint.

    Returns:
      Its step, or None for the beginning of the run.
    """
    step = (bad_step - 1) // every_steps * every_steps
    if step == 0:
        return None
    return step if (directory / str(step)).is_dir() else newest
