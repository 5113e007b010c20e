"""Text that is read from where it lies, file by file as it is needed: data sets of the Hugging Face hub, buckets."""

import functools
import glob
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from orthojax.data.documents import Item, Piece, Source, read_documents
from orthojax.errors import UserError, needing

_SUFFIXES = (".parquet", ".jsonl", ".txt")
_BLOCK = 1 << 22
# What file systems call something that changes with the content of a file, the best first.
_VERSIONS = ("blob_id", "sha256", "etag", "ETag", "md5Hash", "mtime", "LastModified", "created")


def is_remote(paths: Sequence[Any]) -> bool:
    """Whether the paths are addresses.

    Raises:
      UserError: Where some are and some are not.
    """
    remote = ["://" in str(path) for path in paths]
    if any(remote) and not all(remote):
        raise UserError("addresses and files on disk are mixed", allowed="one kind of them")
    return any(remote)


def remote_files(addresses: Sequence[str]) -> list[list[Any]]:
    """[address, bytes, version] of every file.

    Args:
      addresses: Files and patterns of a file system that fsspec knows, `hf://datasets/NAME/data/train-*.parquet` first
        of all; a folder means its .parquet, .jsonl and .txt files, those of jsonl and text also compressed.

    Raises:
      UserError: Where nothing is there, or it cannot be reached; without the extra `huggingface`.
    """
    found: list[list[Any]] = []
    for address in addresses:
        try:
            system, path = _open_system(address)
            paths = sorted(system.glob(path)) if glob.has_magic(path) else [path]
            if paths == [path] and system.isdir(path):
                paths = sorted(name for name in system.find(path) if set(PurePosixPath(name).suffixes) & {*_SUFFIXES})
            infos = [system.info(name) for name in paths]
        except (UserError, KeyboardInterrupt):
            raise
        except Exception as error:  # every file system has errors of its own
            raise _unreachable(address, error) from None
        if not infos:
            raise UserError(f"{address} matches no files", allowed=f"files that end in {', '.join(_SUFFIXES)}")
        for name, info in zip(paths, infos, strict=True):
            version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
            found.append([system.unstrip_protocol(name), int(info["size"]), version])
    return found


def remote_corpus(files: Sequence[Sequence[Any]]) -> Source:
    """A source of `remote_files`; every file is one piece of it. Its sha256 covers names, sizes and versions."""
    starts = [0, *itertools.accumulate(size for _, size, _ in files)]

    def pieces(index: int, count: int) -> list[Piece]:
        begin, end = (starts[-1] * i // count for i in (index, index + 1))
        return [
            Piece(functools.partial(_read, address), 0, size, 0)
            for (address, size, _), start in zip(files, starts, strict=False)
            if size and begin <= start < end
        ]

    names = ", ".join(address for address, *_ in files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")
    return Source(names, hashlib.sha256(json.dumps(list(map(list, files))).encode()).hexdigest(), len(files), pieces)


def _read(address: str, start: int) -> Iterator[Item]:
    system, path = _open_system(address)

    def opener(_: Path) -> IO[bytes]:
        return system.open(path, "rb", block_size=_BLOCK)

    try:
        yield from read_documents(PurePosixPath(path).name, Path(path), start, opener=opener)
    except (UserError, KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        raise _unreachable(address, error) from None


def _open_system(address: str) -> tuple[Any, str]:
    with needing(address, "huggingface"):
        import fsspec  # type: ignore[import-not-found]
        import huggingface_hub  # type: ignore[import-not-found]  # noqa: F401  # fsspec finds hf:// by it
    try:
        return fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UserError(f"cannot read {address}: {error}", allowed="hf://datasets/NAME/FILES, or paths") from None


def _unreachable(address: str, error: Exception) -> UserError:
    words = (str(error) or type(error).__name__).splitlines()[0][:200]
    return UserError(f"cannot read {address}: {words}", hint="the same command resumes")
