"""The folder of a run, which belongs to one config."""

from pathlib import Path

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.fields import changed_fields, from_json, to_json
from orthojax.train.files import make_folder, write_text


def check_workdir(workdir: Path, config: Config) -> None:
    """Looks whether a run of this config may go there; writes nothing.

    Raises:
      UserError: Where the path is a file, or already holds a run of another config.
    """
    path = workdir / "config.json"
    if any(part.is_file() for part in (workdir, *workdir.parents)):
        raise UserError(f"workdir {workdir} is a file", allowed="a folder, new or of an earlier call")
    if path.exists():
        try:
            before = from_json(Config, path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: {error}", hint="another --workdir, or the right config.json") from error
        require_same_config(config, before, str(workdir))


def prepare_workdir(workdir: Path, config: Config) -> None:
    """Creates the folder of a run and writes its config.json.

    Raises:
      UserError: As `check_workdir`.
    """
    check_workdir(workdir, config)
    make_folder(workdir, "workdir")
    if not (workdir / "config.json").exists():
        write_text(workdir / "config.json", to_json(config) + "\n")


def _may_change(field: str) -> bool:
    # How the same step is computed: on which devices, in how many parts.
    return field.startswith("mesh.") or field == "train.accumulation_steps"


def require_same_config(config: Config, before: Config, where: str) -> None:
    """Refuses to go on with another config than the run began with.

    Raises:
      UserError: Naming the fields that differ.
    """
    changed = [field for field in changed_fields(before, config) if not _may_change(field)]
    if changed:
        raise UserError(
            f"{where} holds a run with another config: {', '.join(sorted(changed))} differ",
            allowed="the config of that run, or another --workdir",
        )
