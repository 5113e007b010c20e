"""Reading checkpoints: where they are, what they hold, and whether they are what was written."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.fields import from_dict
from orthojax.train.checkpoint.checksums import by_path
from orthojax.train.checkpoint.items import DamagedError, read_json_item, steps_in
from orthojax.train.checkpoint.verification import read_checksums, require_intact, require_intact_values
from orthojax.train.step import parameter_shapes

ARRAYS = ("params", "opt_state")  # the items of arrays; a quantised checkpoint has the first alone
QUANTIZATION = "quantization"  # the JSON item by which that is known


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
        steps = steps_in(folder)
        if steps:
            return folder / str(steps[-1])
    if (path / "params").is_dir() and (path / "config").is_dir():
        return path
    raise UserError(
        f"no orthojax checkpoint in {path}", allowed="a workdir, its checkpoints folder, or one step's folder"
    )


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
        raise DamagedError(step_folder / item, error) from error


def list_arrays(step_folder: Path, item: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(path, shape, dtype) of every array of `params` or `opt_state`.

    Raises:
      UserError: Where the item is missing or damaged.
    """
    arrays = by_path(read_tree(step_folder, item))
    return [(path, tuple(leaf.shape), str(np.dtype(leaf.dtype))) for path, leaf in arrays.items()]


def array_items(step_folder: Path) -> tuple[str, ...]:
    """Which items of arrays a checkpoint should have."""
    return ARRAYS[:1] if (step_folder / QUANTIZATION).is_dir() else ARRAYS


def restore_item(step_folder: Path, item: str, like: Any) -> Any:
    """Reads this process's part of `params` or `opt_state`, without waiting for other processes; nothing is checked.

    Args:
      step_folder: The checkpoint.
      item: Which.
      like: A tree of jax.ShapeDtypeStruct with the shardings that are wanted, whatever they were when it was saved.

    Raises:
      Exception: Whatever Orbax raises.
    """
    with _reader() as checkpointer:
        return checkpointer.restore(step_folder.absolute() / item, like)


def _reader() -> ocp.StandardCheckpointer:
    """Orbax's reader, of this process alone: where one process fails the others must not wait for it."""
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"reader_{process}"
    )
    return ocp.StandardCheckpointer(multiprocessing_options=alone)


def read_whole(step_folder: Path, item: str, device: Any) -> Any:
    """The item on one device, checked.

    Raises:
      DamagedError: Where it cannot be read, or an array does not have its checksum.
    """
    checksums = read_checksums(step_folder)
    placed = jax.sharding.SingleDeviceSharding(device)
    tree = read_tree(step_folder, item)
    try:
        like = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, np.dtype(m.dtype), sharding=placed), tree)
        arrays = restore_item(step_folder, item, like)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # of this machine, not of the files
    except Exception as error:
        raise DamagedError(step_folder / item, error) from error
    require_intact(step_folder, checksums, item, arrays)
    return arrays


def read_params(step_folder: Path) -> Any:
    """The parameters alone, as a nested dict of float32 arrays on the first device of this process.

    Whatever mesh, device count and process count saved them.

    Raises:
      UserError: Where they are missing, damaged or quantised, or not those of the model in the checkpoint's config.
    """
    if array_items(step_folder) != ARRAYS:
        raise UserError(
            f"the checkpoint {step_folder} is quantised: its kernels are integers",
            allowed="the checkpoint that it was made from",
        )
    found = {path: shape for path, shape, _ in list_arrays(step_folder, "params")}
    expected = {path: leaf.shape for path, leaf in by_path(parameter_shapes(read_config(step_folder))).items()}
    if found != expected:
        path = min(path for path in found | expected if found.get(path) != expected.get(path))
        raise DamagedError(
            step_folder, f"its config wants {path} {expected.get(path, 'absent')}, it is {found.get(path, 'absent')}"
        )
    params = read_whole(step_folder, "params", jax.local_devices()[0])
    require_intact_values(step_folder, read_checksums(step_folder))
    return params


def read_optimizer_state(step_folder: Path) -> Any:
    """The optimizer state alone, as a nested dict of arrays on the first device of this process.

    Its names are those that `list_arrays` shows: named tuples by field, as in ["adam"]["nu"]["layers_0"].

    Raises:
      UserError: Where it is missing or damaged; a quantised checkpoint has none.
    """
    if array_items(step_folder) != ARRAYS:
        raise UserError(
            f"the checkpoint {step_folder} is quantised: it has no optimizer state",
            allowed="the checkpoint that it was made from",
        )
    return read_whole(step_folder, "opt_state", jax.local_devices()[0])


def verify_checkpoint(step_folder: Path) -> int:
    """Reads everything of a checkpoint once and compares it with its checksums.

    Returns:
      How many bytes the arrays have.

    Raises:
      DamagedError: Naming what is damaged.
    """
    require_intact_values(step_folder, read_checksums(step_folder))
    host = jax.local_devices(backend="cpu")[0]
    return sum(
        leaf.nbytes
        for item in array_items(step_folder)
        for leaf in jax.tree.leaves(read_whole(step_folder, item, host))
    )
