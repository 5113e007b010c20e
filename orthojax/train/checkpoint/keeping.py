"""Which checkpoints stay."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Validation(NamedTuple):
    """A validation loss."""

    step: int  # at which it was measured
    loss_nats: float


@dataclasses.dataclass(frozen=True)
class Keep:
    """A checkpoint stays where one of these wants it.

    Attributes:
      newest: How many of the newest stay; at least 1, and 2 for one to fall back on.
      every_steps: Those at multiples of so many steps stay for good; 0 means none.
      best: How many of those with the lowest validation loss stay.
    """

    newest: int
    every_steps: int = 0
    best: int = 0

    def kept(self, steps: Sequence[int], validations: Mapping[int, Validation]) -> set[int]:
        """The steps that stay.

        A loss counts for the first checkpoint that bears it, the one that is nearest to what was measured; of equal
        losses the later one is the better.

        Args:
          steps: Of the checkpoints that are there, in order.
          validations: The newest validation loss when a checkpoint was saved, by its step.

        >>> losses = {10: Validation(10, 2.5), 20: Validation(20, 2.0), 30: Validation(20, 2.0)}
        >>> sorted(Keep(newest=1, best=2).kept([10, 20, 30, 40], losses))
        [10, 20, 40]
        """
        kept = set(steps[-self.newest :])
        if self.every_steps:
            kept |= {step for step in steps if step % self.every_steps == 0}
        nearest: dict[int, int] = {}
        for step in sorted(step for step in steps if step in validations):
            nearest.setdefault(validations[step].step, step)
        ranked = sorted(nearest.values(), key=lambda step: (validations[step].loss_nats, -step))
        return kept | set(ranked[: self.best])


class Preservation:
    """`Keep` as Orbax asks for it.

    Orbax's own policy by metrics forgets them where no `best_fn` is set, and would not start beside a damaged one; so
    the losses stand in the item `validation` of every step, and are handed over here.
    """

    def __init__(self, keep: Keep, validations: Mapping[int, Validation]):
        self._keep, self._validations = keep, validations

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer for each checkpoint."""
        del context
        kept = self._keep.kept([info.step for info in checkpoints], self._validations)
        return [info.step in kept for info in checkpoints]
