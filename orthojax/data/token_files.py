"""Token files: all ids of a corpus in one flat little-endian array, with a JSON sidecar that describes it.

`train.bin` has its sidecar in `train.json`. Documents stand one after the other, each followed by the tokenizer's
end-of-text id. `orthojax prepare --shard=i/n` writes `train-0000i-of-0000n.bin`, and whoever names `train.bin`,
which is not there, gets all of them as one. Text is tokenised once; training reads the files through the page cache.
"""

import bisect
import dataclasses
import functools
import glob
import hashlib
import os
import re
import typing
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.data.sealed import is_count, is_sha256, read_sealed, sealed
from orthojax.errors import UserError
from orthojax.files import require_file, write_text

FORMAT_VERSION = 1
TOKENIZER_FIELDS = ("tokenizer_sha256", "vocab_size", "bos_id", "eos_id")  # equal in files that belong together
_SAMPLE_BLOCKS, _SAMPLE_BYTES = 16, 4096
_ALWAYS_COMPARED_BYTES = 1 << 28  # takes a second at most
_IDS_AT_ONCE = 1 << 24
_OPEN_AT_ONCE = 256  # every memory map holds a file open, and a process may open about a thousand
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclasses.dataclass(frozen=True)
class TokenFileInfo:
    """The sidecar of a token file."""

    format_version: int
    dtype: str  # `uint16` if every id fits, else `uint32`; little-endian
    n_tokens: int  # end-of-text ids included
    n_bytes: int  # of the text in UTF-8; n_bytes / n_tokens turns nats per token into bits per byte
    n_documents: int
    vocab_size: int  # one more than the largest possible id
    bos_id: int
    eos_id: int  # follows every document
    tokenizer: str  # its name
    tokenizer_sha256: str  # of its file
    source: str  # what was tokenised
    source_sha256: str  # of the corpus; '' if unknown
    file_count: int  # of the corpus; 0 if unknown
    split: str  # `train`, `validation` or any other name
    data_sha256: str  # of the .bin file
    sample_sha256: str = ""  # of a few blocks of it, compared whenever it is opened; '' in files of earlier versions
    shard: str = ""  # `i/n` if the file is one of several that belong together


class JoinedTokens:
    """Files of little-endian integers read as one array, in slices of step 1; memory-mapped as they are needed."""

    def __init__(self, paths: list[Path], lengths: list[int], dtype: np.dtype):
        self.dtype = dtype
        self._ends = np.cumsum(lengths).tolist()
        self._map = functools.lru_cache(_OPEN_AT_ONCE)(lambda i: np.asarray(np.memmap(paths[i], dtype, "r")))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        """The integers [start, stop); a view if they lie in one file."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise IndexError("joined token files are read in steps of 1")
        index = bisect.bisect_right(self._ends, start)
        parts = []
        while start < stop:
            first = self._ends[index - 1] if index else 0
            end = min(stop, self._ends[index])
            parts.append(self._map(index)[start - first : end - first])
            start, index = end, index + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])


Tokens = np.ndarray | JoinedTokens


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """An open token file, or all shards of one."""

    path: Path  # the .bin file, as it was named
    info: TokenFileInfo  # that of shards has their sums, and as data_sha256 the sha256 of the lines of theirs
    tokens: Tokens  # uint16 or uint32 [n_tokens], a read-only memory map or several


def token_dtype(vocab_size: int) -> np.dtype:
    """The little-endian integers that hold every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def sidecar_path(path: str | Path) -> Path:
    """The sidecar of a token file: the same name with .json."""
    return Path(path).with_suffix(".json")


def shard_path(path: Path, index: int, count: int) -> Path:
    """The file of one shard; of the only one, the path itself.

    >>> shard_path(Path("tokens/train.bin"), 2, 8).name
    'train-00002-of-00008.bin'
    """
    return path if count == 1 else path.with_name(f"{path.stem}-{index:05d}-of-{count:05d}{path.suffix}")


def write_sidecar(path: Path, info: TokenFileInfo) -> None:
    """Writes the sidecar of a token file and its checksum, whole or not at all."""
    write_text(sidecar_path(path), sealed(dataclasses.asdict(info)))


def sample_sha256(path: Path) -> str:
    """sha256 of 16 blocks of 4,096 bytes, evenly spread from the first to the last; of all if there are fewer."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        if size <= _SAMPLE_BLOCKS * _SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for i in range(_SAMPLE_BLOCKS):
                file.seek((size - _SAMPLE_BYTES) * i // (_SAMPLE_BLOCKS - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def open_token_file(path: str | Path, *, verify: bool = False) -> TokenFile:
    """Opens one token file, after checking that it is what its sidecar describes.

    Args:
      path: The .bin file.
      verify: Also compare the sha256 and the ids, which reads the whole file; its size, a few blocks and the last id
        are always compared.

    Raises:
      UserError: If the file or its sidecar is missing, the sidecar was edited, or they do not belong together.
    """
    path = Path(path)
    again = f"rebuild it with orthojax prepare or, if {path.parent} is a cache, delete that folder"
    if not os.path.exists(path):
        raise UserError(f"there is no token file {path}", hint=again)
    require_file(path, "token file")
    again = f"delete it and {again}"
    info = _read_sidecar(path, again)
    expected = info.n_tokens * np.dtype(info.dtype).itemsize
    if path.stat().st_size != expected:
        raise UserError(
            f"token file {path} has {path.stat().st_size} bytes, its sidecar says {expected}: cut short or replaced",
            hint=again,
        )
    same = not info.sample_sha256 or sample_sha256(path) == info.sample_sha256
    if same and verify:
        with open(path, "rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == info.data_sha256
    if not same:
        raise UserError(f"token file {path} does not have the sha256 of its sidecar: it was changed", hint=again)
    tokens = np.memmap(path, np.dtype(info.dtype).newbyteorder("<"), "r")
    if tokens[-1] != info.eos_id or (verify and not _holds_documents(tokens, info)):
        raise UserError(
            f"token file {path} does not hold {info.n_documents} documents of ids below {info.vocab_size}, each "
            f"followed by {info.eos_id}, as its sidecar says",
            hint=again,
        )
    return TokenFile(path, info, tokens)


def open_token_files(path: Path, *, verify: bool = False) -> TokenFile:
    """Opens a token file or all shards of one, after checking that they are complete and belong together.

    Args:
      path: `DIR/train.bin`, for that file or, if there is none, for the shards `DIR/train-?????-of-?????.bin`; or a
        pattern such as `DIR/*/train-*.bin`, for shards in several folders.
      verify: Compare the sha256 of every file, which reads them whole. Files of 256 MB together are always compared
        whole, larger ones by a few blocks of each.

    Raises:
      UserError: If a file is missing or damaged, or they do not belong together.
    """
    found = list(_find_shards(path))
    if not found and glob.has_magic(str(path)) and not path.exists():
        found = map(Path, glob.glob(str(path)))
    places = sorted((_place(shard), shard) for shard in found)
    if places and path.exists():
        raise UserError(f"{path} exists both as one file and as shards", allowed="one of them; move the other away")
    paths = [shard for _, shard in places] or [path]
    verify = verify or sum(file.stat().st_size for file in paths if os.path.isfile(file)) <= _ALWAYS_COMPARED_BYTES
    if not places:
        file = open_token_file(path, verify=verify)
        if file.info.shard:
            whole = path.with_name(_SHARD.sub("", path.stem) + path.suffix)
            raise UserError(f"token file {path} is shard {file.info.shard}", allowed=f"all shards: {whole}")
        return file
    _require_all(path, [place for place, _ in places])
    infos = [open_token_file(shard, verify=verify).info for shard in paths]
    for ((index, count), shard), info in zip(places, infos, strict=True):
        if info.shard != f"{index}/{count}":
            raise UserError(
                f"token file {shard} is shard {info.shard or '0/1'} by its sidecar: it was renamed",
                allowed="the names that orthojax prepare gave",
            )
        for name in (*TOKENIZER_FIELDS, "source_sha256", "split", "dtype"):
            a, b = getattr(infos[0], name), getattr(info, name)
            if a != b:
                raise UserError(
                    f"{paths[0]} and {shard} do not belong together: {name} is {a} and {b}",
                    allowed="shards of one source, split and tokenizer",
                )
    sums: Any = {name: sum(getattr(info, name) for info in infos) for name in ("n_tokens", "n_bytes", "n_documents")}
    sha256 = hashlib.sha256("".join(f"{info.data_sha256}\n" for info in infos).encode()).hexdigest()
    joined = JoinedTokens(paths, [info.n_tokens for info in infos], np.dtype(infos[0].dtype).newbyteorder("<"))
    return TokenFile(path, dataclasses.replace(infos[0], **sums, data_sha256=sha256, shard=""), joined)


def _holds_documents(tokens: np.ndarray, info: TokenFileInfo) -> bool:
    """Whether all ids are of the vocabulary, and the end of text is there for each document (a text may spell it)."""
    parts = [tokens[i : i + _IDS_AT_ONCE] for i in range(0, len(tokens), _IDS_AT_ONCE)]
    ends = sum(int(np.count_nonzero(part == info.eos_id)) for part in parts)
    return ends >= info.n_documents and all(int(part.max()) < info.vocab_size for part in parts)


def require_alone(path: Path, count: int) -> None:
    """Refuses to write a token file in `count` shards if it is there already in another number of them.

    Raises:
      UserError: Names what is there.
    """
    for other in (path, *_find_shards(path)):
        if other.exists() and (1 if other == path else _place(other)[1]) != count:
            raise UserError(
                f"{path.name} is there already, in another number of files: {other}",
                allowed="the same --shard=i/n, or another --output or --name",
            )


def _find_shards(path: Path) -> list[Path]:
    found = path.parent.glob(f"{glob.escape(path.stem)}-*.bin") if path.suffix == ".bin" else ()
    return [shard for shard in found if _SHARD.fullmatch(shard.stem, len(path.stem))]


def _place(path: Path) -> tuple[int, int]:
    match = _SHARD.search(path.stem)
    if not match:
        raise UserError(f"token file {path} is not a shard", allowed="names such as train-00000-of-00008.bin")
    return int(match[1]), int(match[2])


def _require_all(path: Path, places: list[tuple[int, int]]) -> None:
    counts = sorted({count for _, count in places})
    if len(counts) > 1:
        raise UserError(
            f"{path} names shards of {' and of '.join(map(str, counts))} files",
            allowed="one set of shards; move the others away",
        )
    missing = sorted(set(range(counts[0])) - {index for index, _ in places})
    if missing:
        raise UserError(
            f"of the {counts[0]} shards of {path}, {len(missing)} are missing, the first is {missing[0]}",
            hint=f"orthojax prepare with --shard={missing[0]}/{counts[0]}",
        )
    if len(places) > counts[0]:
        raise UserError(f"{path} names a shard twice", allowed="one folder, or shards with different numbers")


def _read_sidecar(path: Path, again: str) -> TokenFileInfo:
    sidecar = sidecar_path(path)
    if not os.path.lexists(sidecar):
        raise UserError(f"token file {path} has no sidecar {sidecar.name}", hint=again)
    # Earlier versions wrote no sample and no shard.
    values = {"sample_sha256": "", "shard": "", **read_sealed(sidecar, "sidecar", again)}
    types = {name: type(value) for name, value in values.items()}
    if types != typing.get_type_hints(TokenFileInfo) or not _is_possible(info := TokenFileInfo(**values)):
        raise UserError(f"sidecar {sidecar} does not describe a token file of format {FORMAT_VERSION}", hint=again)
    return info


def _is_possible(info: TokenFileInfo) -> bool:
    """Whether values of the right types can be those of a token file."""
    counts = (info.n_tokens, info.n_bytes, info.file_count, info.vocab_size)
    return (
        info.format_version == FORMAT_VERSION
        and all(map(is_count, counts))
        and info.dtype == token_dtype(info.vocab_size).name
        and 0 <= info.bos_id < info.vocab_size
        and 0 <= info.eos_id < info.vocab_size
        and 1 <= info.n_documents <= min(info.n_bytes, info.n_tokens)  # no text is empty
        and is_sha256(info.data_sha256)
        and (not info.sample_sha256 or is_sha256(info.sample_sha256))
    )
