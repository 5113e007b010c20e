"""Writing the checkpoints of one run, and resuming from the newest that is intact."""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from orthojax.config import Config, to_json
from orthojax.errors import UserError
from orthojax.files import make_folder, write_text
from orthojax.train.checkpoint.reading import (
    ARRAYS,
    JSON_ITEMS,
    DamagedError,
    file_digests,
    first_line,
    require_fitting,
    restore_item,
    steps_in,
    verify,
)
from orthojax.train.step import TrainState


class ManifestHandler(ocp.JsonCheckpointHandler):
    """Writes the digests of all other items into the item `checksums` when Orbax finalises it."""

    @classmethod
    def typestr(cls) -> str:
        """Names plain JSON as what is on disk, so that readers without orthojax find it so."""
        return ocp.JsonCheckpointHandler.typestr()

    def finalize(self, directory: Any) -> None:
        """Hashes the files; Orbax calls it on process 0, after every process has written and before the renaming."""
        folder = Path(directory)
        paths = [path for item in (*ARRAYS, *JSON_ITEMS) for path in (folder.parent / item).rglob("*")]
        files = sorted(path for path in paths if path.is_file() and path.name != "commit_success.txt")
        digests = file_digests(folder.parent, [path.relative_to(folder.parent).as_posix() for path in files])
        write_text(folder / "metadata", json.dumps({"algorithm": "sha256", "files": digests}))


def _handlers() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Returns the items of a step in the order in which Orbax finalises them: arrays are merged, then all is hashed."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ARRAYS:
        registry.add(item, ocp.args.StandardSave, ocp.StandardCheckpointHandler())
    for item in JSON_ITEMS:
        registry.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    registry.add("checksums", ocp.args.JsonSave, ManifestHandler())
    return registry


@contextlib.contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
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

    def __init__(self, directory: Path, *, keep: int, keep_every_steps: int = 0):
        """Opens or creates the folder.

        Args:
          directory: The `checkpoints` folder of a workdir, the same for every process.
          keep: How many of the newest steps stay; 2 for one to fall back on.
          keep_every_steps: Multiples of so many steps stay too; 0 means none.
        """
        self.directory = directory.absolute()
        make_folder(self.directory, "checkpoints folder")
        policies: list[Any] = [checkpoint_managers.LatestN(keep)]
        if keep_every_steps:
            policies.append(checkpoint_managers.EveryNSteps(keep_every_steps))
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,
                lightweight_initialize=True,
            ),
            metadata={"format": "orthojax", "version": 3},
            handler_registry=_handlers(),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*([UserError] if kind else [])), _write_errors(self.directory):
            self._manager.close()

    # Writing.

    def save(self, state: TrainState, config: Config, data: dict[str, Any]) -> None:
        """Writes a step in the background; it appears under its name only when it is complete.

        Returns when the state is on the host, so that the next step may overwrite it on the devices. Every process
        calls it and writes what it holds.

        Args:
          state: After `state.step` steps.
          config: Of the run.
          data: JSON values; `next_step` is added.

        Raises:
          UserError: If the disk refuses this write or refused the one before; earlier checkpoints stay.
        """
        step = int(jax.device_get(state.step))
        items: dict[str, Any] = {item: ocp.args.StandardSave(getattr(state, item)) for item in ARRAYS}
        items["config"] = ocp.args.JsonSave(json.loads(to_json(config)))
        items["data"] = ocp.args.JsonSave(data | {"next_step": step})
        items["checksums"] = ocp.args.JsonSave({})  # filled in by `ManifestHandler`
        with _write_errors(self.directory):
            # Forced: otherwise Orbax leaves out steps that its own schedule does not ask for.
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def check(self) -> None:
        """Raises the UserError of a write in the background that failed; costs nothing."""
        with _write_errors(self.directory):
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Returns when the last save is on disk, or raises its UserError."""
        with _write_errors(self.directory):
            self._manager.wait_until_finished()

    # Reading.

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def restore(self, like: TrainState, step: int) -> TrainState:
        """Reads parameters and optimizer state, whatever mesh, device count and process count saved them.

        Args:
          like: A state of the right structure, of arrays or jax.ShapeDtypeStruct with shardings.
          step: Which step.

        Raises:
          DamagedError: If the files are damaged.
          UserError: If they are whole and do not fit.
        """
        folder = self.directory / str(step)
        verify(folder, ARRAYS, together=True)
        for item in ARRAYS:
            require_fitting(folder, item, getattr(like, item))
        restored = {item: restore_item(folder, item, getattr(like, item)) for item in ARRAYS}
        # Placed as the arrays are: a step without a place would make the second training step compile again.
        step_taken = jax.device_put(np.asarray(step, like.step.dtype), like.step.sharding)
        return TrainState(step_taken, **restored)

    def restore_newest(self, like: TrainState, accept: Callable[[Path], None] = lambda _: None) -> TrainState | None:
        """Resumes from the newest checkpoint that is intact.

        Damaged ones are reported on stderr and set aside under another name, so that their steps can be written again;
        nothing is deleted. If none is intact, nothing is renamed either.

        Args:
          like: As in `restore`.
          accept: Called with the folder of a step whose JSON items are intact; raises if the run must not resume there.

        Returns:
          The state, or None if there is no checkpoint.

        Raises:
          UserError: If every checkpoint is damaged or one does not fit; and what `accept` raises.
        """
        damaged: dict[int, DamagedError] = {}
        for step in reversed(self.steps()):
            folder = self.directory / str(step)
            try:
                verify(folder, ())
                accept(folder)
                state = self.restore(like, step)
            except DamagedError as error:
                damaged[step] = error
                continue
            if damaged:
                self._set_aside(damaged, step)
            return state
        if damaged:
            raise UserError(
                f"{damaged[max(damaged)]}".splitlines()[0],
                allowed=f"an intact checkpoint; {len(damaged)} of {len(damaged)} are damaged",
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
        self._manager.reload()
