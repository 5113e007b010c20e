"""TFDS folders without TensorFlow: ArrayRecord as TFDS itself writes it, TFRecord as this file writes it."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from orthojax.data import encoding, token_writer
from orthojax.data.preparation import prepare, tfds_parts
from orthojax.data.sources import documents
from orthojax.data.tfds_folder import find_folder, open_tfds, resolve_split
from orthojax.data.tfrecord import bytes_feature, crc32c, crc32c_of_each, masked_crc32c, read_records
from orthojax.data.token_shards import open_token_files
from orthojax.errors import UserError

TEXTS = [f"text {i} größer " * (i % 7) for i in range(50)]  # every seventh is empty


def bitwise_crc32c(data):
    """CRC-32C by its definition: division of polynomials, one bit after the other."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def varint(value):
    groups = []
    while True:
        groups.append(value & 127 | (128 if value > 127 else 0))
        value >>= 7
        if not value:
            return bytes(groups)


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**features):
    """A serialized tf.train.Example: bytes features, and int64 ones, which are packed varints."""
    entries = []
    for name, value in features.items():
        values = field(1, field(1, value)) if isinstance(value, bytes) else field(3, field(1, varint(value)))
        entries.append(field(1, field(1, name.encode()) + field(2, values)))
    return field(1, b"".join(entries))


def framed(data):
    def masked(part):
        crc = bitwise_crc32c(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def write_tfrecord(data_dir, texts=TEXTS, version="3.0.1", shards=3, **changes):
    """A TFDS folder as `tfds build` leaves it."""
    folder = data_dir / "c4" / "en" / version
    folder.mkdir(parents=True)
    lengths = []
    for i in range(shards):
        part = texts[len(texts) * i // shards : len(texts) * (i + 1) // shards]
        records = [framed(example(length=len(text), text=text.encode(), url=b"http://a.b")) for text in part]
        (folder / f"c4-train.tfrecord-{i:05d}-of-{shards:05d}").write_bytes(b"".join(records))
        lengths.append(str(len(part)))
    split = {"name": "train", "shardLengths": lengths, "numBytes": "0"}
    info = {"name": "c4", "configName": "en", "version": version, "fileFormat": "tfrecord", "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(info | changes))
    features = {"text": {"text": {}}, "url": {"text": {}}, "length": {}}
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
    return folder


# Made in another process: TFDS is slow to import, and it must not bring TensorFlow with it.
BUILD = """
import sys, numpy as np, tensorflow_datasets as tfds
class Small(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.2.0")
    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "length": tfds.features.Scalar(np.int64)})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)
    def _split_generators(self, _):
        return {"train": self._generate_examples(50), "validation": self._generate_examples(9)}
    def _generate_examples(self, n):
        for i in range(n):
            yield i, {"text": f"text {i} größer " * (i % 7), "length": i}
builder = Small(data_dir=sys.argv[1], file_format="array_record")
builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))
for split in ("train[10%:47]", "train[-33%:]", "train[:-12]", "train[3:11]", "train[7%:88%]", "train[10%:]"):
    print(split, *(row["length"] for row in builder.as_data_source(split=split)))
print("tensorflow" in sys.modules)
"""


@pytest.fixture(scope="module")
def array_record(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("tfds")
    done = subprocess.run([sys.executable, "-c", BUILD, str(data_dir)], capture_output=True, text=True, check=True)
    *slices, tensorflow = [line for line in done.stdout.splitlines() if line.startswith(("train", "True", "False"))]
    assert tensorflow == "False"
    return data_dir, dict(line.split(" ", 1) for line in slices)


def texts_of(source, index=0, count=1):
    return [document.text for document in documents(source.pieces(index, count))]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 9, 31, 1023, 1024, 1025, 2047, 2500])
def test_crc32c_is_the_division_of_polynomials(size):
    data = np.random.default_rng(size).bytes(size)
    assert crc32c(data) == bitwise_crc32c(data)


def test_crc32c_of_the_standard():
    # RFC 3720, B.4
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert masked_crc32c(struct.pack("<Q", 5)) == struct.unpack("<I", framed(b"12345")[8:12])[0]


def test_records_and_features(tmp_path):
    path = tmp_path / "a.tfrecord"
    messages = [example(text=b"one", url=b"u"), example(url=b"u" * 300), example(n=7, text=b""), b""]
    path.write_bytes(b"".join(map(framed, messages)))
    assert list(read_records(path)) == messages
    assert list(read_records(path, 2)) == messages[2:]
    assert [bytes_feature(message, "text") for message in messages] == [[b"one"], [], [b""], []]
    assert bytes_feature(messages[0], "url") == [b"u"]
    # A message may hold fields of other kinds, and the value before the name.
    odd = field(1, field(1, field(2, field(1, field(1, b"two"))) + field(1, b"text") + varint(3 << 3) + varint(300)))
    assert bytes_feature(varint(9 << 3 | 5) + b"1234" + odd + varint(8 << 3 | 1) + b"12345678", "text") == [b"two"]


def test_a_feature_with_several_texts_is_refused(tmp_path):
    folder = write_tfrecord(tmp_path, ["one"], shards=1)
    two = field(1, field(1, b"one") + field(1, b"two"))
    record = framed(field(1, field(1, field(1, b"text") + field(2, two))))
    (folder / "c4-train.tfrecord-00000-of-00001").write_bytes(record)
    with pytest.raises(UserError, match=r"record 0 of .* has 2 texts in its feature 'text'"):
        list(documents(open_tfds(folder, "train").pieces(0, 1)))


@hypothesis.given(st.binary(max_size=60))
def test_bytes_that_are_no_example_are_refused_or_have_no_text(data):
    try:
        assert bytes_feature(data, "a name that is too long for it") == []
    except ValueError:
        pass


@pytest.mark.parametrize("damage", ["length", "data", "checksum", "cut", "cut header", "text file"])
def test_damaged_records_are_named(tmp_path, damage):
    path = tmp_path / "a.tfrecord"
    one = framed(example(text=b"one"))
    content = bytearray(one * 3)
    if damage in ("length", "data", "checksum"):
        content[len(one) + {"length": 1, "data": 20, "checksum": len(one) - 1}[damage]] ^= 4
    message = {"cut": "cut short", "cut header": "cut short", "length": "damaged length", "text file": "damaged length"}
    cuts = {"cut": 2 * len(one) - 3, "cut header": len(one) + 5}
    path.write_bytes(b"only some text, and no record" if damage == "text file" else content[: cuts.get(damage)])
    number = 0 if damage == "text file" else 1
    with pytest.raises(UserError, match=rf"record {number} of .*a\.tfrecord, at byte \d+, .*") as error:
        list(read_records(path))
    assert message.get(damage, "does not have its checksum") in str(error.value)
    if damage == "length":  # checked also where the record itself is passed over
        with pytest.raises(UserError, match="damaged length"):
            list(read_records(path, 2))


def test_tfrecord_folder(tmp_path):
    write_tfrecord(tmp_path)
    source = open_tfds(find_folder(tmp_path, "c4/en"), "train")
    assert texts_of(source) == [text for text in TEXTS if text]
    assert (source.description, source.file_count) == ("c4/en:3.0.1 train", 3)
    folder = find_folder(tmp_path, "c4/en:3.0.1")
    assert texts_of(open_tfds(folder, "train[20%:]")) == [text for text in TEXTS[10:] if text]
    assert texts_of(open_tfds(folder, "train", "url")) == ["http://a.b"] * 50
    assert find_folder(folder, "") == folder


@pytest.mark.parametrize(("split", "count"), [("train", 2), ("train[13:40]", 5)])
def test_parts_are_the_whole_in_order(tmp_path, array_record, split, count):
    write_tfrecord(tmp_path)
    for folder in (find_folder(tmp_path, "c4/en"), find_folder(array_record[0], "small")):
        source = open_tfds(folder, split)
        joined = [text for i in range(count) for text in texts_of(source, i, count)]
        assert joined == texts_of(source)
        begin, end = (0, 50) if split == "train" else (13, 40)
        assert joined == [text for text in TEXTS[begin:end] if text]


def test_reading_goes_on_at_every_position(tmp_path, array_record):
    write_tfrecord(tmp_path)
    for folder in (find_folder(tmp_path, "c4/en"), find_folder(array_record[0], "small")):
        for piece in open_tfds(folder, "train[10:45]").pieces(1, 2):
            items = list(piece.read(piece.start))
            for i, item in [*enumerate(items)][::6]:
                assert [later.document.text for later in piece.read(item.position)] == [
                    later.document.text for later in items[i + 1 :]
                ]
            offsets = [item.offset - piece.offset for item in items]
            assert offsets == sorted(offsets)
            assert 0 < offsets[0]
            assert offsets[-1] <= piece.n_bytes


def test_slices_are_those_of_tfds(array_record):
    _, slices = array_record
    assert len(slices) == 6
    for split, numbers in slices.items():
        name, begin, end = resolve_split(split, {"train": 50})
        assert (name, list(range(begin, end))) == ("train", list(map(int, numbers.split())))


def test_array_record_names_what_is_there(array_record):
    folder = find_folder(array_record[0], "small")
    assert folder.name == "1.2.0"
    with pytest.raises(UserError, match=r"no split 'valid'\nallowed: train \| validation\ndid you mean 'validation'"):
        open_tfds(folder, "valid")
    with pytest.raises(UserError, match=r"no feature 'txt'\nallowed: length \| text\ndid you mean 'text'"):
        open_tfds(folder, "train", "txt")
    with pytest.raises(UserError, match=r"example 0 of 'train' in .* has no bytes feature 'length'"):
        texts_of(open_tfds(folder, "train", "length"))


def test_the_highest_version_is_taken(tmp_path):
    for version in ("3.0.1", "10.0.0", "9.1.0"):
        write_tfrecord(tmp_path, version=version)
    (tmp_path / "c4/en/11.0.0.incomplete").mkdir()
    assert find_folder(tmp_path, "c4/en").name == "10.0.0"
    with pytest.raises(
        UserError, match=r"no version '3\.1\.0' of c4/en in .*\nallowed: 3\.0\.1 \| 9\.1\.0 \| 10\.0\.0"
    ):
        find_folder(tmp_path, "c4/en:3.1.0")
    with pytest.raises(UserError, match=r"no data set 'c4' in .*\nallowed: c4/en"):
        find_folder(tmp_path, "c4")
    with pytest.raises(UserError, match=r"no data set 'lm1b'"):
        find_folder(tmp_path, "lm1b:1.1.0")
    with pytest.raises(UserError, match=r"no dataset_info\.json\nallowed: c4/en"):
        find_folder(tmp_path, "")
    with pytest.raises(UserError, match=r"NAME/CONFIG/VERSION/dataset_info\.json, and none is there"):
        find_folder(tmp_path / "c4/en/3.0.1", "c4")
    with pytest.raises(UserError, match="there is no folder"):
        find_folder(tmp_path / "nowhere", "c4")


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("test", r"no split 'test'\nallowed: train"),
        ("train[5:5]", "is empty"),
        ("train[60:]", "is empty"),
        ("train+test", "cannot be read"),
        ("train[a:b]", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_wrong_splits(split, message):
    with pytest.raises(UserError, match=message):
        resolve_split(split, {"train": 50})


def test_incomplete_folders(tmp_path):
    folder = write_tfrecord(tmp_path)
    shard = folder / "c4-train.tfrecord-00001-of-00003"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(framed(example(length=0, text=TEXTS[16].encode(), url=b"http://a.b")))])
    with pytest.raises(UserError, match=r"00001-of-00003 has fewer than the 17 records of dataset_info\.json"):
        texts_of(open_tfds(folder, "train"))
    shard.unlink()
    with pytest.raises(UserError, match=r"lacks c4-train\.tfrecord-00001-of-00003 of the 3 files of 'train'"):
        open_tfds(folder, "train")
    shard.write_bytes(content)
    (folder / "features.json").unlink()
    with pytest.raises(UserError, match=r"record 0 of .* has no bytes feature 'txt'"):
        texts_of(open_tfds(folder, "train", "txt"))
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "riegeli"}))
    with pytest.raises(UserError, match=r"file format 'riegeli'\nallowed: tfrecord \| array_record"):
        open_tfds(folder, "train")
    (folder / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        open_tfds(folder, "train")


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"name": "c4", "version": "3.0.1", "splits": {"train": 1}},
        {"version": "3.0.1", "splits": [{"name": "train", "shardLengths": ["1"]}]},
        {"name": "c4", "version": "3.0.1", "splits": [{"name": "train", "shardLengths": ["many"]}]},
        {"name": "c4", "version": "3.0.1", "splits": [{"shardLengths": ["1"]}]},
    ],
)
def test_metadata_of_another_kind(tmp_path, content):
    folder = write_tfrecord(tmp_path, texts=["a"], shards=1)
    (folder / "dataset_info.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"dataset_info\.json does not describe a data set of TFDS"):
        open_tfds(folder, "train")


def test_templates_and_features_of_another_kind(tmp_path):
    folder = write_tfrecord(tmp_path, texts=["a"], shards=1)
    (folder / "features.json").write_text('{"featuresDict": []}')
    with pytest.raises(UserError, match=r"features\.json does not describe features"):
        open_tfds(folder, "train")
    (folder / "features.json").unlink()
    info = json.loads((folder / "dataset_info.json").read_text())
    info["splits"][0]["filepathTemplate"] = "{DATASET}-{PLACE}"
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"names its files '\{DATASET\}-\{PLACE\}'\nallowed: \{DATASET\}, \{SPLIT\}"):
        open_tfds(folder, "train")


def test_text_that_is_no_utf8(tmp_path):
    folder = write_tfrecord(tmp_path, texts=["a"], shards=1)
    (folder / "c4-train.tfrecord-00000-of-00001").write_bytes(framed(example(text=b"ab\xff")))
    with pytest.raises(UserError, match=r"record 0 of .* is not UTF-8 text: invalid start byte at byte 2"):
        texts_of(open_tfds(folder, "train"))


def test_the_sums_of_many_records_at_once(tmp_path):
    rng = np.random.default_rng(0)
    messages = [rng.bytes(size) for size in (0, 1, 3, 4, 511, 512, 513, 40_000, 2, 1024, *range(60))]
    assert crc32c_of_each(messages) == list(map(bitwise_crc32c, messages))
    assert crc32c_of_each([]) == []
    path = tmp_path / "many.tfrecord"
    parts = [framed(rng.bytes(64)) for _ in range(40)]
    damaged = bytearray(b"".join(parts))
    damaged[len(parts[0]) * 30 + 20] ^= 1
    path.write_bytes(damaged)
    reader = read_records(path)
    assert [framed(next(reader)) for _ in range(30)] == parts[:30]  # those before it are given
    with pytest.raises(UserError, match=rf"record 30 of .*, at byte {len(parts[0]) * 30}, does not have its checksum"):
        next(reader)


@pytest.fixture(params=["tfrecord", "array_record"])
def data_set(request, tmp_path, array_record):
    """A folder of TFDS with `TEXTS` as its split train, and the name of the data set."""
    if request.param == "array_record":
        return array_record[0], "small"
    write_tfrecord(tmp_path / "tfds")
    return tmp_path / "tfds", "c4/en"


def test_token_files_of_a_data_set(data_set, tmp_path, monkeypatch):
    """Whole, in shards, and after a failure at every batch: the bytes of the texts, an end after each."""
    wanted = np.concatenate([[*text.encode(), 257] for text in TEXTS[5:47] if text])

    def make(folder, shard=(0, 1)):
        return prepare(tmp_path / folder, tfds_parts(*data_set, ["train[5:47]"], "text"), "bytes", shard=shard)

    (whole,) = make("whole")
    np.testing.assert_array_equal(whole.tokens, wanted)
    assert (whole.info.split, whole.info.n_documents) == ("train[5:47]", sum(map(bool, TEXTS[5:47])))
    assert whole.info.source.endswith(" train[5:47]")
    for index in (1, 2, 0):
        make("shards", (index, 3))
    np.testing.assert_array_equal(open_token_files(tmp_path / "shards/train.bin").tokens[:], wanted)

    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 200)
    real, left = token_writer.encode, []

    def failing(tokenizer, texts):
        if not left:
            raise OSError(28, "No space left on device")
        return left.pop() and real(tokenizer, texts)

    monkeypatch.setattr(token_writer, "encode", failing)
    for _ in range(40):
        left[:] = [True] * 3
        try:
            (file,) = make("again")
            break
        except UserError as error:
            assert "No space left" in str(error)  # noqa: PT017
    assert file.path.read_bytes() == whole.path.read_bytes()


def test_the_command_line(tmp_path):
    write_tfrecord(tmp_path / "tfds")
    script = Path(__file__).parents[1] / "launch/prepare_data.py"
    arguments = ["--tfds_dir=tfds", "--dataset=c4/en", "--split=train", "--tokenizer=bytes", "--output=tokens"]

    def run(*more):
        return subprocess.run(
            [sys.executable, str(script), *arguments, *more], cwd=tmp_path, capture_output=True, text=True
        )

    for index in (0, 1):
        done = run(f"--shard={index}/2")
        assert done.returncode == 0, done.stderr
    wanted = np.concatenate([[*text.encode(), 257] for text in TEXTS if text])
    np.testing.assert_array_equal(open_token_files(tmp_path / "tokens/train.bin").tokens[:], wanted)
    refused = run("--split=validation")
    assert refused.returncode == 2
    assert "there is no split 'validation'" in refused.stderr
