"""The folder of a run, which belongs to one config."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.fields import changed_fields, from_json, to_json
from orthojax.files import make_folder, try_lock, write_text

# What may differ when a run goes on, as dotted paths; those with a dot or an underscore at the end stand for all that
# begin so. It is what is told and kept of the run, and how its computation is laid out: not which numbers it computes,
# beyond rounding. The number of steps is not among them, because the learning rate depends on it.
FREE_FIELDS = (
    "train.log_every_steps",
    "train.eval_every_steps",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "train.keep_every_steps",
    "train.keep_best",
    "train.accumulation_steps",
    "train.loss_chunk_positions",
    "train.tensorboard",
    "train.probe_",
    "mesh.",
    "data.verify",
    "model.remat",
    "model.attention_implementation",
)


def check_workdir(workdir: Path, config: Config) -> None:
    """Looks whether a run of this config may go there; writes nothing.

    Raises:
      UserError: Where the path, or a part of it, is a file, or it already holds a run of another config.
    """
    for path in (workdir / "checkpoints", workdir, *workdir.parents):
        if path.is_file():
            raise UserError(f"workdir {workdir}: {path} is a file", allowed="a folder, new or of an earlier call")
    before = _read_config(workdir)
    if before is not None:
        require_same_config(config, before, str(workdir))


def prepare_workdir(workdir: Path, config: Config) -> None:
    """Creates the folder of a run and writes its config.json.

    Where the run goes on with other `FREE_FIELDS`, config.json becomes the newest config, which is what the run now
    does; every checkpoint holds the config that it was saved under.

    Raises:
      UserError: As `check_workdir`.
    """
    check_workdir(workdir, config)
    make_folder(workdir, "workdir")
    if _read_config(workdir) != config:
        write_text(workdir / "config.json", to_json(config) + "\n")


@contextlib.contextmanager
def alone_in(workdir: Path) -> Iterator[None]:
    """Keeps a second call off the folder of a run, where it would take the first one's unfinished checkpoint away.

    Raises:
      UserError: Where another process has it, or it cannot be made.
    """
    make_folder(workdir, "workdir")
    try:
        file = open(workdir / ".lock", "a")
    except OSError as error:
        raise UserError(f"cannot write to workdir {workdir}: {error.strerror}", allowed="a folder of yours") from error
    with file:
        if not try_lock(file):
            raise UserError(
                f"another process is training in {workdir}", allowed="another --workdir, or to wait until it ends"
            )
        yield


def _read_config(workdir: Path) -> Config | None:
    path = workdir / "config.json"
    if not path.exists():
        return None
    try:
        return from_json(Config, path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: {error}", hint="another --workdir, or the right config.json") from error


def is_free(path: str) -> bool:
    """Whether a field may differ when a run goes on.

    >>> is_free("train.keep_best"), is_free("train.steps"), is_free("mesh.data")
    (True, False, True)
    """
    return any(path.startswith(free) if free[-1] in "._" else path == free for free in FREE_FIELDS)


def require_same_config(config: Config, before: Config, where: str) -> None:
    """Refuses to go on with another config than the run began with, but for `FREE_FIELDS`.

    Raises:
      UserError: Naming the fields that differ.
    """
    changed = sorted(path for path in changed_fields(before, config) if not is_free(path))
    if changed:
        raise UserError(
            f"{where} holds a run with another config: {', '.join(changed)} differ",
            allowed="the config of that run, or another --workdir",
            hint="what is logged, evaluated, checkpointed and kept, and the mesh, may differ",
        )
