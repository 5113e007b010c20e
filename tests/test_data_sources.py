"""Sources of documents, as a contract: shards are the whole, every position resumes, damage is named."""

import bz2
import functools
import gzip
import hashlib
import itertools
import json
import lzma
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tensorflow_datasets.core.features import feature as feature_lib
from tensorflow_datasets.proto.tf_example_generated_pb2 import Example  # type: ignore[attr-defined]

from orthojax.data import token_writer
from orthojax.data.documents import Document, embedded_corpus, find_files, read_documents, text_corpus
from orthojax.data.preparation import HoldOut, divided, hold_out_by_text, sample
from orthojax.data.records import crc32c
from orthojax.data.tfds import find_folder, open_tfds
from orthojax.data.token_files import open_token_files
from orthojax.data.token_writer import write_token_files
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError

TEXTS = [f"text {i} größer " * (i % 7) for i in range(50)]  # every seventh is empty, and left out
KEPT = [text for text in TEXTS if text]
RULE = HoldOut("end")
LINES = "".join(json.dumps({"text": text}) + "\n\n" * (i % 3 == 0) + "\n" for i, text in enumerate(TEXTS))


def zstd(content):
    return pytest.importorskip("zstandard").compress(content)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


# TFRecord, written from its definition.


def example(**features):
    """A serialized tf.train.Example."""
    message = Example()
    for name, value in features.items():
        kind = "int64_list" if isinstance(value, int) else "bytes_list"
        getattr(message.features.feature[name], kind).value.extend(value if isinstance(value, list) else [value])
    return message.SerializeToString()


def bitwise_crc32c(data):
    """CRC-32C by its definition: division of polynomials, one bit after the other."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def framed(data):
    def masked(part):
        crc = bitwise_crc32c(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def write_tfds(data_dir, texts=TEXTS, version="3.0.1", shards=3, file_format="tfrecord"):
    """A TFDS folder as `tfds build` leaves it."""
    folder = data_dir / "c4" / "en" / version
    folder.mkdir(parents=True)
    lengths = []
    for i in range(shards):
        part = texts[len(texts) * i // shards : len(texts) * (i + 1) // shards]
        records = [example(length=len(text), text=text.encode(), url=b"http://a.b") for text in part]
        path = folder / f"c4-train.{file_format}-{i:05d}-of-{shards:05d}"
        if file_format == "tfrecord":
            path.write_bytes(b"".join(map(framed, records)))
        else:
            from array_record.python.array_record_module import ArrayRecordWriter

            writer = ArrayRecordWriter(str(path), "group_size:1")
            list(map(writer.write, records))
            writer.close()
        lengths.append(str(len(part)))
    split = {"name": "train", "shardLengths": lengths, "numBytes": "0"}
    info = {"name": "c4", "configName": "en", "version": version, "fileFormat": file_format, "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    features = {"featuresDict": {"features": {"text": {"text": {}}, "url": {"text": {}}, "length": {"tensor": {}}}}}
    (folder / "features.json").write_text(json.dumps(features))
    return folder


# The contract.


class Case(NamedTuple):
    """A kind of source: how to write it and open it, and what a damaged one of it is called."""

    write: object
    open: object
    damage: object
    message: str
    texts: list = KEPT


def write_texts(folder, suffix=".txt", compress=lambda content: content):
    for i, text in enumerate(KEPT):
        (folder / f"{i:02d}{suffix}").write_bytes(compress(text.encode()))


def write_mixed(folder):
    """Files that are divided between shards and others that are not."""
    lines = [json.dumps({"text": text}) + "\n" for text in KEPT]
    (folder / "a.jsonl").write_text("".join(lines[:30]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:40]).encode()))
    (folder / "c.txt").write_text(KEPT[40])
    (folder / "d.txt").touch()


def write_library(folder):
    write_texts(folder, ".py")
    (folder / "test").mkdir()
    write_texts(folder / "test", ".py")


def write_jsonl(suffix):
    def write(folder):
        content, compress = LINES.encode(), COMPRESS.get(suffix, lambda content: content)
        half = len(content) // 2
        (folder / f"a.jsonl{suffix}").write_bytes(compress(content[:half]) + compress(content[half:]))  # as `cat` does

    return write


def change(pattern, edit):
    def damage(folder):
        path = sorted(folder.rglob(pattern))[0]
        path.write_bytes(edit(path.read_bytes()))

    return damage


def opened_tfds(folder):
    return open_tfds(find_folder(folder, "c4/en"), "train")


def opened_text(folder):
    return text_corpus([folder])


not_utf8 = change("*", lambda content: content[:5] + b"\xff" + content[6:])
truncated = change("*.*", lambda content: content[:-9])
zeroed = change("*00000-of*", lambda content: content[:100] + bytes(300) + content[400:])
CASES = {
    "text": Case(write_texts, opened_text, not_utf8, "00.txt is not UTF-8 text: byte 0xff at offset 5"),
    "text.gz": Case(lambda f: write_texts(f, ".txt.gz", gzip.compress), opened_text, truncated, "00.txt.gz is not"),
    "jsonl": Case(write_jsonl(""), opened_text, truncated, "a.jsonl, line 8[0-9] is not valid JSON"),
    "mixed": Case(write_mixed, opened_text, truncated, "a.jsonl, .* is not valid JSON", KEPT[:41]),
    "embedded": Case(write_library, embedded_corpus, shutil.rmtree, "no standard library sources"),
    "tfrecord": Case(write_tfds, opened_tfds, zeroed, r"record \d+ of .*00000-of-00003, at byte \d+"),
    "array_record": Case(
        functools.partial(write_tfds, file_format="array_record"), opened_tfds, zeroed, "00000-of-00003 is corrupt: "
    ),
}
for suffix in COMPRESS:
    message = rf"a.jsonl{suffix} is not a complete \w+ file"
    CASES[f"jsonl{suffix}"] = Case(write_jsonl(suffix), opened_text, truncated, message)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "text"
    folder.mkdir()
    CASES[request.param].write(folder)
    return CASES[request.param], folder


def texts_of(source, index=0, count=1):
    return [document.text for document in source.documents(index, count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shards_are_the_whole_in_order(case, count):
    source = case[0].open(case[1])
    assert [text for i in range(count) for text in texts_of(source, i, count)] == case[0].texts
    sizes = [sum(piece.n_bytes for piece in source.pieces(i, count)) for i in range(count)]
    assert sum(sizes) == pytest.approx(source.n_bytes, abs=count)


def test_reading_resumes_at_every_position(case):
    for piece in case[0].open(case[1]).pieces(0, 2):
        items = list(piece.read(piece.start))
        for i, item in enumerate(items):
            later = [item.document.text for item in items[i + 1 :]]
            assert [item.document.text for item in piece.read(item.position)] == later
        offsets = [item.offset - piece.offset for item in items]
        assert offsets == sorted(offsets)
        assert all(0 < offset for offset in offsets)
        if piece.read.keywords.get("stop"):  # the last line may reach beyond the part of a divided file
            assert offsets[-1] <= piece.n_bytes + max(map(len, LINES.splitlines())) * 2


class Failing(ByteTokenizer):
    """Fails at every call of `encode_batch` after the first `successes`."""

    successes = 0

    def encode_batch(self, texts):
        if Failing.successes == 0:
            raise OSError(28, "No space left on device")
        Failing.successes -= 1
        return super().encode_batch(texts)


def write_failing(folder, parts, shard):
    """Token files from calls that fail after every second batch; the number of calls."""
    reported, calls = [], 0
    while not reported or reported[-1][0] < reported[-1][1]:
        Failing.successes, calls = 2, calls + 1
        try:
            write_token_files(folder, parts, Failing(), shard=shard, report=lambda *call: reported.append(call))
        except UserError as error:
            assert "No space left" in str(error)  # noqa: PT017
            assert list(folder.glob("*.partial"))
        assert calls < 100
    assert [done for done, *_ in reported] == sorted(done for done, *_ in reported)
    return calls


@pytest.mark.parametrize(
    ("shard", "splits"),
    [
        ((0, 1), ["all"]),
        ((1, 3), ["train", "validation"]),
        pytest.param((0, 1), ["train", "validation"], marks=pytest.mark.slow),
        pytest.param((1, 3), ["all"], marks=pytest.mark.slow),
    ],
)
def test_token_files_are_the_same_after_a_failure_at_any_batch(case, tmp_path, monkeypatch, shard, splits):
    source = case[0].open(case[1])
    parts, whole, resumed = divided(source, RULE, splits), tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    if not texts_of(source, *shard):
        with pytest.raises(UserError, match=r"no text for .*\nallowed: at least one document in each shard"):
            write_token_files(whole, parts, ByteTokenizer(), shard=shard)
        return
    files = write_token_files(whole, parts, ByteTokenizer(), shard=shard)
    wanted = [[*RULE.part(splits[0], Document("", text)).encode(), 257] for text in texts_of(source, *shard)]
    np.testing.assert_array_equal(files[0].tokens, np.concatenate(wanted))
    monkeypatch.setattr(token_writer, "_BATCH_CHARACTERS", 60)
    assert write_failing(resumed, parts, shard) > 1
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (whole, resumed)]
    assert contents[0] == contents[1]
    Failing.successes = 0
    write_token_files(resumed, parts, Failing(), shard=shard)  # complete: nothing is encoded


def test_damage_is_named(case, tmp_path):
    kind, folder = case
    shutil.copytree(folder, tmp_path / "text")
    kind.damage(tmp_path / "text")
    with pytest.raises(UserError, match=kind.message) as error:
        texts_of(kind.open(tmp_path / "text"))
    assert str(error.value).count("\n") <= 2


# Text files.


def test_every_byte_of_a_jsonl_file_belongs_to_one_part(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + LINES + json.dumps({"text": "no end"}), encoding="utf-8")
    size = path.stat().st_size
    cuts = [0, 1, 2, *random.Random(0).sample(range(3, size), 30), size]
    cuts = sorted({*cuts, *(item.position for item in list(read_documents("a", path))[::9])})
    items = [item for start, stop in itertools.pairwise(cuts) for item in read_documents("a", path, start, stop)]
    assert [item.document.text for item in items] == [*KEPT, "no end"]


def test_text_files(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffgrüße\r\n".encode())
    (tmp_path / "b.py.gz").write_bytes(gzip.compress(b"x = 1\n"))
    lines = [{"text": "one\u2028line"}, None, {"text": "", "id": 3}, {"text": "four"}]
    content = "\n".join("" if line is None else json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "c.jsonl").write_text(content, encoding="utf-8")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "e.txt").touch()
    assert list(text_corpus([tmp_path]).documents()) == [
        ("a.txt", "grüße\r\n"),
        ("b.py.gz", "x = 1\n"),
        ("c.jsonl:1", "one\u2028line"),
        ("c.jsonl:4", "four"),
        ("d.jsonl.gz:1", "one\u2028line"),
        ("d.jsonl.gz:4", "four"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "start", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', 0, r"a\.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", b'\n{"content": "x"}', 0, r'a\.jsonl, line 2: no string under "text"'),
        ("a.jsonl", b'{"text": 3}', 0, r'a\.jsonl, line 1: no string under "text"'),
        ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}", 0, r"a\.jsonl, line 1 is not valid JSON: .*digits"),
        ("a.jsonl", b"\n" + b"[" * 100_000, 0, r"a\.jsonl, line 2 is nested too deeply\nallowed: an object such"),
        ("a.jsonl", b'["text"]', 0, r'a\.jsonl, line 1: no string under "text"'),
        ("a.jsonl", b'{"text": "ab\\ud800"}', 0, r"a\.jsonl, line 1: .*not valid Unicode at character 2"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 1}\n', 5, r"a\.jsonl, the line at byte 14: no string"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', 14, "byte 0xff at offset 24"),
        *((f"a.txt{suffix}", b"plain", 0, rf"a\.txt{suffix} is not a complete \w+ file") for suffix in COMPRESS),
    ],
)
def test_bad_files(tmp_path, name, content, start, message):
    if name.endswith("zst"):
        pytest.importorskip("zstandard")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_documents(name, tmp_path / name, start))


def test_folders_and_patterns(tmp_path):
    for name in ("b/2.txt", "b/1.jsonl", "b/deep/3.txt", "b/.hidden", "b/.git/x", "c1.txt", "c2.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    found = find_files([tmp_path / "c2.txt", tmp_path / "b", tmp_path / "c?.txt"])
    assert [name for name, _ in found] == ["c2.txt", "1.jsonl", "2.txt", "deep/3.txt", "c1.txt", "c2.txt"]
    assert [name for name, _ in find_files([tmp_path / "**/*.txt"])] == ["2.txt", "3.txt", "c1.txt", "c2.txt"]
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")  # reading would wait for ever
    for paths, message in (
        ([tmp_path / "empty"], "empty is a folder without files"),
        ([tmp_path / "d*.txt"], r"d\*\.txt is a pattern without matches"),
        ([tmp_path / "missing.txt"], r"no such text file: .*missing\.txt"),
        ([tmp_path / "pipe.txt"], r"text file .*pipe\.txt is a pipe"),
        ([tmp_path / ("long" * 999)], r"no such text file: .*long"),
        ([], "no text files"),
    ):
        with pytest.raises(UserError, match=message):
            find_files(paths)


def test_sha256_is_that_of_a_checksum_listing(tmp_path):
    for names in (["a.txt", "b.md"], ["c.txt", "b.md"]):
        for name, text in zip(names, ("one", "two"), strict=True):
            (tmp_path / name).write_text(text)
        listing = "".join(f"{hashlib.sha256((tmp_path / p).read_bytes()).hexdigest()}  {p}\n" for p in names)
        assert text_corpus([tmp_path / p for p in names]).sha256 == hashlib.sha256(listing.encode()).hexdigest()


# The embedded corpus.


def test_embedded_keeps_the_library_only(tmp_path):
    kept = {"abc.py": "a = 1\n", "json/decoder.py": "b = 'é'\n", "latest.py": "c\n", "zconfig.py": "d\n"}
    dropped = [
        *("test/test_abc.py", "unittest/test/x.py", "email/tests/x.py", "site-packages/numpy/x.py"),
        *("dist-packages/y.py", "idlelib/x.py", "lib2to3/pgen2/x.py", "distutils/x.py", "encodings/cp1252.py"),
        *("turtledemo/x.py", "tkinter/x.py", "ensurepip/x.py", "pydoc_data/topics.py", "__pycache__/x.py"),
        *("config-3.11-x86/x.py", "_sysconfigdata__linux_x86_64.py", "sitecustomize.py", "usercustomize.py"),
        *("x.pyc", "LICENSE.txt"),
    ]
    for name, text in [*kept.items(), *((name, "no") for name in dropped)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere.py")
    assert list(embedded_corpus(tmp_path).documents()) == sorted(kept.items())


def test_the_real_embedded_corpus():
    corpus = embedded_corpus()
    documents = list(corpus.documents())
    names = [document.name for document in documents]
    assert {"argparse.py", "asyncio/tasks.py", "typing.py"} <= set(names)
    assert names == sorted(names)
    assert 300 < corpus.file_count < 800
    assert 6e6 < corpus.n_bytes < 12e6
    assert embedded_corpus().sha256 == corpus.sha256
    rule = HoldOut("name")
    sizes = {split: [len(rule.part(split, document)) for document in documents] for split in ("train", "validation")}
    assert all(bool(a) != bool(b) for a, b in zip(*sizes.values(), strict=True))
    assert 0.05 < sum(sizes["validation"]) / sum(map(sum, sizes.values())) < 0.10
    # A file stays where it is, whatever its text.
    changed = [bool(rule.part("validation", Document(name, "changed"))) for name in names]
    assert changed == [size > 0 for size in sizes["validation"]]


# The rule that divides text.


def split_by_text(documents):
    rule = hold_out_by_text(iter(documents))
    parts = [[Document(d.name, rule.part(split, d)) for d in documents] for split in ("train", "validation")]
    return [[document for document in part if document.text] for part in parts]


def test_text_split_of_many_documents():
    documents = [Document(str(i), f"text {i % 20}") for i in range(40)]
    train, validation = split_by_text(documents)
    assert sorted(train + validation) == sorted(documents)
    assert len(validation) == 4
    held_out = {text for _, text in validation}
    assert held_out.isdisjoint(text for _, text in train)  # twins stay together
    renamed = [Document("other " + name, text) for name, text in reversed(documents)]
    assert {text for _, text in split_by_text(renamed)[1]} == held_out


def test_text_split_of_text_without_end():
    """A tenth of it, to four standard deviations, from its beginning, whatever is repeated there."""
    repeated = (Document("", f"text {i % 3}") for i in range(9_000))
    hold_out = hold_out_by_text(itertools.chain(repeated, (Document("", f"text {i}") for i in itertools.count())))
    later = [hold_out.part("validation", Document("", f"later text {i}")) for i in range(20_000)]
    assert sum(map(bool, later)) / len(later) == pytest.approx(0.1, abs=4 * (0.09 / 4096 + 0.09 / 20_000) ** 0.5)


@pytest.mark.parametrize(
    "documents",
    [[Document("a", "0123456789" * 7), Document("b", "short")], [Document(str(i), "x" * 30) for i in range(25)]],
)
def test_text_split_of_few_or_equal_documents(documents):
    train, validation = split_by_text(documents)
    joined = {name: text for name, text in train}
    for name, text in validation:
        assert len(text) == len(documents[0].text) // 10
        joined[name] += text
    assert joined == dict(documents)


def test_the_sample_of_a_long_source_comes_from_everywhere(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i:04d}"}) + "\n" for i in range(1000)))
    source = text_corpus([tmp_path / "a.jsonl"])
    numbers = [int(document.text) for document in sample(source, 80, parts=4)]
    assert numbers == [n for start in (0, 250, 500, 750) for n in range(start, start + 5)]
    assert len(list(sample(source, 1 << 20))) == 1000


# TFRecord.


@hypothesis.given(st.one_of(st.binary(max_size=60), st.integers(500, 2500).map(np.random.default_rng(0).bytes)))
@hypothesis.example(bytes(508))
@hypothesis.example(bytes(509))
@hypothesis.example(bytes(1024))
def test_crc32c_is_the_division_of_polynomials(data):
    assert crc32c(data) == bitwise_crc32c(data)
    for data, crc in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        assert crc32c(data) == crc  # RFC 3720, B.4


def write_records(tmp_path, content, count=1):
    folder = write_tfds(tmp_path, ["a"] * count, shards=1)
    (folder / "c4-train.tfrecord-00000-of-00001").write_bytes(content)
    return folder


ONE = framed(example(text=b"one"))


def flipped(place):
    return ONE + bytes(byte ^ 4 * (i == place) for i, byte in enumerate(ONE)) + ONE


@pytest.mark.parametrize(
    ("content", "number", "message"),
    [
        (flipped(1), 1, "has a corrupt length"),
        (flipped(20), 1, "does not match its checksum"),
        (flipped(len(ONE) - 1), 1, "does not match its checksum"),
        (ONE * 2 + ONE[:-3], 2, "is cut short"),
        (ONE + ONE[:5], 1, "is cut short"),
        (b"only some text, and no record", 0, "has a corrupt length"),
    ],
)
def test_damaged_records_are_named_after_those_before(tmp_path, content, number, message):
    folder = write_records(tmp_path, content, 3)
    documents = open_tfds(folder, "train").documents()
    assert [next(documents).text for _ in range(number)] == ["one"] * number
    with pytest.raises(UserError, match=rf"record {number} of .*, at byte {number * len(ONE)}, {message}"):
        next(documents)
    if "length" in message:  # checked also if the record itself is skipped
        with pytest.raises(UserError, match="corrupt length"):
            texts_of(open_tfds(folder, "train[2:]"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (example(text=[b"one", b"two"]), r"has 2 texts in its feature 'text'"),
        (example(url=b"u"), r"has no bytes feature 'text'"),
        (example(text=3), r"has no bytes feature 'text'"),
        (example(text=b"ab\xff"), r"is not UTF-8 text: invalid start byte at byte 2"),
        (b"\x0a\x05abc", r"is not a tf\.train\.Example"),
    ],
)
def test_records_that_are_no_text(tmp_path, record, message):
    with pytest.raises(UserError, match=f"record 0 of .* {message}"):
        texts_of(open_tfds(write_records(tmp_path, framed(record)), "train"))


# TFDS folders.


def test_versions(tmp_path):
    for version in ("3.0.1", "10.0.0", "9.1.0"):
        write_tfds(tmp_path, version=version)
    (tmp_path / "c4/en/11.0.0.incomplete").mkdir()
    assert find_folder(tmp_path, "c4/en").name == "10.0.0"
    folder = find_folder(tmp_path, "c4/en:3.0.1")
    assert find_folder(folder, "") == folder
    for home, dataset, message in (
        (tmp_path, "c4/en:3.1.0", r"no version '3\.1\.0' of c4/en in .*\nallowed: 3\.0\.1 \| 9\.1\.0 \| 10\.0\.0"),
        (tmp_path, "c4", r"no data set 'c4' in .*\nallowed: c4/en"),
        (tmp_path, "lm1b:1.1.0", "no data set 'lm1b'"),
        (tmp_path, "", r"no dataset_info\.json\nallowed: c4/en"),
        (folder, "c4", r"NAME/CONFIG/VERSION/dataset_info\.json, and none is there"),
        (tmp_path / "nowhere", "c4", "there is no folder"),
    ):
        with pytest.raises(UserError, match=message):
            find_folder(home, dataset)


def test_slices_and_features(tmp_path):
    folder = write_tfds(tmp_path)
    source = open_tfds(folder, "train[20%:]")
    assert (source.description, source.file_count) == ("c4/en:3.0.1 train[20%:]", 3)
    for split, start, stop in (("[20%:]", 10, 50), ("[13:40]", 13, 40), ("[-10:-5]", 40, 45), ("[7%:88%]", 4, 44)):
        assert texts_of(open_tfds(folder, f"train{split}")) == [text for text in TEXTS[start:stop] if text]
    assert texts_of(open_tfds(folder, "train", "url")) == ["http://a.b"] * 50


@pytest.mark.parametrize(
    ("split", "feature", "message"),
    [
        ("test", "text", r"no split 'test'\nallowed: train"),
        ("trian", "text", r"no split 'trian'\nallowed: train\ndid you mean 'train'"),
        ("train[5:5]", "text", "is empty"),
        ("train[60:]", "text", "cannot be read: .*incompatible with 50 examples"),
        ("train+test", "text", "cannot be read"),
        ("train[a:b]", "text", "cannot be read"),
        ("", "text", "cannot be read"),
        ("train", "txt", r"no feature 'txt'\nallowed: length \| text \| url\ndid you mean 'text'"),
    ],
)
def test_wrong_splits_and_features(tmp_path, split, feature, message):
    with pytest.raises(UserError, match=message):
        open_tfds(write_tfds(tmp_path), split, feature)


def test_incomplete_and_foreign_folders(tmp_path):
    folder = write_tfds(tmp_path)
    (folder / "features.json").unlink()  # only names the features
    assert texts_of(open_tfds(folder, "train")) == KEPT
    shard = folder / "c4-train.tfrecord-00001-of-00003"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(framed(example(length=0, text=TEXTS[16].encode(), url=b"http://a.b")))])
    with pytest.raises(UserError, match=r"00001-of-00003 has fewer than the 17 records of dataset_info\.json"):
        texts_of(open_tfds(folder, "train"))
    shard.unlink()
    with pytest.raises(UserError, match=r"lacks c4-train\.tfrecord-00001-of-00003 of the 3 files of 'train'"):
        open_tfds(folder, "train")
    for file in [*folder.glob("*.tfrecord-*"), shard]:
        file.with_name(file.name.replace("tfrecord", "riegeli")).touch()
    path = folder / "dataset_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fileFormat": "riegeli"}))
    with pytest.raises(UserError, match=r"file format 'riegeli'\nallowed: tfrecord \| array_record"):
        open_tfds(folder, "train")


INFO = {"name": "c4", "version": "3.0.1", "splits": [{"name": "train", "shardLengths": ["1"]}]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset_info.json", "{"),
        ("dataset_info.json", "[]"),
        ("dataset_info.json", json.dumps(INFO | {"splits": {"train": 1}})),
        ("dataset_info.json", json.dumps({**INFO, "name": ""})),
        ("dataset_info.json", json.dumps(INFO | {"splits": [{"name": "train", "shardLengths": ["many"]}]})),
        ("dataset_info.json", json.dumps(INFO | {"splits": [{"shardLengths": ["1"]}]})),
        ("dataset_info.json", json.dumps(INFO | {"splits": INFO["splits"] * 2})),
        ("dataset_info.json", json.dumps(INFO | {"name": "c4" * 200})),
        ("features.json", '{"featuresDict": []}'),
    ],
)
def test_metadata_of_another_kind(tmp_path, name, content):
    folder = write_tfds(tmp_path, texts=["a"], shards=1)
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=r"does not describe a data set of TFDS: .+\nfetch the folder again") as error:
        open_tfds(folder, "train")
    assert str(error.value).count("\n") <= 2


def with_template(folder, template):
    path = folder / "dataset_info.json"
    info = json.loads(path.read_text())
    info["splits"][0]["filepathTemplate"] = template
    path.write_text(json.dumps(info))
    return folder


@pytest.mark.parametrize(
    "template",
    [
        *("{PLACE}", "{SHARD_INDEX:999999999}", "{SHARD_INDEX!r}", "{SPLIT.__class__}", "{}", "{{", "{SPLIT", "x"),
        *("../c4-{SHARD_INDEX}", "{SPLIT}/../../{SHARD_INDEX}", "/etc/{SHARD_INDEX}", "linked-{SHARD_INDEX}"),
    ],
)
def test_shards_outside_the_folder_and_names_by_format(tmp_path, template):
    """Each of these shards exists where it can, so that it would be read."""
    folder = with_template(write_tfds(tmp_path / "tfds"), template)
    for i, shard in enumerate(sorted(folder.glob("*.tfrecord-*"))):
        shutil.copy(shard, folder.parent / f"c4-{i:05d}")
        shutil.copy(shard, folder.parent / f"{i:05d}")
        shutil.copy(shard, folder / "x")
        (folder / f"linked-{i:05d}").symlink_to(folder.parent / f"c4-{i:05d}")
    with pytest.raises(UserError, match=r"the names of the files of 'train' in .*\nallowed: different names") as error:
        open_tfds(folder, "train")
    assert len(str(error.value)) < 2_000


def test_templates_in_the_folder_and_links_to_it(tmp_path):
    folder = with_template(write_tfds(tmp_path / "tfds"), "{SPLIT}/{DATASET}.{FILEFORMAT}.{SHARD_INDEX}of{NUM_SHARDS}")
    (folder / "train").mkdir()
    for i, shard in enumerate(sorted(folder.glob("*.tfrecord-*"))):
        shard.rename(folder / f"train/c4.tfrecord.{i:05d}of00003")
    (tmp_path / "link").symlink_to(tmp_path / "tfds/c4")
    assert texts_of(open_tfds(find_folder(tmp_path, "link/en"), "train")) == KEPT


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_no_module_is_imported_by_name(tmp_path, monkeypatch, file_format):
    module = f"hostile_{file_format}"
    (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    folder, name = write_tfds(tmp_path / "tfds", file_format=file_format), {"pythonClassName": f"{module}.Text"}
    path = folder / "features.json"
    values = json.loads(path.read_text()) | name
    for feature in values["featuresDict"]["features"].values():
        feature |= name
    path.write_text(json.dumps(values))
    assert texts_of(open_tfds(folder, "train")) == KEPT
    assert not (tmp_path / "mark").exists()
    with pytest.raises(ValueError, match="hostile"):
        feature_lib.FeatureConnector.from_config(str(folder))  # TFDS does import it
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("file_format", "message"), [("tfrecord", "goes on after"), ("array_record", "it has 17 records")]
)
@pytest.mark.parametrize("count", [0, 16])
def test_more_records_than_dataset_info_says(tmp_path, file_format, message, count):
    folder = write_tfds(tmp_path, file_format=file_format)
    path = folder / "dataset_info.json"
    info = json.loads(path.read_text())
    assert info["splits"][0]["shardLengths"] == ["16", "17", "17"]
    info["splits"][0]["shardLengths"][1] = str(count)
    path.write_text(json.dumps(info))
    with pytest.raises(UserError, match=rf"c4-train\.{file_format}-00001-of-00003 .*{message}"):
        texts_of(open_tfds(folder, "train"))


def test_bytes_after_the_last_record(tmp_path):
    source = open_tfds(write_records(tmp_path, ONE + b"garbage"), "train")
    documents = source.documents()
    assert next(documents).text == "one"
    with pytest.raises(UserError, match="00000-of-00001 goes on after the 1 records of dataset_info"):
        next(documents)


def test_a_record_longer_than_its_file_is_not_made_room_for(tmp_path):
    length = struct.pack("<Q", 1 << 62)
    crc = bitwise_crc32c(length)
    content = length + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF) + b"text"
    with pytest.raises(UserError, match=r"record 0 of .*, at byte 0, is cut short"):
        texts_of(open_tfds(write_records(tmp_path, content), "train"))


def test_features_that_hold_no_text_and_a_split_called_all(tmp_path):
    folder = write_tfds(tmp_path)
    path = folder / "features.json"
    features = {"text": {"text": {}}, "picture": {"image": {}}, "\x1b[2J\n\n": {"text": {}}}
    path.write_text(json.dumps({"featuresDict": {"features": features}}))
    with pytest.raises(UserError, match=r"feature 'picture' of .* holds no text\nallowed: '\\x1b\[2J\\n\\n' \| text$"):
        open_tfds(folder, "train", "picture")
    path = folder / "dataset_info.json"
    path.write_text(path.read_text().replace('"train"', '"all"'))
    for shard in folder.glob("*.tfrecord-*"):
        shard.rename(shard.with_name(shard.name.replace("train", "all")))
    assert texts_of(open_tfds(folder, "all")) == KEPT


def test_the_command_line_reads_tfds_without_tensorflow(tmp_path):
    write_tfds(tmp_path / "tfds")
    script = Path(__file__).parents[1] / "launch/prepare_data.py"
    code = f"import runpy, sys\ntry:\n    runpy.run_path({str(script)!r}, run_name='__main__')\n"
    code += "finally:\n    print('tensorflow' in sys.modules)"
    arguments = ["--tfds_dir=tfds", "--dataset=c4/en", "--split=train", "--tokenizer=bytes", "--output=tokens"]
    for shard in ("0/2", "1/2", "2/2"):
        command = [sys.executable, "-c", code, *arguments, f"--shard={shard}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        if shard == "2/2":
            assert done.returncode == 2
            assert "--shard=2/2 is not valid" in done.stderr
        else:
            assert done.returncode == 0, done.stderr
            assert done.stdout.endswith("False\n")
            assert f"train-0000{shard[0]}-of-00002.bin" in done.stdout
    wanted = np.concatenate([[*text.encode(), 257] for text in KEPT])
    np.testing.assert_array_equal(open_token_files(tmp_path / "tokens/train.bin").tokens[:], wanted)
