"""Published tokenizers: GPT-2's two files, the ranks of Llama 3 and sentencepiece, against references of their own."""

import base64
import itertools
import json
import re

import hypothesis
import pytest
import tokenizers as hf
from hypothesis import strategies as st

from orthojax.data.tokenizers import load_tokenizer, make_tokenizer, tokenizer_identity, train_bpe
from orthojax.errors import UserError

TEXTS = [
    "def word(a, b):\n    return a + b  # größer\n" * 3,
    "It's what they'd said, 12345 times:  the token  and the sink.\n\n\n" * 3,
    "\t\x00 日本語 日本 🙂",
]
SENTENCES = st.lists(
    st.sampled_from([*"ab \n\t'1é日", "the ", "token", "'s", "12345", "  ", "\r\n", "!?", "größer"]), max_size=20
).map("".join)


def byte_letters():
    """GPT-2's characters for bytes (encoder.py, bytes_to_unicode): printable Latin-1 stands for itself."""
    table, extra = {}, 0
    for byte in range(256):
        if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD):
            table[byte] = chr(byte)
        else:
            table[byte], extra = chr(256 + extra), extra + 1
    return table


def greedy(word, rank):
    """BPE as it is defined: join the leftmost pair of the smallest rank, until no pair has one."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        pairs = [(rank(a, b), i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if rank(a, b) is not None]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.fixture(scope="module")
def learned():
    """Merges and vocabulary learned from a text, as any byte-level BPE has them."""
    model = json.loads(train_bpe(TEXTS, 330).serialized)["model"]
    vocabulary = {token: i - 2 for token, i in model["vocab"].items() if i >= 2}  # without <|bos|> and <|eos|>
    return vocabulary, [tuple(pair) if isinstance(pair, list) else tuple(pair.split()) for pair in model["merges"]]


# GPT-2.


@pytest.fixture(scope="module")
def gpt2(learned, tmp_path_factory):
    vocabulary, merges = learned
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": len(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    return folder


def gpt2_words(text):
    """The split of encoder.py, with the classes of its pattern spelled out for the standard library."""
    letter, number = r"[^\W\d_]", r"\d"
    other = r"(?:(?!\s)(?:[\W_]))"
    pattern = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{letter}+| ?{number}+| ?{other}+|\s+(?!\S)|\s+"
    return re.findall(pattern, text)


@hypothesis.given(SENTENCES)
def test_gpt2_is_greedy_bpe(gpt2, learned, text):
    vocabulary, merges = learned
    letters, order = byte_letters(), {pair: i for i, pair in enumerate(merges)}
    words = gpt2_words(text)
    assert "".join(words) == text
    expected = [
        vocabulary[part]
        for word in words
        for part in greedy("".join(letters[byte] for byte in word.encode()), lambda a, b: order.get((a, b)))
    ]
    tokenizer = load_tokenizer(gpt2)
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == expected
    assert tokenizer.decode(ids) == text


def test_gpt2_by_folder_or_file(gpt2, tmp_path):
    tokenizer = load_tokenizer(gpt2 / "vocab.json")
    assert tokenizer.vocab_size == len(json.loads((gpt2 / "vocab.json").read_text()))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (tokenizer.vocab_size - 1, tokenizer.vocab_size - 1)
    (ids,) = tokenizer.encode_batch(["a<|endoftext|>"])
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "a<|endoftext|>"
    assert load_tokenizer(gpt2).sha256 == tokenizer.sha256
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").sha256 == tokenizer.sha256
    for new, old in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (tmp_path / "openai").mkdir(exist_ok=True)
        (tmp_path / "openai" / new).write_bytes((gpt2 / old).read_bytes())
    assert load_tokenizer(tmp_path / "openai").sha256 == tokenizer.sha256
    before = tokenizer_identity(str(tmp_path / "openai"))
    assert before == tokenizer_identity(str(gpt2))
    (tmp_path / "openai/vocab.bpe").write_text("#version: 0.2\n")
    assert tokenizer_identity(str(tmp_path / "openai")) != before


def test_bad_gpt2_files(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "<|endoftext|>": 2}')
    with pytest.raises(UserError, match=r"no tokenizer file .*merges\.txt"):
        load_tokenizer(tmp_path)
    for merges in ("a c\n", "a b c\n", "a b\n"):
        (tmp_path / "merges.txt").write_text(merges)
        with pytest.raises(UserError, match=r"holds no GPT-2 tokenizer.*\nallowed: vocab\.json and merges\.txt"):
            load_tokenizer(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"is a folder without a tokenizer\nallowed: tokenizer\.json \| vocab\.json"):
        make_tokenizer(str(tmp_path / "empty"), ())


# Llama 3.


@pytest.fixture(scope="module")
def ranks(learned):
    """Token bytes -> rank: what was learned, and a token that no merges lead to."""
    back = {letter: byte for byte, letter in byte_letters().items()}
    tokens = sorted(learned[0], key=learned[0].__getitem__)
    found = {bytes(back[letter] for letter in token): i for i, token in enumerate(tokens)}
    return found | {b" unreachable": len(found)}


@pytest.fixture(scope="module")
def llama3(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()))
    return path


def llama3_words(text):
    """The split of llama3/tokenizer.py, with its classes spelled out for the standard library."""
    letter, number = r"[^\W\d_]", r"\d"
    neither = r"(?:(?!\s)[\W_])"
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:(?![\r\n])[\W_])?{letter}+|{number}{{1,3}}| ?{neither}+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return re.findall(pattern, text)


@hypothesis.given(SENTENCES)
def test_llama3_is_greedy_bpe_of_ranks(llama3, ranks, text):
    words = llama3_words(text)
    assert "".join(words) == text
    expected = []
    for word in map(str.encode, words):
        parts = [word] if word in ranks else greedy(word, lambda a, b: ranks.get(a + b))
        expected += [ranks[part] for part in parts]
    tokenizer = load_tokenizer(llama3)
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == expected
    assert tokenizer.decode(ids) == text


def test_llama3_special_tokens(llama3, ranks):
    tokenizer = load_tokenizer(llama3.parent)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (
        len(ranks) + 256,
        len(ranks),
        len(ranks) + 1,
    )
    special = {name: tokenizer.backend.token_to_id(name) - len(ranks) for name in ("<|eot_id|>", "<|end_header_id|>")}
    assert special == {"<|eot_id|>": 9, "<|end_header_id|>": 7}
    assert tokenizer.backend.token_to_id("<|reserved_special_token_250|>") == tokenizer.vocab_size - 1
    (ids,) = tokenizer.encode_batch(["a <|end_of_text|> unreachable"])
    assert max(ids) < len(ranks)
    assert ids[-1] == ranks[b" unreachable"]


def test_llama3_is_tiktoken(llama3, ranks):
    tiktoken = pytest.importorskip("tiktoken")  # besides the reference above
    from orthojax.data.tokenizer_formats import LLAMA3_WORDS

    reference = tiktoken.Encoding("llama3", pat_str=LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens={})
    tokenizer = load_tokenizer(llama3)
    for text in [*TEXTS, *(open(__file__, encoding="utf-8").read().split("\n\n"))]:
        assert tokenizer.encode_batch([text])[0].tolist() == reference.encode_ordinary(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\nIg== 1\n", "the ranks are not 0 to 1, or a byte has none"),
        (b"IQ== 0\nnothing\n", "line 2: no token and rank"),
        (b"IQ== 0\nI 1\n", "line 2: no token and rank"),
    ],
)
def test_bad_ranks(tmp_path, content, message):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=rf"tokenizer\.model.* {message}"):
        load_tokenizer(tmp_path / "tokenizer.model")


# sentencepiece.


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def piece(request, tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "a.txt").write_text("\n".join(TEXTS * 20).replace("\x00", ""), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "a.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=330, hard_vocab_limit=False,
        model_type=request.param, byte_fallback=True, bos_id=1 if request.param == "bpe" else -1,
        eos_id=2 if request.param == "bpe" else 1, unk_id=0, minloglevel=2,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return request.param, folder / "tokenizer.model", processor


def test_sentencepiece_is_its_library(piece, tmp_path):
    kind, path, reference = piece
    tokenizer = load_tokenizer(path)
    texts = [*TEXTS, "", "a <s> b </s>", "  two  spaces\n"]
    for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert ids.tolist() == reference.encode(text)
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == reference.decode(reference.encode(text))
    assert tokenizer.vocab_size == reference.vocab_size()
    assert (tokenizer.bos_id, tokenizer.eos_id) == ((1, 2) if kind == "bpe" else (1, 1))
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json", tokenizer.spec)
    assert loaded == tokenizer
    assert loaded.encode_batch(TEXTS)[0].tolist() == reference.encode(TEXTS[0])
    assert load_tokenizer(path.parent).sha256 == tokenizer.sha256


def test_a_broken_model_or_none(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x01")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "sentencepiece", None)
        with pytest.raises(UserError, match=r"needs a package\nallowed: pip install sentencepiece"):
            load_tokenizer(tmp_path / "tokenizer.model")
    pytest.importorskip("sentencepiece")
    with pytest.raises(UserError, match=r"tokenizer\.model is no tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.model")


def test_words_of_the_references(gpt2):
    """The patterns of the standard library split as the package does, also where the BPE would hide it."""
    words = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in TEXTS:
        spans = [text[a:b] for _, (a, b) in words.pre_tokenize_str(text)]
        assert [span for span in spans if span] == gpt2_words(text)
