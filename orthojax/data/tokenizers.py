"""Text to ids and back: bytes, byte-level BPE trained on the corpus, or a published tokenizer by its path.

| what | begins a row, where asked | follows every document |
|---|---|---|
| `bytes` | 256 | 257 |
| `bpe:N` | <|bos|> | <|eos|> |
| tokenizer.json | the first of `_BOS_NAMES` that it has, else as the next | the first of `_EOS_NAMES` |
| GPT-2: vocab.json and merges.txt | <|endoftext|> | <|endoftext|> |
| sentencepiece .model | its bos, or eos where it has none | its eos |
| Llama 3: ranks in base64 | <|begin_of_text|> | <|end_of_text|> |

The packages `tokenizers` and `sentencepiece` are imported only where they are used.
"""

import abc
import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.errors import UserError

BOS, EOS = "<|bos|>", "<|eos|>"
ALLOWED = (
    "bytes | bpe:N (N ids, trained on the corpus) | the path of a tokenizer.json, GPT-2's vocab.json, a sentencepiece "
    ".model, the ranks of Llama 3, or of a folder with one"
)
SMALLEST_BPE = 260
# What published tokenizers call the two; the first that exists counts.
_EOS_NAMES = (EOS, "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|end▁of▁sentence|>")
_BOS_NAMES = (BOS, "<s>", "<|begin_of_text|>", "<bos>", "<|begin▁of▁sentence|>")
_CACHED_WORDS = 1 << 18  # whose ids are kept, about 50 MB; the package's own 10,000 are fewer than a corpus has
_BYTES_FILE = json.dumps({"orthojax_tokenizer": "bytes", "vocab_size": 258, "bos_id": 256, "eos_id": 257})


@dataclasses.dataclass(frozen=True)
class Tokenizer(abc.ABC):
    """Turns text into ids below `vocab_size` and back.

    Attributes:
      spec: The name under which it was asked for: `bytes`, `bpe:N` or a file name.
      vocab_size: One more than the largest id.
      bos_id: Id that starts a row where rows start with one; the same as `eos_id` where the tokenizer has only that.
      eos_id: Id that follows every document.
      serialized: What `save` writes.
    """

    spec: str
    vocab_size: int
    bos_id: int
    eos_id: int
    serialized: str = dataclasses.field(repr=False)

    @property
    def sha256(self) -> str:
        """sha256 of the file that `save` writes: equal for tokenizers that give equal ids."""
        return hashlib.sha256(self.serialized.encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Writes a file that `load_tokenizer` reads."""
        Path(path).write_bytes(self.serialized.encode())

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, int32 [length]; special tokens are neither added nor recognised inside the text."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""


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

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """UTF-8 bytes of every text, int32 [length]."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in np.asarray(ids, np.int64).tolist() if i < 256).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` package.

    Attributes:
      backend: The `tokenizers.Tokenizer`, set to add nothing, cut nothing and read special tokens in text as text.
    """

    backend: Any = dataclasses.field(compare=False, repr=False)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, int32 [length]; each text is encoded whole."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        # fromiter reads a list of ints faster than array does.
        return [np.fromiter(encoding.ids, np.int32, len(encoding)) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=True)


def tokenizer_identity(spec: str) -> str:
    """What a cached tokenizer depends on besides its corpus: the name, or the sha256 of the user's file.

    Cheap, and imports nothing.

    Raises:
      UserError: For an unknown name, a BPE that is too small, or a missing file.

    >>> tokenizer_identity("bpe:02048")
    'bpe:2048'
    """
    if spec == "bytes":
        return spec
    if spec.startswith("bpe:"):
        return f"bpe:{_bpe_size(spec)}"
    return "sha256:" + hashlib.sha256(b"".join(_read_file(str(path)) for path in _files(spec))).hexdigest()


def make_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """Makes the tokenizer that a config names.

    Args:
      spec: `bytes`, `bpe:N` or a path, as `load_tokenizer`.
      texts: What `bpe:N` is trained on; not read otherwise.

    Raises:
      UserError: As `tokenizer_identity`, `train_bpe` and `load_tokenizer`.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        return train_bpe(texts, _bpe_size(spec))
    return load_tokenizer(spec)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE, split into words as GPT-2 does; any text survives encoding and decoding.

    Ids 0 and 1 are <|bos|> and <|eos|>, then come the 256 bytes and the merges. Equal texts give equal ids.

    Args:
      texts: The training documents.
      vocab_size: Number of ids in total, at least 260.

    Raises:
      UserError: Where `vocab_size` is too small, or too large for this text to have so many merges.
    """
    if vocab_size < SMALLEST_BPE:
        raise UserError(f"tokenizer 'bpe:{vocab_size}' is too small", allowed=f"bpe:{SMALLEST_BPE} or more")
    import tokenizers as hf

    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab_size()
    if found != vocab_size:
        raise UserError(
            f"tokenizer 'bpe:{vocab_size}' needs more text: there are only {found} different ids in this one",
            allowed=(f"bpe:{SMALLEST_BPE} to bpe:{found}, or " if found >= SMALLEST_BPE else "") + "bytes",
        )
    return _from_json(backend.to_str(), f"bpe:{vocab_size}", "the trained BPE")


def load_tokenizer(path: str | Path, spec: str | None = None) -> Tokenizer:
    """Reads a published tokenizer, or what `Tokenizer.save` wrote.

    Args:
      path: A tokenizer.json; GPT-2's vocab.json, beside its merges.txt; a sentencepiece .model; the ranks of Llama 3;
        or a folder with one of them. What a file is shows in its contents.
      spec: What the tokenizer calls itself; None takes the file's name.

    Raises:
      UserError: Where the file is missing, is no tokenizer, or has no end-of-text token under a usual name.
    """
    from orthojax.data import sentencepiece_model, tokenizer_formats

    file, *merges = _files(str(path))
    content, spec = _read_file(str(file)), Path(path).name if spec is None else spec
    if content == _BYTES_FILE.encode():
        return ByteTokenizer()
    if merges:
        text = tokenizer_formats.gpt2_json(content, _read_file(str(merges[0])), file)
    elif tokenizer_formats.is_ranks(content):
        text = tokenizer_formats.ranks_json(content, file)
    elif file.suffix == ".model":
        return sentencepiece_model.load(content, spec, str(file))
    else:
        allowed = "the tokenizer.json of a Hugging Face tokenizer"
        try:
            text = content.decode()
            values = json.loads(text)
        except ValueError:
            raise UserError(f"{file} is not JSON", allowed=allowed) from None
        if not isinstance(values, dict):
            raise UserError(f"{file} is JSON, but not of a tokenizer", allowed=allowed)
        if model := sentencepiece_model.unwrap(values):
            return sentencepiece_model.load(model, spec, str(file))
    return _from_json(text, spec, str(file))


def _files(spec: str) -> list[Path]:
    """The files that a path means: one, or GPT-2's two."""
    pairs, path = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}, Path(spec)
    if path.is_dir():
        names = ["tokenizer.json", *pairs, "tokenizer.model", "spiece.model"]
        found = [name for name in names if (path / name).is_file()]
        if not found:
            raise UserError(f"tokenizer {spec!r} is a folder without a tokenizer", allowed=" | ".join(names))
        path = path / found[0]
    return [path, path.with_name(pairs[path.name])] if path.name in pairs else [path]


def _from_json(text: str, spec: str, where: str) -> Tokenizer:
    import tokenizers as hf

    try:
        backend = hf.Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception
        raise UserError(
            f"{where} is JSON, but not of a tokenizer: {error}",
            allowed="the tokenizer.json of a Hugging Face tokenizer",
        ) from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # a document that talks about <|eos|> does not end there
    if resize := getattr(backend.model, "_resize_cache", None):  # not public; the ids are the same without
        resize(_CACHED_WORDS)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    eos_id = next((vocabulary[name] for name in _EOS_NAMES if name in vocabulary), None)
    if eos_id is None:
        raise UserError(f"{where} has no end-of-text token", allowed="one of " + ", ".join(_EOS_NAMES))
    bos_id = next((vocabulary[name] for name in _BOS_NAMES if name in vocabulary), eos_id)
    return HuggingFaceTokenizer(spec, max(vocabulary.values()) + 1, bos_id, eos_id, text, backend)


def _bpe_size(spec: str) -> int:
    digits = spec.removeprefix("bpe:")
    if not (digits.isascii() and digits.isdigit()):
        raise UserError(f"unknown tokenizer {spec!r}", allowed=ALLOWED, hint="did you mean 'bpe:2048'?")
    if int(digits) < SMALLEST_BPE:
        raise UserError(f"tokenizer {spec!r} is too small", allowed=f"bpe:{SMALLEST_BPE} or more")
    return int(digits)


def _read_file(spec: str) -> bytes:
    path = Path(spec)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(f"cannot read tokenizer {spec!r}: {error.strerror}", allowed=ALLOWED) from None
    if path.suffix or len(path.parts) > 1:
        raise UserError(f"there is no tokenizer file {spec!r}", allowed=ALLOWED)
    near = difflib.get_close_matches(spec, ["bytes", "bpe:2048"], n=1, cutoff=0.4)
    raise UserError(f"unknown tokenizer {spec!r}", allowed=ALLOWED, hint=f"did you mean {near[0]!r}?" if near else "")
