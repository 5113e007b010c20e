"""Names in flags: NAME=VALUE,VALUE,NAME=VALUE."""

import re
from collections.abc import Sequence

from orthojax.errors import UserError

_NAME = r"[A-Za-z0-9][\w.-]*"
_TAKEN = ("text", "texts", "figures")  # what the workdir holds


def named_models(given: Sequence[str], flag: str = "--model=") -> dict[str, str]:
    """Name -> path, in order; a path without a name takes the last part of it.

    Raises:
      UserError: For a name that cannot be that of a folder, or one that two models have.

    >>> named_models(["smollm2,tuned=runs/tuned", "runs/base/"])
    {'smollm2': 'smollm2', 'tuned': 'runs/tuned', 'base': 'runs/base/'}
    """
    models: dict[str, str] = {}
    for part in (part for text in given for part in text.split(",")):
        name, equals, path = part.partition("=")
        if not equals:
            name, path = _last_part(part), part
        if not path or not re.fullmatch(_NAME, name) or name in _TAKEN:
            raise UserError(
                f"{flag}{part!r} gives no path and name", allowed=f"{flag}PATH or {flag}NAME=PATH, NAME of letters"
            )
        if name in models:
            raise UserError(f"two are called {name!r}", allowed=f"{flag}NAME=PATH for one of them")
        models[name] = path
    return models


def _last_part(path: str) -> str:
    last = path.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    return re.sub(r"[^\w.-]", "_", last).lstrip("._-") or "model"


def named_files(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Name -> files: what has no name belongs to the name before.

    Raises:
      UserError: For files before any name, or a name twice.

    >>> named_files(["code=a.py", "b.py", "prose=*.txt"])
    {'code': ('a.py', 'b.py'), 'prose': ('*.txt',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    last = ""
    for part in given:
        name, equals, path = part.partition("=")
        if equals and re.fullmatch(_NAME, name):
            if name in found or name in _TAKEN:
                raise UserError(f"--domains has the name {name!r} twice, or may not", allowed="a name for each domain")
            last, found[name] = name, ()
        elif last:
            path = part
        if not last or not path:
            raise UserError(f"--domains: {part!r} has no name or no files", allowed="NAME=FILES,NAME=FILES")
        found[last] += (path,)
    return found
