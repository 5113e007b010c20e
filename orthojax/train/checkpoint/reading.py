"""Reading checkpoints: where they are, what they hold, and whether they are what was written.

Orbax restores a flipped byte silently. So every step carries the SHA-256 of each of its files, in the JSON item
`checksums`: `{"algorithm": "sha256", "files": {path in the step folder: digest}}`.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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

ARRAYS = ("params", "opt_state")  # the items of arrays
JSON_ITEMS = ("config", "data")


class DamagedError(UserError):
    """A checkpoint is not what was written; training resumes from the one before it.

    Attributes:
      reason: What was found, in a few words.
    """

    def __init__(self, folder: Path, error: Exception | str):
        """Names the folder, of a step or of one of its items, what was found, and which other steps there are."""
        self.reason = error if isinstance(error, str) else first_line(error)
        step_folder = folder if folder.name.isdigit() else folder.parent
        others = [step for step in steps_in(step_folder.parent) if str(step) != step_folder.name]
        super().__init__(
            f"cannot read the checkpoint {folder}: {self.reason}",
            allowed="a complete orthojax checkpoint",
            hint=f"also in {step_folder.parent}: {', '.join(map(str, reversed(others)))}" if others else "",
        )


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message; of a long one 200 characters, since the cause ends it.

    >>> first_line(ValueError("writing " + "x" * 300 + ": No space left on device"))[-30:]
    'xxxxx: No space left on device'
    """
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 200 else f"{text[:97]} ... {text[-98:]}"


# Finding.


def steps_in(folder: Path) -> list[int]:
    """Returns the steps that a `checkpoints` folder holds, in order."""
    if not os.path.isdir(folder):
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def find_checkpoint(path: Path) -> Path:
    """Returns the newest step folder behind a workdir, its `checkpoints` folder, or a step folder.

    Raises:
      UserError: If there is none.
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
    runs = [os.path.relpath(run) for run in sorted(path.iterdir()) if steps_in(run / "checkpoints")]
    hint = f"did you mean one of its runs: {', '.join(runs[:3])}?" if runs else ""
    raise UserError(f"no orthojax checkpoint in {path}", allowed=allowed, hint=hint)


def read_json_item(step_folder: Path, item: str) -> dict[str, Any]:
    """Returns a JSON item of one step: `config`, `data` or `checksums`.

    Raises:
      DamagedError: If it is missing or not a JSON object.
    """
    path = step_folder / item / "metadata"
    try:
        return read_json(path, "file")
    except UserError as error:
        raise DamagedError(step_folder, f"item {item!r}: {first_line(error).replace(f' {path}', '')}") from None


def read_config(step_folder: Path) -> Config:
    """Returns the config that a checkpoint was trained with.

    Raises:
      UserError: If it is missing, damaged or of another version.
    """
    return from_dict(Config, read_json_item(step_folder, "config"), f"the config in {step_folder}")


def require_same_data(step_folder: Path, provenance: dict[str, Any]) -> None:
    """Refuses other tokens than those that a checkpoint was trained on: their ids would mean something else.

    Args:
      step_folder: The checkpoint.
      provenance: Of the data that is there now.

    Raises:
      UserError: If they differ, as when the embedded corpus comes from another Python version.
    """
    saved = read_json_item(step_folder, "data")
    for name, value in provenance.items():
        if saved.get(name) != value:
            raise UserError(
                f"the data is not that of the checkpoint {step_folder}: {name} is {value!r}, not {saved.get(name)!r}",
                allowed="the data that the run began with, or a run of its own in another --workdir",
            )


# Names, shapes and dtypes.


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _read_shapes(step_folder: Path, item: str) -> Any:
    """Returns shapes and dtypes of an item, as a nested dict; lists and tuples as dicts by index."""
    try:
        if strange := [path for path in (step_folder / item).rglob("*") if not (path.is_file() or path.is_dir())]:
            raise ValueError(f"{strange[0].name} is not a regular file")  # Orbax would wait for ever for a pipe
        # A Checkpointer would warn twice of a file that Orbax writes for the step, not for its items.
        tree = ocp.StandardCheckpointHandler().metadata(step_folder.absolute() / item).tree  # pyright: ignore
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    except Exception as error:
        raise DamagedError(step_folder / item, error) from error


def list_arrays(step_folder: Path, item: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns (path, shape, dtype) of every array of `params` or `opt_state`, without reading one.

    Raises:
      DamagedError: If the item is missing or damaged.
    """
    return [(path, leaf.shape, str(leaf.dtype)) for path, leaf in _by_path(_read_shapes(step_folder, item)).items()]


def require_fitting(step_folder: Path, item: str, like: Any) -> None:
    """Refuses a checkpoint whose arrays have other names, shapes or dtypes than are wanted; it is not damaged then.

    Args:
      step_folder: The checkpoint.
      item: `params` or `opt_state`.
      like: A tree of arrays or jax.ShapeDtypeStruct.

    Raises:
      UserError: Naming the first array that differs.
    """
    saved = {path: f"{dtype}{list(shape)}" for path, shape, dtype in list_arrays(step_folder, item)}
    wanted = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in _by_path(like).items()}
    for path in sorted(saved | wanted):
        if saved.get(path) != wanted.get(path):
            differs = f"{path} is {saved.get(path, 'absent')}, not {wanted.get(path, 'absent')}"
            raise UserError(
                f"the checkpoint {step_folder} has a different structure: {item}/{differs}",
                allowed="a checkpoint of the same model and optimizer",
            )


# Checking.


def file_digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Returns the SHA-256 of files in a folder by name, computed several at a time."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def verify(step_folder: Path, items: tuple[str, ...], *, together: bool = False) -> None:
    """Compares the JSON items and the given items of arrays with their checksums.

    Args:
      step_folder: The checkpoint.
      items: Of arrays.
      together: Whether every process calls it: each checks its share of the arrays, and all return or all raise.

    Raises:
      DamagedError: Naming the first damaged file, or if the checksums are not understood.
    """
    share = slice(jax.process_index(), None, jax.process_count()) if together else slice(None)
    problem = failure = None
    try:
        manifest = read_json_item(step_folder, "checksums")
        if manifest["algorithm"] != "sha256":
            raise ValueError(f"unknown algorithm {manifest['algorithm']!r}")
        files = manifest["files"]
        names = [name for name in files if name.split("/")[0] not in ARRAYS]
        names += sorted(name for name in files if name.split("/")[0] in items)[share]
        found = file_digests(step_folder, [name for name in names if (step_folder / name).is_file()])
        if bad := [name for name in names if found.get(name) != files[name]]:
            problem = f"{bad[0]} {'does not match its checksum' if bad[0] in found else 'is missing'}"
    except DamagedError as error:
        failure = error
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        problem = f"item 'checksums': {first_line(error)}"
    if together and jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.asarray(bool(problem or failure)))
        if np.any(failed) and not (problem or failure):
            problem = "another process has found its part damaged"
    if problem or failure:
        raise failure or DamagedError(step_folder, problem or "")


def verify_checkpoint(step_folder: Path) -> int:
    """Compares everything in a checkpoint with its checksums.

    Returns:
      How many bytes the arrays have.

    Raises:
      DamagedError: Naming what is damaged.
    """
    verify(step_folder, ARRAYS)
    arrays = [array for item in ARRAYS for array in list_arrays(step_folder, item)]
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in arrays)


# Arrays.


def restore_item(step_folder: Path, item: str, like: Any) -> Any:
    """Reads this process's part of `params` or `opt_state`, without waiting for other processes; nothing is checked.

    Args:
      step_folder: The checkpoint.
      item: `params` or `opt_state`.
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


def _read_item(step_folder: Path, item: str) -> Any:
    verify(step_folder, (item,))
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = _read_shapes(step_folder, item)
    return restore_item(step_folder, item, jax.tree.map(lambda leaf: leaf.update(sharding=here), shapes))


def read_params(step_folder: Path) -> Any:
    """Returns the parameters alone, as a nested dict of float32 arrays on the first device of this process.

    The mesh, device count and process count that saved them do not matter.

    Raises:
      UserError: If they are missing, damaged, or not those of the model in the checkpoint's config.
    """
    require_fitting(step_folder, "params", parameter_shapes(read_config(step_folder).model))
    return _read_item(step_folder, "params")


def read_optimizer_state(step_folder: Path) -> Any:
    """Returns the optimizer state alone, as a nested dict of arrays on the first device of this process.

    Its names are those that `list_arrays` shows: named tuples by field, as in `state["adam"]["nu"]["layers_0"]`.

    Raises:
      UserError: If it is missing or damaged.
    """
    return _read_item(step_folder, "opt_state")
