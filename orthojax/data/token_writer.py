"""Writes token files from a stream of any length, so that a stopped call goes on where it was.

While it grows, `train.bin` is called `train.bin.partial`; `train.bin.partial.json` says how much of it counts and where
in the source it goes on. Documents are tokenised one by one, so where a call was stopped does not show in the file.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from orthojax.data.encoding import batches, encode, token_dtype
from orthojax.data.sources import Piece, Source
from orthojax.data.text_files import Document
from orthojax.data.token_files import (
    TokenFile,
    TokenFileInfo,
    describe_tokenizer,
    open_token_file,
    sample_sha256,
    sidecar_path,
    write_sidecar,
)
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError
from orthojax.files import try_lock

_SAVE_SECONDS = 10.0
_AT_ONCE = 3  # batches that are tokenised while others are read and written

Report = Callable[[int, int, int], Any]
"""Called now and then with bytes of the source that are done and in total, and the number of tokens so far."""


@dataclasses.dataclass(frozen=True)
class Output:
    """A token file to make of a source.

    Attributes:
      path: The .bin file.
      split: Its name, for the sidecar.
      part: What of a document is taken; '' leaves it out.
    """

    path: Path
    split: str
    part: Callable[[Document], str]


class _Text(NamedTuple):
    text: str
    writer: "_Writer"
    piece: int
    position: int
    done_bytes: int


@dataclasses.dataclass
class _State:
    """How far a file is; what stands in `.partial.json`."""

    piece: int = 0
    position: int = -1  # -1 before the first document of a piece
    n_tokens: int = 0
    n_bytes: int = 0
    n_documents: int = 0
    done_bytes: int = 0  # of the source, on the disk


def write_token_files(
    outputs: Sequence[Output],
    source: Source,
    tokenizer: Tokenizer,
    *,
    shard: tuple[int, int] = (0, 1),
    report: Report | None = None,
) -> list[TokenFile]:
    """Tokenises a source, or a shard of it, into token files; goes on with what an earlier call left.

    The source is read once for all of them. Reading, tokenising and writing overlap; memory is bounded by the longest
    document.

    Args:
      outputs: The files. Nothing is done for those that are complete and of the same making.
      source: The documents.
      tokenizer: Gives the ids.
      shard: (i, n) takes the i-th of n consecutive parts of the source.
      report: Called after every batch.

    Raises:
      UserError: Where a file or what is left of it is of another making, another process writes it, it cannot be
        written, or there are no documents for it; and as the reading of the source.
    """
    made_of = {
        **describe_tokenizer(tokenizer),
        "source": source.description,
        "source_sha256": source.sha256,
        "shard": "" if shard[1] == 1 else f"{shard[0]}/{shard[1]}",
    }
    try:
        with contextlib.ExitStack() as stack:
            opened = [_open(output, tokenizer, {**made_of, "split": output.split}, stack) for output in outputs]
            if writers := [writer for writer in opened if writer]:
                _run(writers, tokenizer, source.pieces(*shard), report or (lambda *_: None))
            made = [writer for writer in writers if writer.state.n_documents]
            for writer in made:
                writer.complete(source.file_count)
    except OSError as error:
        names = ", ".join(str(output.path) for output in outputs)
        raise UserError(f"cannot write the token file {names}: {error}") from error
    if len(made) < len(writers):
        raise UserError(
            f"no documents for the token file {', '.join(str(w.path) for w in writers if w not in made)}",
            allowed="at least one document" + (" in each shard: take fewer" if shard[1] > 1 else ""),
        )
    return [open_token_file(output.path) for output in outputs]


def _open(
    output: Output, tokenizer: Tokenizer, made_of: dict[str, Any], stack: contextlib.ExitStack
) -> "_Writer | None":
    """A writer that goes on where the file ends; None where it is complete."""
    path = output.path
    partial, notes = _partial_paths(path)
    if path.exists() and (sidecar_path(path).exists() or not notes.exists()):
        _require_same_file(path, made_of)
        notes.unlink(missing_ok=True)
        return None
    # In its place without its sidecar: a call was killed in between, or another one is just there, with its lock on it.
    in_place = path.exists()
    file = stack.enter_context(open(path, "r+b") if in_place else open(partial, "a+b"))
    locked, complete = try_lock(file), path.exists() and sidecar_path(path).exists()
    if not in_place and path.exists():  # what another process has just moved there
        partial.unlink(missing_ok=True)
        locked = False
    if complete:
        _require_same_file(path, made_of)
        return None
    if not locked:
        raise UserError(f"another process is writing {path}", allowed="one process for each shard: --shard=i/n")
    if in_place:
        os.replace(path, partial)
    sidecar_path(path).unlink(missing_ok=True)  # of a file that was deleted
    writer = _Writer(output, file, tokenizer, made_of)
    stack.callback(writer.remove_if_empty)
    return writer


def _run(writers: "list[_Writer]", tokenizer: Tokenizer, pieces: list[Piece], report: Report) -> None:
    """Goes on to the end of the pieces; what is done by then is kept whatever happens."""
    total = sum(piece.n_bytes for piece in pieces)
    saved = time.monotonic()

    def tell() -> None:
        done = max(writer.state.done_bytes for writer in writers)
        # Not all before all files are; and the last line may reach beyond a shard.
        report(min(done, max(total - 1, 0)), total, sum(writer.state.n_tokens for writer in writers))

    def append() -> None:
        group, future = waiting.popleft()
        group[0].writer.append(group, *future.result())
        tell()

    tell()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting: collections.deque[tuple[list[_Text], Any]] = collections.deque()
        try:
            for group in batches(_texts(pieces, writers), lambda item: item.text, lambda item: item.writer):
                waiting.append((group, pool.submit(encode, tokenizer, [item.text for item in group])))
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
    report(total, total, sum(writer.state.n_tokens for writer in writers))


class _Writer:
    """The open partial file of an output, with what is known about its contents."""

    def __init__(self, output: Output, file: IO[bytes], tokenizer: Tokenizer, made_of: dict[str, Any]):
        self.path, self.part = output.path, output.part
        self._file, self._made_of = file, made_of
        self._partial, self._notes = _partial_paths(output.path)
        self.state = _read_notes(self._notes, made_of) if self._notes.exists() else _State()
        size = self.state.n_tokens * token_dtype(tokenizer.vocab_size).itemsize
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
        self.state = _State(
            piece=last.piece,
            position=last.position,
            n_tokens=state.n_tokens + len(ids),
            n_bytes=state.n_bytes + n_bytes,
            n_documents=state.n_documents + len(group),
            done_bytes=last.done_bytes,
        )

    def save(self) -> None:
        """The ids first, then the note that they count: in the other order a kill would leave a hole."""
        if not self.state.n_documents:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        temporary = self._notes.with_name(self._notes.name + ".new")
        temporary.write_text(json.dumps({"made_of": self._made_of, "state": dataclasses.asdict(self.state)}))
        os.replace(temporary, self._notes)

    def remove_if_empty(self) -> None:
        """Leaves nothing where there would be nothing to go on with."""
        if not self.state.n_documents:
            self._partial.unlink()

    def complete(self, file_count: int) -> None:
        """Puts the file in its place, with its sidecar."""
        info = TokenFileInfo(
            **self._made_of,
            n_tokens=self.state.n_tokens,
            n_bytes=self.state.n_bytes,
            n_documents=self.state.n_documents,
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
                    if (index, item.position) > place and (text := writer.part(item.document)):
                        yield _Text(text, writer, index, item.position, before + item.offset - piece.offset)
        before += piece.n_bytes


def _partial_paths(path: Path) -> tuple[Path, Path]:
    """The file while it grows, and the note on how far it is."""
    return path.with_name(path.name + ".partial"), path.with_name(path.name + ".partial.json")


def _read_notes(notes: Path, made_of: dict[str, Any]) -> _State:
    try:
        content = json.loads(notes.read_bytes())
        state, before = _State(**content["state"]), content["made_of"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{notes} is damaged", hint=f"delete it and {notes.stem} and start the command again") from None
    _require_same(notes, before, made_of, f"the same command, or delete {notes.name} and {notes.stem}")
    return state


def _require_same_file(path: Path, made_of: dict[str, Any]) -> None:
    info = dataclasses.asdict(open_token_file(path).info)
    _require_same(path, info, made_of, "the same command, or another --output")


def _require_same(path: Path, before: dict[str, Any], made_of: dict[str, Any], allowed: str) -> None:
    for name, value in made_of.items():
        if before.get(name) != value:
            raise UserError(
                f"{path} is of another making: {name} was {before.get(name)!r}, is {value!r}", allowed=allowed
            )
