"""Token files and their shards: what is in them, that shards read as one file, and that a wrong one is refused."""

import dataclasses
import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from orthojax.config import DataConfig
from orthojax.data import TokenBatches, open_dataset, token_files, token_writer
from orthojax.data.documents import Document, Item, Piece, Source
from orthojax.data.preparation import prepare, text_parts
from orthojax.data.sealed import sealed
from orthojax.data.token_files import JoinedTokens, open_token_file, open_token_files, shard_path, sidecar_path
from orthojax.data.token_writer import Part, write_token_files
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError

SHARDS = 5


def make(path, texts=("hé", "x"), tokenizer=None):
    """A token file of some texts."""

    def read(start):
        return (Item(Document("", text), i + 1, i + 1) for i, text in enumerate(texts) if i >= start)

    source = Source("test", "abc", 2, lambda *_: [Piece(read, 0, len(texts), 0)])
    part = Part(path.stem, "train", source, lambda document: document.text)
    return write_token_files(path.parent, [part], tokenizer or ByteTokenizer())[0]


def test_contents_and_sidecar(tmp_path):
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
        "file_count": 2,
        "split": "train",
        "data_sha256": hashlib.sha256(raw).hexdigest(),
        "sample_sha256": hashlib.sha256(raw).hexdigest(),  # all of so small a file
        "shard": "",
        "content_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.bin", "train.json"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_dtype_holds_every_id(tmp_path, vocab_size, dtype):
    wide = dataclasses.replace(ByteTokenizer(), vocab_size=vocab_size, eos_id=vocab_size - 1)
    file = make(tmp_path / "train.bin", tokenizer=wide)
    assert file.tokens.dtype == dtype
    assert file.tokens[-1] == vocab_size - 1


def test_long_documents_are_cut_at_lines(tmp_path, monkeypatch):
    seen = []

    class Listening(ByteTokenizer):
        def encode_batch(self, texts):
            seen.extend(texts)
            return super().encode_batch(texts)

    texts = ["0123\n5678\nabcdefghijklmnop", "short"]
    whole = make(tmp_path / "a.bin", texts)
    monkeypatch.setattr(token_writer, "_LONGEST_TEXT", 8)
    cut = make(tmp_path / "b.bin", texts, Listening())
    assert seen == ["0123\n", "5678\n", "abcdefgh", "ijklmnop", "short"]
    assert cut.tokens.tolist() == whole.tokens.tolist()


def test_missing_and_changed_files(tmp_path):
    """Another file of the same size is noticed at once, one changed byte of a large file when all is read."""
    path, block = tmp_path / "train.bin", 4096

    def refused(message, content=None, **options):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            open_token_file(path, **options)

    refused(r"there is no token file .*train\.bin")
    refused(r"has no sidecar train\.json\ndelete it and rebuild it with orthojax prepare", b"1234")
    path.unlink()
    small = make(path).path.read_bytes()
    refused(r"train\.bin has 10 bytes, its sidecar says 12", small[:-2])
    refused(r"train\.bin does not have the sha256 of its sidecar", b"\x01" + small[1:])
    large = bytearray(make(tmp_path / "large.bin", ["word " * 40_000]).path.read_bytes())
    path = tmp_path / "large.bin"
    blocks = [large[(len(large) - block) * i // 15 :][:block] for i in range(16)]
    assert json.loads(sidecar_path(path).read_text())["sample_sha256"] == hashlib.sha256(b"".join(blocks)).hexdigest()
    large[block] ^= 1
    path.write_bytes(large)
    open_token_file(path)
    refused("does not have the sha256 of its sidecar", verify=True)
    large[-1] ^= 1
    refused("does not have the sha256 of its sidecar", large)


def test_sidecars_of_earlier_versions_and_of_something_else(tmp_path):
    path = tmp_path / "train.bin"
    make(path)
    later = ("sample_sha256", "shard", "content_sha256")
    values = json.loads(sidecar_path(path).read_text())
    earlier = {name: value for name, value in values.items() if name not in later}
    sidecar_path(path).write_text(json.dumps(earlier))
    assert open_token_file(path, verify=True).info.shard == ""
    changes = [{"format_version": 2}, {"format_version": None}, {"dtype": "float32"}, {"n_tokens": "5"}]
    contents = [sealed(earlier | change).encode() for change in [*changes, {"n_tokens": 0}, {"unknown": 1}]]
    problems = {b"[]": "holds a JSON list", b"{": "is not valid JSON", b"\xff": "is not valid JSON"}
    for content in [*contents, *problems]:
        sidecar_path(path).write_bytes(content)
        problem = problems.get(content, "does not describe a token file of format 1")
        with pytest.raises(UserError, match=rf"train\.json {problem}(.|\n)*delete it and rebuild"):
            open_token_file(path)


@pytest.mark.parametrize(
    "change",
    [{"bos_id": 0}, {"eos_id": 256}, {"vocab_size": 50_000}, {"n_bytes": 1}, {"n_documents": 1}, {"file_count": 0}],
    ids=str,
)
def test_an_edited_sidecar_is_noticed(tmp_path, change):
    """Also values that are possible."""
    path = make(tmp_path / "train.bin").path
    values = json.loads(sidecar_path(path).read_text())
    sidecar_path(path).write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=r"train\.json was edited: it does not match its checksum\ndelete it and"):
        open_token_file(path)
    sidecar_path(path).write_text(json.dumps(values))  # the same in another form
    open_token_file(path)


def of_an_earlier_version(path, change):
    values = json.loads(sidecar_path(path).read_text())
    del values["content_sha256"]
    sidecar_path(path).write_text(json.dumps(values | change))


@pytest.mark.parametrize(
    "change",
    [
        *({"bos_id": 258}, {"bos_id": -1}, {"eos_id": 258}, {"vocab_size": 0}, {"vocab_size": 70_000}, {"n_bytes": 0}),
        *({"n_bytes": 1}, {"n_documents": 0}, {"n_documents": 7}, {"file_count": -1}, {"data_sha256": "0"}),
    ],
    ids=str,
)
def test_impossible_values_without_a_checksum(tmp_path, change):
    path = make(tmp_path / "train.bin").path
    of_an_earlier_version(path, change)
    with pytest.raises(UserError, match=r"train\.json does not describe a token file of format 1\ndelete it and"):
        open_token_file(path)


@pytest.mark.parametrize("change", [{"eos_id": 120}, {"vocab_size": 200, "eos_id": 1, "bos_id": 0}, {"n_documents": 3}])
def test_values_that_contradict_the_ids(tmp_path, monkeypatch, change):
    monkeypatch.setattr(token_files, "_IDS_AT_ONCE", 4)
    path = make(tmp_path / "train.bin").path
    of_an_earlier_version(path, change)
    with pytest.raises(UserError, match=r"does not hold \d documents of ids below 2\d\d, each followed by \d+, as its"):
        open_token_file(path, verify=True)


def test_an_id_beyond_the_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_IDS_AT_ONCE", 4)
    narrow = dataclasses.replace(ByteTokenizer(), vocab_size=200, bos_id=0, eos_id=1)
    open_token_file(make(tmp_path / "a.bin", ["ab", "hé"], narrow).path, verify=True)
    path = make(tmp_path / "b.bin", ["\U0001f642", "ab", "hé"], narrow).path
    open_token_file(path)
    with pytest.raises(UserError, match="does not hold 3 documents of ids below 200"):
        open_token_file(path, verify=True)


@pytest.mark.parametrize("name", ["train.bin", "train.json"])
@pytest.mark.parametrize(("make_other", "what"), [(os.mkfifo, "a pipe or a device"), (os.mkdir, "a folder")])
def test_pipes_and_folders_in_the_place_of_files(tmp_path, name, make_other, what):
    path = make(tmp_path / "train.bin").path
    (tmp_path / name).unlink()
    make_other(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name} is {what}"):
        open_token_files(path)


# Shards.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same text as one file, and in five shards."""
    home = tmp_path_factory.mktemp("shards")
    lines = [json.dumps({"text": f"text {i} " * (1 + i % 9)}) for i in range(200)]
    (home / "a.jsonl").write_text("\n".join(lines))
    for folder, count in (("one", 1), ("many", SHARDS)):
        for i in range(count):
            parts = text_parts([str(home / "a.jsonl")], ["train", "validation"], home / folder)
            prepare(home / folder, parts, "bytes", shard=(i, count))
    return home


@pytest.fixture
def home(made, tmp_path):
    return shutil.copytree(made, tmp_path / "home")


def changed(sidecar, **changes):
    """The text of a sidecar with other fields and the checksum of these."""
    values = json.loads(sidecar) | changes
    del values["content_sha256"]
    return sealed(values)


def opened(folder, **changes):
    paths = (str(folder / "train.bin"), str(folder / "validation.bin"))
    return open_dataset(DataConfig(kind="tokens", paths=paths, **changes), folder / "unused")


def test_shards_are_the_parts_of_the_one_file(made):
    for split in ("train", "validation"):
        one = open_token_files(made / f"one/{split}.bin")
        parts = [shard_path(made / "many" / f"{split}.bin", i, SHARDS).read_bytes() for i in range(SHARDS)]
        assert b"".join(parts) == one.path.read_bytes()
        assert all(parts)
        for path in (f"many/{split}.bin", f"many/{split}-*.bin", f"m*/{split}-0*-of-00005.bin"):
            many = open_token_files(made / path, verify=True)
            assert len(many.tokens) == len(one.tokens)
            np.testing.assert_array_equal(many.tokens[:], one.tokens)
            assert many.info == dataclasses.replace(
                one.info, data_sha256=many.info.data_sha256, sample_sha256=many.info.sample_sha256
            )
    one, many = opened(made / "one"), opened(made / "many")
    for bos_id in (None, 256):
        sources = [TokenBatches(dataset.train, 7, 16, 3, bos_id) for dataset in (one, many)]
        for step in (0, 5, 40):
            np.testing.assert_array_equal(sources[1](step), sources[0](step))
        np.testing.assert_array_equal(sources[1].spread_rows(20), sources[0].spread_rows(20))


@pytest.mark.parametrize("open_at_once", [1, 256])
def test_joined_tokens_slice_as_one_array(tmp_path, monkeypatch, open_at_once):
    monkeypatch.setattr(token_files, "_OPEN_AT_ONCE", open_at_once)
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


def test_missing_foreign_and_renamed_shards(home):
    many, name = home / "many", "train-00002-of-00005"

    def refused(message, path=many / "train.bin"):
        with pytest.raises(UserError, match=message):
            open_token_files(path)

    (many / f"{name}.bin").rename(home / "kept.bin")
    refused(r"of the 5 shards of .*train\.bin, 1 are missing, the first is 2\n.*--shard=2/5")
    shutil.copy(many / "train-00001-of-00005.bin", many / f"{name}.bin")
    kept = (many / f"{name}.json").read_text()
    shutil.copy(many / "train-00001-of-00005.json", many / f"{name}.json")
    refused(r"00002-of-00005\.bin is shard 1/5 by its sidecar: it was renamed")
    (home / "kept.bin").rename(many / f"{name}.bin")
    for field, value in (("tokenizer_sha256", "0"), ("bos_id", 0), ("source_sha256", "1"), ("split", "test")):
        (many / f"{name}.json").write_text(changed(kept, **{field: value}))
        refused(f"do not belong together: {field} is .* and {value}")
    (many / f"{name}.json").write_text(kept)
    open_token_files(many / "train.bin")
    first = many / "train-00000-of-00005.bin"
    refused(r"train-00000-of-00005\.bin is shard 0/5\nallowed: all shards: .*train\.bin", first)
    refused(r"there is no token file .*nothing\.bin", many / "nothing.bin")
    refused(r"\.bin is not a shard\nallowed: names such as train-00000-of-00008", home / "one/*.bin")
    shutil.copytree(many, home / "more")
    refused("names a shard twice", home / "m*/train-*.bin")


def test_what_opening_a_dataset_compares(home, monkeypatch):
    """A few blocks do not show every byte; `data.verify` does, and small files are always compared whole."""
    many = home / "many"
    sidecar = sidecar_path(shard_path(many / "train.bin", 3, SHARDS))
    kept = sidecar.read_text()
    sidecar.write_text(changed(kept, data_sha256="0" * 64))
    message = r"train-00003-of-00005\.bin does not have the sha256"
    with pytest.raises(UserError, match=message):
        opened(many)
    monkeypatch.setattr(token_files, "_ALWAYS_COMPARED_BYTES", 1000)
    opened(many)
    with pytest.raises(UserError, match=message):
        opened(many, verify=True)
    sidecar.write_text(kept)
    (many / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not the tokenizer of .*train\.bin"):
        opened(many)
    (many / "tokenizer.json").unlink()
    assert opened(many).tokenizer_path is None
