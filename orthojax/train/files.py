"""Files that are either whole or not there."""

from pathlib import Path


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
