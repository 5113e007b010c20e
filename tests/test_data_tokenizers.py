"""Tokenizers: exact round trips, equal ids for equal text, and what is said about bad files and names."""

import hashlib
import json
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
import tokenizers as hf
from hypothesis import strategies as st

from orthojax.data.tokenizers import ByteTokenizer, load_tokenizer, make_tokenizer, tokenizer_identity, train_bpe
from orthojax.errors import UserError

TEXTS = [
    "def word(a, b):\n    return a + b  # größer\n" * 3,
    "class Word:\n    '''Words, words.'''\n",
    "\t\x00 日本 🙂",
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


@hypothesis.given(st.text())
def test_bytes_are_utf8(text):
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_batch([text])
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text


@hypothesis.given(st.lists(st.text(), max_size=4))
def test_bpe_round_trip(bpe, texts):
    rows = bpe.encode_batch(texts)
    assert [bpe.decode(row) for row in rows] == texts
    for row in rows:
        assert row.dtype == np.int32
        assert ((row >= 0) & (row < bpe.vocab_size)).all()
        assert not np.isin(row, [bpe.bos_id, bpe.eos_id]).any()


def test_ids_are_those_of_the_package_as_it_comes(bpe):
    """Of more words than it keeps the ids of, and met twice."""
    assert hasattr(bpe.backend.model, "_resize_cache")  # a private name, without which tokenising is slower
    texts = [" ".join(f"größe{i}" for i in range(20_000))] * 2
    expected = [encoding.ids for encoding in hf.Tokenizer.from_str(bpe.serialized).encode_batch(texts)]
    assert [ids.tolist() for ids in bpe.encode_batch(texts)] == expected


def test_bpe_shape(bpe):
    assert (bpe.spec, bpe.vocab_size, bpe.bos_id, bpe.eos_id) == ("bpe:300", 300, 0, 1)
    assert len(bpe.encode_batch(TEXTS)[0]) < len(TEXTS[0].encode()) / 2
    assert sorted(json.loads(bpe.serialized)["model"]["vocab"].values()) == list(range(300))


def test_special_tokens_in_text_are_text(bpe):
    text = "a <|eos|> b <|bos|>"
    (ids,) = bpe.encode_batch([text])
    assert not np.isin(ids, [bpe.bos_id, bpe.eos_id]).any()
    assert bpe.decode(ids) == text
    assert bpe.decode([bpe.bos_id, *ids, bpe.eos_id]) == text


def test_bpe_is_deterministic_in_another_process(bpe):
    code = f"from orthojax.data.tokenizers import train_bpe\nprint(train_bpe({TEXTS!r}, 300).sha256)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == bpe.sha256
    assert train_bpe(TEXTS[:1], 270).sha256 != bpe.sha256


@pytest.mark.parametrize("spec", ["bytes", "bpe:280"])
def test_save_and_load(tmp_path, spec):
    tokenizer = make_tokenizer(spec, TEXTS)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path, spec)
    assert loaded == tokenizer
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    for a, b in zip(loaded.encode_batch(TEXTS), tokenizer.encode_batch(TEXTS), strict=True):
        np.testing.assert_array_equal(a, b)


def foreign(path, special_tokens, **settings):
    """A tokenizer.json as other projects publish them."""
    backend = hf.Tokenizer(hf.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    backend.add_special_tokens(special_tokens)
    for name, arguments in settings.items():
        getattr(backend, name)(**arguments)
    if special_tokens:
        begin = (special_tokens[0], backend.token_to_id(special_tokens[0]))
        backend.post_processor = hf.processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    backend.save(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("special", "bos_id", "eos_id"),
    [
        (["<s>", "</s>"], 3, 4),
        (["<|endoftext|>"], 3, 3),
        (["<|begin_of_text|>", "<|end_of_text|>"], 3, 4),
        (["<eos>", "<bos>"], 4, 3),
    ],
)
def test_foreign_tokenizer(tmp_path, special, bos_id, eos_id):
    path = foreign(tmp_path / "x.json", special, enable_truncation={"max_length": 2}, enable_padding={"length": 9})
    tokenizer = make_tokenizer(path, ())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (bos_id, eos_id, 3 + len(special))
    assert tokenizer.encode_batch(["a b a b"])[0].tolist() == [1, 2, 1, 2]  # nothing added, cut or padded
    assert tokenizer_identity(path) == "sha256:" + tokenizer.sha256
    assert tokenizer.spec == "x.json"


def test_vocab_size_counts_to_the_largest_id(tmp_path):
    backend = hf.Tokenizer(hf.models.WordLevel({"a": 0, "</s>": 7}, unk_token="a"))
    backend.save(str(tmp_path / "holes.json"))
    assert load_tokenizer(tmp_path / "holes.json").vocab_size == 8


def test_bad_files(tmp_path):
    with pytest.raises(UserError, match=r"no end-of-text token\nallowed: one of .*<\|endoftext\|>"):
        make_tokenizer(foreign(tmp_path / "none.json", []), ())
    for name, content, message in [
        ("a.json", b"{", "is not JSON"),
        ("b.json", b"\xff", "is not JSON"),
        ("c.json", b"[1]", "is JSON, but not of a tokenizer"),
        ("d.json", b'{"model": 1}', "is JSON, but not of a tokenizer"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            make_tokenizer(str(tmp_path / name), ())
    with pytest.raises(UserError, match=r"there is no tokenizer file .*missing\.json"):
        make_tokenizer(str(tmp_path / "missing.json"), ())
    with pytest.raises(UserError, match="is a folder"):
        make_tokenizer(str(tmp_path), ())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("byte", r"unknown tokenizer 'byte'\nallowed: bytes \| bpe:N.*\ndid you mean 'bytes'"),
        ("bpe", r"unknown tokenizer 'bpe'\n.*\ndid you mean 'bpe:2048'"),
        ("bpe:", r"unknown tokenizer 'bpe:'"),
        ("bpe:-300", r"unknown tokenizer 'bpe:-300'"),
        ("bpe:2k", r"unknown tokenizer 'bpe:2k'"),
        ("bpe:259", r"'bpe:259' is too small\nallowed: bpe:260 or more"),
        ("bpe:5000", r"'bpe:5000' needs more text: there are only \d+ different ids"),
        ("", "unknown tokenizer|is a folder"),
    ],
)
def test_bad_names(spec, message):
    with pytest.raises(UserError, match=message):
        make_tokenizer(spec, TEXTS)


def test_identity_imports_nothing_heavy():
    code = (
        "import sys, orthojax.data.datasets, orthojax.data.batches, orthojax.data.bigram_backcopy\n"
        "from orthojax.data.tokenizers import tokenizer_identity, make_tokenizer\n"
        "assert tokenizer_identity('bpe:2048') == 'bpe:2048'\n"
        "make_tokenizer('bytes', ()).encode_batch(['x'])\n"
        "print(sorted({'tokenizers', 'grain', 'jax', 'flax', 'optax', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
