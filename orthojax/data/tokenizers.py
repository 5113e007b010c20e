"""Text to ids and back: bytes, byte-level BPE trained on the corpus, or a published tokenizer by its path.

| what | begins a row, if asked | follows every document |
|---|---|---|
| `bytes` | 256 | 257 |
| `bpe:N` | <|bos|> | <|eos|> |
| tokenizer.json | the first of `_BOS_NAMES` that it has, else as the next | the first of `_EOS_NAMES` |
| GPT-2: vocab.json and merges.txt | <|endoftext|> | <|endoftext|> |
| sentencepiece .model (T5, Llama 2) | its bos, or eos if it has none | its eos |

The packages `tokenizers` and `sentencepiece` are imported only when they are used.
"""

import abc
import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.data.published import gguf_begins_with_bos, gguf_sentencepiece, gguf_tokenizer, open_gguf
from orthojax.errors import UserError, nearest, needing
from orthojax.files import parse_json, read_json, require_file
from orthojax.places import locate

BOS, EOS = "<|bos|>", "<|eos|>"
_FORMATS = "a tokenizer.json, GPT-2's vocab.json, a sentencepiece .model"
_PATHS = f"the path of {_FORMATS}, or of a folder with one"
ALLOWED = f"bytes | bpe:N (N ids, at least 260, trained on the corpus) | {_PATHS}"
# Usual EOS and BOS names in published tokenizers, by precedence.
_EOS_NAMES = (EOS, "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
_BOS_NAMES = (BOS, "<s>", "<|begin_of_text|>", "<bos>", "<｜begin▁of▁sentence｜>")  # noqa: RUF001
_BYTES_FILE = json.dumps({"orthojax_tokenizer": "bytes", "vocab_size": 258, "bos_id": 256, "eos_id": 257})


@dataclasses.dataclass(frozen=True)
class Tokenizer(abc.ABC):
    """Encodes text as ids below `vocab_size`, and decodes them."""

    spec: str  # the requested name: `bytes`, `bpe:N` or a file name
    vocab_size: int  # one more than the largest id
    bos_id: int  # starts a row if rows start with one; `eos_id` if the tokenizer has only that
    eos_id: int  # follows every document
    serialized: str = dataclasses.field(repr=False)  # content of the file that `save` writes
    # The `tokenizers.Tokenizer` or `sentencepiece.SentencePieceProcessor`.
    backend: Any = dataclasses.field(default=None, compare=False, repr=False)
    stop_ids: tuple[int, ...] = ()  # other ids that end generation, if the model declares any

    @property
    def ends(self) -> frozenset[int]:
        """The ids at which generation stops."""
        return frozenset((self.eos_id, *self.stop_ids))

    @property
    def sha256(self) -> str:
        """The sha256 of the file that `save` writes: equal for tokenizers that give equal ids."""
        return hashlib.sha256(self.serialized.encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Writes a file that `load_tokenizer` reads."""
        Path(path).write_bytes(self.serialized.encode())

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of tokens that stand for no text: BOS, end tokens, and others that the file marks as special."""
        return tuple(sorted({self.bos_id, self.eos_id, *self.stop_ids, *self.special_tokens.values()}))

    @property
    def special_tokens(self) -> dict[str, int]:
        """Name -> id of the tokens that the file marks as special."""
        return {}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of every text, int32 [length]; special tokens are neither added nor recognised."""
        return self._encode(list(texts))

    def encode_special(self, text: str) -> np.ndarray:
        """Returns the ids of a text, int32 [length]; names of special tokens in it stand for these tokens."""
        special = self.special_tokens
        names = sorted(map(re.escape, special), key=len, reverse=True)
        parts = re.split(f"({'|'.join(names)})", text) if names else [text]
        plain = iter(self.encode_batch([part for part in parts if part and part not in special]))
        ids = [np.array([special[part]]) if part in special else next(plain) for part in parts if part]
        return np.concatenate([np.zeros(0), *ids]).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, without special tokens and unknown ids; bytes that are not UTF-8 become U+FFFD."""
        return self._decode(np.asarray(ids, np.int64).tolist())

    @abc.abstractmethod
    def _encode(self, texts: list[str]) -> list[np.ndarray]: ...

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, then bos = 256 and eos = 257; needs no file and no package.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode_batch(["né"])[0].tolist(), tokenizer.decode([256, 110, 195, 169, 257])
    ([110, 195, 169], 'né')
    """

    spec: str = "bytes"
    vocab_size: int = 258
    bos_id: int = 256
    eos_id: int = 257
    serialized: str = dataclasses.field(default=_BYTES_FILE, repr=False)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


@contextlib.contextmanager
def _panics_refused() -> Iterator[None]:
    """Refuses a text where a regular expression of the tokenizer gives up, such as (a+)+$ on many letters."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, which is no Exception and cannot be imported
            raise
        raise UserError(f"the tokenizer cannot read this text: {error!s:.200}", allowed="another tokenizer") from None


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer`, set to add nothing, truncate nothing and read special tokens in text as text."""

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        with _panics_refused():
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        # fromiter reads a list of ints faster than array does.
        return [np.fromiter(encoding.ids, np.int32, len(encoding)) for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=True)

    def encode_special(self, text: str) -> np.ndarray:
        """As in `Tokenizer`, with the file's rules for spaces around special tokens."""
        self.backend.encode_special_tokens = False
        try:
            with _panics_refused():
                return np.array(self.backend.encode(text, add_special_tokens=False).ids, np.int32)
        finally:
            self.backend.encode_special_tokens = True

    @property
    def special_tokens(self) -> dict[str, int]:
        """Name -> id of the added tokens that are special."""
        return {token.content: i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece .model run by its own library, since no conversion is exact for all; it may normalise texts."""

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        rows = self.backend.encode(texts, out_type=int, num_threads=-1) if texts else []
        return [np.array(row, np.int32) for row in rows]

    def _decode(self, ids: list[int]) -> str:
        return self.backend.decode([i for i in ids if 0 <= i < self.vocab_size])

    @property
    def special_tokens(self) -> dict[str, int]:
        """Name -> id of the control tokens."""
        return {self.backend.id_to_piece(i): i for i in range(self.vocab_size) if self.backend.is_control(i)}


def tokenizer_identity(spec: str) -> str:
    """Returns what a cached tokenizer depends on besides its corpus: the name, or the sha256 of the user's file.

    >>> tokenizer_identity("bpe:02048")
    'bpe:2048'
    """
    if spec == "bytes":
        return spec
    if spec.startswith("bpe:"):
        return f"bpe:{_bpe_size(spec)}"
    digests = []
    for path in _files(spec):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return "sha256:" + "-".join(digests)


def make_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """Makes the tokenizer that a config names: `bytes`, `bpe:N` (trained on the texts), or as `load_tokenizer`.

    Raises UserError for an unknown name or a bad file, or if the texts are too short for the BPE.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        return train_bpe(texts, _bpe_size(spec))
    return load_tokenizer(spec)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE, split into words as GPT-2 does; any text survives encoding and decoding.

    Ids 0 and 1 are <|bos|> and <|eos|>, then come the 256 bytes and the merges: `vocab_size` ids, at least 260. Equal
    texts give equal ids. Raises UserError if this text yields fewer or more distinct ids.
    """
    import tokenizers as hf

    backend = _byte_level(hf.models.BPE())
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    size = backend.get_vocab_size()
    if size != vocab_size:
        problem = f"tokenizer 'bpe:{vocab_size}' needs more text: there are only {size} different ids in this one"
        raise UserError(problem, allowed=f"at most bpe:{size}, or bytes")
    return from_json(backend.to_str(), f"bpe:{vocab_size}", "the trained BPE")


def load_tokenizer(path: str | Path, spec: str | None = None) -> Tokenizer:
    """Reads a published tokenizer, or what `Tokenizer.save` wrote.

    Args:
      path: A tokenizer.json; GPT-2's vocab.json, beside its merges.txt; a sentencepiece .model; a .gguf file; a folder
        with one of them; or the name of a model that `orthojax.places.locate` finds.
      spec: The tokenizer's name; None takes the file's name.

    Raises:
      UserError: If the file is missing, is not a tokenizer, or has no end-of-text token under a usual name.
    """
    file, *merges = _files(str(path))
    spec = Path(path).name if spec is None else spec
    if file.suffix == ".gguf":
        if (model := gguf_sentencepiece(file)) is not None:
            return _from_sentencepiece(model, spec, str(file))
        return from_json(gguf_tokenizer(file), spec, str(file))
    if merges:
        return from_json(_gpt2_json(file, merges[0]), spec, str(file))
    content = file.read_bytes()
    if file.suffix == ".model":
        return _from_sentencepiece(content, spec, str(file))
    values = parse_json(content, f"tokenizer {file}")
    match values if isinstance(values, dict) else {}:
        case {"orthojax_tokenizer": "bytes"}:
            return ByteTokenizer()
        case {"orthojax_tokenizer": "sentencepiece", "model": str(model)}:
            with _said_by_the_package(f"{file} holds no sentencepiece model in base64"):
                content = base64.b64decode(model, validate=True)
            return _from_sentencepiece(content, spec, str(file))
    return from_json(content.decode(), spec, str(file))


def from_json(text: str, spec: str, where: str) -> Tokenizer:
    """Makes a tokenizer named `spec` from the text of a tokenizer.json, which came from `where`.

    Raises UserError if it is not a tokenizer, or has no end-of-text token under a usual name.
    """
    import tokenizers as hf

    with _said_by_the_package(f"{where} is not a tokenizer"):
        backend = hf.Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # a document that mentions <|eos|> does not end there
    vocabulary = backend.get_vocab(with_added_tokens=True)
    eos_id = next((vocabulary[name] for name in _EOS_NAMES if name in vocabulary), None)
    if eos_id is None:
        raise UserError(f"{where} has no end-of-text token", allowed="one of " + ", ".join(_EOS_NAMES))
    bos_id = next((vocabulary[name] for name in _BOS_NAMES if name in vocabulary), eos_id)
    return HuggingFaceTokenizer(spec, max(vocabulary.values()) + 1, bos_id, eos_id, text, backend)


@contextlib.contextmanager
def _said_by_the_package(problem: str, allowed: str = _FORMATS) -> Iterator[None]:
    """Raises a package's failure as UserError: `tokenizers` raises bare Exception, and if it panics not even that."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {str(error).partition(chr(10))[0][:200]}", allowed=allowed) from None


def _from_sentencepiece(model: bytes, spec: str, where: str) -> Tokenizer:
    with needing(f"the sentencepiece model {where}", "sentencepiece"):
        import sentencepiece  # type: ignore[import-not-found]
    with _said_by_the_package(f"{where} is not a tokenizer"):
        backend = sentencepiece.SentencePieceProcessor(model_proto=model)
    bos_id, eos_id = backend.bos_id(), backend.eos_id()
    if eos_id < 0:
        raise UserError(f"{where} has no end-of-text token", allowed="a sentencepiece model trained with eos_id")
    text = json.dumps({"orthojax_tokenizer": "sentencepiece", "model": base64.b64encode(model).decode()})
    return SentencePieceTokenizer(spec, backend.vocab_size(), bos_id if bos_id >= 0 else eos_id, eos_id, text, backend)


def _gpt2_json(vocabulary: Path, merges: Path) -> str:
    import tokenizers as hf

    allowed = "vocab.json and merges.txt that belong together"
    with _said_by_the_package(f"{vocabulary.parent} holds no GPT-2 tokenizer", allowed):
        model = hf.models.BPE.from_file(str(vocabulary), str(merges))
    backend = _byte_level(model)
    backend.add_special_tokens(
        [name for name in ("<|endoftext|>", "<s>", "</s>") if backend.token_to_id(name) is not None]
    )
    return backend.to_str()


def _byte_level(model: Any) -> Any:
    import tokenizers as hf

    backend = hf.Tokenizer(model)
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    return backend


def _bpe_size(spec: str) -> int:
    match = re.fullmatch(r"bpe:0*([0-9]{1,7})", spec)
    if not match or int(match[1]) < 260:
        raise UserError(f"unknown tokenizer {spec[:40]!r}", allowed=ALLOWED, hint="did you mean 'bpe:2048'?")
    return int(match[1])


def _files(spec: str) -> list[Path]:
    path = Path(spec)
    if not os.path.lexists(path):
        with contextlib.suppress(UserError):  # which says what is missing of a model, not of a tokenizer
            path = locate(spec)
    if os.path.isdir(path):
        names = ["tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model"]
        present = [name for name in names if (path / name).is_file()]
        if not present:
            raise UserError(f"tokenizer {spec!r} is a folder without a tokenizer", allowed=" | ".join(names))
        path = path / present[0]
    files = [path, path.with_name("merges.txt")] if path.name == "vocab.json" else [path]
    for file in files:
        if not os.path.lexists(file):
            if re.fullmatch(r"bytes|bpe:\d+", spec):
                raise UserError(f"tokenizer {spec!r} is not that of a trained model", allowed=_PATHS)
            hint = nearest(spec, ["bytes", "bpe:N"])
            raise UserError(f"there is no tokenizer {str(file)!r}", allowed=ALLOWED, hint=hint)
        require_file(file, "tokenizer file")
    return files


# The tokens that begin a text and end generation, as the files of a published model declare them.


def with_declared_tokens(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """Gives a tokenizer the BOS token and the end tokens that a published model, a .gguf file or a folder, declares.

    Names do not determine them: OPT begins with `</s>`, SmolLM2-Instruct and Llama 3 Instruct end with their own
    tokens. `eos_id`, which follows a document, stays as it is.
    """
    if path.suffix == ".gguf":
        metadata = open_gguf(path).metadata
        bos, *ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot"))
        begins = [bos]
    else:
        names = ("tokenizer_config.json", "generation_config.json", "config.json")
        words, generation, model = (_read(path / name) for name in names)
        begins = [words.get("bos_token"), generation.get("bos_token_id"), model.get("bos_token_id")]
        ends = [words.get("eos_token")]
        for config in (generation, model):
            value = config.get("eos_token_id")
            ends += value if isinstance(value, list) else [value]
    bos_id = next((token_id for value in begins if (token_id := _id(tokenizer, value)) is not None), tokenizer.bos_id)
    stop_ids = {token_id for value in ends if (token_id := _id(tokenizer, value)) is not None}
    return dataclasses.replace(tokenizer, bos_id=bos_id, stop_ids=tuple(sorted(stop_ids)))


def begins_with_bos(path: Path) -> bool:
    """Returns whether a published model was trained on texts that begin with its BOS token.

    `add_bos_token` of tokenizer_config.json or of a .gguf file decides; if it is missing, whether the post-processor of
    tokenizer.json puts a special token first, or the kind of tokenizer, since Llama's sentencepiece model begins with
    BOS by default.
    """
    if path.suffix == ".gguf":
        return gguf_begins_with_bos(path)
    words, tokenizer = (_read(path / name) for name in ("tokenizer_config.json", "tokenizer.json"))
    if type(declared := words.get("add_bos_token")) is bool:
        return declared
    if tokenizer:
        return _puts_special_token_first(tokenizer.get("post_processor"))
    kind = str(words.get("tokenizer_class", ""))
    return (path / "tokenizer.model").is_file() and kind.startswith(("Llama", "CodeLlama", "Gemma"))


def bos_first(tokenizer: HuggingFaceTokenizer) -> HuggingFaceTokenizer:
    """Returns a tokenizer whose file says that texts begin with BOS; its sha256 is then another."""
    import tokenizers as hf

    backend, name = hf.Tokenizer.from_str(tokenizer.serialized), tokenizer.backend.id_to_token(tokenizer.bos_id)
    backend.post_processor = hf.processors.TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", f"{name}:1", "$B:1"], special_tokens=[(name, tokenizer.bos_id)]
    )
    return dataclasses.replace(tokenizer, serialized=backend.to_str())


def _puts_special_token_first(post_processor: Any) -> bool:
    """Returns whether a `TemplateProcessing`, by itself or in a sequence, puts a special token first."""
    if not isinstance(post_processor, dict):
        return False
    if post_processor.get("type") == "Sequence":
        parts = post_processor.get("processors")
        return isinstance(parts, list) and any(map(_puts_special_token_first, parts))
    template = post_processor.get("single")
    first = template[0] if isinstance(template, list) and template else None
    return isinstance(first, dict) and "SpecialToken" in first


def _read(file: Path) -> dict[str, Any]:
    return read_json(file, "file of a model") if file.is_file() else {}


def _id(tokenizer: Tokenizer, value: Any) -> int | None:
    """Returns the tokenizer's id for a declaration (an id, a token, or a token with its properties), else None."""
    if isinstance(value, dict):
        value = value.get("content")
    if isinstance(value, str):
        find = getattr(tokenizer.backend, "token_to_id", None)  # of sentencepiece, whose file says its own
        value = find(value) if find else None
    return value if type(value) is int and 0 <= value < tokenizer.vocab_size else None
