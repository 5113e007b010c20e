"""Token files: all ids of a corpus in one flat little-endian array, with a JSON sidecar that says what they are.

`train.bin` has its sidecar in `train.json`. Documents stand one after the other, each followed by the tokenizer's
end-of-text id. Text is tokenised once, and training then reads the array through the operating system's page cache.
A file is opened after a look at its size and at a few blocks of its contents; all of them are compared on demand.
"""

import dataclasses
import hashlib
import json
import os
import secrets
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from orthojax.data.encoding import batches, encode, token_dtype
from orthojax.data.text_files import Document
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError

FORMAT_VERSION = 1
_SAMPLE_BLOCKS, _SAMPLE_BYTES = 16, 4096

Progress = Callable[[str, int, int], None]
"""Called now and then with (what is being done, bytes of text done, bytes in total or 0 where unknown)."""


@dataclasses.dataclass(frozen=True)
class TokenFileInfo:
    """The sidecar of a token file.

    Attributes:
      format_version: Of this format.
      dtype: `uint16` where every id fits, else `uint32`; little-endian.
      n_tokens: Ids in the file, end-of-text ids included.
      n_bytes: UTF-8 bytes of the text, so that n_bytes / n_tokens turns nats per token into bits per byte.
      n_documents: Documents.
      vocab_size: One more than the largest possible id.
      bos_id: Of the tokenizer.
      eos_id: Of the tokenizer; follows every document.
      tokenizer: Its name.
      tokenizer_sha256: Of its file.
      source: What was tokenised.
      source_sha256: Of the corpus; '' where unknown.
      file_count: Files of the corpus; 0 where unknown.
      split: `train`, `validation` or any other name.
      data_sha256: Of the .bin file.
      sample_sha256: Of a few blocks of it, which are compared whenever it is opened; '' in files of earlier versions.
      shard: `i/n` where the file is one of several that belong together, '' otherwise.
    """

    format_version: int
    dtype: str
    n_tokens: int
    n_bytes: int
    n_documents: int
    vocab_size: int
    bos_id: int
    eos_id: int
    tokenizer: str
    tokenizer_sha256: str
    source: str
    source_sha256: str
    file_count: int
    split: str
    data_sha256: str
    sample_sha256: str = ""
    shard: str = ""


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """An open token file.

    Attributes:
      path: The .bin file.
      info: Its sidecar.
      tokens: uint16 or uint32 [n_tokens], a read-only memory map.
    """

    path: Path
    info: TokenFileInfo
    tokens: np.ndarray


def sidecar_path(path: str | Path) -> Path:
    """The sidecar of a token file: the same name with .json.

    >>> sidecar_path("data/train.bin").name
    'train.json'
    """
    return Path(path).with_suffix(".json")


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The sidecar's fields that a tokenizer decides."""
    return {
        "format_version": FORMAT_VERSION,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.spec,
        "tokenizer_sha256": tokenizer.sha256,
    }


def prepare(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    path: str | Path,
    *,
    split: str,
    source: str,
    source_sha256: str = "",
    file_count: int = 0,
    total_bytes: int = 0,
    progress: Progress | None = None,
) -> TokenFile:
    """Tokenises documents into a token file; it appears under its name only when it is complete.

    Args:
      documents: Read once and in batches, so an iterator over more text than memory will do.
      tokenizer: Gives the ids.
      path: The .bin file, replaced where it exists; the folder is made.
      split: What part of the source this is.
      source: What was tokenised, for reports.
      source_sha256: Identity of the source.
      file_count: Files of the source.
      total_bytes: UTF-8 bytes of all documents where known, for the progress only.
      progress: Called after every batch.

    Returns:
      The file, opened.

    Raises:
      UserError: Where there is no document, or `path` cannot be written.
    """
    path = Path(path)
    if path.suffix == ".json":
        raise UserError(f"token file {path} would be its own sidecar", allowed="a name such as train.bin")
    report = progress or (lambda *_: None)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            written = _write_tokens(file, documents, tokenizer, lambda n: report(split, n, total_bytes))
        if not written["n_documents"]:
            raise UserError(f"no documents for the token file {path}", allowed="at least one document")
        info = TokenFileInfo(
            **describe_tokenizer(tokenizer),
            source=source,
            source_sha256=source_sha256,
            file_count=file_count,
            split=split,
            sample_sha256=sample_sha256(temporary),
            **written,
        )
        # Without its sidecar a token file is refused, so at no moment can a new file meet an old description.
        sidecar_path(path).unlink(missing_ok=True)
        os.replace(temporary, path)
        write_sidecar(path, info)
    except OSError as error:
        raise UserError(f"cannot write the token file {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return open_token_file(path)


def write_sidecar(path: Path, info: TokenFileInfo) -> None:
    """Writes the sidecar of a token file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.json.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(info), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, sidecar_path(path))
    finally:
        temporary.unlink(missing_ok=True)


def sample_sha256(path: Path) -> str:
    """sha256 of 16 blocks of 4,096 bytes, evenly spread from the first to the last; of all where there are fewer."""
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
    """Opens a token file, after checking that it is what its sidecar describes.

    Args:
      path: The .bin file.
      verify: Also compare the sha256, which reads the whole file; its size and a few blocks are always compared.

    Raises:
      UserError: Where the file or its sidecar is missing, or they do not belong together.
    """
    path = Path(path)
    again = f"make it again with launch/prepare_data.py or, if {path.parent} is a cache, delete that folder"
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


def _write_tokens(
    file: IO[bytes], documents: Iterable[Document], tokenizer: Tokenizer, report: Callable[[int], Any]
) -> dict[str, Any]:
    """Writes the ids; returns the sidecar's fields that count them."""
    digest = hashlib.sha256()
    n_tokens = n_bytes = n_documents = 0
    for group in batches(documents, lambda document: document.text):
        ids, size = encode(tokenizer, [document.text for document in group])
        file.write(ids.data)
        digest.update(ids.data)
        n_tokens += len(ids)
        n_bytes += size
        n_documents += len(group)
        report(n_bytes)
    return {"n_tokens": n_tokens, "n_bytes": n_bytes, "n_documents": n_documents, "data_sha256": digest.hexdigest()}


def _read_sidecar(path: Path, again: str) -> TokenFileInfo:
    sidecar = sidecar_path(path)
    values: Any = None
    try:
        values = json.loads(sidecar.read_bytes())
    except FileNotFoundError:
        raise UserError(f"token file {path} has no sidecar {sidecar.name}", hint=again) from None
    except ValueError:
        raise UserError(f"{sidecar} is not JSON", hint=again) from None
    hints = typing.get_type_hints(TokenFileInfo)
    version = values.get("format_version") if isinstance(values, dict) else None
    if isinstance(values, dict):
        values = {"sample_sha256": "", "shard": "", **values}  # earlier versions wrote neither
    if version != FORMAT_VERSION or {name: type(value) for name, value in values.items()} != hints:
        raise UserError(f"{sidecar} does not describe a token file of format {FORMAT_VERSION}", hint=again)
    if values["dtype"] not in ("uint16", "uint32") or values["n_tokens"] < 1:
        raise UserError(f"{sidecar} does not describe a token file of format {FORMAT_VERSION}", hint=again)
    return TokenFileInfo(**values)
