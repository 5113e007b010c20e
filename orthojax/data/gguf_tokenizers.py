"""The tokenizer in the metadata of a GGUF file."""

import json
from pathlib import Path

from orthojax.data.tokenizers import LLAMA3_WORDS, Tokenizer, from_json
from orthojax.errors import UserError
from orthojax.gguf_reader import open_gguf

# How text is cut into words before BPE, by `tokenizer.ggml.pre`; None is GPT-2's own expression.
_QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_SINGLE_DIGITS, _GPT2 = {"smollm"}, {"gpt-2", "olmo", "default"}
_EXPRESSIONS = {"llama-bpe": LLAMA3_WORDS, "llama3": LLAMA3_WORDS, "qwen2": _QWEN2_WORDS}
_CONTROL = 3  # tokenizer.ggml.token_type of special tokens
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def gguf_tokenizer(path: Path, spec: str) -> Tokenizer:
    """The byte-level BPE of a GGUF file, which calls itself `spec`.

    Raises:
      UserError: For another kind of tokenizer, metadata that do not fit, or a damaged file; without the extra
        `pretrained`.
    """
    where, metadata = str(path), open_gguf(path).metadata
    allowed = "byte-level BPE of " + ", ".join(sorted((*_SINGLE_DIGITS, *_GPT2, *_EXPRESSIONS)))
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens, merges = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    if kind != "gpt2" or not isinstance(tokens, list) or not isinstance(merges, list):
        hint = "give token ids from a file instead of text"
        raise UserError(f"{where} has a tokenizer of kind {kind!r}, which is not supported", allowed=allowed, hint=hint)
    if split in _SINGLE_DIGITS:
        words = [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL | {"use_regex": True}]
    elif split in _GPT2:
        words = [_BYTE_LEVEL | {"use_regex": True}]
    elif split in _EXPRESSIONS:
        pattern = {"Regex": _EXPRESSIONS[split]}
        cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        words = [cut, _BYTE_LEVEL | {"use_regex": False}]
    else:
        raise UserError(f"{where} splits words as {split!r}, which is not supported", allowed=allowed)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [plain | {"id": i, "content": tokens[i]} for i, kind in enumerate(types) if kind == _CONTROL]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "ignore_merges": split in {"llama-bpe", "llama3"},
             "vocab": {token: i for i, token in enumerate(tokens)},
             "merges": [merge.split(" ") for merge in merges]}  # fmt: skip
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": words}, "post_processor": None,
             "decoder": _BYTE_LEVEL | {"use_regex": True}, "model": model}  # fmt: skip
    return from_json(json.dumps(whole), spec, where)
