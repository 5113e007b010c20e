"""Writing the checkpoints of one run, and going on from the newest that is whole."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.fields import to_json
from orthojax.files import make_folder
from orthojax.train.checkpoint.handler import ChecksumSave, registry
from orthojax.train.checkpoint.items import DamagedError, first_line, read_json_item, steps_in
from orthojax.train.checkpoint.keeping import Keep, Preservation, Validation
from orthojax.train.checkpoint.reading import ARRAYS, restore_item
from orthojax.train.checkpoint.verification import (
    read_checksums,
    require_fitting,
    require_intact_values,
    restore_agreed,
)
from orthojax.train.step import TrainState

FORMAT_VERSION = 2


class Checkpoints:
    """The checkpoints of one run; use it in a `with` block, which waits for the last write."""

    def __init__(self, directory: Path, *, keep: int, keep_every_steps: int = 0, keep_best: int = 0):
        """Opens or creates the folder.

        Args:
          directory: The `checkpoints` folder of a workdir, the same for every process.
          keep: How many of the newest steps stay.
          keep_every_steps: Multiples of so many steps stay too; 0 means none.
          keep_best: How many of those with the lowest validation loss stay too.
        """
        self.directory = directory.absolute()
        make_folder(self.directory, "checkpoints folder")
        self._validations: dict[int, Validation] = {}  # of the checkpoints that are there
        self._newest_validation: Validation | None = None
        policy = Preservation(Keep(keep, keep_every_steps, keep_best), self._validations)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy, cleanup_tmp_directories=True, lightweight_initialize=True
        )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=options,
            metadata={"format": "orthojax", "version": FORMAT_VERSION},
            handler_registry=registry(),
        )
        for step in self.steps():
            self._read_validation(step)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._manager.close()
        except Exception as error:
            if kind is None:
                raise self._write_error(error) from error

    # Writing.

    def validated(self, step: int, loss_nats: float) -> None:
        """Takes note of a validation loss: later checkpoints bear it, and are kept by it.

        So is one that is there already: a signal had it saved before the loss was known.
        """
        self._newest_validation = Validation(step, loss_nats)
        if step in self.steps():
            self._validations[step] = self._newest_validation

    def validated_before(self, losses: Mapping[int, float]) -> None:
        """Takes note of what was measured before this call of the run, by step; checkpoints do not bear all of it."""
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
        arrays = {"params": state.params, "opt_state": state.opt_state}
        values: dict[str, Any] = {"config": json.loads(to_json(config)), "data": data | {"next_step": step}}
        if self._newest_validation:
            values["validation"] = self._newest_validation._asdict()
            self._validations[step] = self._newest_validation
        items = {item: ocp.args.StandardSave(tree) for item, tree in arrays.items()}
        items |= {item: ocp.args.JsonSave(content) for item, content in values.items()}
        try:
            # Forced: by itself Orbax silently leaves out a step before the newest, as after a step back.
            args = ocp.args.Composite(**items, checksums=ChecksumSave(arrays, values))
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._write_error(error) from error

    def check(self) -> None:
        """Raises what a write in the background has run into; costs nothing.

        Raises:
          UserError: Where the disk refused it; earlier checkpoints stay.
        """
        try:
            self._manager.check_for_errors()
        except Exception as error:
            raise self._write_error(error) from error

    def wait(self) -> None:
        """Returns when the last save is on disk.

        Raises:
          UserError: Where the disk refused it.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._write_error(error) from error

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, which a run that goes back to this one will reach by another way."""
        for later in [later for later in self.steps() if later > step]:
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
          like: A state of the right structure; its arrays give shapes, dtypes and shardings.
          step: Which step.

        Raises:
          DamagedError: Where the files are damaged.
          UserError: Where they are whole and do not fit.
        """
        folder = self.directory / str(step)
        checksums = read_checksums(folder)
        require_intact_values(folder, checksums)
        wanted = {"params": like.params, "opt_state": like.opt_state}
        for item in ARRAYS:
            require_fitting(folder, checksums, item, wanted[item])
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
        restored = restore_agreed(
            folder, checksums, lambda: {item: restore_item(folder, item, abstract[item]) for item in ARRAYS}
        )
        self._newest_validation = self._validations.get(step)
        # Placed as the arrays are: a step without a place would make the second training step compile again.
        step_taken = jax.device_put(np.asarray(step, like.step.dtype), like.step.sharding)
        return TrainState(step_taken, restored["params"], restored["opt_state"])

    def restore_newest(self, like: TrainState, accept: Callable[[Path], None] = lambda _: None) -> TrainState | None:
        """Goes on from the newest checkpoint that is whole.

        Damaged ones are told on stderr and set aside under another name, so that their steps can be written again;
        nothing is deleted. Where none is whole nothing is renamed either.

        Args:
          like: As in `restore`.
          accept: Called with the folder of a step, raises where the run must not go on from it.

        Returns:
          The state, or None where there is no checkpoint.

        Raises:
          UserError: Where every checkpoint is damaged; where one does not fit; what `accept` raises.
        """
        damaged: dict[int, DamagedError] = {}
        for step in reversed(self.steps()):
            folder = self.directory / str(step)
            try:
                require_intact_values(folder, read_checksums(folder))
                accept(folder)
                state = self.restore(like, step)
            except DamagedError as error:
                damaged[step] = error
                continue
            self._set_aside(damaged, step)
            return state
        if damaged:
            newest = max(damaged)
            raise UserError(
                f"{damaged[newest]}".splitlines()[0],
                allowed="one checkpoint at least that is whole; "
                + ("there is no other" if len(damaged) == 1 else f"all {len(damaged)} are damaged"),
                hint=f"without {self.directory} the run begins anew",
            )
        return None

    def _set_aside(self, damaged: dict[int, DamagedError], used: int) -> None:
        if not damaged:
            return
        if jax.process_index() == 0:
            for step, error in damaged.items():
                target = _free_name(self.directory / f"{step}.damaged")
                (self.directory / str(step)).rename(target)
                print(
                    f"warning: the checkpoint of step {step} is damaged: {error.reason}; "
                    f"going on from step {used}, the damaged one is now {target}",
                    file=sys.stderr,
                )
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("damaged checkpoints are set aside")
        for step in damaged:
            self._validations.pop(step, None)
        self._manager.reload()

    def _read_validation(self, step: int) -> None:
        folder = self.directory / str(step)
        if not (folder / "validation").is_dir():
            return
        try:
            values = read_json_item(folder, "validation")
            self._validations[step] = Validation(int(values["step"]), float(values["loss_nats"]))
        except (DamagedError, KeyError, TypeError, ValueError):
            pass  # told when the step is restored; until then it is not among the best

    def _write_error(self, error: Exception) -> UserError:
        steps = steps_in(self.directory)
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no earlier checkpoint"
        return UserError(
            f"cannot write a checkpoint to {self.directory}: {first_line(error)}",
            hint=f"{kept}; free some space and run the same command to go on",
        )


def _free_name(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
