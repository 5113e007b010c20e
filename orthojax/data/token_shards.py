"""Several token files that belong together, opened and read as one.

`launch/prepare_data.py --shard=i/n` writes `train-0000i-of-0000n.bin`. Who names `train.bin`, which is not there, gets
all of them, in their order.
"""

import bisect
import dataclasses
import glob
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from orthojax.data.token_files import TokenFile, TokenFileInfo, open_token_file
from orthojax.errors import UserError

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_ALWAYS_COMPARED_BYTES = 1 << 28  # which takes a second at most
_OPEN_AT_ONCE = 256  # every memory map holds a file open, of which a process may have about a thousand


def shard_path(path: Path, index: int, count: int) -> Path:
    """The file of one shard; of the only one, the path itself.

    >>> shard_path(Path("tokens/train.bin"), 2, 8).name
    'train-00002-of-00008.bin'
    """
    return path if count == 1 else path.with_name(f"{path.stem}-{index:05d}-of-{count:05d}{path.suffix}")


class JoinedTokens:
    """Memory maps of several files, sliced as if they were one array; very many files are opened for each reading.

    Attributes:
      dtype: uint16 or uint32.
    """

    def __init__(self, paths: list[Path], lengths: list[int], dtype: np.dtype):
        """Opens the files, where they are not too many.

        Args:
          paths: Files of little-endian integers.
          lengths: Their numbers of integers.
          dtype: Of the integers.
        """
        self.dtype = dtype
        self._paths = paths
        self._ends = np.cumsum(lengths).tolist()
        few = len(paths) <= _OPEN_AT_ONCE
        self._maps = [np.asarray(np.memmap(path, dtype, "r")) for path in paths] if few else []

    def _read(self, index: int, start: int, stop: int) -> np.ndarray:
        if self._maps:
            return self._maps[index][start:stop]
        file = os.open(self._paths[index], os.O_RDONLY)
        try:
            size = self.dtype.itemsize
            return np.frombuffer(os.pread(file, (stop - start) * size, start * size), self.dtype)
        finally:
            os.close(file)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        """The integers [start, stop); a view where they lie in one file."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise IndexError("joined token files are read in steps of 1")
        index = bisect.bisect_right(self._ends, start)
        parts = []
        while start < stop:
            first = self._ends[index - 1] if index else 0
            end = min(stop, self._ends[index])
            parts.append(self._read(index, start - first, end - first))
            start, index = end, index + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])


Tokens = np.ndarray | JoinedTokens


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """One token file, or all shards of one.

    Attributes:
      path: As it was named.
      info: The sidecar; that of shards has their sums, and as data_sha256 the sha256 of the lines of theirs.
      tokens: All ids, a read-only memory map or several.
    """

    path: Path
    info: TokenFileInfo
    tokens: Tokens


def open_token_files(path: Path, *, verify: bool = False) -> TokenFiles:
    """Opens a token file or all shards of one, after checking that they are complete and belong together.

    Args:
      path: `DIR/train.bin`, for that file or, where there is none, for the shards `DIR/train-?????-of-?????.bin`; or a
        pattern such as `DIR/*/train-*.bin`, for shards in several folders.
      verify: Compare the sha256 of every file, which reads them whole; of files of 256 MB together it always is,
        and of others a few blocks of each.

    Raises:
      UserError: Where a file is missing or damaged, or they do not belong together.
    """
    found = map(Path, glob.glob(str(path))) if glob.has_magic(str(path)) else find_shards(path)
    shards = {shard: _place(shard) for shard in found}
    if shards and path.exists():
        raise UserError(f"{path} is there as one file and in shards", allowed="one of them; move the other away")
    verify = verify or _total_bytes(shards or [path]) <= _ALWAYS_COMPARED_BYTES
    if not shards:
        file = open_token_file(path, verify=verify)
        if file.info.shard:
            raise UserError(f"token file {path} is shard {file.info.shard}", allowed=f"all shards: {_whole(path)}")
        return TokenFiles(file.path, file.info, file.tokens)
    _require_all(path, shards)
    files = [open_token_file(shard, verify=verify) for shard in sorted(shards, key=lambda shard: shards[shard])]
    _require_alike(files)
    infos = [file.info for file in files]
    listing = "".join(f"{info.data_sha256}\n" for info in infos)
    info = dataclasses.replace(
        infos[0],
        n_tokens=sum(info.n_tokens for info in infos),
        n_bytes=sum(info.n_bytes for info in infos),
        n_documents=sum(info.n_documents for info in infos),
        data_sha256=hashlib.sha256(listing.encode()).hexdigest(),
        shard="",
    )
    lengths = [info.n_tokens for info in infos]
    joined = JoinedTokens([file.path for file in files], lengths, np.dtype(info.dtype).newbyteorder("<"))
    return TokenFiles(path, info, joined)


def find_shards(path: Path) -> list[Path]:
    """All files that are named as shards of a token file."""
    pattern = f"{glob.escape(str(path.with_suffix('')))}-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].bin"
    return list(map(Path, glob.glob(pattern))) if path.suffix == ".bin" else []


def require_alone(path: Path, count: int) -> None:
    """Refuses to make a token file in `count` shards where it is there already in another number of them.

    Raises:
      UserError: Names what is there.
    """
    for other in (path, *find_shards(path)):
        if other.exists() and (1 if other == path else _place(other)[1]) != count:
            raise UserError(
                f"{path.name} is there already, in another number of files: {other}",
                allowed="the same --shard=i/n, or another --output or --name",
            )


def _total_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _place(path: Path) -> tuple[int, int]:
    match = _SHARD.search(path.stem)
    if not match:
        raise UserError(f"token file {path} is no shard", allowed="names such as train-00000-of-00008.bin")
    return int(match[1]), int(match[2])


def _whole(path: Path) -> Path:
    return path.with_name(_SHARD.sub("", path.stem) + path.suffix)


def _require_all(path: Path, shards: dict[Path, tuple[int, int]]) -> None:
    counts = sorted({count for _, count in shards.values()})
    if len(counts) > 1:
        raise UserError(
            f"{path} names shards of {' and of '.join(map(str, counts))} files",
            allowed="one set of shards; move the others away",
        )
    found = sorted(index for index, _ in shards.values())
    missing = sorted(set(range(counts[0])) - set(found))
    if missing:
        raise UserError(
            f"of the {counts[0]} shards of {path}, {len(missing)} are missing, the first is {missing[0]}",
            hint=f"launch/prepare_data.py with --shard={missing[0]}/{counts[0]}",
        )
    if len(found) > counts[0]:
        raise UserError(f"{path} names a shard twice", allowed="one folder, or shards with different numbers")


def _require_alike(files: list[TokenFile]) -> None:
    first = files[0]
    for file in files:
        index, count = _place(file.path)
        if file.info.shard != f"{index}/{count}":
            raise UserError(
                f"token file {file.path} is shard {file.info.shard or '0/1'} by its sidecar: it was renamed",
                allowed="the names that launch/prepare_data.py gave",
            )
        for name in ("tokenizer_sha256", "source_sha256", "split", "dtype"):
            a, b = getattr(first.info, name), getattr(file.info, name)
            if a != b:
                raise UserError(
                    f"{first.path} and {file.path} do not belong together: {name} is {a} and {b}",
                    allowed="shards of one source, split and tokenizer",
                )
