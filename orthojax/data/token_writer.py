"""Writes a token file from a stream of any length, so that a stopped call goes on where it was.

While it grows, `train.bin` is called `train.bin.partial`; `train.bin.partial.json` says how much of it counts and where
in the source it goes on. Documents are tokenised one by one, so where a call was stopped does not show in the file.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

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
from orthojax.locks import try_lock

_SAVE_SECONDS = 10.0
_AT_ONCE = 2  # batches that are tokenised while others are read and written

Report = Callable[[int, int, int], Any]
"""Called now and then with bytes of the source that are done and in total, and the number of tokens so far."""


class _Text(NamedTuple):
    text: str
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


def write_token_file(
    path: Path,
    source: Source,
    tokenizer: Tokenizer,
    *,
    split: str,
    part: Callable[[Document], str],
    shard: tuple[int, int] = (0, 1),
    report: Report | None = None,
) -> TokenFile:
    """Tokenises a source, or a shard of it, into a token file; goes on with what an earlier call left.

    Reading, tokenising and writing overlap; memory is bounded by the longest document.

    Args:
      path: The .bin file. Where it is complete and of the same making, nothing is done.
      source: The documents.
      tokenizer: Gives the ids.
      split: Its name, for the sidecar.
      part: What of a document is taken; '' leaves it out.
      shard: (i, n) takes the i-th of n consecutive parts of the source.
      report: Called after every batch.

    Raises:
      UserError: Where the file or what is left of it is of another making, another process writes it, it cannot be
        written, or there are no documents; and as the reading of the source.
    """
    made_of = {
        **describe_tokenizer(tokenizer),
        "source": source.description,
        "source_sha256": source.sha256,
        "split": split,
        "shard": "" if shard[1] == 1 else f"{shard[0]}/{shard[1]}",
    }
    pieces = source.pieces(*shard)
    partial, notes = path.with_name(path.name + ".partial"), path.with_name(path.name + ".partial.json")
    try:
        if finished := _finished(path, made_of, notes):
            return finished
        if path.exists():  # killed between the renaming of the file and the writing of its sidecar
            os.replace(path, partial)
        with open(partial, "a+b") as file:
            if not try_lock(file):
                raise UserError(f"another process is writing {path}", allowed="one process for each shard: --shard=i/n")
            if sidecar_path(path).exists():  # another process has just finished
                return open_token_file(path)
            writer = _Writer(file, notes, tokenizer, made_of)
            writer.run(pieces, part, report or (lambda *_: None))
            if not partial.exists():
                raise UserError(
                    f"no documents for the token file {path}",
                    allowed="at least one document" + (" in each shard: take fewer" if shard[1] > 1 else ""),
                )
            info = writer.info(source.file_count, sample_sha256(partial))
            os.replace(partial, path)
            write_sidecar(path, info)
            notes.unlink()
    except OSError as error:
        raise UserError(f"cannot write the token file {path}: {error}") from error
    return open_token_file(path)


class _Writer:
    """The open partial file, with what is known about its contents."""

    def __init__(self, file: IO[bytes], notes: Path, tokenizer: Tokenizer, made_of: dict[str, Any]):
        self._file, self._notes, self._tokenizer, self._made_of = file, notes, tokenizer, made_of
        self._itemsize = token_dtype(tokenizer.vocab_size).itemsize
        self._state = _read_notes(notes, made_of) if notes.exists() else _State()
        size = self._state.n_tokens * self._itemsize
        if file.seek(0, os.SEEK_END) < size:
            raise UserError(
                f"{file.name} is shorter than {notes.name} says", hint="delete both files and start the command again"
            )
        file.truncate(size)
        file.seek(0)
        self._digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]

    def run(self, pieces: list[Piece], part: Callable[[Document], str], report: Report) -> None:
        """Goes on to the end of the pieces; what is done by then is kept whatever happens."""
        total = sum(piece.n_bytes for piece in pieces)
        saved = time.monotonic()
        texts = _texts(pieces, part, self._state)
        report(self._state.done_bytes, total, self._state.n_tokens)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            waiting: collections.deque[tuple[list[_Text], Any]] = collections.deque()
            try:
                for group in batches(texts, lambda item: item.text):
                    waiting.append((group, pool.submit(encode, self._tokenizer, [item.text for item in group])))
                    if len(waiting) > _AT_ONCE:
                        self._append(*waiting.popleft())
                        report(self._state.done_bytes, total, self._state.n_tokens)
                    if time.monotonic() - saved > _SAVE_SECONDS:
                        self._save()
                        saved = time.monotonic()
                while waiting:
                    self._append(*waiting.popleft())
                report(total, total, self._state.n_tokens)
            finally:
                self._save()
                if not self._state.n_documents:  # nothing to go on with
                    os.unlink(self._file.name)

    def _append(self, group: list[_Text], future: Any) -> None:
        ids, n_bytes = future.result()
        self._file.write(ids.data)
        self._digest.update(ids.data)
        state, last = self._state, group[-1]
        self._state = _State(
            piece=last.piece,
            position=last.position,
            n_tokens=state.n_tokens + len(ids),
            n_bytes=state.n_bytes + n_bytes,
            n_documents=state.n_documents + len(group),
            done_bytes=last.done_bytes,
        )

    def _save(self) -> None:
        """The ids first, then the note that they count: in the other order a kill would leave a hole."""
        if not self._state.n_documents:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        temporary = self._notes.with_name(self._notes.name + ".new")
        temporary.write_text(json.dumps({"made_of": self._made_of, "state": dataclasses.asdict(self._state)}))
        os.replace(temporary, self._notes)

    def info(self, file_count: int, sample: str) -> TokenFileInfo:
        """The sidecar."""
        return TokenFileInfo(
            **self._made_of,
            n_tokens=self._state.n_tokens,
            n_bytes=self._state.n_bytes,
            n_documents=self._state.n_documents,
            file_count=file_count,
            data_sha256=self._digest.hexdigest(),
            sample_sha256=sample,
        )


def _texts(pieces: list[Piece], part: Callable[[Document], str], state: _State) -> Iterator[_Text]:
    before = 0
    for index, piece in enumerate(pieces):
        if index >= state.piece:
            start = state.position if index == state.piece and state.position >= 0 else piece.start
            for item in piece.read(start):
                if text := part(item.document):
                    yield _Text(text, index, item.position, before + item.offset - piece.offset)
        before += piece.n_bytes


def _read_notes(notes: Path, made_of: dict[str, Any]) -> _State:
    try:
        content = json.loads(notes.read_bytes())
        state, before = _State(**content["state"]), content["made_of"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{notes} is damaged", hint=f"delete it and {notes.stem} and start the command again") from None
    _require_same(notes, before, made_of, f"the same command, or delete {notes.name} and {notes.stem}")
    return state


def _require_same(path: Path, before: dict[str, Any], made_of: dict[str, Any], allowed: str) -> None:
    for name, value in made_of.items():
        if before.get(name) != value:
            raise UserError(
                f"{path} is of another making: {name} was {before.get(name)!r}, is {value!r}", allowed=allowed
            )


def _finished(path: Path, made_of: dict[str, Any], notes: Path) -> TokenFile | None:
    if path.exists() and (sidecar_path(path).exists() or not notes.exists()):
        file = open_token_file(path)
        _require_same(path, dataclasses.asdict(file.info), made_of, "the same command, or another --output")
        notes.unlink(missing_ok=True)
        return file
    return None
