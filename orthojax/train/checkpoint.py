"""Checkpoints: Orbax, four items a step with plain names, readable without orthojax.

`checkpoints/STEP/` holds `params` and `opt_state` (arrays), `config` (JSON, the whole config, so that a softmax-1 model
can not be evaluated as softmax) and `data` (JSON: the position in the data and the hashes of what was read).
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orthojax.config import Config, UserError, from_dict, to_json
from orthojax.train.step import TrainState

FORMAT_VERSION = 1


class Checkpoints:
    """The checkpoints of one run; use it in a `with` block, which waits for the last write."""

    def __init__(self, directory: Path, *, keep: int):
        """Opens or creates the folder.

        Args:
          directory: The `checkpoints` folder of a workdir.
          keep: How many of the newest steps stay.
        """
        self.directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, metadata={"format": "orthojax", "version": FORMAT_VERSION}
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._manager.close()
        except Exception as error:
            if kind is None:
                raise self._write_error(error) from error

    def save(self, state: TrainState, config: Config, data: dict[str, Any]) -> None:
        """Writes a step in the background; it appears under its name only when it is complete.

        Args:
          state: After `state.step` steps.
          config: Of the run.
          data: JSON values; `next_step` is added.

        Raises:
          UserError: Where the disk refuses; earlier checkpoints stay.
        """
        step = int(state.step)
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    opt_state=ocp.args.StandardSave(state.opt_state),
                    config=ocp.args.JsonSave(json.loads(to_json(config))),
                    data=ocp.args.JsonSave(data | {"next_step": step}),
                ),
            )
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

    def latest_step(self) -> int | None:
        """The newest complete step."""
        return self._manager.latest_step()

    def restore(self, like: TrainState, step: int) -> TrainState:
        """Reads parameters and optimizer state.

        Args:
          like: A state of the right structure; its arrays give shapes, dtypes and shardings.
          step: Which step.

        Raises:
          UserError: Where the files are damaged or do not fit.
        """
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(abstract.params),
                    opt_state=ocp.args.StandardRestore(abstract.opt_state),
                ),
            )
        except Exception as error:
            raise _read_error(self.directory / str(step), error) from error
        return TrainState(jax.numpy.asarray(step, like.step.dtype), restored.params, restored.opt_state)

    def _write_error(self, error: Exception) -> UserError:
        steps = sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdigit())
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no earlier checkpoint"
        return UserError(
            f"cannot write a checkpoint to {self.directory}: {_first_line(error)}",
            hint=f"{kept}; free some space and run the same command to go on",
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _read_error(path: Path, error: Exception) -> UserError:
    return UserError(
        f"cannot read the checkpoint {path}: {_first_line(error)}",
        allowed="a complete checkpoint of the same model and optimizer",
        hint="delete that step's folder to go on from the one before",
    )


def find_checkpoint(path: Path) -> Path:
    """The newest step folder behind what a user names: a workdir, its `checkpoints` folder, or a step folder.

    Raises:
      UserError: Where there is none.
    """
    if not path.exists():
        raise UserError(f"no such checkpoint: {path}", allowed="a workdir, its checkpoints folder, or one step's folder")
    for folder in (path / "checkpoints", path):
        steps = [int(p.name) for p in folder.glob("*") if p.name.isdigit() and p.is_dir()] if folder.is_dir() else []
        if steps:
            return folder / str(max(steps))
    if (path / "params").is_dir() and (path / "config").is_dir():
        return path
    raise UserError(
        f"no orthojax checkpoint in {path}", allowed="a workdir, its checkpoints folder, or one step's folder"
    )


def read_json_item(step_folder: Path, item: str) -> dict[str, Any]:
    """The `config` or `data` item of one step.

    Raises:
      UserError: Where it is missing or damaged.
    """
    path = step_folder / item / "metadata"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{step_folder} is not a complete orthojax checkpoint: {path.name} of {item!r}: {_first_line(error)}",
            allowed="a checkpoint written by orthojax",
        ) from None


def read_config(step_folder: Path) -> Config:
    """The config that a checkpoint was trained with.

    Raises:
      UserError: Where it is missing, damaged or of another version.
    """
    return from_dict(Config, read_json_item(step_folder, "config"), f"the config in {step_folder}")


def read_tree(step_folder: Path, item: str) -> Any:
    """Names, shapes and dtypes of `params` or `opt_state`, no array read.

    Returns:
      A nested dict (lists and tuples as dicts by index) with `shape` and `dtype` at its leaves.

    Raises:
      UserError: Where the item is missing or damaged.
    """
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.metadata(step_folder.absolute() / item).item_metadata.tree
    except Exception as error:
        raise _read_error(step_folder / item, error) from error


def list_arrays(step_folder: Path, item: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(path, shape, dtype) of every array of `params` or `opt_state`.

    Raises:
      UserError: Where the item is missing or damaged.
    """
    leaves = jax.tree_util.tree_leaves_with_path(read_tree(step_folder, item))
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), tuple(leaf.shape), str(np.dtype(leaf.dtype)))
        for path, leaf in leaves
    ]


def read_params(step_folder: Path) -> Any:
    """The parameters alone, as a nested dict of float32 arrays on the first device, whatever saved them.

    Raises:
      UserError: Where they are missing or damaged.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = read_tree(step_folder, "params")
    like = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, np.dtype(m.dtype), sharding=device), tree)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(step_folder.absolute() / "params", like)
    except Exception as error:
        raise _read_error(step_folder / "params", error) from error
