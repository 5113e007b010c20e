"""Documents in tables: .parquet files, and the .arrow files of Hugging Face data sets, by their column `text`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from orthojax.errors import UserError, needing

SUFFIXES = (".parquet", ".arrow")
_COLUMN = "text"


def read_texts(
    path: Path, start: int = 0, opener: Callable[[Path], IO[bytes]] | None = None
) -> Iterator[tuple[int, str, int]]:
    """(row, text, bytes of the file that are read) of every row from `start` on; rows without text are left out.

    One group of rows is in memory at a time. `opener` opens a .parquet file that is not on disk.

    Raises:
      UserError: Without the extra `parquet`, for a damaged file, or where the column is missing or of another type.
    """
    with needing(f"{path.name} ({path.suffix} files)", "parquet"):
        import pyarrow as pa
    try:
        row = 0
        for texts, offset in _groups(path, opener):
            skipped = min(max(start - row, 0), len(texts))
            for at, text in enumerate(texts.slice(skipped), row + skipped):
                if value := text.as_py():
                    yield at, value, offset
            row += len(texts)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        raise UserError(f"{path} is not a complete {path.suffix} file: {str(error).splitlines()[0]}") from None


def _groups(path: Path, opener: Callable[[Path], IO[bytes]] | None) -> Iterator[tuple[Any, int]]:
    """The texts of a group of rows, and how many bytes of the file the groups so far are."""
    import pyarrow as pa

    if path.suffix == ".parquet":
        from pyarrow import parquet

        with opener(path) if opener else open(path, "rb") as raw, parquet.ParquetFile(raw) as file:
            size = raw.seek(0, 2)
            _require_texts(path, file.schema_arrow)
            done, total = 0, file.metadata.num_rows
            for group in range(file.num_row_groups):
                texts = file.read_row_group(group, columns=[_COLUMN]).column(0)
                done += len(texts)
                yield texts, size * done // max(total, 1)
        return
    with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as stream:  # as `datasets` writes them
        _require_texts(path, stream.schema)
        for batch in stream:
            yield batch.column(batch.schema.get_field_index(_COLUMN)), file.tell()


def _require_texts(path: Path, schema: Any) -> None:
    import pyarrow as pa

    if _COLUMN not in schema.names:
        raise UserError(f"{path} has no column {_COLUMN!r}", allowed=f"one; it has {', '.join(schema.names)}")
    kind = schema.field(_COLUMN).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"the column {_COLUMN!r} of {path} has the type {kind}", allowed="string")
