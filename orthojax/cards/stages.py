"""The parts of a measurement, kept in files so that an interrupted measurement resumes."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orthojax.errors import UserError
from orthojax.files import kept, read_with_digest


class Stages:
    """The finished parts of a measurement, each in its own file."""

    def __init__(self, folder: Path | None, subject: Any = None, say: Callable[[str], object] = lambda what: None):
        """Keeps parts in an existing folder, None for none; those there of the same JSON value `subject` are reused."""
        self._folder, self._subject, self._say = folder, subject, say

    def __call__(self, name: str, compute: Callable[[], Any], *options: Any) -> Any:
        """Returns the JSON value that `compute` makes, or made earlier with these options; arrays become lists.

        For a UserError it is {"left_out": its message}, and is not kept.
        """
        plain = lambda: json.loads(json.dumps(compute(), default=lambda array: array.tolist()))  # noqa: E731
        try:
            part = self._kept(self._folder, name, plain, options) if self._folder else plain()
        except UserError as error:
            part = {"left_out": str(error).partition("\n")[0]}
        self._say(name)
        return part

    def _kept(self, folder: Path, name: str, compute: Callable[[], Any], options: Any) -> Any:
        path, subject = folder / f"{name}.json", json.dumps({"of": self._subject, "with": options})
        key, kept_key = hashlib.sha256(subject.encode()).hexdigest(), None
        with contextlib.suppress(UserError):  # a missing or damaged part is computed
            kept_key = read_with_digest(path, "stage").get("of")
        if kept_key != key:
            path.unlink(missing_ok=True)
        return kept(path, "stage", lambda: {"of": key, "found": compute()})["found"]


def identity(place: Path, workdir: Path) -> list[Any]:
    """Returns the names, sizes and times of a model's files, which change with them, without those in the workdir."""
    own = workdir.resolve()
    files = (
        [place]
        if place.is_file()
        else sorted(path for path in place.rglob("*") if path.is_file() and own not in path.resolve().parents)
    )
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
