"""Published tokenizers that are not a tokenizer.json, written as one: GPT-2's two files, and the ranks of Llama 3.

Both are byte-level BPE: text is split into words, the bytes of a word are tokens, and of all neighbours whose joint is
a token those of the smallest rank are joined first, until there are none.
"""

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any

from orthojax.errors import UserError

# The tokenizer of Llama 3 (llama3/llama/tokenizer.py): how it splits text, and its special tokens, which come after the
# ranks in this order.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def is_ranks(content: bytes) -> bool:
    """Whether a file begins as one of token ranks: lines of a token in base64 and its rank."""
    return bool(_RANK_LINE.match(content))


def gpt2_json(vocabulary: bytes, merges: bytes, where: Path) -> str:
    """The tokenizer.json of GPT-2's two files.

    Args:
      vocabulary: vocab.json: token -> id.
      merges: merges.txt: two tokens on every line, those that are joined first first.
      where: For errors.

    Raises:
      UserError: Where they are no such files or do not belong together.
    """
    import tokenizers as hf

    try:
        ids = json.loads(vocabulary)
        lines = [line for line in merges.decode().split("\n") if line.strip() and not line.startswith("#version")]
        pairs = [(left, right) for left, right in (line.split() for line in lines)]
        backend = hf.Tokenizer(hf.models.BPE(vocab=ids, merges=pairs))
    except Exception as error:  # the package raises bare Exception
        raise UserError(
            f"{where.parent} holds no GPT-2 tokenizer: {error}",
            allowed="vocab.json and merges.txt that belong together",
        ) from None
    _byte_level(backend, hf, hf.pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.add_special_tokens([name for name in ("<|endoftext|>", "<s>", "</s>") if name in ids])
    return backend.to_str()


def ranks_json(content: bytes, where: Path) -> str:
    """The tokenizer.json of the ranks of Llama 3, as `tokenizer.model` of its own release holds them.

    A word that is a token is taken whole, as Llama 3 does.

    Args:
      content: Lines of a token in base64 and its rank.
      where: For errors.

    Raises:
      UserError: Where a line is something else, or ranks are missing.
    """
    import tokenizers as hf

    ranks = _read_ranks(content, where)
    letters = _letters()
    name = {token: "".join(letters[byte] for byte in token) for token in ranks}
    # Every way to put a token together from two others is a merge, and they rank as what they make.
    merges = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], name[token[:cut]], name[token[cut:]])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    backend = hf.Tokenizer(
        hf.models.BPE(
            vocab={name[token]: rank for token, rank in ranks.items()},
            merges=[(left, right) for *_, left, right in sorted(merges)],
            ignore_merges=True,
        )
    )
    split = hf.pre_tokenizers.Split(hf.Regex(LLAMA3_WORDS), behavior="isolated")
    letters_only = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    _byte_level(backend, hf, hf.pre_tokenizers.Sequence([split, letters_only]))
    backend.add_special_tokens(list(LLAMA3_SPECIAL))
    return backend.to_str()


def _byte_level(backend: Any, hf: Any, words: Any) -> None:
    backend.pre_tokenizer = words
    backend.decoder = hf.decoders.ByteLevel()


def _read_ranks(content: bytes, where: Path) -> dict[bytes, int]:
    allowed = "on every line a token in base64 and its rank, as in the tokenizer.model of Llama 3"
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{where}, line {number}: no token and rank", allowed=allowed) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([i]) not in ranks for i in range(256)):
        raise UserError(f"{where}: the ranks are not 0 to {len(ranks) - 1}, or a byte has none", allowed=allowed)
    return ranks


def _letters() -> list[str]:
    """The character that stands for each byte: itself where it is printed, else one from 256 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
