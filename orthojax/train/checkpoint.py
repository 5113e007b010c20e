"""Checkpoints: Orbax, plain names, readable without orthojax, restorable onto any mesh.

`checkpoints/STEP/` holds `params` and `opt_state` (arrays), and as JSON `config` (the whole config, so that a softmax-1
model cannot be evaluated as softmax), `data` (the position in the data and the hashes of what was read) and
`checksums`: `{"algorithm": "sha256", "files": {path in the step folder: digest}}`, since Orbax restores a flipped byte
silently. They are committed together, by one rename, in the background.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from orthojax.config import Config, from_dict, to_json
from orthojax.errors import UserError
from orthojax.files import is_remote, make_folder, read_json
from orthojax.model import parameter_shapes
from orthojax.places import steps_in
from orthojax.train.mesh import parameter_shardings
from orthojax.train.step import TrainState

ARRAYS = ("params", "opt_state")  # the items of arrays
_JSON_ITEMS = ("config", "data")


class DamagedError(UserError):
    """A checkpoint is not what was written; training resumes from the one before it."""

    def __init__(self, step_folder: Path, reason: str):
        """Names the folder, what was found, and which other steps there are."""
        others = [str(step) for step in steps_in(step_folder.parent) if str(step) != step_folder.name]
        super().__init__(
            f"cannot read the checkpoint {step_folder}: {reason}",
            allowed="a complete orthojax checkpoint",
            hint=f"also in {step_folder.parent}: {', '.join(reversed(others))}" if others else "",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _absolute(path: Any) -> Any:
    return path if is_remote(path) else path.absolute()


def read_json_item(step_folder: Path, item: str) -> dict[str, Any]:
    """Returns a JSON item of one step, `config`, `data` or `checksums`; raises DamagedError without one."""
    try:
        return read_json(step_folder / item / "metadata", "file")
    except UserError as error:
        raise DamagedError(step_folder, _first_line(error)) from None


def read_config(step_folder: Path) -> Config:
    """Returns the config that a checkpoint was trained with; raises UserError if damaged or of another version."""
    return from_dict(Config, read_json_item(step_folder, "config"), f"the config in {step_folder}")


def require_same_data(step_folder: Path, provenance: dict[str, Any]) -> None:
    """Raises UserError for tokens other than a checkpoint was trained on, as the embedded ones of another Python."""
    saved = read_json_item(step_folder, "data")
    for name, value in provenance.items():
        if saved.get(name) != value:
            raise UserError(
                f"the data is not that of the checkpoint {step_folder}: {name} is {value!r}, not {saved.get(name)!r}",
                allowed="the data that the run began with, or a run of its own in another folder",
            )


def _read_shapes(step_folder: Path, item: str) -> Any:
    """Returns shapes and dtypes of an item, as a nested dict; lists and tuples as dicts by index."""
    try:
        # A Checkpointer would warn twice of a file that Orbax writes for the step, not for its items.
        tree = ocp.StandardCheckpointHandler().metadata(_absolute(step_folder) / item).tree  # pyright: ignore
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    except Exception as error:
        raise DamagedError(step_folder, f"{item}: {_first_line(error)}") from error


def list_arrays(step_folder: Path, item: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns (path, shape, dtype) of every array of an item, without reading one; raises DamagedError without it."""
    leaves = jax.tree.leaves_with_path(_read_shapes(step_folder, item))
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
    return [(name, leaf.shape, str(leaf.dtype)) for name, (_, leaf) in zip(names, leaves, strict=True)]


def _restore_item(step_folder: Path, item: str, like: Any) -> Any:
    """Reads this process's part of an item in the form of `like`, whatever its shardings were, without checksums."""
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"reader_{process}"
    )
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    try:
        return handler.restore(_absolute(step_folder) / item, args=ocp.args.StandardRestore(abstract))  # pyright: ignore
    except ValueError as error:
        problem = f"the checkpoint {step_folder} has a different structure: {item}: {_first_line(error)}"
        raise UserError(problem, allowed="a checkpoint of the same model and optimizer") from error


def _read_item(step_folder: Path, item: str, shapes: Any) -> Any:
    _verify(step_folder, (item,))
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return _restore_item(step_folder, item, jax.tree.map(lambda leaf: leaf.update(sharding=here), shapes))


def read_params(step_folder: Path, mesh: jax.sharding.Mesh | None = None) -> Any:
    """Returns only the parameters, as a nested dict of float32 arrays on the first device of this process.

    Given the mesh of a run, they are sharded over it, and every process calls this and reads only its part. Raises
    UserError if they are missing, damaged, or not those of the model in the checkpoint's config.
    """
    model = read_config(step_folder).model
    if mesh is None:
        return _read_item(step_folder, "params", parameter_shapes(model))
    _verify_together(step_folder, ("params",))
    shapes = parameter_shapes(model)
    shardings = parameter_shardings(model, shapes, mesh)
    return _restore_item(step_folder, "params", jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings))


def read_optimizer_state(step_folder: Path) -> Any:
    """Returns only the optimizer state, as a nested dict of arrays on the first device of this process.

    Names are as in `list_arrays`: named tuples by field, as in `state["adam"]["nu"]["layers_0"]`. Raises UserError if
    the state is missing or damaged.
    """
    return _read_item(step_folder, "opt_state", _read_shapes(step_folder, "opt_state"))


def _digests(folder: Any, names: Sequence[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _verify(step_folder: Path, items: tuple[str, ...], share: slice = slice(None)) -> None:
    """Compares the JSON items, and a share of the files of the given items of arrays, with their checksums."""
    manifest = read_json_item(step_folder, "checksums")
    files = manifest.get("files")
    if manifest.get("algorithm") != "sha256" or not isinstance(files, dict):
        raise DamagedError(step_folder, "its checksums are not understood")
    names = [name for name in files if name.split("/")[0] not in ARRAYS]
    names += sorted(name for name in files if name.split("/")[0] in items)[share]
    try:
        digests = _digests(step_folder, [name for name in names if (step_folder / name).is_file()])
    except OSError as error:
        raise DamagedError(step_folder, _first_line(error)) from error
    for name in names:
        if digests.get(name) != files[name]:
            problem = "does not match its checksum" if name in digests else "is missing"
            raise DamagedError(step_folder, f"{name} {problem}")


def _verify_together(step_folder: Path, items: tuple[str, ...] = ARRAYS) -> None:
    """Compares items with their checksums, a share in each process; either all return or all raise."""
    failure = None
    try:
        _verify(step_folder, items, slice(jax.process_index(), None, jax.process_count()))
    except DamagedError as error:
        failure = error
    if jax.process_count() > 1 and np.any(multihost_utils.process_allgather(np.asarray(failure is not None))):
        failure = failure or DamagedError(step_folder, "another process has found its part damaged")
    if failure:
        raise failure


def verify_checkpoint(step_folder: Path) -> int:
    """Compares everything in a checkpoint with its checksums, and returns the size of its arrays in bytes.

    Raises DamagedError naming what is damaged.
    """
    _verify(step_folder, ARRAYS)
    arrays = [array for item in ARRAYS for array in list_arrays(step_folder, item)]
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in arrays)


class _ManifestHandler(ocp.JsonCheckpointHandler):
    """Writes the digests of all other items into the item `checksums`.

    Every process hashes what it has written itself, before Orbax makes the whole of it; process 0 hashes the rest.
    """

    @classmethod
    def typestr(cls) -> str:
        """Names plain JSON, which readers without orthojax know."""
        return ocp.JsonCheckpointHandler.typestr()

    def finalize(self, directory: Any) -> None:
        """Hashes the files; Orbax calls it on process 0, after every process has written and before the renaming."""
        digests = dict[str, str]()
        parts = [(kind, part) for kind in ARRAYS for part in (directory.parent / kind).glob("process_*.json")]
        for kind, part in parts:
            digests |= {f"{kind}/{name}": digest for name, digest in read_json(part, "digests").items()}
            part.unlink()
        names = [name for item in (*ARRAYS, *_JSON_ITEMS) for name in _files_in(directory.parent, item)]
        digests |= _digests(directory.parent, [name for name in names if name not in digests])
        manifest = {"algorithm": "sha256", "files": {name: digests[name] for name in names}}
        (directory / "metadata").write_text(json.dumps(manifest))


class _HashingHandler(ocp.StandardCheckpointHandler):
    """Hashes what this process has written of an item of arrays, once it is written."""

    @classmethod
    def typestr(cls) -> str:
        """Names Orbax's own, which readers without orthojax know."""
        return ocp.StandardCheckpointHandler.typestr()

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds to the futures, which Orbax awaits one after the other, one that hashes."""
        saves = await super().async_save(directory, *args, **kwargs)
        return [*(saves or ()), _OwnDigests(directory)]


@dataclasses.dataclass(frozen=True)
class _OwnDigests:
    """A future of Orbax: the digests of this process's files of an item, in a file for process 0."""

    item: Any  # Orbax's path, which may be on an object store

    def result(self, timeout: float | None = None) -> None:
        own = f"process_{jax.process_index()}"
        if jax.process_count() > 1:
            digests = _digests(self.item, _files_in(self.item, f"ocdbt.{own}"))
            (self.item / f"{own}.json").write_text(json.dumps(digests))

    def cancel(self) -> None:
        pass


def _files_in(folder: Any, item: str) -> list[str]:
    """Returns the names of the files of an item, sorted; the paths of etils have no `rglob` on a store."""
    inside = sorted(path.name for path in (folder / item).iterdir()) if (folder / item).is_dir() else ()
    parts = [(f"{item}/{name}", (folder / item / name).is_dir()) for name in inside if name != "commit_success.txt"]
    return [file for name, is_folder in parts for file in (_files_in(folder, name) if is_folder else [name])]


def _handlers() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Returns the items of a step in the order in which Orbax finalises them: arrays are merged, then all is hashed."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ARRAYS:
        registry.add(item, ocp.args.StandardSave, _HashingHandler())
    for item in _JSON_ITEMS:
        registry.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    registry.add("checksums", ocp.args.JsonSave, _ManifestHandler())
    return registry


@contextlib.contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    """Raises errors while writing as a UserError that names the last good checkpoint."""
    try:
        yield
    except Exception as error:
        steps = steps_in(directory)
        kept = "there is no earlier checkpoint; the same command starts again"
        if steps:
            kept = f"the checkpoint of step {steps[-1]} is kept; run the same command to resume"
        problem = f"cannot write a checkpoint to {directory}: {_first_line(error):.200}"
        raise UserError(problem, hint=kept) from error


class Checkpoints:
    """The checkpoints of one run; use it in a `with` block, which waits for the last write."""

    def __init__(self, directory: Path, *, keep: int, keep_every_steps: int = 0):
        """Opens or creates the `checkpoints` folder of a workdir, the same for every process.

        The newest `keep` steps are kept, and multiples of `keep_every_steps` unless that is 0.
        """
        self.directory = _absolute(directory)
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

    def save(self, state: TrainState, config: Config, data: dict[str, Any]) -> None:
        """Writes a step in the background; it appears under its name only when it is complete.

        Returns when the state is on the host, so that the next step may overwrite it on the devices. Every process
        calls it and writes what it holds. `next_step` is added to `data`, JSON values. Raises UserError if the disk
        refuses this write or refused the one before; earlier checkpoints stay.
        """
        step = int(jax.device_get(state.step))
        items: dict[str, Any] = {item: ocp.args.StandardSave(getattr(state, item)) for item in ARRAYS}
        items["config"] = ocp.args.JsonSave(json.loads(to_json(config)))
        items["data"] = ocp.args.JsonSave(data | {"next_step": step})
        items["checksums"] = ocp.args.JsonSave({})  # filled in by `_ManifestHandler`
        with _write_errors(self.directory):
            # Forced: otherwise Orbax leaves out steps that its own schedule does not ask for.
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def check(self) -> None:
        """Raises the UserError of a write in the background that failed; costs nothing."""
        with _write_errors(self.directory):
            self._manager.check_for_errors()

    def restore_newest(self, like: TrainState, accept: Callable[[Path], None] = lambda _: None) -> TrainState | None:
        """Resumes from the newest checkpoint that is intact, whatever mesh, device count and process count saved it.

        Damaged checkpoints are reported on stderr and renamed, so that their steps can be written again, unless all are
        damaged. `like` is a state of the right structure, with arrays or jax.ShapeDtypeStruct with shardings; `accept`
        raises if the run must not resume in the folder of an intact step. Returns None if there is no checkpoint;
        raises UserError if every checkpoint is damaged or one does not fit.
        """
        damaged: dict[int, DamagedError] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            folder = self.directory / str(step)
            try:
                _verify_together(folder)
            except DamagedError as error:
                damaged[step] = error
                continue
            accept(folder)
            restored = {item: _restore_item(folder, item, getattr(like, item)) for item in ARRAYS}
            if damaged:
                self._set_aside(damaged, step)
            # Placed as the arrays are: a step without a place would make the second training step compile again.
            return TrainState(jax.device_put(np.asarray(step, like.step.dtype), like.step.sharding), **restored)
        if damaged:
            problem = _first_line(damaged[max(damaged)])
            hint = f"without {self.directory} the run starts from the beginning"
            raise UserError(problem, allowed=f"an intact checkpoint; all of {len(damaged)} are damaged", hint=hint)
        return None

    def _set_aside(self, damaged: dict[int, DamagedError], used: int) -> None:
        if jax.process_index() == 0:
            for step, error in damaged.items():
                names = (self.directory / f"{step}.damaged-{n}" for n in itertools.count(1))
                target = next(path for path in names if not path.exists())
                (self.directory / str(step)).rename(target)
                problem = f"warning: {_first_line(error)}; resuming from step {used}; the damaged one is now {target}"
                print(problem, file=sys.stderr)
        multihost_utils.sync_global_devices("damaged checkpoints set aside")
        self._manager.reload()
