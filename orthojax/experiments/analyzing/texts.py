"""The text that a model is measured on, as rows of its own tokens in a file: any amount, one document in memory."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from orthojax.config import ModelConfig
from orthojax.data.sources import embedded_corpus, find_files, text_corpus
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError
from orthojax.files import parse_json, read_again, require_file, write_atomically, write_text

TOPICS, STDLIB = "topics", "stdlib"
_PIECE = 1 << 20  # characters that are tokenised at a time; a longer document is cut after a line


@dataclasses.dataclass(frozen=True)
class Cut:
    """How tokens are cut into rows.

    Attributes:
      rows: At most that many; 0 for all that there are.
      length: T, tokens that the model sees; rows have one more, the last target.
      bos: Whether every row starts with the tokenizer's BOS token.
    """

    rows: int
    length: int
    bos: bool = False


class Text(NamedTuple):
    """Rows of tokens.

    Attributes:
      name: In results.
      rows: int32 [rows, T + 1], on disk.
      sha256: Of the rows.
      source: What it is, for reports, with its own sha256.
      bits_per_nat_of_loss: Bits per byte of text for a loss of one nat per token; None for token ids without text.
    """

    name: str
    rows: np.ndarray
    sha256: str
    source: str
    bits_per_nat_of_loss: float | None


class _Words(NamedTuple):
    """A text before it is tokenised."""

    documents: Callable[[], Iterator[str]]
    source: str
    sha256: str


def open_text(
    name: str, files: Sequence[str], tokenizer: Tokenizer, model: ModelConfig, cut: Cut, folder: Path
) -> Text:
    """Tokenises text files for a model, or finds what an earlier call tokenised.

    Args:
      name: Of the text.
      files: As `orthojax.data.sources.find_files` takes them; or one of `topics`, the text of pydoc_data.topics
        joined by blank lines, and `stdlib`, the embedded corpus. Between documents is an end-of-text token.
      tokenizer: The model's.
      model: Of which the vocabulary and the largest length are read.
      cut: How rows are cut.
      folder: Where rows are kept.

    Raises:
      UserError: For files that cannot be read, less text than one row, or ids that the model does not have.
    """
    words = _words(files)
    begins = [tokenizer.bos_id] if cut.bos else []
    key = json.dumps([words.sha256, tokenizer.sha256, dataclasses.astuple(cut), *begins])
    write = functools.partial(_tokenise, words, tokenizer, cut)
    source = words.source + ("; every row begins with the BOS token" if cut.bos else "")
    return _kept(name, source, folder / hashlib.sha256(key.encode()).hexdigest()[:16], write, model, cut)


def open_ids(name: str, path: Path, model: ModelConfig, cut: Cut, folder: Path) -> Text:
    """Rows from token ids in a .npy file: [rows, T + 1 or more], or a stream [N] that is cut into rows.

    Raises:
      UserError: For a file that holds no integers of such a shape, or ids that the model lacks.
    """
    require_file(path, "file of token ids")
    if cut.bos:
        raise UserError("--bos is for text", allowed="token ids that have the BOS token already")
    try:
        ids = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise UserError(f"{path} is no .npy file: {error}") from None
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{path} holds {ids.dtype} {ids.shape}", allowed="integers [rows, length + 1] or [tokens]")
    width = cut.length + 1
    if ids.ndim == 1:
        ids = ids[: len(ids) // width * width].reshape(-1, width)
    if ids.shape[1] < width or not len(ids):
        raise UserError(f"{path} holds {ids.shape}: no row of {width} tokens", allowed="a smaller --length")
    ids = ids[: cut.rows or None, :width]

    def write(file: IO[bytes]) -> float | None:
        for start in range(0, len(ids), 1024):
            file.write(_checked(ids[start : start + 1024], model.vocab_size, str(path)).tobytes())

    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    key = hashlib.sha256(json.dumps([digest, dataclasses.astuple(cut)]).encode()).hexdigest()[:16]
    return _kept(name, f"{path.name} (token ids, sha256 {digest[:12]})", folder / key, write, model, cut)


def require_files(files: Sequence[str]) -> None:
    """Checks that the files of a text are there.

    Raises:
      UserError: As `find_files`.
    """
    if list(files) not in ([TOPICS], [STDLIB]):
        find_files(files)


def topics_text() -> str:
    """The text of pydoc_data.topics, Python's documentation, with an empty line between two topics."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def _words(files: Sequence[str]) -> _Words:
    if list(files) == [TOPICS]:
        text = topics_text()
        digest = hashlib.sha256(text.encode()).hexdigest()
        return _Words(lambda: iter([text]), f"pydoc_data.topics (Python's documentation, sha256 {digest[:12]})", digest)
    source = embedded_corpus() if list(files) == [STDLIB] else text_corpus(files)
    about = f"{source.description} (sha256 {source.sha256[:12]})"
    return _Words(lambda: (document.text for document in source.documents()), about, source.sha256)


def _kept(
    name: str, source: str, path: Path, write: Callable[[IO[bytes]], float | None], model: ModelConfig, cut: Cut
) -> Text:
    """The rows at a path, which are written unless an earlier call did."""
    rows, about = path.with_suffix(".tokens"), path.with_suffix(".json")
    found = read_again(about, "tokens", lambda content: parse_json(content, "its content"), print)
    size = rows.stat().st_size if rows.is_file() else -1
    if not isinstance(found, dict) or found.get("bytes") != size:
        path.parent.mkdir(parents=True, exist_ok=True)
        ratio: list[float | None] = []
        write_atomically(rows, lambda file: ratio.append(write(file)))
        with open(rows, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found = {"bytes": rows.stat().st_size, "sha256": digest, "bits_per_nat_of_loss": ratio[0]}
        write_text(about, json.dumps(found) + "\n")
    if not found["bytes"]:
        raise UserError(
            f"the text {name} ({source}) has fewer than {cut.length + 1} tokens, one row",
            allowed="more text, or a smaller --length",
        )
    tokens = np.memmap(rows, np.int32, "r").reshape(-1, cut.length + 1)
    for start in range(0, len(tokens), 4096):
        _checked(tokens[start : start + 4096], model.vocab_size, f"the text {name}")
    return Text(name, tokens, found["sha256"], source, found["bits_per_nat_of_loss"])


def _tokenise(words: _Words, tokenizer: Tokenizer, cut: Cut, file: IO[bytes]) -> float | None:
    """Writes rows; returns bits per byte for a loss of one nat per token, of what was read."""
    width = cut.length + (not cut.bos)
    left, rows, tokens, size = np.zeros(0, np.int32), 0, 0, 0
    for piece, ends in _pieces(words.documents()):
        ids = tokenizer.encode_batch([piece])[0]
        tokens, size = tokens + len(ids), size + len(piece.encode())
        left = np.concatenate([left, ids, *([[tokenizer.eos_id]] if ends else [])]).astype(np.int32)
        full = len(left) // width
        if cut.rows:
            full = min(full, cut.rows - rows)
        new = left[: full * width].reshape(full, width)
        if cut.bos:
            new = np.concatenate([np.full((full, 1), tokenizer.bos_id, np.int32), new], axis=1)
        file.write(np.ascontiguousarray(new).tobytes())
        left, rows = left[full * width :], rows + full
        if cut.rows and rows == cut.rows:
            break
    return tokens / size / math.log(2) if size else None


def _pieces(documents: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """(piece, whether its document ends with it)."""
    for text in documents:
        start = 0
        while start < len(text):
            stop = len(text) if len(text) - start <= _PIECE else text.find("\n", start + _PIECE) + 1 or len(text)
            yield text[start:stop], stop == len(text)
            start = stop


def _checked(ids: Any, vocab_size: int, where: str) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise UserError(
            f"{where} has the token id {wrong}, which the model does not have", allowed=f"0 to {vocab_size - 1}"
        )
    return np.ascontiguousarray(ids, np.int32)
