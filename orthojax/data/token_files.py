"""Token files: all ids of a corpus in one flat little-endian array, with a JSON sidecar that describes it.

`train.bin` has its sidecar in `train.json`. Documents stand one after the other, each followed by the tokenizer's
end-of-text id. `launch/prepare_data.py --shard=i/n` writes `train-0000i-of-0000n.bin`, and whoever names `train.bin`,
which is not there, gets all of them as one. Text is tokenised once; training reads the files through the page cache.
"""

import bisect
import dataclasses
import functools
import glob
import hashlib
import json
import re
import typing
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.errors import UserError
from orthojax.files import write_text

FORMAT_VERSION = 1
_SAMPLE_BLOCKS, _SAMPLE_BYTES = 16, 4096
_ALWAYS_COMPARED_BYTES = 1 << 28  # takes a second at most
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
    """Writes the sidecar of a token file, whole or not at all."""
    write_text(sidecar_path(path), json.dumps(dataclasses.asdict(info), indent=2) + "\n")


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
      verify: Also compare the sha256, which reads the whole file; its size and a few blocks are always compared.

    Raises:
      UserError: If the file or its sidecar is missing, or they do not belong together.
    """
    path = Path(path)
    again = f"rebuild it with launch/prepare_data.py or, if {path.parent} is a cache, delete that folder"
    if not path.is_file():
        raise UserError(f"there is no token file {path}", hint=again)
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
    return TokenFile(path, info, np.memmap(path, np.dtype(info.dtype).newbyteorder("<"), "r"))


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
    found = map(Path, glob.glob(str(path))) if glob.has_magic(str(path)) else _find_shards(path)
    places = sorted((_place(shard), shard) for shard in found)
    if places and path.exists():
        raise UserError(f"{path} exists both as one file and as shards", allowed="one of them; move the other away")
    paths = [shard for _, shard in places] or [path]
    verify = verify or sum(file.stat().st_size for file in paths if file.is_file()) <= _ALWAYS_COMPARED_BYTES
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
                allowed="the names that launch/prepare_data.py gave",
            )
        for name in ("tokenizer_sha256", "source_sha256", "split", "dtype"):
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
            hint=f"launch/prepare_data.py with --shard={missing[0]}/{counts[0]}",
        )
    if len(places) > counts[0]:
        raise UserError(f"{path} names a shard twice", allowed="one folder, or shards with different numbers")


def _read_sidecar(path: Path, again: str) -> TokenFileInfo:
    sidecar = sidecar_path(path)
    try:
        values: Any = json.loads(sidecar.read_bytes())
        values = {"sample_sha256": "", "shard": "", **values}  # earlier versions wrote neither
    except FileNotFoundError:
        raise UserError(f"token file {path} has no sidecar {sidecar.name}", hint=again) from None
    except ValueError:
        raise UserError(f"{sidecar} is not JSON", hint=again) from None
    except TypeError:
        values = {}
    types = {name: type(value) for name, value in values.items()}
    if (
        types != typing.get_type_hints(TokenFileInfo)
        or values["format_version"] != FORMAT_VERSION
        or values["dtype"] not in ("uint16", "uint32")
        or values["n_tokens"] < 1
    ):
        raise UserError(f"{sidecar} does not describe a token file of format {FORMAT_VERSION}", hint=again)
    return TokenFileInfo(**values)
