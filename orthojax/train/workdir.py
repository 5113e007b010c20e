"""The folder of a run: which run it belongs to, and which process works in it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from orthojax.config import Config, changed_fields, fields_affecting, flatten, from_dict, to_json
from orthojax.errors import UserError
from orthojax.files import (
    exists,
    folder_of_one,
    is_at,
    is_remote,
    make_folder,
    read_json,
    require_utf8,
    say_once,
    write_atomically,
    write_text,
)


def check_workdir(workdir: Path, config: Config) -> None:
    """Checks that a run of this config may use the folder; writes nothing.

    Raises UserError if the path, or a part of it, is not a folder or not UTF-8, or it already holds a run of another
    config.
    """
    if not is_remote(workdir):
        require_utf8(workdir, "workdir")
    for path in () if is_remote(workdir) else (workdir, *workdir.parents):
        if os.path.lexists(path) and not os.path.isdir(path):  # pathlib raises for names that are too long
            kind = "a file" if os.path.isfile(path) else "no folder"
            raise UserError(f"workdir {workdir}: {path} is {kind}", allowed="a folder, new or of an earlier call")
    before = _kept_config(workdir)
    if before is not None:
        require_same_config(config, before, workdir)


@contextlib.contextmanager
def claimed(workdir: Path, config: Config) -> Iterator[Callable[[], None]]:
    """Creates and locks the folder of a run: a second call would remove the first one's unfinished checkpoint.

    Yields:
      A check that raises UserError if the folder is gone; it also runs at the end.

    Raises:
      UserError: If another process has it or it cannot be written, or as for `check_workdir`.
    """
    if is_remote(workdir):
        say_once(f"{workdir} cannot be locked: start no second run there while this one trains")
        make_folder(workdir, "workdir")
        check_workdir(workdir, config)
        yield lambda: None
        return
    lock = workdir.absolute() / ".lock"
    with folder_of_one(workdir, "workdir") as file:

        def check() -> None:
            if not is_at(lock, file):
                hint = "moved back, the same command resumes it from its newest checkpoint"
                raise UserError(f"workdir {workdir} was moved or deleted while its run was training", hint=hint)

        check_workdir(workdir, config)
        try:
            yield check
        except (OSError, UserError):  # which a checkpoint that finds no folder raises as well
            check()
            raise
        check()


def keep_config(workdir: Path, config: Config) -> None:
    """Writes config.json, which becomes the newest config if a run resumes; every checkpoint holds its own."""
    if _kept_config(workdir) != config:
        write_text(workdir / "config.json", to_json(config) + "\n")


def keep_tokenizer(workdir: Path, path: Path | None) -> None:
    """Copies the tokenizer into the folder of a run, so that its model reads and writes text wherever it is moved."""
    copy = workdir / "tokenizer.json"
    if path is not None and not (copy.is_file() and copy.read_bytes() == path.read_bytes()):
        content = path.read_bytes()
        write_atomically(copy, lambda file: file.write(content))


def _kept_config(workdir: Path) -> Config | None:
    path = workdir / "config.json"
    if not exists(path):
        return None
    return from_dict(Config, read_json(path, "config"), f"the config in {path}")


def require_same_config(config: Config, before: Config, where: Path) -> None:
    """Refuses to resume with a config other than the run's, except for fields that do not affect its numbers.

    The number of steps does affect them, because the learning rate depends on it.
    """
    decides = fields_affecting(Config, "numbers", "start")
    changed = {path: value for path, value in sorted(changed_fields(before, config).items()) if path in decides}
    if not (before.optim.has_rotation or config.optim.has_rotation):
        changed = {path: value for path, value in changed.items() if not path.startswith("optim.rotation.")}  # not read
    if not changed:
        return
    had, some = flatten(before), list(changed)[:3]
    differ = ", ".join(f"{path}={changed[path]} (was {had[path]})" for path in some)
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    hint = "logging, when it validates and checkpoints, retention, the mesh and how a step is computed may differ"
    if config.train.steps > before.train.steps:
        more_steps = f"--config={where / 'config.json'} --workdir=NEW --config.train.init_from={where}"
        hint = f"the learning rate follows train.steps; to train on: {more_steps}"
    allowed = "the config of that run (its config.json after --config=), or another --workdir"
    raise UserError(f"{where} holds a run with another config: {differ}{more}", allowed=allowed, hint=hint)
