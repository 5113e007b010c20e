"""Writes token files from a stream of documents of any length, so that an interrupted call resumes where it was.

While it grows, `train.bin` is called `train.bin.partial`; `train.bin.partial.json` says how much of it counts and where
to resume in the source. Documents are tokenised one by one, so the file does not show where a call was interrupted.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from orthojax.data.documents import Document, Piece, Source
from orthojax.data.sealed import is_count, read_sealed, sealed
from orthojax.data.token_files import (
    FORMAT_VERSION,
    TokenFile,
    TokenFileInfo,
    open_token_file,
    sample_sha256,
    shard_path,
    sidecar_path,
    token_dtype,
    write_sidecar,
)
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError
from orthojax.files import try_lock

_BATCH_CHARACTERS = 1 << 20  # text tokenised at once, which bounds memory and paces the progress
_LONGEST_TEXT = 1 << 22  # characters; a longer document is tokenised in pieces
_SAVE_SECONDS = 10.0
_AT_ONCE = 3  # batches that are tokenised while others are read and written

Report = Callable[[int, int, int], Any]  # (bytes of the source done, bytes in total, tokens so far)


@dataclasses.dataclass(frozen=True)
class Part:
    """A split of a source."""

    name: str  # of the token file, without its suffix
    split: str  # for the sidecar
    source: Source
    text: Callable[[Document], str]  # what of a document belongs to it; '' if nothing does


class _Text(NamedTuple):
    text: str
    writer: "_Writer"
    piece: int
    position: int
    done_bytes: int


class _State(NamedTuple):
    """Contents of `.partial.json`."""

    piece: int = 0
    position: int = -1  # -1 before the first document of a piece
    n_tokens: int = 0
    n_bytes: int = 0
    n_documents: int = 0
    done_bytes: int = 0  # of the source, on disk


def _is_state(values: Any) -> bool:
    """Whether a JSON value has the fields of `_State`."""
    if type(values) is not dict or values.keys() != set(_State._fields):
        return False
    return all(is_count(value) or (name, value) == ("position", -1) for name, value in values.items())


def write_token_files(
    folder: Path,
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    *,
    shard: tuple[int, int] = (0, 1),
    report: Report | None = None,
) -> list[TokenFile]:
    """Tokenises splits of one source, or a shard of it, into token files; resumes what an earlier call left.

    The source is read once for all splits; reading, tokenising and writing overlap.

    Args:
      folder: Gets the files; those that are complete and were created from the same are kept.
      parts: The splits, all of the same source.
      tokenizer: Gives the ids. To bound memory, a document of more than 4 million characters is tokenised in pieces
        that end with a line; only there may its ids differ from those of the whole.
      shard: (i, n) takes the i-th of n consecutive parts of the source.
      report: Called after every batch.

    Raises:
      UserError: If a file, complete or partial, was created from something else, another process writes it, it cannot
        be written, or there is no text for it; and as the reading of the source.
    """
    source, paths = parts[0].source, [shard_path(folder / f"{part.name}.bin", *shard) for part in parts]
    created_from = {
        "format_version": FORMAT_VERSION,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.spec,
        "tokenizer_sha256": tokenizer.sha256,
        "source": source.description,
        "source_sha256": source.sha256,
        "shard": "" if shard[1] == 1 else f"{shard[0]}/{shard[1]}",
    }
    empty = []
    try:
        with contextlib.ExitStack() as stack:
            opened = [
                _open(path, part.text, {**created_from, "split": part.split}, stack)
                for path, part in zip(paths, parts, strict=True)
            ]
            if writers := [writer for writer in opened if writer]:
                _run(writers, tokenizer, source.pieces(*shard), report or (lambda *_: None))
            for writer in writers:
                if writer.state.n_documents:
                    writer.complete(source.file_count)
                else:
                    empty.append(writer.path.name)
    except OSError as error:
        raise UserError(f"cannot write the token file {', '.join(map(str, paths))}: {error}") from error
    if empty:
        raise UserError(
            f"no text for the token file {', '.join(empty)} in {source.description}",
            allowed="at least one document" + (" in each shard: take fewer" if shard[1] > 1 else ""),
        )
    return [open_token_file(path) for path in paths]


def _open(path: Path, text: Callable, created_from: dict[str, Any], stack: contextlib.ExitStack) -> "_Writer | None":
    """A writer that resumes at the end of the file; None if it is complete."""
    partial, notes = _partial_paths(path)
    if path.exists() and (sidecar_path(path).exists() or not notes.exists()):
        _require_same(path, open_token_file(path).info.__dict__, created_from, "the same command, or another --output")
        notes.unlink(missing_ok=True)
        return None
    # In place without its sidecar: a call was killed in between, or another is just there, with its lock on the file.
    in_place = path.exists()
    file = stack.enter_context(open(path, "r+b") if in_place else open(partial, "a+b"))
    locked, complete = try_lock(file), path.exists() and sidecar_path(path).exists()
    if not in_place and path.exists():  # another process has just moved it there
        partial.unlink(missing_ok=True)
        locked = False
    if complete:
        return _open(path, text, created_from, stack)
    if not locked:
        raise UserError(f"another process is writing {path}", allowed="one process for each shard: --shard=i/n")
    if in_place:
        os.replace(path, partial)
    sidecar_path(path).unlink(missing_ok=True)  # of a file that was deleted
    writer = _Writer(path, text, file, created_from)
    stack.callback(lambda: writer.state.n_documents or partial.unlink())  # nothing to resume
    return writer


def _run(writers: "list[_Writer]", tokenizer: Tokenizer, pieces: list[Piece], report: Report) -> None:
    """Continues to the end of the pieces; what is done by then is kept whatever happens."""
    total, saved = sum(piece.n_bytes for piece in pieces), time.monotonic()
    waiting: collections.deque[tuple[list[_Text], Any]] = collections.deque()

    def log(complete: bool = False) -> None:
        # Below the total until all files are complete; and the last line may reach beyond a shard.
        done = total if complete else min(max(writer.state.done_bytes for writer in writers), max(total - 1, 0))
        report(done, total, sum(writer.state.n_tokens for writer in writers))

    def append() -> None:
        group, future = waiting.popleft()
        group[0].writer.append(group, *future.result())
        log()

    log()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for group in _batches(_texts(pieces, writers)):
                waiting.append((group, pool.submit(_encode, tokenizer, [item.text for item in group])))
                if len(waiting) > _AT_ONCE:
                    append()
                if time.monotonic() - saved > _SAVE_SECONDS:
                    for writer in writers:
                        writer.save()
                    saved = time.monotonic()
            while waiting:
                append()
        finally:
            for writer in writers:
                writer.save()
    log(complete=True)


class _Writer:
    """An open partial file, and what is known about its contents."""

    def __init__(self, path: Path, text: Callable[[Document], str], file: IO[bytes], created_from: dict[str, Any]):
        self.path, self.text = path, text
        self._file, self._created_from = file, created_from
        self._partial, self._notes = _partial_paths(path)
        self.state = _State()
        if os.path.lexists(self._notes):
            both = f"it and {self._partial.name}"
            again = f"delete {both} and start the command again"
            content = read_sealed(self._notes, "note", again, required=True)
            before: Any = content.get("made_of")
            state: Any = content.get("state")
            if type(before) is not dict or not _is_state(state):
                raise UserError(f"note {self._notes} is corrupt", hint=again)
            _require_same(self._notes, before, created_from, f"the same command, or delete {both}")
            self.state = _State(**state)
        size = self.state.n_tokens * np.dtype(created_from["dtype"]).itemsize
        if file.seek(0, os.SEEK_END) < size:
            raise UserError(
                f"{file.name} is shorter than {self._notes.name} says",
                hint="delete both files and start the command again",
            )
        file.truncate(size)
        file.seek(0)
        self._digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]

    def append(self, group: list[_Text], ids: np.ndarray, n_bytes: int) -> None:
        """Writes the ids of some documents."""
        self._file.write(ids.data)
        self._digest.update(ids.data)
        state, last = self.state, group[-1]
        counts = (state.n_tokens + len(ids), state.n_bytes + n_bytes, state.n_documents + len(group))
        self.state = _State(last.piece, last.position, *counts, last.done_bytes)

    def save(self) -> None:
        """The ids first, then the note that they count: in the other order a kill would leave a hole."""
        if self.state.n_documents:
            self._file.flush()
            os.fsync(self._file.fileno())
            content = {"made_of": self._created_from, "state": self.state._asdict()}
            temporary = self._notes.with_name(self._notes.name + ".new")  # one name, so that kills leave one at most
            temporary.write_text(sealed(content), encoding="utf-8")
            os.replace(temporary, self._notes)

    def complete(self, file_count: int) -> None:
        """Moves the file into place, with its sidecar."""
        counts = {name: getattr(self.state, name) for name in ("n_tokens", "n_bytes", "n_documents")}
        info = TokenFileInfo(
            **self._created_from,
            **counts,
            file_count=file_count,
            data_sha256=self._digest.hexdigest(),
            sample_sha256=sample_sha256(self._partial),
        )
        os.replace(self._partial, self.path)
        write_sidecar(self.path, info)
        self._notes.unlink(missing_ok=True)  # another process that found the file complete may have done it


def _texts(pieces: list[Piece], writers: list[_Writer]) -> Iterator[_Text]:
    """What each writer is to take, from where the first of them is."""
    places = [(writer.state.piece, writer.state.position) for writer in writers]
    first, position = min(places)
    before = 0
    for index, piece in enumerate(pieces):
        if index >= first:
            for item in piece.read(position if index == first and position >= 0 else piece.start):
                for writer, place in zip(writers, places, strict=True):
                    if (index, item.position) > place and (text := writer.text(item.document)):
                        yield _Text(text, writer, index, item.position, before + item.offset - piece.offset)
        before += piece.n_bytes


def _batches(texts: Iterable[_Text]) -> Iterator[list[_Text]]:
    """Groups of about a million characters of text, each for one writer."""
    groups: dict[_Writer, list[_Text]] = {}
    characters: collections.Counter[_Writer] = collections.Counter()
    for item in texts:
        groups.setdefault(item.writer, []).append(item)
        characters[item.writer] += len(item.text)
        if characters[item.writer] >= _BATCH_CHARACTERS:
            yield groups.pop(item.writer)
            del characters[item.writer]
    yield from groups.values()


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """The ids of some documents as they stand in a token file, and the UTF-8 bytes of the documents."""
    pieces = [piece for text in texts for piece in _cut(text)]
    rows = tokenizer.encode_batch([piece for piece, _ in pieces])
    end = np.array([tokenizer.eos_id], np.int32)
    parts = [part for row, (_, last) in zip(rows, pieces, strict=True) for part in ((row, end) if last else (row,))]
    return np.concatenate(parts).astype(token_dtype(tokenizer.vocab_size)), sum(len(text.encode()) for text in texts)


def _cut(text: str) -> Iterator[tuple[str, bool]]:
    """The pieces of a document, and whether each is the last one."""
    begin = 0
    while len(text) - begin > _LONGEST_TEXT:
        end = text.rfind("\n", begin, begin + _LONGEST_TEXT) + 1 or begin + _LONGEST_TEXT
        yield text[begin:end], False
        begin = end
    yield text[begin:], True


def _partial_paths(path: Path) -> tuple[Path, Path]:
    """The file while it grows, and the note on how far it is."""
    return path.with_name(path.name + ".partial"), path.with_name(path.name + ".partial.json")


def _require_same(path: Path, before: dict[str, Any], created_from: dict[str, Any], allowed: str) -> None:
    for name, value in created_from.items():
        if before.get(name) != value:
            raise UserError(
                f"{path} was created with a different {name}: {before.get(name)!r}, not {value!r}", allowed=allowed
            )
