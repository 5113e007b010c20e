"""The tokens that begin a text and end generation, as the files of a published model declare them."""

import dataclasses
from pathlib import Path
from typing import Any

from orthojax.data.published import open_gguf
from orthojax.data.tokenizers import Tokenizer
from orthojax.files import read_json


def with_declared_tokens(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """Gives a tokenizer the BOS token and the end tokens that a published model declares.

    Names alone do not say them: OPT begins with `</s>`, SmolLM2-Instruct and Llama 3 Instruct end with tokens of their
    own. What follows a document, `eos_id`, stays as it is.

    Args:
      tokenizer: Of the model.
      path: A .gguf file; or a folder, whose tokenizer_config.json, generation_config.json and config.json are
        read if they exist.

    Raises:
      UserError: For a damaged file.
    """
    begins, ends = (_of_gguf if path.suffix == ".gguf" else _of_folder)(path)
    bos_id = next((found for value in begins if (found := _id(tokenizer, value)) is not None), tokenizer.bos_id)
    stop_ids = {found for value in ends if (found := _id(tokenizer, value)) is not None}
    return dataclasses.replace(tokenizer, bos_id=bos_id, stop_ids=tuple(sorted(stop_ids)))


def begins_with_bos(path: Path) -> bool:
    """Tells whether a published model was trained on texts that begin with its BOS token.

    `add_bos_token` of tokenizer_config.json or of a .gguf file says so; if it is missing, the post-processor of
    tokenizer.json, by the special token that it puts first, or the kind of tokenizer, as Llama's sentencepiece model
    begins with it by default.

    Args:
      path: As of `with_declared_tokens`.

    Raises:
      UserError: For a damaged file.
    """
    if path.suffix == ".gguf":
        metadata = open_gguf(path).metadata
        return bool(metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama"))
    words, tokenizer = (_read(path / name) for name in ("tokenizer_config.json", "tokenizer.json"))
    if type(declared := words.get("add_bos_token")) is bool:
        return declared
    if tokenizer:
        return _puts_special_token_first(tokenizer.get("post_processor"))
    kind = str(words.get("tokenizer_class", ""))
    return (path / "tokenizer.model").is_file() and kind.startswith(("Llama", "CodeLlama", "Gemma"))


def _puts_special_token_first(post_processor: Any) -> bool:
    """Tells this of a `TemplateProcessing`, alone or in a sequence of processors."""
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


def _of_gguf(path: Path) -> tuple[list[Any], list[Any]]:
    """Returns declarations of BOS, the first of which counts, and of ends."""
    metadata = open_gguf(path).metadata
    bos, eos, eot = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot"))
    return [bos], [eos, eot]


def _of_folder(path: Path) -> tuple[list[Any], list[Any]]:
    """Returns the same as `_of_gguf`."""
    names = ("tokenizer_config.json", "generation_config.json", "config.json")
    words, generation, model = (_read(path / name) for name in names)
    ends = [words.get("eos_token")]
    for of in (generation, model):
        value = of.get("eos_token_id")
        ends += value if isinstance(value, list) else [value]
    return [words.get("bos_token"), generation.get("bos_token_id"), model.get("bos_token_id")], ends


def _id(tokenizer: Tokenizer, value: Any) -> int | None:
    """Returns the id of a declaration (an id, a token, or a token with its properties) that the tokenizer has."""
    if isinstance(value, dict):
        value = value.get("content")
    if isinstance(value, str):
        find = getattr(tokenizer.backend, "token_to_id", None)  # of sentencepiece, whose file says its own
        value = find(value) if find else None
    return value if type(value) is int and 0 <= value < tokenizer.vocab_size else None
