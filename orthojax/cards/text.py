"""Rows of a model's own tokens: from text files, from files of token ids."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from orthojax.data import embedded_corpus, text_corpus
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError
from orthojax.files import require_file
from orthojax.train import Inputs


def _documents(files: Sequence[str]) -> tuple[Iterable[str], str]:
    """Returns the documents of several files, or of a text without files, and their description."""
    if list(files) == ["topics"]:
        from pydoc_data.topics import topics

        return ["\n\n".join(topics.values())], "pydoc_data.topics (Python's documentation)"
    corpus = embedded_corpus() if list(files) == ["stdlib"] else text_corpus(files)
    return (document.text for document in corpus.documents()), corpus.description


def read_rows(
    files: Sequence[str], tokenizer: Tokenizer, *, rows: int, length: int, bos: bool = False, packed: bool = False
) -> Inputs:
    """Reads rows of a model's tokens, each from one document: the first row of every document, then the second rows.

    So no row has a separator, which is often a second sink. The rest of a document after its last whole row is skipped.

    Args:
      files: As for `orthojax.data.text_corpus`; or "topics", Python's documentation, or "stdlib", its sources.
      tokenizer: The model's.
      rows: Maximum number of rows; 0 for all.
      length: T, tokens that the model sees; rows have one more, the last target.
      bos: Start every row with the tokenizer's BOS token.
      packed: Cut rows from all documents joined, with an end-of-text token after each document.

    Raises:
      UserError: For files that cannot be read, or text shorter than one row.
    """
    documents, source = _documents(files)
    width = length + (not bos)
    parts, complete, tokens, size = [], 0, 0, 0
    for text in documents:
        parts.append(tokenizer.encode_batch([text])[0])
        tokens, size = tokens + len(parts[-1]) + packed, size + len(text.encode())
        complete = tokens // width if packed else complete + (len(parts[-1]) >= width)
        if rows and complete >= rows:
            break
    if packed:
        parts = [np.concatenate([np.append(part, tokenizer.eos_id) for part in parts])] if parts else []
    whole = [part[: len(part) // width * width].reshape(-1, width) for part in parts]
    turns = range(max(map(len, whole), default=0))
    ids = [part[i] for i in turns for part in whole if i < len(part)][: rows or None]
    if not ids:
        what = "tokens" if packed else "tokens in each document"
        raise UserError(f"{source}: fewer than {width} {what}, one row", allowed="more text, or a smaller --length")
    ids = np.array(ids, np.int32)
    if bos:
        ids = np.concatenate([np.full((len(ids), 1), tokenizer.bos_id, np.int32), ids], axis=1)
    inputs = rows_of_ids(ids, source, tokenizer)._replace(bits_per_nat_of_loss=tokens / size / math.log(2))
    inputs.provenance["rows_of"] = "packed documents" if packed else "one document"
    return inputs


def read_token_ids(path: Path, tokenizer: Tokenizer | None = None, *, rows: int, length: int) -> Inputs:
    """Reads rows of token ids from a .npy file, [rows, T + 1 or more] or [tokens]; 0 rows for all.

    Raises:
      UserError: For any other file, or one shorter than one row.
    """
    require_file(path, "file of token ids")
    try:
        ids = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise UserError(f"{path} is not a .npy file: {str(error)[:200]}") from None
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{path} holds {ids.dtype} {ids.shape}", allowed="integers [rows, length + 1] or [tokens]")
    width = length + 1
    ids = ids[: len(ids) // width * width].reshape(-1, width) if ids.ndim == 1 else ids
    if not len(ids) or ids.shape[1] < width:
        most = ids.shape[1] - 1 if ids.ndim == 2 and ids.shape[0] and ids.shape[1] > 1 else 0
        allowed = f"--length={most} or less" if most else "a smaller --length"
        raise UserError(f"{path} holds {ids.shape}: no row of {width} tokens", allowed=allowed)
    require_unpadded(ids := ids[: rows or None, :width], str(path))
    return rows_of_ids(ids, f"{path.name} (token ids)", tokenizer)


def require_unpadded(ids: np.ndarray, source: str) -> None:
    """Refuses padded batches, whose first token is no sink: no model here is given an attention mask.

    Padding is an id that half of the rows or more begin with, or end with, several times, not equally often.

    Raises:
      UserError: With the id; `source` names the rows.
    """
    for side, row in (("begin", ids), ("end", ids[:, ::-1])):
        ids_there, counts = np.unique(row[:, 0], return_counts=True)
        for padding in ids_there[2 * counts >= len(row)]:
            lengths = np.cumprod(row == padding, axis=1).sum(axis=1)
            padded = lengths > 1
            if 2 * padded.sum() >= len(row) and len(np.unique(lengths)) > 1:
                problem = f"{source}: {padded.sum()} of {len(row)} rows {side} with token {padding} repeatedly"
                raise UserError(f"{problem}: are they padded?", allowed="rows of equal length without padding")


def rows_of_ids(ids: np.ndarray, source: str, tokenizer: Tokenizer | None = None) -> Inputs:
    """Returns rows of token ids [rows, T + 1] as inputs; the last token of a row is only predicted.

    Args:
      ids: Integers.
      source: What they are, in words.
      tokenizer: Its special tokens get numbers of their own.

    Raises:
      UserError: For another shape or dtype, or ids that no model has.
    """
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not ids.size or ids.shape[1] < 2:
        problem = f"{source}: {ids.dtype} {ids.shape}"
        raise UserError(problem, allowed="integers [rows, length], at least one row of two tokens")
    extreme = ids.min() if ids.min() < 0 else ids.max()
    if not 0 <= extreme < 2**31:  # in 32 bits it would be another id
        raise UserError(f"{source} holds the token id {extreme}", allowed="those of the model")
    rows = np.ascontiguousarray(ids, np.int32)
    about = {"source": source, "rows": len(rows), "length": rows.shape[1] - 1}
    about["tokens_sha256"] = hashlib.sha256(rows.tobytes()).hexdigest()
    special = tokenizer.special_ids if tokenizer else ()
    return Inputs(lambda step: rows, rows, None, about, None, special_ids=special)


def read_text(files: Sequence[str], tokenizer: Tokenizer, *, bos: bool = False) -> np.ndarray:
    """Reads files, as for `read_rows`, as one text with empty lines between documents, int32 [tokens]."""
    ids = tokenizer.encode_batch(["\n\n".join(_documents(files)[0])])[0]
    return np.concatenate([np.full(int(bos), tokenizer.bos_id, np.int32), ids])
