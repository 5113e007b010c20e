"""Which tokens begin a text and end generation, as a published model's own files say."""

import dataclasses
from pathlib import Path
from typing import Any

from orthojax.data.tokenizers import Tokenizer
from orthojax.files import read_json
from orthojax.gguf_reader import open_gguf


def with_declared_tokens(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """The tokenizer with the BOS token and the end tokens that a published model declares.

    Names alone do not say them: OPT begins with `</s>`, SmolLM2-Instruct and Llama 3 Instruct end with tokens of their
    own. What follows a document, `eos_id`, stays as it is.

    Args:
      tokenizer: Of the model.
      path: A .gguf file; or a folder, of which tokenizer_config.json, generation_config.json and config.json are read,
        where it has them.

    Raises:
      UserError: For a damaged file.
    """
    begins, ends = (_of_gguf if path.suffix == ".gguf" else _of_folder)(path)
    bos_id = next((found for value in begins if (found := _id(tokenizer, value)) is not None), tokenizer.bos_id)
    stop_ids = {found for value in ends if (found := _id(tokenizer, value)) is not None}
    return dataclasses.replace(tokenizer, bos_id=bos_id, stop_ids=tuple(sorted(stop_ids)))


def _of_gguf(path: Path) -> tuple[list[Any], list[Any]]:
    """Values that say BOS, the first counts; and those that say an end."""
    metadata = open_gguf(path).metadata
    bos, eos, eot = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot"))
    return [bos], [eos, eot]


def _of_folder(path: Path) -> tuple[list[Any], list[Any]]:
    """As `_of_gguf`."""
    words, generation, model = (
        read_json(file, "file of a model") if (file := path / name).is_file() else {}
        for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    ends = [words.get("eos_token")]
    for of in (generation, model):
        value = of.get("eos_token_id")
        ends += value if isinstance(value, list) else [value]
    return [words.get("bos_token"), generation.get("bos_token_id"), model.get("bos_token_id")], ends


def _id(tokenizer: Tokenizer, value: Any) -> int | None:
    """The id that a declaration means: an id, a token, or a token with its properties; None for none that it has."""
    if isinstance(value, dict):
        value = value.get("content")
    if isinstance(value, str):
        find = getattr(tokenizer.backend, "token_to_id", None)  # of sentencepiece, whose file says its own
        value = find(value) if find else None
    return value if type(value) is int and 0 <= value < tokenizer.vocab_size else None
