"""Tokenizers of sentencepiece, as of T5 and Llama 2, run by its own library: no conversion is exact for all of them."""

import base64
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError

_KIND = "sentencepiece"


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer(Tokenizer):
    """A .model file of sentencepiece, unigram or BPE.

    Its begin and end tokens are those of the model; where it has no begin token, as T5, the end token is both. Texts
    are normalised as the model says, so that decoding need not give the same text.

    Attributes:
      backend: The `sentencepiece.SentencePieceProcessor`.
    """

    backend: Any = dataclasses.field(compare=False, repr=False)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, int32 [length]; special tokens are neither added nor recognised inside the text."""
        rows = self.backend.encode(list(texts), out_type=int, num_threads=-1) if texts else []
        return [np.array(row, np.int32) for row in rows]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some ids, without special tokens."""
        return self.backend.decode(np.asarray(ids, np.int64).tolist())


def wrap(model: bytes) -> str:
    """A .model file as the tokenizer.json beside token files."""
    return json.dumps({"orthojax_tokenizer": _KIND, "model": base64.b64encode(model).decode()})


def unwrap(content: Any) -> bytes | None:
    """The .model in the parsed JSON of `wrap`; None in other JSON."""
    if isinstance(content, dict) and content.get("orthojax_tokenizer") == _KIND:
        return base64.b64decode(content["model"])
    return None


def load(model: bytes, spec: str, where: str) -> SentencePieceTokenizer:
    """A tokenizer from a .model file.

    Args:
      model: The content of the file.
      spec: What it calls itself.
      where: For errors.

    Raises:
      UserError: Without the library, for other bytes, or for a model without an end token.
    """
    try:
        import sentencepiece  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            f"{where} is a sentencepiece model, which needs a package", allowed="pip install sentencepiece"
        ) from None
    try:
        backend = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise UserError(
            f"{where} is no tokenizer",
            allowed="a tokenizer.json, GPT-2's vocab.json, a sentencepiece .model or the ranks of Llama 3",
        ) from None
    bos_id, eos_id = backend.bos_id(), backend.eos_id()
    if eos_id < 0:
        raise UserError(f"{where} has no end-of-text token", allowed="a sentencepiece model trained with eos_id")
    return SentencePieceTokenizer(
        spec, backend.vocab_size(), bos_id if bos_id >= 0 else eos_id, eos_id, wrap(model), backend
    )
