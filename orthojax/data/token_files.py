"""Token files: written whole, checked when they are opened, and several of them read as one.

A token file has all ids of a corpus in one flat little-endian array; `train.bin` has its sidecar in `train.json`.
Documents follow one after the other, each ended by the tokenizer's end-of-text id. The files of datatrove's tokenizers
(`x.ds` beside `x.ds.index` and `x.ds.metadata`) are read as well.
"""

import bisect
import dataclasses
import glob
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from orthojax.config import from_dict, require
from orthojax.data.tokenizers import Tokenizer, make_tokenizer
from orthojax.errors import UserError
from orthojax.files import (
    is_remote,
    read_with_digest,
    require_file,
    write_atomically,
    write_with_digest,
)
from orthojax.stores import as_path, fetched

FORMAT_VERSION = 2
_ALWAYS_COMPARED_BYTES = 1 << 28  # takes a second at most
_COMPARED_IDS, _COMPARED_PARTS = 2**16, 64  # of a file without a sidecar, the rest is not read before training


@dataclasses.dataclass(frozen=True)
class TokenFileInfo:
    """The sidecar of a token file."""

    format_version: int
    dtype: Literal["uint16", "uint32"]  # `uint16` if every id fits, else `uint32`; little-endian
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


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """An open token file."""

    path: Path  # the .bin file, the first of several
    info: TokenFileInfo
    tokens: Any  # uint16 or uint32 [n_tokens], a read-only memory map; of several files `JoinedTokens`


class JoinedTokens:
    """Tokens of several files, read like one array [n]; nothing is copied but slices that cross the ends of files.

    >>> joined = JoinedTokens([np.arange(3), np.arange(3, 5), np.arange(5, 9)])
    >>> len(joined), joined[2:6], joined[8:99]
    (9, array([2, 3, 4, 5]), array([8]))
    """

    def __init__(self, parts: Sequence[np.ndarray]):
        """Joins arrays [n] of one dtype, at least one."""
        self.dtype, self._parts = parts[0].dtype, parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        found, i = [], bisect.bisect_right(self._ends, start)
        while i < len(self._parts) and (before := self._ends[i] - len(self._parts[i])) < stop:
            found.append(self._parts[i][max(start - before, 0) : stop - before])
            i += 1
        return found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, self.dtype)])


def write_token_file(
    path: Path,
    created_from: dict[str, Any],
    batches: Iterable[tuple[np.ndarray, int, int]],
    *,
    may_be_empty: bool = False,
) -> None:
    """Writes a token file and its sidecar; the .bin file appears when both are complete.

    A batch has the ids of some documents, each with its end-of-text id; the number of documents; and the bytes of their
    texts in UTF-8. `created_from` has the other fields of the sidecar, which do not depend on the contents.
    """
    dtype = np.dtype(created_from["dtype"]).newbyteorder("<")

    def write(file: IO[bytes]) -> None:
        digest, n_tokens, n_documents, n_bytes = hashlib.sha256(), 0, 0, 0
        for ids, documents, size in batches:
            data = ids.astype(dtype).tobytes()
            file.write(data)
            digest.update(data)
            n_tokens, n_documents, n_bytes = n_tokens + len(ids), n_documents + documents, n_bytes + size
        if not n_tokens and not may_be_empty:
            problem = f"no text for the token file {path.name} in {created_from['source']}"
            raise UserError(problem, allowed="at least one document")
        counted: dict[str, Any] = {"n_tokens": n_tokens, "n_documents": n_documents, "n_bytes": n_bytes}
        info = TokenFileInfo(**created_from | counted, data_sha256=digest.hexdigest())
        write_with_digest(sidecar_path(path), dataclasses.asdict(info))

    write_atomically(path, write)


def sidecar_path(path: str | Path) -> Path:
    """Returns the sidecar of a token file: the same name with .json."""
    return Path(path).with_suffix(".json")


def open_token_file(path: str | Path, *, verify: bool = False, tokenizer: str = "") -> TokenFile:
    """Opens a token file, or all that a pattern such as `train-*.bin` matches, sorted by name, as one.

    Each must be what its sidecar describes. Up to 256 MB in all, or with `verify`, the sha256 is compared, which reads
    everything; otherwise only the sizes. Files of datatrove (.ds) have no sidecar and need `tokenizer`, as for
    `make_tokenizer`; the size of their text is not known (`n_bytes` is 0).

    Raises:
      UserError: If a file or its sidecar is missing or damaged, they do not belong together, or there is no token.
    """
    paths = _matches(str(path))
    compare = verify or sum(os.path.getsize(each) for each in paths if os.path.isfile(each)) <= _ALWAYS_COMPARED_BYTES
    known = paths[0].suffix == ".ds" and tokenizer and not tokenizer.startswith("bpe:")
    made = make_tokenizer(tokenizer, ()) if known else None
    files = [_open_datatrove(each, made) if each.suffix == ".ds" else _open_one(each, compare) for each in paths]
    first, infos = files[0], [file.info for file in files]
    if len(files) == 1:
        return first
    if len({(info.dtype, info.tokenizer_sha256, info.split) for info in infos}) > 1:
        raise UserError(f"{path} matches files of several tokenizers or splits", allowed="those of one")
    whole: dict[str, Any] = {n: sum(getattr(info, n) for info in infos) for n in ("n_tokens", "n_bytes", "n_documents")}
    for name in ("source_sha256", "data_sha256"):
        whole[name] = hashlib.sha256(" ".join(getattr(info, name) for info in infos).encode()).hexdigest()
    if not whole["n_tokens"]:
        raise UserError(f"there are no tokens in {path}", allowed="files with at least one document")
    whole["file_count"] = sum(info.file_count for info in infos)
    return TokenFile(first.path, dataclasses.replace(first.info, **whole), JoinedTokens([f.tokens for f in files]))


def fetched_pattern(pattern: str, cache_dir: Path) -> str:
    """Copies token files of an object store, with what is beside them, into the cache; they are mapped into memory."""
    path = as_path(pattern, "token file")
    if not is_remote(path):
        return pattern
    found = sorted(path.parent.glob(path.name))
    if not found:
        raise UserError(f"no token file matches {pattern}", allowed="the pattern of token files")
    beside = [each for of in found for each in (of.with_suffix(".json"), of.with_name(f"{of.name}.index"))]
    copies = [fetched(each, cache_dir) for each in (*found, *beside, path.with_name("tokenizer.json")) if each.exists()]
    for gone in {*copies[0].parent.glob(path.name)} - {*copies}:  # else the pattern would match what was deleted there
        gone.unlink(missing_ok=True)
    return str(copies[0].with_name(path.name))


def _matches(pattern: str) -> list[Path]:
    """Returns the files that a pattern matches; refuses it if `prepare` has not yet made all that belong together."""
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [Path(pattern)]
    paths = [Path(found) for found in sorted(glob.glob(pattern))]
    if not paths:
        problem = f"no token file matches {pattern}"
        raise UserError(problem, allowed="the pattern of token files, such as DIR/train-*.bin")
    sets: dict[Path, list[int]] = {}
    for path in paths:
        if numbered := re.fullmatch(r"(.*)-(\d+)-of-(\d+)", path.stem):
            sets.setdefault(path.with_name(f"{numbered[1]}-*-of-{numbered[3]}"), []).append(int(numbered[2]))
    for of_one, numbers in sets.items():
        if missing := sorted({*range(int(of_one.name.rpartition("-")[2]))} - {*numbers}):
            problem = f"{len(missing)} token files of {of_one} are missing, the first is number {missing[0]}"
            raise UserError(problem, allowed="all of them: run the same orthojax prepare until it ends")
    if len(sets) > 1 or (sets and sum(map(len, sets.values())) < len(paths)):
        raise UserError(f"{pattern} matches more than {next(iter(sets))}", allowed="the files of one call of prepare")
    return paths


def _open_one(path: Path, compare: bool) -> TokenFile:
    again = f"rebuild it with orthojax prepare or, if {path.parent} is a cache, delete that folder"
    require_file(path, "token file")
    try:
        info = from_dict(TokenFileInfo, read_with_digest(sidecar_path(path), "sidecar"), str(sidecar_path(path)))
        require(info.format_version == FORMAT_VERSION, f"its sidecar is of format {info.format_version}")
        size, expected = path.stat().st_size, info.n_tokens * np.dtype(info.dtype).itemsize
        require(size == expected, f"it has {size} bytes, its sidecar says {expected}")
        if compare:
            with path.open("rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == info.data_sha256
            require(same, "it does not have the sha256 of its sidecar: it was changed")
    except UserError as error:
        raise UserError(f"token file {path}: {str(error).splitlines()[0]}", hint=again) from None
    return TokenFile(path, info, _map(path, info.dtype))


def _map(path: Path, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype).newbyteorder("<")
    return np.memmap(path, kind, "r") if path.stat().st_size else np.empty(0, kind)  # none of length 0 can be mapped


def _open_datatrove(path: Path, tokenizer: Tokenizer | None) -> TokenFile:
    """Opens ids (x.ds) and the ends of documents (x.ds.index, uint64 [n]) of datatrove.

    The data_sha256 covers the size of the file, its index, and of its ids a few million, spread evenly; the same ids
    are compared with the tokenizer's.
    """
    index = path.with_name(f"{path.name}.index")
    require_file(path, "token file")
    require_file(index, "index of the token file")
    if tokenizer is None:
        allowed = "data.tokenizer=PATH of the tokenizer that made them"
        raise UserError(f"{path} does not say what its ids mean", allowed=allowed)
    ends, size = np.frombuffer(index.read_bytes(), "<u8"), path.stat().st_size
    n_tokens = int(ends[-1]) if len(ends) else 0
    if size not in (2 * n_tokens, 4 * n_tokens) or not n_tokens:
        problem = f"{path} has {size} bytes, its index says {n_tokens} ids"
        raise UserError(problem, allowed="the files of one complete run of datatrove")
    dtype, digest = f"uint{8 * size // n_tokens}", hashlib.sha256(f"{size} ".encode() + ends.tobytes())
    ids = _map(path, dtype)
    parts = np.linspace(0, max(n_tokens - _COMPARED_IDS, 0), _COMPARED_PARTS).astype(int)
    for some in (ids[start : start + _COMPARED_IDS] for start in dict.fromkeys(parts.tolist())):
        digest.update(some.tobytes())
        if (largest := int(some.max(initial=0))) >= tokenizer.vocab_size:
            problem = f"{path} has token {largest}, data.tokenizer has {tokenizer.vocab_size}"
            raise UserError(problem, allowed="the tokenizer that made the file")
    info = TokenFileInfo(
        *(FORMAT_VERSION, dtype, n_tokens, 0, len(ends)),  # pyright: ignore
        *(tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.spec, tokenizer.sha256),
        *("datatrove", "", 1, "", digest.hexdigest()),
    )
    return TokenFile(path, info, _map(path, dtype))
