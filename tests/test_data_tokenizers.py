"""Tokenizers: exact round trips, published formats against references of their own, and what bad files are called."""

import hashlib
import json
import shutil
import sys

import hypothesis
import numpy as np
import pytest
import tokenizers as hf
from hypothesis import strategies as st
from small_runs import python

from orthojax.data import tokenizers
from orthojax.data.tokenizers import ByteTokenizer, load_tokenizer, make_tokenizer, tokenizer_identity, train_bpe
from orthojax.errors import UserError

TEXTS = [
    "def word(a, b):\n    return a + b  # größer\n" * 3,
    "It's what they'd said, 12345 times:  the token  and the sink.\n\n\n" * 3,
    "\t\x00 日本語 日本 🙂",
]
SENTENCES = st.lists(
    st.sampled_from([*"ab \n\t'1é日", "the ", "token", "'s", "12345", "  ", "\r\n", "!?", "größer"]), max_size=20
).map("".join)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 330)


@hypothesis.given(st.lists(st.text(), max_size=4))
@hypothesis.example(["a <|eos|> b <|bos|>"])
def test_round_trip(bpe, texts):
    for tokenizer in (ByteTokenizer(), bpe):
        rows = tokenizer.encode_batch(texts)
        assert [tokenizer.decode([tokenizer.bos_id, *row, tokenizer.eos_id]) for row in rows] == texts
        for row, text in zip(rows, texts, strict=True):
            assert row.dtype == np.int32
            assert ((row >= 0) & (row < tokenizer.vocab_size)).all()
            assert not np.isin(row, [tokenizer.bos_id, tokenizer.eos_id]).any()
            assert tokenizer is bpe or row.tolist() == list(text.encode())


def test_bpe_shape_and_determinism(bpe):
    """In another process too, where what needs no package imports none."""
    assert (bpe.spec, bpe.vocab_size, bpe.bos_id, bpe.eos_id) == ("bpe:330", 330, 0, 1)
    assert len(bpe.encode_batch(TEXTS)[0]) < len(TEXTS[0].encode()) / 2
    assert sorted(json.loads(bpe.serialized)["model"]["vocab"].values()) == list(range(330))
    code = (
        "import sys, orthojax.data\n"
        "from orthojax.data.tokenizers import tokenizer_identity, make_tokenizer, train_bpe\n"
        "assert tokenizer_identity('bpe:2048') == 'bpe:2048'\n"
        "make_tokenizer('bytes', ()).encode_batch(['x'])\n"
        "heavy = {'tokenizers', 'grain', 'flax', 'tensorflow_datasets', 'tensorflow'}\n"
        f"print(sorted(heavy & set(sys.modules)), train_bpe({TEXTS!r}, 330).sha256)"
    )
    assert python("-c", code).stdout == f"[] {bpe.sha256}\n"
    assert train_bpe(TEXTS[:1], 270).sha256 != bpe.sha256


@pytest.mark.parametrize("spec", ["bytes", "bpe:280"])
def test_save_and_load(tmp_path, spec):
    tokenizer, path = make_tokenizer(spec, TEXTS), tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path, spec)
    assert loaded == tokenizer
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    for a, b in zip(loaded.encode_batch(TEXTS), tokenizer.encode_batch(TEXTS), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("special", "bos_id", "eos_id"), [
    (["<s>", "</s>"], 3, 4),
    (["<|endoftext|>"], 3, 3),
    (["<|begin_of_text|>", "<|end_of_text|>"], 3, 4),
    (["<eos>", "<bos>"], 4, 3),
    (["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"], 3, 4),
])  # fmt: skip
def test_published_json_adds_and_cuts_nothing(tmp_path, special, bos_id, eos_id):
    """A tokenizer.json as other projects publish them."""
    backend, path = hf.Tokenizer(hf.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2})), str(tmp_path / "x.json")
    backend.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    backend.save(path)
    with pytest.raises(UserError, match="end-of-text"):
        make_tokenizer(path, ())
    backend.add_special_tokens(special)
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=9)
    begin = (special[0], backend.token_to_id(special[0]))
    backend.post_processor = hf.processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    backend.save(path)
    tokenizer = make_tokenizer(path, ())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (bos_id, eos_id, 3 + len(special))
    assert tokenizer.encode_batch(["a b a b"])[0].tolist() == [1, 2, 1, 2]  # nothing added, cut or padded
    assert tokenizer_identity(path) == "sha256:" + tokenizer.sha256
    assert tokenizer.spec == "x.json"


def test_vocab_size_counts_to_the_largest_id(tmp_path):
    backend = hf.Tokenizer(hf.models.WordLevel({"a": 0, "</s>": 7}, unk_token="a"))
    backend.save(str(tmp_path / "holes.json"))
    assert load_tokenizer(tmp_path / "holes.json").vocab_size == 8


@pytest.fixture(scope="module")
def gpt2(bpe, tmp_path_factory):
    """A folder with merges and vocabulary learned from a text, as any byte-level BPE has them."""
    model, folder = json.loads(bpe.serialized)["model"], tmp_path_factory.mktemp("gpt2")
    vocabulary = {token: i - 2 for token, i in model["vocab"].items() if i >= 2}  # without <|bos|> and <|eos|>
    merges = [pair.split() if isinstance(pair, str) else pair for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": len(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    return folder


@hypothesis.given(SENTENCES)
def test_gpt2_is_that_of_the_package(gpt2, text):
    reference = hf.ByteLevelBPETokenizer.from_file(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    (ids,) = load_tokenizer(gpt2).encode_batch([text])
    assert ids.tolist() == reference.encode(text).ids
    assert load_tokenizer(gpt2).decode(ids) == text


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
    before = tokenizer_identity(str(gpt2))
    shutil.copytree(gpt2, tmp_path / "copy")
    assert tokenizer_identity(str(tmp_path / "copy")) == before
    (tmp_path / "copy/merges.txt").write_text("#version: 0.2\n")
    assert tokenizer_identity(str(tmp_path / "copy")) != before


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_is_its_library(tmp_path, kind):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "a.txt").write_text("\n".join(TEXTS * 20).replace("\x00", ""), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "a.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=330, hard_vocab_limit=False,
        model_type=kind, byte_fallback=True, bos_id=1 if kind == "bpe" else -1, eos_id=2 if kind == "bpe" else 1,
        unk_id=0, minloglevel=2,
    )  # fmt: skip
    path = tmp_path / "tokenizer.model"
    reference, tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path)), load_tokenizer(path)
    texts = [*TEXTS, "", "a <s> b </s>", "  two  spaces\n"]
    for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert ids.tolist() == reference.encode(text)
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == reference.decode(reference.encode(text))
    assert tokenizer.vocab_size == reference.vocab_size()
    assert (tokenizer.bos_id, tokenizer.eos_id) == ((1, 2) if kind == "bpe" else (1, 1))
    assert load_tokenizer(tmp_path).sha256 == tokenizer.sha256
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json", tokenizer.spec)
    assert loaded == tokenizer
    assert loaded.encode_batch(TEXTS)[0].tolist() == reference.encode(TEXTS[0])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x01")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'orthojax\[sentencepiece\]'"):
        load_tokenizer(tmp_path / "tokenizer.model")


def test_unknown_ids_are_left_out():
    class Backend:
        def decode(self, ids):
            return "".join("abc"[i] for i in ids)

    assert ByteTokenizer().decode([-1, 65, 999]) == "A"
    assert tokenizers.SentencePieceTokenizer("s", 3, 0, 1, "", Backend()).decode([0, 250, -1, 2]) == "ac"


def test_a_text_on_which_a_regular_expression_gives_up_is_refused(tmp_path):
    tokenizer = hf.Tokenizer(hf.models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex("(a+)+$"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode_batch(["aab"])[0].tolist() == [0, 0, 1]
    for encode in (lambda text: loaded.encode_batch([text]), loaded.encode_special):
        with pytest.raises(UserError, match=r"cannot read this text: .*retry-limit"):
            encode("a" * 40 + "b")
