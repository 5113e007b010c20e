"""GGUF files, each parsed once for everybody who reads it: its config, its tensors and its tokenizer."""

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from orthojax.errors import UserError, needing
from orthojax.files import require_file


class Gguf(NamedTuple):
    """What a GGUF file holds; nobody may change it.

    Attributes:
      metadata: By name.
      tensors: By name, those of `gguf.GGUFReader`, whose data are read from the file where they are used.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]


def open_gguf(path: Path) -> Gguf:
    """The metadata and tensors of a GGUF file.

    Those of the two files read last are kept, since parsing takes seconds: mostly the words of the tokenizer. A file
    that was replaced or written again is parsed again.

    Raises:
      UserError: Where it is missing, damaged or no GGUF file, or without the extra `pretrained`.
    """
    require_file(path, "GGUF file")
    found = path.stat()
    return _parsed(path, (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size))


@functools.lru_cache(maxsize=2)
def _parsed(path: Path, _: tuple[int, ...]) -> Gguf:
    with needing(str(path), "pretrained"):
        from gguf import GGUFReader
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(f"{path} is damaged, or no GGUF file: {error}") from None
    # Not the reader itself: it has several arrays for each word of the tokenizer.
    return Gguf(MappingProxyType(metadata), MappingProxyType({tensor.name: tensor for tensor in reader.tensors}))
