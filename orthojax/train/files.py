"""Files that are either whole or not there, and the folders that they go to."""

from pathlib import Path

from orthojax.errors import UserError


def make_folder(path: Path, what: str) -> None:
    """Makes a folder, with its parents, unless it is there.

    Raises:
      UserError: Where the path, or a part of it, is a file or cannot be written; `what` names it.
    """
    allowed = "a folder, new or of an earlier call"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{what} {path} is a file", allowed=allowed) from None
    except OSError as error:
        raise UserError(f"{what} {path} cannot be made: {error.strerror}", allowed=allowed) from error


def write_text(path: Path, text: str) -> None:
    """Writes a file that is either whole or, where the disk refuses, as it was before.

    Raises:
      OSError: With the name of the file, which a full disk does not tell.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
