"""Paths on object stores, gs://, s3:// and az://: what turns a text into a path, and local copies."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

from orthojax.errors import UserError, needing
from orthojax.files import is_remote, one_writer, require_local, write_atomically

_STORES = ("gs", "s3", "az")


def as_path(text: str, what: str) -> Any:
    """Returns the path of a text, which on an object store (gs://, s3://, az://) is one of `etils.epath`.

    Raises:
      UserError: If it is another address, fsspec's package for the store is missing, or it is a workdir, checkpoint or
        model and not on gs://, the only store that Orbax writes to; `what` names it.
    """
    scheme, found, _ = text.partition("://")
    if not found or scheme not in _STORES:
        require_local(text, what)
        return Path(text)
    if scheme != "gs" and what in ("workdir", "checkpoint", "model"):
        raise UserError(f"{what} {text}: checkpoints are not written there", allowed="gs://, or a disk")
    with needing(f"{what} {text}", "train"):
        from etils import epath  # type: ignore[import-not-found]
    path = epath.Path(text)
    try:
        path.exists()
    except Exception as error:  # every store has errors of its own
        hint = "pip install " + {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}[scheme]
        raise UserError(f"{what} {text} cannot be reached: {error!r:.200}", hint=hint) from None
    return path


def fetched(path: Any, folder: Path) -> Path:
    """Returns a copy of a file of an object store in a local folder, made anew if it changes; a local file itself."""
    if not is_remote(path):
        return path
    copy = folder / "fetched" / hashlib.sha256(str(path.parent).encode()).hexdigest()[:16] / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    there = path.stat()
    with one_writer(copy):
        if not copy.exists() or copy.stat().st_size != there.length or copy.stat().st_mtime < there.mtime:
            with path.open("rb") as source:
                write_atomically(copy, lambda file: shutil.copyfileobj(source, file, 1 << 24))
    return copy
