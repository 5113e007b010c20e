"""Reading checkpoints: where they are, what they hold, and whether they are what was written."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orthojax.config import Config, from_dict
from orthojax.errors import UserError
from orthojax.train.checkpoint.checksums import (
    ARRAYS,
    DamagedError,
    file_digests,
    first_line,
    json_checksum,
    read_array_checksums,
    read_json_item,
    steps_in,
)
from orthojax.train.step import parameter_shapes


def by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by path, as in `layers_0/attention/query/kernel`."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def find_checkpoint(path: Path) -> Path:
    """The newest step folder behind what a user names: a workdir, its `checkpoints` folder, or a step folder.

    Raises:
      UserError: Where there is none.
    """
    path, allowed = path.absolute(), "a workdir, its checkpoints folder, or one step's folder"
    if not path.exists():
        raise UserError(f"no such checkpoint: {path}", allowed=allowed)
    for folder in (path / "checkpoints", path):
        steps = steps_in(folder)
        if steps:
            return folder / str(steps[-1])
    if (path / "params").is_dir() and (path / "config").is_dir():
        return path
    raise UserError(f"no orthojax checkpoint in {path}", allowed=allowed)


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


# Names, shapes and dtypes.


def array_items(step_folder: Path) -> tuple[str, ...]:
    """Which items of arrays a checkpoint should have."""
    return ARRAYS[:1] if (step_folder / "quantization").is_dir() else ARRAYS


def _read_tree(step_folder: Path, item: str, sharding: Any = None) -> Any:
    """Shapes and dtypes of an item, as a nested dict; lists and tuples as dicts by index."""
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(step_folder.absolute() / item).item_metadata
        if metadata is None:
            raise ValueError("its metadata is missing or damaged")
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), metadata.tree)
    except Exception as error:
        raise DamagedError(step_folder / item, error) from error


def list_arrays(step_folder: Path, item: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(path, shape, dtype) of every array of `params` or `opt_state`, without reading one.

    Raises:
      DamagedError: Where the item is missing or damaged.
    """
    return [(path, leaf.shape, str(leaf.dtype)) for path, leaf in by_path(_read_tree(step_folder, item)).items()]


def require_fitting(step_folder: Path, item: str, like: Any) -> None:
    """Refuses a tree of other names, shapes or dtypes than were saved; the checkpoint is not damaged then.

    Raises:
      UserError: Naming the first array that differs.
    """
    saved = {path: f"{dtype}{list(shape)}" for path, shape, dtype in list_arrays(step_folder, item)}
    wanted = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in by_path(like).items()}
    for path, is_, should_be in _differences(saved, wanted):
        raise UserError(
            f"the checkpoint {step_folder} has a different structure: {item}/{path} is {is_}, not {should_be}",
            allowed="a checkpoint of the same model and optimizer",
        )


def require_model(step_folder: Path, params: dict[str, Any]) -> None:
    """Refuses parameters by path whose names or shapes are not those of the model in the checkpoint's config.

    Raises:
      DamagedError: Naming the first that differs.
    """
    found = {path: leaf.shape for path, leaf in params.items()}
    wanted = {path: leaf.shape for path, leaf in by_path(parameter_shapes(read_config(step_folder))).items()}
    for path, is_, should_be in _differences(found, wanted):
        raise DamagedError(step_folder, f"its config wants {path} {should_be}, it is {is_}")


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for path in sorted(found | wanted):
        if found.get(path) != wanted.get(path):
            yield path, found.get(path, "absent"), wanted.get(path, "absent")


# Checking.


def verify(step_folder: Path, items: tuple[str, ...] = (), *, together: bool = False) -> None:
    """Compares the JSON items and the given items of arrays with their checksums.

    Args:
      step_folder: The checkpoint.
      items: Of arrays.
      together: Whether every process calls it: each checks its share of the arrays, and all return or all raise.

    Raises:
      DamagedError: Naming the file or array, or where the checksums are not understood.
    """
    failure = None
    try:
        share = slice(jax.process_index(), None, jax.process_count()) if together else slice(None)
        expected, found = _checksums(step_folder, items, share)
        bad = [name for name in sorted(expected | found) if expected.get(name) != found.get(name)]
        if bad:
            problem = "does not match its checksum" if bad[0] in found else "is missing"
            more = f", and {len(bad) - 1} more" if bad[1:] else ""
            raise DamagedError(step_folder, f"{bad[0]} {problem}{more}")
    except DamagedError as error:
        failure = error
    if together and jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = multihost_utils.process_allgather(np.asarray(failure is not None))
        if failure is None and np.any(failed):
            failure = DamagedError(step_folder, "another process has found its part damaged")
    if failure:
        raise failure


def _checksums(step_folder: Path, items: tuple[str, ...], share: slice) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checksums that are expected and those that are found, by the name of what they are of."""
    manifest = read_json_item(step_folder, "checksums")
    try:
        if manifest.get("algorithm") == "sha256":
            names = [name for name in manifest["files"] if name.split("/")[0] not in ARRAYS]
            names += sorted(name for name in manifest["files"] if name.split("/")[0] in items)[share]
            present = [name for name in names if (step_folder / name).is_file()]
            return {name: manifest["files"][name] for name in names}, file_digests(step_folder, present)
        values, arrays, checksum = read_array_checksums(step_folder, manifest)
    except DamagedError:
        raise
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise DamagedError(step_folder, f"item 'checksums': {first_line(error)}") from error
    expected: dict[str, Any] = dict(values)
    found: dict[str, Any] = {item: json_checksum(read_json_item(step_folder, item)) for item in values}
    for item in items:
        expected |= {f"{item}/{path}": arrays[item][path] for path in sorted(arrays[item])[share]}
        found |= {f"{item}/{path}": checksum(array) for path, array in _read_share(step_folder, item, share).items()}
    return expected, found


def _read_share(step_folder: Path, item: str, share: slice) -> dict[str, np.ndarray]:
    """Some of the arrays of an item by path, on the host."""
    tree = _read_tree(step_folder, item, jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0]))
    mine = sorted(by_path(tree))[share]
    like = [leaf if path in mine else ocp.PLACEHOLDER for path, leaf in by_path(tree).items()]
    try:
        arrays = by_path(restore_item(step_folder, item, jax.tree.unflatten(jax.tree.structure(tree), like)))
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # of this machine, not of the files
    except Exception as error:
        raise DamagedError(step_folder / item, error) from error
    return {path: jax.device_get(arrays[path]) for path in mine}


def verify_checkpoint(step_folder: Path) -> int:
    """Compares everything in a checkpoint with its checksums.

    Returns:
      How many bytes the arrays have.

    Raises:
      DamagedError: Naming what is damaged.
    """
    items = array_items(step_folder)
    verify(step_folder, items)
    arrays = [array for item in items for array in list_arrays(step_folder, item)]
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in arrays)


# Arrays.


def restore_item(step_folder: Path, item: str, like: Any) -> Any:
    """Reads this process's part of `params` or `opt_state`, without waiting for other processes; nothing is checked.

    Args:
      step_folder: The checkpoint.
      item: Which.
      like: A tree of jax.ShapeDtypeStruct with the shardings that are wanted, whatever they were when it was saved.
    """
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"reader_{process}"
    )
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        return checkpointer.restore(step_folder.absolute() / item, like)


def read_verified(step_folder: Path, item: str) -> Any:
    """An item of arrays on the first device of this process, verified together with the JSON items.

    Raises:
      DamagedError: Where it is not what was written.
    """
    verify(step_folder, (item,))
    like = _read_tree(step_folder, item, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
    return restore_item(step_folder, item, like)


def read_params(step_folder: Path) -> Any:
    """The parameters alone, as a nested dict of float32 arrays on the first device of this process.

    Whatever mesh, device count and process count saved them.

    Raises:
      UserError: Where they are missing, damaged or quantised, or not those of the model in the checkpoint's config.
    """
    _require_float(step_folder, "its kernels are integers")
    require_model(step_folder, by_path(_read_tree(step_folder, "params")))
    return read_verified(step_folder, "params")


def read_optimizer_state(step_folder: Path) -> Any:
    """The optimizer state alone, as a nested dict of arrays on the first device of this process.

    Its names are those that `list_arrays` shows: named tuples by field, as in ["adam"]["nu"]["layers_0"].

    Raises:
      UserError: Where it is missing or damaged; a quantised checkpoint has none.
    """
    _require_float(step_folder, "it has no optimizer state")
    return read_verified(step_folder, "opt_state")


def _require_float(step_folder: Path, reason: str) -> None:
    if array_items(step_folder) != ARRAYS:
        raise UserError(
            f"the checkpoint {step_folder} is quantised: {reason}", allowed="the checkpoint that it was made from"
        )
