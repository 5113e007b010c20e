"""Metadata and tokenizers of GGUF files; `orthojax.pretrained` interprets their weights."""

import functools
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from orthojax.errors import UserError, needing
from orthojax.files import require_file

# The lengths in a header are compared with its file before it is read: a flipped bit must not ask for exabytes.
_STRING, _ARRAY = 8, 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a number, by its type
_LEAST = {**_BYTES, _STRING: 8}


class _Header:
    """Walks over the header of a file; every step says what it is of."""

    def __init__(self, file: IO[bytes], path: Path):
        self._file, self._path, self._size = file, path, os.fstat(file.fileno()).st_size

    def refuse(self, problem: str) -> UserError:
        return UserError(f"{self._path} is damaged, or no GGUF file: {problem}")

    def require(self, needed: int, what: str) -> None:
        left = self._size - self._file.tell()
        if needed > left:
            raise self.refuse(f"{what} needs {needed:,} bytes, and {left:,} are left")

    def number(self, kind: str, what: str) -> int:
        self.require(struct.calcsize(kind), what)
        return struct.unpack(f"<{kind}", self._file.read(struct.calcsize(kind)))[0]

    def skip(self, length: int, what: str) -> None:
        self.require(length, what)
        self._file.seek(length, os.SEEK_CUR)

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        self.require(length, what)
        return self._file.read(length).decode("utf-8", "backslashreplace")

    def value(self, kind: int, name: str) -> None:
        if kind == _STRING:
            self.skip(self.number("Q", name), name)
        elif kind != _ARRAY:
            self.skip(self._bytes(kind, name), name)
        else:
            element, count = self.number("I", name), self.number("Q", name)
            if element == _ARRAY:
                raise self.refuse(f"{name} is an array of arrays")
            self.require(count * self._bytes(element, name), f"{name}, {count:,} values,")
            for _ in range(count if element == _STRING else 0):
                self.skip(self.number("Q", name), name)
            self.skip(0 if element == _STRING else count * _BYTES[element], name)

    def _bytes(self, kind: int, name: str) -> int:
        if kind not in _LEAST:
            raise self.refuse(f"{name} has the unknown type {kind}")
        return _LEAST[kind]


def check_header(path: Path) -> None:
    """Checks that every string, array and count of the header fits into the file.

    Raises UserError if one does not, with its name; for unknown types and arrays of arrays.
    """
    with path.open("rb") as file:
        header = _Header(file, path)
        magic, version = header.number("I", "the magic number"), header.number("I", "the version")
        if magic != 0x46554747 or version not in (2, 3):  # big-endian, or another version: the reader judges
            return
        tensors, pairs = header.number("Q", "the header"), header.number("Q", "the header")
        header.require(24 * tensors + 13 * pairs, f"a header of {tensors:,} tensors and {pairs:,} fields")
        for _ in range(pairs):
            name = header.string("the name of a field")
            header.value(header.number("I", name), name)
        for _ in range(tensors):
            name = header.string("the name of a tensor")
            header.skip(8 * header.number("I", name) + 4 + 8, name)


def check_offsets(path: Path, tensors: Iterable[Any]) -> None:
    """Checks that the tensors of `gguf.GGUFReader` follow each other and end with the file, as llama.cpp writes them.

    Raises UserError for one that begins inside of the one before it, or ends beyond the file.
    """
    end, before = 0, "the header"
    for tensor in tensors:
        start = int(tensor.data_offset)
        if start < end:
            raise UserError(f"{path} is damaged: tensor {tensor.name} begins inside of {before}")
        end, before = start + int(tensor.n_bytes), tensor.name
    if end > path.stat().st_size:
        raise UserError(f"{path} is damaged: tensor {before} ends beyond the file")


class Gguf(NamedTuple):
    """The content of a GGUF file, by name; it must not be changed."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]  # those of `gguf.GGUFReader`, whose data are read from the file on use


def open_gguf(path: Path) -> Gguf:
    """Reads the metadata and finds the tensors of a GGUF file; a split file is given by its first part.

    The last two results are cached, since parsing takes seconds, mostly for the words of the tokenizer. A file is
    parsed again if a part of it was replaced or rewritten.
    """
    require_file(path, "GGUF file")
    parts = [part.stat() for part in _parts(path, int(path.stem[-5:])) if part.exists()] if _is_first(path) else []
    return _parsed(path, tuple((of.st_dev, of.st_ino, of.st_mtime_ns, of.st_size) for of in parts or [path.stat()]))


@functools.lru_cache(maxsize=2)
def _parsed(path: Path, _: tuple[tuple[int, ...], ...]) -> Gguf:
    metadata, tensors = _read_part(path)
    for number, other in enumerate(_other_parts(path, metadata), start=1):
        of_part, more = _read_part(other)
        if of_part.get("split.no") != number or not tensors.keys().isdisjoint(more):
            problem = f"{other} says that it is part {of_part.get('split.no')}"
            raise UserError(problem, allowed=f"part {number}, counted from 0, of one file")
        tensors |= more
    return Gguf(MappingProxyType(metadata), MappingProxyType(tensors))


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with needing(str(path), "pretrained"):
        from gguf import GGUFReader
    check_header(path)
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(f"{path} is damaged, or no GGUF file: {error}") from None
    check_offsets(path, reader.tensors)
    # Not the reader itself: it has several arrays for each word of the tokenizer.
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _is_first(path: Path, count: str = "[0-9]{5}") -> bool:
    return re.search(f"-00001-of-{count}[.]gguf$", path.name) is not None


def _parts(path: Path, count: int) -> list[Path]:
    """Lists the parts of a split file from its first part, by llama.cpp's naming."""
    name = path.name.removesuffix(f"-00001-of-{count:05d}.gguf")
    return [path.with_name(f"{name}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def _other_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return []
    if not _is_first(path, f"{count:05d}"):
        allowed = f"the first of them, NAME-00001-of-{count:05d}.gguf, beside the others"
        raise UserError(f"{path} is one of {count} parts", allowed=allowed)
    others = _parts(path, count)[1:]
    for other in others:
        require_file(other, f"part of {path.name}")
    return others


# The expressions that cut text into words before BPE: Llama 3's comes from llama3/llama/tokenizer.py, GPT-4o's from
# tiktoken's o200k_base, and `default` from llama.cpp, which applies them one after the other.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}]" for case in (r"Lu}\p{Lt", "Ll"))
_GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _cut(*expressions: str) -> list[dict[str, Any]]:
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False} for words in expressions
    ]
    return [*cuts, _BYTE_LEVEL | {"use_regex": False}]


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")  # which begin with BOS, and take a whole word that is a token
# By `tokenizer.ggml.pre`; llama.cpp takes `default` for a file without one.
_WORDS = {
    "default": _cut(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "olmo"), _cut(_GPT2_WORDS)),
    **dict.fromkeys(_LLAMA3, _cut(LLAMA3_WORDS)),
    "qwen2": _cut(_QWEN2_WORDS),
    "gpt-4o": _cut(_GPT4O_WORDS),  # of gpt-oss
    "smollm": _cut(r"\p{N}", _GPT2_WORDS),
}
# Values of `tokenizer.ggml.token_type`: control tokens, which text does not contain; words that are always one token,
# such as <think> or runs of spaces; and, in sentencepiece models, bytes of what has no token.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


def gguf_begins_with_bos(path: Path) -> bool:
    """Returns whether llama.cpp begins texts with a file's BOS token: as the file says, or by its kind of tokenizer."""
    metadata = open_gguf(path).metadata
    by_kind = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    return bool(metadata.get("tokenizer.ggml.add_bos_token", by_kind))


def gguf_sentencepiece(path: Path) -> bytes | None:
    """Returns the sentencepiece model in the metadata of a GGUF file, as in Llama 2; None if it has another kind."""
    metadata = open_gguf(path).metadata
    if metadata.get("tokenizer.ggml.model") != "llama":
        return None
    parts: list[Any] = [metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type")]
    if not all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts):
        allowed = "tokens, scores and types, as many of each"
        raise UserError(f"{path} has no whole tokenizer of kind 'llama'", allowed=allowed)
    with needing(f"the sentencepiece model of {path}", "sentencepiece"):
        from sentencepiece import sentencepiece_model_pb2
    model: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for token, score, kind in zip(*parts, strict=True):  # the kinds have the same numbers
            model.pieces.add(piece=token, score=score, type=kind)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} has no whole tokenizer of kind 'llama': {error}") from None
    spec, ids = model.trainer_spec, {"unk": 0, "bos": 1, "eos": 2}
    spec.model_type, spec.byte_fallback = spec.BPE, _BYTE in parts[2]
    for name, usual in ids.items():
        there = "unknown" if name == "unk" else name
        setattr(spec, f"{name}_id", int(metadata.get(f"tokenizer.ggml.{there}_token_id", usual)))
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


def gguf_tokenizer(path: Path) -> str:
    """Returns the tokenizer.json of the byte-level BPE in the metadata of a GGUF file."""
    metadata, allowed = open_gguf(path).metadata, "sentencepiece, or byte-level BPE of " + ", ".join(sorted(_WORDS))
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens, merges = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    if kind != "gpt2" or not isinstance(tokens, list) or not isinstance(merges, list):
        hint = "give token ids from a file instead of text"
        raise UserError(f"{path} has a tokenizer of kind {kind!r}, which is not supported", allowed=allowed, hint=hint)
    if split not in _WORDS:
        raise UserError(f"{path} splits words as {split!r}, which is not supported", allowed=allowed)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise UserError(f"{path} has {len(tokens)} tokens, and other token types", allowed="as many of each")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [plain | {"id": i, "content": tokens[i], "special": kind == _CONTROL}
             for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]  # fmt: skip
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "ignore_merges": split in _LLAMA3,
             "vocab": {token: i for i, token in enumerate(tokens)},
             "merges": [merge.split(" ") for merge in merges]}  # fmt: skip
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": _WORDS[split]}, "post_processor": None,
             "decoder": _BYTE_LEVEL | {"use_regex": True}, "model": model}  # fmt: skip
    return json.dumps(whole)
