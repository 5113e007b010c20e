"""Reading checkpoints: where they are, what they hold, and whether they are what was written."""

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from orthojax.config import Config, from_dict
from orthojax.errors import UserError
from orthojax.files import nearest_path, read_json
from orthojax.model import parameter_shapes
from orthojax.train.checkpoint.checksums import (
    ARRAYS,
    DamagedError,
    file_digests,
    first_line,
    older_checksums,
    read_json_item,
    steps_in,
)

_RUNS_SHOWN = 3  # where a folder of runs is taken for a run


def by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by path, as in `layers_0/attention/query/kernel`."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def find_checkpoint(path: Path) -> Path:
    """The newest step folder behind what a user names: a workdir, its `checkpoints` folder, or a step folder.

    Raises:
      UserError: Where there is none.
    """
    hint, allowed = nearest_path(path), "a workdir, its checkpoints folder, or one step's folder"
    path = path.absolute()
    if not os.path.exists(path):  # pathlib raises for names that are too long
        raise UserError(f"no such checkpoint: {path}", allowed=allowed, hint=hint)
    for folder in (path / "checkpoints", path):
        # A folder of runs that are named by numbers is none of checkpoints.
        steps = [step for step in steps_in(folder) if not (folder / str(step) / "checkpoints").is_dir()]
        if steps:
            return folder / str(steps[-1])
    if (path / "params").is_dir() and (path / "config").is_dir():
        return path
    if not path.is_dir():
        raise UserError(f"no checkpoint: {path} is not a folder", allowed=allowed)
    runs = _runs_of(path)
    more = f" and {len(runs) - _RUNS_SHOWN} more" if len(runs) > _RUNS_SHOWN else ""
    hint = f"did you mean one of its runs: {', '.join(map(str, runs[:_RUNS_SHOWN]))}{more}?" if runs else ""
    raise UserError(f"no orthojax checkpoint in {path}", allowed=allowed, hint=hint)


def _runs_of(path: Path) -> list[Path]:
    """The workdirs of finished runs in a folder, or in those that the results.json of a study names, seen from here."""
    folders = sorted(path.iterdir())
    if os.path.lexists(path / "results.json"):
        with contextlib.suppress(AttributeError, KeyError, TypeError, UserError):  # of another program, or damaged
            folders += [path / row["run"] for row in read_json(path / "results.json", "results")["rows"]]
    found = {os.path.relpath(folder): None for folder in folders if steps_in(folder / "checkpoints")}
    return list(map(Path, found))


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
    newer = {name: provenance.get(name) for name in ("bos_id", "counts_sha256")}  # earlier versions wrote none
    saved = newer | read_json_item(step_folder, "data")
    for name, value in provenance.items():
        if saved.get(name) != value:
            raise UserError(
                f"the data is not that of the checkpoint {step_folder}: {name} is {value!r}, not {saved.get(name)!r}",
                allowed="the data that the run began with, or a run of its own in another --workdir",
            )


# Names, shapes and dtypes.


def is_quantized(step_folder: Path) -> bool:
    """Whether a checkpoint is one of `quantize_checkpoint`."""
    return (step_folder / "quantization").is_dir()


def array_items(step_folder: Path) -> tuple[str, ...]:
    """Which items of arrays a checkpoint should have."""
    return ARRAYS[:1] if is_quantized(step_folder) else ARRAYS


def _read_shapes(step_folder: Path, item: str) -> Any:
    """Shapes and dtypes of an item, as a nested dict; lists and tuples as dicts by index."""
    try:
        if strange := [path for path in (step_folder / item).rglob("*") if not (path.is_file() or path.is_dir())]:
            raise ValueError(f"{strange[0].name} is not a regular file")  # Orbax would wait for ever for a pipe
        # A Checkpointer would warn twice of a file that Orbax writes for the step, not for its items.
        tree = ocp.StandardCheckpointHandler().metadata(step_folder.absolute() / item).tree  # pyright: ignore
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    except Exception as error:
        raise DamagedError(step_folder / item, error) from error


def list_arrays(step_folder: Path, item: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(path, shape, dtype) of every array of `params` or `opt_state`, without reading one.

    Raises:
      DamagedError: Where the item is missing or damaged.
    """
    return [(path, leaf.shape, str(leaf.dtype)) for path, leaf in by_path(_read_shapes(step_folder, item)).items()]


def require_fitting(step_folder: Path, item: str, like: Any) -> None:
    """Refuses a tree of other names, shapes or dtypes than were saved; the checkpoint is not damaged then.

    Raises:
      UserError: Naming the first array that differs.
    """
    saved = {path: f"{dtype}{list(shape)}" for path, shape, dtype in list_arrays(step_folder, item)}
    wanted = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in by_path(like).items()}
    if difference := _difference(saved, wanted):
        raise UserError(
            f"the checkpoint {step_folder} has a different structure: {item}/{difference}",
            allowed="a checkpoint of the same model and optimizer",
        )


def require_model(step_folder: Path, params: dict[str, Any]) -> None:
    """Refuses parameters by path whose names or shapes are not those of the model in the checkpoint's config.

    Raises:
      DamagedError: Naming the first that differs.
    """
    found = {path: leaf.shape for path, leaf in params.items()}
    wanted = {path: leaf.shape for path, leaf in by_path(parameter_shapes(read_config(step_folder).model)).items()}
    if difference := _difference(found, wanted):
        raise DamagedError(step_folder, f"its arrays do not fit its config: {difference}")


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first path at which two dicts differ, and how; '' where they agree."""
    for path in sorted(found | wanted):
        if found.get(path) != wanted.get(path):
            return f"{path} is {found.get(path, 'absent')}, not {wanted.get(path, 'absent')}"
    return ""


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
        cpu = jax.local_devices(backend="cpu")[0]

        def read(item: str) -> dict[str, np.ndarray]:
            arrays = by_path(_read_item(step_folder, item, cpu))
            return {path: np.ascontiguousarray(array) for path, array in arrays.items()}

        return older_checksums(step_folder, manifest, items, read)
    except DamagedError:
        raise
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise DamagedError(step_folder, f"item 'checksums': {first_line(error)}") from error


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
      like: A tree with the shapes, dtypes and shardings that are wanted, whatever these were when it was saved.
    """
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"reader_{process}"
    )
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    arguments = ocp.args.StandardRestore(abstract)
    return handler.restore(step_folder.absolute() / item, args=arguments)  # pyright: ignore


def read_verified(step_folder: Path, item: str) -> Any:
    """An item of arrays on the first device of this process, verified together with the JSON items.

    Raises:
      DamagedError: Where it is not what was written.
    """
    verify(step_folder, (item,))
    return _read_item(step_folder, item, jax.local_devices()[0])


def _read_item(step_folder: Path, item: str, device: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = _read_shapes(step_folder, item)
    try:
        return restore_item(step_folder, item, jax.tree.map(lambda leaf: leaf.update(sharding=sharding), shapes))
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # of this machine, not of the files
    except Exception as error:
        raise DamagedError(step_folder / item, error) from error


def read_params(step_folder: Path) -> Any:
    """The parameters alone, as a nested dict of float32 arrays on the first device of this process.

    Whatever mesh, device count and process count saved them.

    Raises:
      UserError: Where they are missing, damaged or quantised, or not those of the model in the checkpoint's config.
    """
    _require_float(step_folder)
    require_model(step_folder, by_path(_read_shapes(step_folder, "params")))
    return read_verified(step_folder, "params")


def read_optimizer_state(step_folder: Path) -> Any:
    """The optimizer state alone, as a nested dict of arrays on the first device of this process.

    Its names are those that `list_arrays` shows: named tuples by field, as in `state["adam"]["nu"]["layers_0"]`.

    Raises:
      UserError: Where it is missing or damaged; a quantised checkpoint has none.
    """
    _require_float(step_folder)
    return read_verified(step_folder, "opt_state")


def _require_float(step_folder: Path) -> None:
    if is_quantized(step_folder):
        raise UserError(
            f"the checkpoint {step_folder} is quantised: its kernels are integers, and it has no optimizer state",
            allowed="the checkpoint that it was made from",
        )
