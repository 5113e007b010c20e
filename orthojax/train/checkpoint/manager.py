"""Writing the checkpoints of one run, and resuming from the newest that is intact."""

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from orthojax.config import Config, to_json
from orthojax.errors import UserError
from orthojax.files import make_folder
from orthojax.train.checkpoint.checksums import (
    ARRAYS,
    DamagedError,
    first_line,
    handler_registry,
    read_json_item,
    steps_in,
)
from orthojax.train.checkpoint.reading import require_fitting, restore_item, verify
from orthojax.train.step import TrainState

FORMAT_VERSION = 3


class Validation(NamedTuple):
    """A validation loss."""

    step: int  # at which it was measured
    loss_nats: float


@dataclasses.dataclass(frozen=True)
class Retention:
    """An Orbax preservation policy: a checkpoint stays where one of these rules wants it.

    Orbax's own policy by metrics forgets them where no `best_fn` is set, and would not start beside a damaged one; so
    the losses are stored in the item `validation` of every step.

    Attributes:
      newest: How many of the newest stay; at least 1, and 2 for one to fall back on.
      every_steps: Those at multiples of so many steps stay for good; 0 means none.
      best: How many of those with the lowest validation loss stay.
      validations: The newest validation loss when a checkpoint was saved, by its step.
      scheduled_every_steps: The newest at a multiple of so many steps stays; 0 means none.
    """

    newest: int
    every_steps: int = 0
    best: int = 0
    validations: Mapping[int, Validation] = dataclasses.field(default_factory=dict)
    scheduled_every_steps: int = 0

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Which of the steps that are there, in order, stay.

        A loss counts for the first checkpoint that carries it, the one nearest to where it was measured; of equal
        losses the later one is the better.

        >>> losses = {10: Validation(10, 2.5), 20: Validation(20, 2.0), 30: Validation(20, 2.0)}
        >>> sorted(Retention(newest=1, best=2, validations=losses).kept([10, 20, 30, 40]))
        [10, 20, 40]
        """
        kept = set(steps[-self.newest :])
        if self.every_steps:
            kept |= {step for step in steps if step % self.every_steps == 0}
        if self.scheduled_every_steps:
            kept |= set([step for step in steps if step % self.scheduled_every_steps == 0][-1:])
        nearest: dict[int, int] = {}
        for step in sorted(step for step in steps if step in self.validations):
            nearest.setdefault(self.validations[step].step, step)
        ranked = sorted(nearest.values(), key=lambda step: (self.validations[step].loss_nats, -step))
        return kept | set(ranked[: self.best])

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer for each checkpoint."""
        del context
        kept = self.kept([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]


def open_manager(directory: Path, retention: Retention | None = None) -> ocp.CheckpointManager:
    """Orbax's manager of a `checkpoints` folder, which is made where it is missing."""
    make_folder(directory, "checkpoints folder")
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=retention, cleanup_tmp_directories=True, lightweight_initialize=True
        ),
        metadata={"format": "orthojax", "version": FORMAT_VERSION},
        handler_registry=handler_registry(),
    )


def save_step(manager: ocp.CheckpointManager, step: int, arrays: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Starts to write a step: items of arrays, JSON items, and the checksums of both."""
    items: dict[str, Any] = {item: ocp.args.StandardSave(tree) for item, tree in arrays.items()}
    items |= {item: ocp.args.JsonSave(content) for item, content in values.items()}
    # Forced: by itself Orbax silently leaves out a step before the newest, as after a step back.
    manager.save(step, args=ocp.args.Composite(**items, checksums=ocp.args.JsonSave({})), force=True)


@contextlib.contextmanager
def write_errors(directory: Path) -> Iterator[None]:
    """Raises what goes wrong while writing as a UserError that names the last good checkpoint."""
    try:
        yield
    except Exception as error:
        steps = steps_in(directory)
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no earlier checkpoint"
        gone = "" if directory.is_dir() else "the folder was deleted or moved while it was in use"
        todo = "; ".join(filter(None, (kept, gone, "run the same command to resume")))
        raise UserError(f"cannot write a checkpoint to {directory}: {first_line(error)}", hint=todo) from error


class Checkpoints:
    """The checkpoints of one run; use it in a `with` block, which waits for the last write."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        keep_every_steps: int = 0,
        keep_best: int = 0,
        scheduled_every_steps: int = 0,
    ):
        """Opens or creates the folder.

        Args:
          directory: The `checkpoints` folder of a workdir, the same for every process.
          keep: How many of the newest steps stay.
          keep_every_steps: Multiples of so many steps stay too; 0 means none.
          keep_best: How many of those with the lowest validation loss stay too.
          scheduled_every_steps: The newest of the multiples of so many steps stays too, to roll back to; 0 means none.
        """
        self.directory = directory.absolute()
        self._validations: dict[int, Validation] = {}  # of the checkpoints that are there
        self._newest_validation: Validation | None = None
        retention = Retention(keep, keep_every_steps, keep_best, self._validations, scheduled_every_steps)
        self._manager = open_manager(self.directory, retention)
        for step in self.steps():
            # A damaged one is reported when the step is restored; until then it is not among the best.
            with contextlib.suppress(DamagedError, KeyError, TypeError, ValueError):
                values = read_json_item(self.directory / str(step), "validation")
                self._validations[step] = Validation(int(values["step"]), float(values["loss_nats"]))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*([UserError] if kind else [])), write_errors(self.directory):
            self._manager.close()

    # Writing.

    def validated(self, step: int, loss_nats: float) -> None:
        """Records a validation loss: later checkpoints carry it, and retention counts it.

        Also for a checkpoint of that step that is there already: a signal had it saved before the loss was known.
        """
        self._newest_validation = Validation(step, loss_nats)
        if step in self.steps():
            self._validations[step] = self._newest_validation

    def validated_before(self, losses: Mapping[int, float]) -> None:
        """Records what metrics.jsonl has from before the run resumed, by step; checkpoints do not carry all of it."""
        for step in sorted(losses.keys() & {*self.steps(), max(losses, default=0)}):
            self.validated(step, losses[step])

    def is_validated(self, step: int) -> bool:
        """Whether the validation loss of a checkpoint's own step is known."""
        return step in self._validations and self._validations[step].step == step

    def save(self, state: TrainState, config: Config, data: dict[str, Any]) -> None:
        """Writes a step in the background; it appears under its name only when it is complete.

        Returns when the state is on the host, so that the next step may overwrite it on the devices. Every process
        calls it and writes what it holds.

        Args:
          state: After `state.step` steps.
          config: Of the run.
          data: JSON values; `next_step` is added.

        Raises:
          UserError: Where the disk refuses this write or refused the one before; earlier checkpoints stay.
        """
        step = int(jax.device_get(state.step))
        values: dict[str, Any] = {"config": json.loads(to_json(config)), "data": data | {"next_step": step}}
        if self._newest_validation:
            values["validation"] = self._newest_validation._asdict()
            self._validations[step] = self._newest_validation
        with write_errors(self.directory):
            save_step(self._manager, step, {"params": state.params, "opt_state": state.opt_state}, values)

    def check(self) -> None:
        """Raises the UserError of a write in the background that failed; costs nothing."""
        with write_errors(self.directory):
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Returns when the last save is on disk, or raises its UserError."""
        with write_errors(self.directory):
            self._manager.wait_until_finished()

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, which a run that rolls back to this one will write again."""
        for later in self.steps():
            if later > step:
                self._manager.delete(later)
                self._validations.pop(later, None)
        self._newest_validation = self._validations.get(step)

    # Reading.

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The newest complete step."""
        return self._manager.latest_step()

    def restore(self, like: TrainState, step: int) -> TrainState:
        """Reads parameters and optimizer state, whatever mesh, device count and process count saved them.

        Args:
          like: A state of the right structure, of arrays or jax.ShapeDtypeStruct with shardings.
          step: Which step.

        Raises:
          DamagedError: Where the files are damaged.
          UserError: Where they are whole and do not fit.
        """
        folder = self.directory / str(step)
        verify(folder, ARRAYS, together=True)
        for item in ARRAYS:
            require_fitting(folder, item, getattr(like, item))
        restored = {item: restore_item(folder, item, getattr(like, item)) for item in ARRAYS}
        self._newest_validation = self._validations.get(step)
        # Placed as the arrays are: a step without a place would make the second training step compile again.
        step_taken = jax.device_put(np.asarray(step, like.step.dtype), like.step.sharding)
        return TrainState(step_taken, **restored)

    def restore_newest(self, like: TrainState, accept: Callable[[Path], None] = lambda _: None) -> TrainState | None:
        """Resumes from the newest checkpoint that is intact.

        Damaged ones are reported on stderr and set aside under another name, so that their steps can be written again;
        nothing is deleted. Where none is intact nothing is renamed either.

        Args:
          like: As in `restore`.
          accept: Called with the folder of a step, raises where the run must not resume from it.

        Returns:
          The state, or None where there is no checkpoint.

        Raises:
          UserError: Where every checkpoint is damaged; where one does not fit; what `accept` raises.
        """
        damaged: dict[int, DamagedError] = {}
        for step in reversed(self.steps()):
            folder = self.directory / str(step)
            try:
                verify(folder)
                accept(folder)
                state = self.restore(like, step)
            except DamagedError as error:
                damaged[step] = error
                continue
            if damaged:
                self._set_aside(damaged, step)
            return state
        if damaged:
            newest = max(damaged)
            raise UserError(
                f"{damaged[newest]}".splitlines()[0],
                allowed="at least one intact checkpoint; "
                + ("there is no other" if len(damaged) == 1 else f"all {len(damaged)} are damaged"),
                hint=f"without {self.directory} the run starts from the beginning",
            )
        return None

    def _set_aside(self, damaged: dict[int, DamagedError], used: int) -> None:
        if jax.process_index() == 0:
            for step, error in damaged.items():
                names = itertools.chain([f"{step}.damaged"], (f"{step}.damaged-{n}" for n in itertools.count(2)))
                target = next(path for name in names if not (path := self.directory / name).exists())
                (self.directory / str(step)).rename(target)
                print(
                    f"warning: the checkpoint of step {step} is damaged: {error.reason}; "
                    f"resuming from step {used}; the damaged one is now {target}",
                    file=sys.stderr,
                )
        multihost_utils.sync_global_devices("damaged checkpoints set aside")
        for step in damaged:
            self._validations.pop(step, None)
        self._manager.reload()
