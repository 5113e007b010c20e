"""Token files: all ids of a corpus in one flat little-endian array, with a JSON sidecar that describes it.

`train.bin` has its sidecar in `train.json`. Documents stand one after the other, each followed by the tokenizer's
end-of-text id. `orthojax prepare --shard=i/n` writes `train-0000i-of-0000n.bin`, and whoever names `train.bin`,
which is not there, gets all of them as one. Text is tokenised once; training reads the files through the page cache.
"""

import bisect
import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.errors import UserError
from orthojax.files import read_json, require_file, write_text

FORMAT_VERSION = 1
TOKENIZER_FIELDS = ("tokenizer_sha256", "vocab_size", "bos_id", "eos_id")  # equal in files that belong together
_SAMPLE_BLOCKS, _SAMPLE_BYTES = 16, 4096
_ALWAYS_COMPARED_BYTES = 1 << 28  # takes a second at most
_OPEN_AT_ONCE = 256  # every memory map holds a file open, and a process may open about a thousand
_ABANDONED_SECONDS = 3600  # since the last change of a hidden file, after which the call that wrote it was killed
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_CHECKSUM = "content_sha256"  # of the other fields of a sidecar, so that an edit does not go unnoticed


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
    source_sha256: str  # of the corpus
    file_count: int  # of the corpus
    split: str  # `train`, `validation` or any other name
    data_sha256: str  # of the .bin file
    sample_sha256: str  # of a few blocks of it, compared whenever it is opened
    shard: str  # `i/n` if the file is one of several that belong together, else ''


class JoinedTokens:
    """Files of little-endian integers read as one array, in slices of step 1; memory-mapped as they are needed."""

    def __init__(self, paths: list[Path], lengths: list[int], dtype: np.dtype):
        self.dtype = dtype
        self._ends = np.cumsum(lengths).tolist()
        self._map = functools.lru_cache(_OPEN_AT_ONCE)(lambda i: np.asarray(np.memmap(paths[i], dtype, "r")))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns the integers [start, stop); a view if they lie in one file."""
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


class TokenWriter:
    """A token file while it is written, under a hidden name that it loses when it is complete.

    Attributes:
      path: The .bin file that it becomes.
      n_tokens: Ids so far.
    """

    def __init__(self, path: Path, created_from: dict[str, Any]):
        """Opens the hidden file; `created_from` are the fields of the sidecar that do not depend on the contents."""
        self.path, self.n_tokens = path, 0
        self._created_from = created_from
        self._dtype = np.dtype(created_from["dtype"]).newbyteorder("<")
        self._n_bytes = self._n_documents = 0
        self._digest = hashlib.sha256()
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            with contextlib.suppress(OSError):  # another process may do the same
                if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                    left.unlink()
        self._file = open(self._temporary, "xb")

    def append(self, ids: np.ndarray, n_documents: int, n_bytes: int) -> None:
        """Writes the ids of some documents, each with its end-of-text id, whose texts have so many bytes in UTF-8."""
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.n_tokens += len(ids)
        self._n_documents += n_documents
        self._n_bytes += n_bytes

    def complete(self) -> None:
        """Writes the sidecar, then moves the file into place.

        Raises:
          UserError: If nothing was written.
        """
        if not self.n_tokens:
            source = self._created_from["source"]
            hint = "take fewer shards: each has whole files" if self._created_from["shard"] else ""
            problem = f"no text for the token file {self.path.name} in {source}"
            raise UserError(problem, allowed="at least one document", hint=hint)
        self._file.flush()
        os.fsync(self._file.fileno())  # or a power cut leaves the final name with nothing behind it
        info = TokenFileInfo(
            **self._created_from,
            n_tokens=self.n_tokens,
            n_bytes=self._n_bytes,
            n_documents=self._n_documents,
            data_sha256=self._digest.hexdigest(),
            sample_sha256=_sample_sha256(self._temporary),
        )
        values = dataclasses.asdict(info)
        write_text(sidecar_path(self.path), json.dumps({**values, _CHECKSUM: _checksum(values)}, indent=2) + "\n")
        self._temporary.replace(self.path)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the little-endian integers that hold every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def sidecar_path(path: str | Path) -> Path:
    """Returns the sidecar of a token file: the same name with .json."""
    return Path(path).with_suffix(".json")


def shard_path(path: Path, index: int, count: int) -> Path:
    """Returns the file of one shard; of the only one, the path itself.

    >>> shard_path(Path("tokens/train.bin"), 2, 8).name
    'train-00002-of-00008.bin'
    """
    return path if count == 1 else path.with_name(f"{path.stem}-{index:05d}-of-{count:05d}{path.suffix}")


def open_token_file(path: str | Path, *, verify: bool = False) -> TokenFile:
    """Opens one token file, after checking that it is what its sidecar describes.

    Args:
      path: The .bin file.
      verify: Also compare the sha256, which reads the whole file; its size and a few blocks are always compared.

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
        problem = f"token file {path} has {path.stat().st_size} bytes, its sidecar says {expected}"
        raise UserError(f"{problem}: it was cut short or replaced", hint=again)
    same = _sample_sha256(path) == info.sample_sha256
    if same and verify:
        with open(path, "rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == info.data_sha256
    if not same:
        raise UserError(f"token file {path} does not have the sha256 of its sidecar: it was changed", hint=again)
    return TokenFile(path, info, np.memmap(path, np.dtype(info.dtype).newbyteorder("<"), "r"))


def open_token_files(path: Path, *, verify: bool = False) -> TokenFile:
    """Opens a token file or all shards of one, after checking that they are complete and belong together.

    Args:
      path: `DIR/train.bin`, for that file or, if there is none, for the shards `DIR/train-?????-of-?????.bin`.
      verify: Compare the sha256 of every file, which reads them whole. Files of 256 MB together are always compared
        whole, larger ones by a few blocks of each.

    Raises:
      UserError: If a file is missing or damaged, or they do not belong together.
    """
    found = path.parent.glob(f"{glob.escape(path.stem)}-*{path.suffix}")
    shards = sorted(shard for shard in found if _SHARD.fullmatch(shard.stem, len(path.stem)))
    if shards and path.exists():
        raise UserError(f"{path} exists both as one file and as shards", allowed="one of them; move the other away")
    paths = shards or [path]
    verify = verify or sum(file.stat().st_size for file in paths if os.path.isfile(file)) <= _ALWAYS_COMPARED_BYTES
    if not shards:
        file = open_token_file(path, verify=verify)
        if file.info.shard:
            whole = path.with_name(_SHARD.sub("", path.stem) + path.suffix)
            raise UserError(f"token file {path} is shard {file.info.shard}", allowed=f"all shards: {whole}")
        return file
    _require_all(path, shards)
    infos = [open_token_file(shard, verify=verify).info for shard in shards]
    for index, (shard, info) in enumerate(zip(shards, infos, strict=True)):
        if info.shard != f"{index}/{len(shards)}":
            raise UserError(f"token file {shard} is shard {info.shard or '0/1'} by its sidecar: it was renamed")
        for name in (*TOKENIZER_FIELDS, "source_sha256", "split", "dtype"):
            a, b = getattr(infos[0], name), getattr(info, name)
            if a != b:
                problem = f"{shards[0]} and {shard} do not belong together: {name} is {a} and {b}"
                raise UserError(problem, allowed="shards of one source, split and tokenizer")
    sums: Any = {name: sum(getattr(info, name) for info in infos) for name in ("n_tokens", "n_bytes", "n_documents")}
    sha256 = hashlib.sha256("".join(f"{info.data_sha256}\n" for info in infos).encode()).hexdigest()
    joined = JoinedTokens(shards, [info.n_tokens for info in infos], np.dtype(infos[0].dtype).newbyteorder("<"))
    return TokenFile(path, dataclasses.replace(infos[0], **sums, data_sha256=sha256, shard=""), joined)


def _require_all(path: Path, shards: list[Path]) -> None:
    counts = sorted({int(shard.stem[-5:]) for shard in shards})
    if len(counts) > 1:
        problem = f"{path} names shards of {' and of '.join(map(str, counts))} files"
        raise UserError(problem, allowed="one set of shards; move the others away")
    if missing := [i for i in range(counts[0]) if shard_path(path, i, counts[0]) not in shards]:
        problem = f"of the {counts[0]} shards of {path}, {len(missing)} are missing, the first is {missing[0]}"
        raise UserError(problem, hint=f"orthojax prepare with --shard={missing[0]}/{counts[0]}")


def _read_sidecar(path: Path, again: str) -> TokenFileInfo:
    sidecar = sidecar_path(path)
    if not os.path.lexists(sidecar):
        raise UserError(f"token file {path} has no sidecar {sidecar.name}", hint=again)
    try:
        values = read_json(sidecar, "sidecar")
    except UserError as error:
        raise UserError(str(error).partition("\n")[0], hint=again) from None
    if values.pop(_CHECKSUM, None) != _checksum(values):
        raise UserError(f"sidecar {sidecar} was edited: it does not match its checksum", hint=again)
    fields = {field.name for field in dataclasses.fields(TokenFileInfo)}
    if values.get("format_version") != FORMAT_VERSION or values.keys() != fields:
        raise UserError(f"sidecar {sidecar} does not describe a token file of format {FORMAT_VERSION}", hint=again)
    return TokenFileInfo(**values)


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sample_sha256(path: Path) -> str:
    """Computes the sha256 of 16 blocks of 4,096 bytes, evenly spread over the file; of all if there are fewer."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        if size <= _SAMPLE_BLOCKS * _SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for i in range(_SAMPLE_BLOCKS):
                file.seek((size - _SAMPLE_BYTES) * i // (_SAMPLE_BLOCKS - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
