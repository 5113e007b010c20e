"""Checkpoints: Orbax, five items a step with plain names, readable without orthojax.

`checkpoints/STEP/` holds `params` and `opt_state` (arrays), `config` (JSON, the whole config, so that a softmax-1 model
can not be evaluated as softmax), `data` (JSON: the position in the data and the hashes of what was read) and
`checksums` (JSON: the CRC-32 of every array, because Orbax restores a flipped byte without a word).
"""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.fields import from_dict, to_json
from orthojax.train.files import make_folder
from orthojax.train.step import TrainState, parameter_shapes

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
        make_folder(self.directory, "checkpoints folder")
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
                    checksums=ocp.args.JsonSave(
                        {"params": _checksums(state.params), "opt_state": _checksums(state.opt_state)}
                    ),
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
        _require_intact(self.directory / str(step), "params", restored["params"])
        _require_intact(self.directory / str(step), "opt_state", restored["opt_state"])
        # Placed as the arrays are: a step without a place would make the second training step compile again.
        step_taken = jax.device_put(np.asarray(step, like.step.dtype), like.step.sharding)
        return TrainState(step_taken, restored["params"], restored["opt_state"])

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


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _whole(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _checksums(tree: Any) -> dict[str, int]:
    """CRC-32 of the bytes of every array by path, row-major."""
    arrays = {path: np.ascontiguousarray(_whole(leaf)) for path, leaf in _by_path(tree).items()}
    return {path: zlib.crc32(array.view(np.uint8).data) for path, array in arrays.items()}


def _require_intact(step_folder: Path, item: str, tree: Any) -> None:
    saved = read_json_item(step_folder, "checksums").get(item)
    for path, checksum in _checksums(tree).items():
        if not isinstance(saved, dict) or saved.get(path) != checksum:
            raise _read_error(step_folder, ValueError(f"{item}/{path} does not have its checksum: it is damaged"))


def find_checkpoint(path: Path) -> Path:
    """The newest step folder behind what a user names: a workdir, its `checkpoints` folder, or a step folder.

    Raises:
      UserError: Where there is none.
    """
    path = path.absolute()
    if not path.exists():
        raise UserError(
            f"no such checkpoint: {path}", allowed="a workdir, its checkpoints folder, or one step's folder"
        )
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
    try:
        values = json.loads((step_folder / item / "metadata").read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else _first_line(error)
        raise UserError(
            f"{step_folder} is not a complete orthojax checkpoint: item {item!r}: {reason}",
            allowed="a checkpoint written by orthojax",
        ) from None
    return values


def read_config(step_folder: Path) -> Config:
    """The config that a checkpoint was trained with.

    Raises:
      UserError: Where it is missing, damaged or of another version.
    """
    return from_dict(Config, read_json_item(step_folder, "config"), f"the config in {step_folder}")


def require_same_data(step_folder: Path, provenance: dict[str, Any]) -> None:
    """Refuses other tokens than those that a checkpoint was trained on: their ids would mean something else.

    Args:
      step_folder: The checkpoint.
      provenance: Of the data that is there now.

    Raises:
      UserError: Where they differ, as when the embedded corpus comes from another Python version.
    """
    saved = read_json_item(step_folder, "data")
    for name, value in provenance.items():
        if saved.get(name) != value:
            raise UserError(
                f"the data is not that of the checkpoint {step_folder}: {name} is {value!r}, not {saved.get(name)!r}",
                allowed="the data that the run began with, or a run of its own in another --workdir",
            )


def read_tree(step_folder: Path, item: str) -> Any:
    """Names, shapes and dtypes of `params` or `opt_state`, no array read.

    Returns:
      A nested dict (lists and tuples as dicts by index) with `shape` and `dtype` at its leaves.

    Raises:
      UserError: Where the item is missing or damaged.
    """
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(step_folder.absolute() / item).item_metadata
            if metadata is None:
                raise ValueError("its metadata is missing or damaged")
            return metadata.tree
    except Exception as error:
        raise _read_error(step_folder / item, error) from error


def list_arrays(step_folder: Path, item: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(path, shape, dtype) of every array of `params` or `opt_state`.

    Raises:
      UserError: Where the item is missing or damaged.
    """
    arrays = _by_path(read_tree(step_folder, item))
    return [(path, tuple(leaf.shape), str(np.dtype(leaf.dtype))) for path, leaf in arrays.items()]


def read_params(step_folder: Path) -> Any:
    """The parameters alone, as a nested dict of float32 arrays on the first device, whatever saved them.

    Raises:
      UserError: Where they are missing or damaged, or not those of the model in the checkpoint's config.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = read_tree(step_folder, "params")
    found = {path: tuple(leaf.shape) for path, leaf in _by_path(tree).items()}
    expected = {path: leaf.shape for path, leaf in _by_path(parameter_shapes(read_config(step_folder))).items()}
    if found != expected:
        path = min(path for path in found | expected if found.get(path) != expected.get(path))
        raise _read_error(
            step_folder,
            ValueError(f"its config wants {path} {expected.get(path, 'absent')}, it is {found.get(path, 'absent')}"),
        )
    like = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, np.dtype(m.dtype), sharding=device), tree)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(step_folder.absolute() / "params", like)
    except Exception as error:
        raise _read_error(step_folder / "params", error) from error
    _require_intact(step_folder, "params", params)
    return params
