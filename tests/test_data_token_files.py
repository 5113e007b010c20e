"""Token files: what is in them, that they appear whole or not at all, and that a wrong one is refused."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from orthojax.data import encoding, token_files
from orthojax.data.text_files import Document
from orthojax.data.token_files import open_token_file, prepare, sidecar_path
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError

DOCUMENTS = [Document("a", "hé"), Document("b", "")]


def make(path, documents=DOCUMENTS, tokenizer=None, **changes):
    return prepare(documents, tokenizer or ByteTokenizer(), path, **{"split": "train", "source": "test", **changes})


def test_contents_and_sidecar(tmp_path):
    file = make(tmp_path / "new" / "train.bin", source_sha256="abc", file_count=2)
    assert file.tokens.tolist() == [104, 195, 169, 257, 257]
    assert isinstance(file.tokens, np.memmap)
    assert not file.tokens.flags.writeable
    raw = (tmp_path / "new" / "train.bin").read_bytes()
    assert raw == bytes([104, 0, 195, 0, 169, 0, 1, 1, 1, 1])  # little-endian
    assert json.loads(sidecar_path(file.path).read_text()) == {
        "format_version": 1,
        "dtype": "uint16",
        "n_tokens": 5,
        "n_bytes": 3,
        "n_documents": 2,
        "vocab_size": 258,
        "bos_id": 256,
        "eos_id": 257,
        "tokenizer": "bytes",
        "tokenizer_sha256": ByteTokenizer().sha256,
        "source": "test",
        "source_sha256": "abc",
        "file_count": 2,
        "split": "train",
        "data_sha256": hashlib.sha256(raw).hexdigest(),
        "sample_sha256": hashlib.sha256(raw).hexdigest(),  # all of so small a file
        "shard": "",
    }
    assert sorted(p.name for p in file.path.parent.iterdir()) == ["train.bin", "train.json"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_dtype_holds_every_id(tmp_path, vocab_size, dtype):
    wide = dataclasses.replace(ByteTokenizer(), vocab_size=vocab_size, eos_id=vocab_size - 1)
    file = make(tmp_path / "train.bin", tokenizer=wide)
    assert file.tokens.dtype == dtype
    assert file.tokens[-1] == vocab_size - 1


def test_batches_of_documents_do_not_show(tmp_path, monkeypatch):
    documents = [Document(str(i), "x" * i) for i in range(30)]
    whole = make(tmp_path / "a.bin", documents)
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 50)
    calls = []
    parts = make(tmp_path / "b.bin", iter(documents), total_bytes=435, progress=lambda *call: calls.append(call))
    assert parts.info == whole.info
    assert len(calls) > 3
    assert calls[-1] == ("train", 435, 435)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def test_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "train.bin"
    make(path)

    def broken():
        yield DOCUMENTS[0]
        raise RuntimeError("the disk of the documents fails")

    with pytest.raises(RuntimeError):
        make(path, broken())
    with pytest.raises(UserError, match="no documents"):
        make(path, [])
    assert open_token_file(path, verify=True).info.n_documents == 2
    assert len(list(tmp_path.iterdir())) == 2

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_files.os, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        make(path)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_no_moment_with_a_foreign_sidecar(tmp_path, monkeypatch):
    """Killed between the two renames, a new file must not be taken for what the old sidecar describes."""
    path = tmp_path / "train.bin"
    make(path)
    real, calls = token_files.os.replace, []

    def killed(source, target):
        if calls:
            raise KeyboardInterrupt
        calls.append(target)
        real(source, target)

    monkeypatch.setattr(token_files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        make(path, [Document("a", "éh"), Document("b", "")])  # as long as the old one
    with pytest.raises(UserError, match="has no sidecar"):
        open_token_file(path)


def test_wrong_files(tmp_path):
    path = tmp_path / "train.bin"
    with pytest.raises(UserError, match=r"there is no token file .*train\.bin"):
        open_token_file(path)
    path.write_bytes(b"1234")
    with pytest.raises(
        UserError, match=r"train\.bin has no sidecar train\.json\ndelete it and make it again with launch/prepare_data"
    ):
        open_token_file(path)
    make(path)
    original = path.read_bytes()
    path.write_bytes(original[:-2])
    with pytest.raises(UserError, match=r"train\.bin has 8 bytes, its sidecar says 10"):
        open_token_file(path)
    path.write_bytes(b"\x01" + original[1:])
    with pytest.raises(UserError, match=r"train\.bin does not have the sha256 of its sidecar"):
        open_token_file(path)
    with pytest.raises(UserError, match="its own sidecar"):
        make(tmp_path / "train.json")


def test_a_look_at_a_large_file_and_the_whole_of_it(tmp_path):
    """Another file of the same size is noticed at once, one changed byte when all is read."""
    path = tmp_path / "train.bin"
    make(path, [Document("a", "word " * 40_000)])
    content, block = bytearray(path.read_bytes()), 4096
    blocks = [content[(len(content) - block) * i // 15 :][:block] for i in range(16)]
    assert json.loads(sidecar_path(path).read_text())["sample_sha256"] == hashlib.sha256(b"".join(blocks)).hexdigest()
    content[block] ^= 1
    path.write_bytes(content)
    open_token_file(path)
    with pytest.raises(UserError, match="does not have the sha256 of its sidecar"):
        open_token_file(path, verify=True)
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="does not have the sha256 of its sidecar"):
        open_token_file(path)


def test_sidecars_of_earlier_versions(tmp_path):
    path = tmp_path / "train.bin"
    make(path)
    values = json.loads(sidecar_path(path).read_text())
    del values["sample_sha256"], values["shard"]
    sidecar_path(path).write_text(json.dumps(values))
    assert open_token_file(path, verify=True).info.shard == ""


def test_long_documents_are_cut_at_lines(tmp_path, monkeypatch):
    seen = []

    class Listening(ByteTokenizer):
        def encode_batch(self, texts):
            seen.extend(texts)
            return super().encode_batch(texts)

    documents = [Document("a", "0123\n5678\nabcdefghijklmnop"), Document("b", "short")]
    whole = make(tmp_path / "a.bin", documents)
    monkeypatch.setattr(encoding, "_LONGEST_TEXT", 8)
    cut = make(tmp_path / "b.bin", documents, tokenizer=Listening())
    assert seen == ["0123\n", "5678\n", "abcdefgh", "ijklmnop", "short"]
    assert cut.tokens.tolist() == whole.tokens.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"format_version": None},
        {"dtype": "float32"},
        {"n_tokens": "5"},
        {"n_tokens": 0},
        {"unknown": 1},
    ],
)
def test_wrong_sidecars(tmp_path, change):
    path = tmp_path / "train.bin"
    make(path)
    values = json.loads(sidecar_path(path).read_text()) | change
    sidecar_path(path).write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"train\.json does not describe a token file of format 1"):
        open_token_file(path)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "does not describe")]
)
def test_sidecars_of_something_else(tmp_path, content, message):
    path = tmp_path / "train.bin"
    make(path)
    sidecar_path(path).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_token_file(path)
