"""Token files and their shards: what is in them, that shards read as one file, and that a wrong one is refused."""

import dataclasses
import hashlib
import json
import os
import shutil
import time

import numpy as np
import pytest

from orthojax.data import Part, TokenBatches, prepare
from orthojax.data.sources import Document, Piece, Source
from orthojax.data.token_files import JoinedTokens, TokenWriter, open_token_file, open_token_files, sidecar_path
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError

SHARDS = 5


def make(path, files=(("hé", "x"),), shard=(0, 1)):
    """A token file of some texts, or a shard of it; every file has a few."""

    def piece(texts):
        return Piece(lambda: ((Document("", text), 1) for text in texts), 1)

    source = Source("test", "abc", tuple(map(piece, files)))
    part = Part(path.stem, "train", source, lambda document: document.text)
    return prepare(path.parent, [part], "bytes", shard=shard)[0]


def test_contents_and_sidecar_are_these_bytes(tmp_path):
    file = make(tmp_path / "train.bin")
    assert file.tokens.tolist() == [104, 195, 169, 257, 120, 257]
    assert isinstance(file.tokens, np.memmap)
    assert not file.tokens.flags.writeable
    raw = (tmp_path / "train.bin").read_bytes()
    assert raw == bytes([104, 0, 195, 0, 169, 0, 1, 1, 120, 0, 1, 1])  # little-endian
    canonical = json.dumps(dataclasses.asdict(file.info), sort_keys=True, separators=(",", ":"))
    assert json.loads(sidecar_path(file.path).read_text()) == {
        "format_version": 1,
        "dtype": "uint16",
        "n_tokens": 6,
        "n_bytes": 4,
        "n_documents": 2,
        "vocab_size": 258,
        "bos_id": 256,
        "eos_id": 257,
        "tokenizer": "bytes",
        "tokenizer_sha256": ByteTokenizer().sha256,
        "source": "test",
        "source_sha256": "abc",
        "file_count": 1,
        "split": "train",
        "data_sha256": hashlib.sha256(raw).hexdigest(),
        "sample_sha256": hashlib.sha256(raw).hexdigest(),  # all of so small a file
        "shard": "",
        "content_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "train.bin", "train.json"]


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 2), ("uint32", 4)])
def test_ids_have_the_width_of_the_sidecar(tmp_path, dtype, size):
    info = dataclasses.asdict(make(tmp_path / "train.bin").info)
    counted = ("n_tokens", "n_bytes", "n_documents", "data_sha256", "sample_sha256")
    created_from = {name: value for name, value in info.items() if name not in counted} | {"dtype": dtype}
    with TokenWriter(tmp_path / "b.bin", created_from) as writer:
        writer.append(np.array([5, 65_535, 257], np.int32), n_documents=1, n_bytes=9)
        writer.complete()
    file = open_token_file(tmp_path / "b.bin", verify=True)
    assert (file.tokens.tolist(), file.tokens.dtype) == ([5, 65_535, 257], dtype)
    assert file.path.stat().st_size == 3 * size


def test_an_abandoned_file_leaves_nothing(tmp_path):
    """Not even what a call left that was killed two hours ago."""
    info = dataclasses.asdict(make(tmp_path / "train.bin").info)
    (tmp_path / ".b.bin.1-ab.tmp").touch()
    os.utime(tmp_path / ".b.bin.1-ab.tmp", (time.time() - 7200,) * 2)
    with TokenWriter(tmp_path / "b.bin", info) as writer:
        writer.append(np.array([1, 257]), n_documents=1, n_bytes=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "train.bin", "train.json"]


# Damage.


def test_missing_and_changed_files_are_refused(tmp_path):
    path = make(tmp_path / "train.bin").path
    small = path.read_bytes()
    for content, message in ((small[:-2], "10 bytes"), (small + small, "24 bytes"), (b"\x01" + small[1:], "sha256")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            open_token_file(path)
    sidecar_path(path).unlink()
    with pytest.raises(UserError, match=r"no sidecar train\.json"):
        open_token_file(path)
    path.unlink()
    with pytest.raises(UserError, match=r"no token file .*train\.bin"):
        open_token_file(path)


def test_one_changed_byte_of_a_large_file_needs_verify(tmp_path):
    """A few blocks are always compared: another file of the same size is noticed at once."""
    path, block = make(tmp_path / "train.bin", [["word " * 40_000]]).path, 4096
    content = bytearray(path.read_bytes())
    blocks = [content[(len(content) - block) * i // 15 :][:block] for i in range(16)]
    assert json.loads(sidecar_path(path).read_text())["sample_sha256"] == hashlib.sha256(b"".join(blocks)).hexdigest()
    content[block] ^= 1
    path.write_bytes(content)
    open_token_file(path)
    with pytest.raises(UserError, match="sha256"):
        open_token_file(path, verify=True)
    with pytest.raises(UserError, match="sha256"):
        open_token_files(path)  # so small a file is read whole
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="sha256"):
        open_token_file(path)


@pytest.mark.parametrize(
    "change",
    [{"bos_id": 0}, {"eos_id": 256}, {"vocab_size": 50_000}, {"n_bytes": "4"}, {"n_documents": None}, {"more": 1}],
    ids=str,
)
def test_an_edited_sidecar_is_noticed(tmp_path, change):
    path = make(tmp_path / "train.bin").path
    values = json.loads(sidecar_path(path).read_text())
    sidecar_path(path).write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=r"train\.json was edited"):
        open_token_file(path)
    sidecar_path(path).write_text(json.dumps(values))  # the same in another form
    open_token_file(path)


def sealed(values):
    """The text of a sidecar with the checksum of its fields."""
    values = {name: value for name, value in values.items() if name != "content_sha256"}
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return json.dumps(values | {"content_sha256": hashlib.sha256(canonical.encode()).hexdigest()})


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, "{}", {"format_version": 2}, {"unknown": 1}], ids=str
)
def test_sidecars_of_something_else_are_refused(tmp_path, content):
    path = make(tmp_path / "train.bin").path
    values = json.loads(sidecar_path(path).read_text())
    sidecar_path(path).write_text(sealed(values | content) if isinstance(content, dict) else content)
    with pytest.raises(UserError, match=r"train\.json") as error:
        open_token_file(path)
    assert str(error.value).count("\n") <= 2


@pytest.mark.parametrize("name", ["train.bin", "train.json"])
@pytest.mark.parametrize(("make_other", "what"), [(os.mkfifo, "pipe"), (os.mkdir, "folder")])
def test_pipes_and_folders_are_refused(tmp_path, name, make_other, what):
    path = make(tmp_path / "train.bin").path
    (tmp_path / name).unlink()
    make_other(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name} is a {what}"):
        open_token_files(path)


# Shards.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same text as one file, and in five shards."""
    home = tmp_path_factory.mktemp("shards")
    files = [[f"text {i} {j} " * (1 + j % 9) for j in range(20)] for i in range(2 * SHARDS)]
    make(home / "one/train.bin", files)
    for i in range(SHARDS):
        make(home / "many/train.bin", files, (i, SHARDS))
    return home


@pytest.fixture
def many(made, tmp_path):
    return shutil.copytree(made / "many", tmp_path / "many")


def test_shards_read_as_the_one_file(made):
    one, many = (open_token_files(made / folder / "train.bin", verify=True) for folder in ("one", "many"))
    parts = [path.read_bytes() for path in sorted((made / "many").glob("*.bin"))]
    assert b"".join(parts) == one.path.read_bytes()
    assert len(parts) == SHARDS
    assert all(parts)
    lines = "".join(f"{hashlib.sha256(part).hexdigest()}\n" for part in parts)
    assert many.info.data_sha256 == hashlib.sha256(lines.encode()).hexdigest()
    for name in ("n_tokens", "n_bytes", "n_documents", "source_sha256", "shard"):
        assert getattr(many.info, name) == getattr(one.info, name)
    for bos_id in (None, 256):
        a, b = (TokenBatches(file.tokens, 7, 16, 3, bos_id) for file in (one, many))
        for step in (0, 5, 40):
            np.testing.assert_array_equal(b(step), a(step))
        np.testing.assert_array_equal(b.spread_rows(20), a.spread_rows(20))


def test_joined_tokens_slice_as_one_array(tmp_path):
    whole, lengths = np.arange(1000, 1023, dtype="<u4"), [5, 1, 10, 7]
    for i, part in enumerate(np.split(whole, np.cumsum(lengths)[:-1])):
        part.tofile(tmp_path / str(i))
    joined = JoinedTokens([tmp_path / str(i) for i in range(4)], lengths, np.dtype("<u4"))
    assert len(joined) == 23
    for start in range(-3, 25):
        for stop in range(-3, 26):
            np.testing.assert_array_equal(joined[start:stop], whole[start:stop])
    assert joined[3:9].dtype == np.uint32
    with pytest.raises(IndexError):
        joined[::2]


def test_missing_and_renamed_shards_are_refused(many):
    second, third = many / "train-00001-of-00005.bin", many / "train-00002-of-00005.bin"
    third.unlink()
    with pytest.raises(UserError, match="--shard=2/5"):
        open_token_files(many / "train.bin")
    for suffix in (".bin", ".json"):
        shutil.copy(second.with_suffix(suffix), third.with_suffix(suffix))
    with pytest.raises(UserError, match=r"00002-of-00005.*renamed"):
        open_token_files(many / "train.bin")
    with pytest.raises(UserError, match=r"shard 1/5(.|\n)*train\.bin"):
        open_token_files(second)
    with pytest.raises(UserError, match=r"nothing\.bin"):
        open_token_files(many / "nothing.bin")


@pytest.mark.parametrize(
    "change", [{"tokenizer_sha256": "0"}, {"bos_id": 0}, {"source_sha256": "1"}, {"split": "test"}]
)
def test_shards_of_different_things_are_refused(many, change):
    sidecar = many / "train-00002-of-00005.json"
    sidecar.write_text(sealed(json.loads(sidecar.read_text()) | change))
    with pytest.raises(UserError, match=next(iter(change))):
        open_token_files(many / "train.bin")


@pytest.mark.parametrize("shard", [(0, 1), (1, 3)])
def test_sets_of_shards_are_not_mixed(many, shard):
    make(many / "train.bin", [["some"], ["more"], ["text"]], shard)
    with pytest.raises(UserError, match=r"as one file and as shards|of 3 and of 5"):
        open_token_files(many / "train.bin")
