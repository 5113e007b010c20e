"""Token files: all ids of a corpus in one flat little-endian array, with a JSON sidecar that describes it.

`train.bin` has its sidecar in `train.json`. Documents stand one after the other, each followed by the tokenizer's
end-of-text id. Text is tokenised once; training reads the file through the page cache.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from orthojax.config import from_dict, require
from orthojax.errors import UserError
from orthojax.files import read_json, require_file, write_atomically, write_text

FORMAT_VERSION = 2
_ALWAYS_COMPARED_BYTES = 1 << 28  # takes a second at most


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

    path: Path  # the .bin file
    info: TokenFileInfo
    tokens: np.ndarray  # uint16 or uint32 [n_tokens], a read-only memory map


def write_token_file(path: Path, created_from: dict[str, Any], batches: Iterable[tuple[np.ndarray, int, int]]) -> None:
    """Writes a token file and its sidecar; the .bin file appears when both are complete.

    Args:
      path: The .bin file.
      created_from: The fields of the sidecar that do not depend on the contents.
      batches: The ids of some documents, each with its end-of-text id; the number of the documents; and the bytes of
        their texts in UTF-8.

    Raises:
      UserError: If there is nothing to write.
    """
    dtype = np.dtype(created_from["dtype"]).newbyteorder("<")

    def write(file: IO[bytes]) -> None:
        digest, n_tokens, n_documents, n_bytes = hashlib.sha256(), 0, 0, 0
        for ids, documents, size in batches:
            data = ids.astype(dtype).tobytes()
            file.write(data)
            digest.update(data)
            n_tokens, n_documents, n_bytes = n_tokens + len(ids), n_documents + documents, n_bytes + size
        if not n_tokens:
            problem = f"no text for the token file {path.name} in {created_from['source']}"
            raise UserError(problem, allowed="at least one document")
        counted: dict[str, Any] = {"n_tokens": n_tokens, "n_documents": n_documents, "n_bytes": n_bytes}
        info = TokenFileInfo(**created_from | counted, data_sha256=digest.hexdigest())
        write_text(sidecar_path(path), json.dumps(dataclasses.asdict(info), indent=2) + "\n")

    write_atomically(path, write)


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the little-endian integers that hold every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def sidecar_path(path: str | Path) -> Path:
    """Returns the sidecar of a token file: the same name with .json."""
    return Path(path).with_suffix(".json")


def open_token_file(path: str | Path, *, verify: bool = False) -> TokenFile:
    """Opens a token file, after checking that it is what its sidecar describes.

    Args:
      path: The .bin file.
      verify: Compare the sha256, which reads the whole file. That of 256 MB is always compared, of a larger one only
        the size.

    Raises:
      UserError: If the file or its sidecar is missing or damaged, or they do not belong together.
    """
    path = Path(path)
    again = f"rebuild it with orthojax prepare or, if {path.parent} is a cache, delete that folder"
    require_file(path, "token file")
    try:
        info = from_dict(TokenFileInfo, read_json(sidecar_path(path), "sidecar"), str(sidecar_path(path)))
        require(info.format_version == FORMAT_VERSION, f"its sidecar is of format {info.format_version}")
        size, expected = path.stat().st_size, info.n_tokens * np.dtype(info.dtype).itemsize
        require(size == expected, f"it has {size} bytes, its sidecar says {expected}")
        if verify or size <= _ALWAYS_COMPARED_BYTES:
            with path.open("rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == info.data_sha256
            require(same, "it does not have the sha256 of its sidecar: it was changed")
    except UserError as error:
        raise UserError(f"token file {path}: {str(error).splitlines()[0]}", hint=again) from None
    return TokenFile(path, info, np.memmap(path, np.dtype(info.dtype).newbyteorder("<"), "r"))
