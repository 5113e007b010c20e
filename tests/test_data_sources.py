"""Sources of text: the documents they hold, what bad files are called, and TFDS folders without TensorFlow."""

import bz2
import gzip
import hashlib
import json
import lzma
import struct
import sys

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from small_runs import ROOT, python
from tensorflow_datasets.proto.tf_example_generated_pb2 import Example  # type: ignore[attr-defined]

from orthojax.data import embedded_corpus, open_token_file, text_corpus
from orthojax.data.sources import find_files, find_tfds, open_tfds
from orthojax.errors import UserError

TEXTS = [f"text {i} größer " * (i % 7) for i in range(50)]  # every seventh is empty, and left out
KEPT = [text for text in TEXTS if text]


def lines(texts):
    return "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()


def zstd(content):
    return pytest.importorskip("zstandard").compress(content)


def as_parquet(texts, column="text"):
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"id": list(range(len(texts))), column: texts}), sink, row_group_size=7)
    return sink.getvalue().to_pybytes()


def as_arrow(texts):
    table, sink = pa.table({"text": pa.array(texts, pa.large_string())}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


# Suffix -> the content of a file with these texts.
FORMATS = {
    ".jsonl": lines,
    ".jsonl.gz": lambda texts: gzip.compress(lines(texts[:9])) + gzip.compress(lines(texts[9:])),  # as `cat` makes them
    ".json.gz": lambda texts: gzip.compress(lines(texts)),  # as C4 is published
    ".jsonl.bz2": lambda texts: bz2.compress(lines(texts)),
    ".jsonl.xz": lambda texts: lzma.compress(lines(texts)),
    ".jsonl.zst": lambda texts: zstd(lines(texts)),
    ".parquet": as_parquet,
    ".arrow": as_arrow,
}
ADDRESSES = [".jsonl", ".jsonl.gz", ".json.gz", ".parquet"]


def texts_of(source):
    return [document.text for document in source.documents()]


@pytest.fixture(params=[*FORMATS, *(f"memory://{suffix}" for suffix in ADDRESSES)])
def opened(request, tmp_path):
    """A source of three files of a format, on disk or in fsspec's file system in memory."""
    suffix = request.param.removeprefix("memory://")
    memory = fsspec.filesystem("memory")
    for i, part in enumerate((TEXTS[:20], TEXTS[20:40], TEXTS[40:])):
        content = FORMATS[suffix](part)
        (tmp_path / f"{i}{suffix}").write_bytes(content)
        memory.pipe_file(f"/{suffix}/{i}{suffix}", content)
    memory.pipe_file(f"/{suffix}/README.md", b"# a card")
    return text_corpus([f"memory://{suffix}" if "memory" in request.param else tmp_path])


def test_every_format_holds_the_same_documents(opened):
    assert texts_of(opened) == KEPT
    assert len(opened.files) == 3


def test_documents_have_names_of_their_own(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffgrüße\r\n".encode())
    (tmp_path / "b.py.gz").write_bytes(gzip.compress(b"x = 1\n"))
    content = b'\xef\xbb\xbf{"text": "one\xe2\x80\xa8line"}\n\n{"text": "", "id": 3}\n{"text": "four"}'
    (tmp_path / "c.jsonl").write_bytes(content)
    (tmp_path / "e.txt").touch()
    expected = [("a.txt", "grüße\r\n"), ("b.py.gz", "x = 1\n"), ("c.jsonl:1", "one\u2028line"), ("c.jsonl:4", "four")]
    assert list(text_corpus([tmp_path]).documents()) == expected
    (tmp_path / "f.txt.zst").write_bytes(zstd(b"two\n\nlines\n"))
    assert list(text_corpus([tmp_path / "f.txt.zst"]).documents()) == [("f.txt.zst", "two\n\nlines\n")]


def test_a_changed_remote_file_is_another_source():
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/changing/a.jsonl", lines(["one"]))
    before = text_corpus(["memory://changing/a.jsonl"]).sha256
    assert text_corpus(["memory://changing/*.jsonl"]).sha256 == before
    memory.pipe_file("/changing/a.jsonl", lines(["two"]))
    assert text_corpus(["memory://changing/a.jsonl"]).sha256 != before


@pytest.mark.parametrize("path", ["a.parquet", "hf://datasets/someone/something/*.parquet"])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(as_parquet(TEXTS))
    with pytest.raises(UserError, match=r"pip install 'orthojax\[datasets\]'"):
        next(text_corpus([path]).documents())


def test_folders_and_patterns_are_expanded_in_order(tmp_path):
    for name in ("b/2.txt", "b/1.jsonl", "b/deep/3.txt", "b/.hidden", "b/.git/x", "c1.txt", "c2.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    found = find_files([tmp_path / "c2.txt", tmp_path / "b", tmp_path / "c?.txt"])
    assert [name for name, _ in found] == ["c2.txt", "1.jsonl", "2.txt", "deep/3.txt", "c1.txt", "c2.txt"]
    assert [name for name, _ in find_files([tmp_path / "**/*.txt"])] == ["2.txt", "3.txt", "c1.txt", "c2.txt"]
    (tmp_path / "b/t.arrow").write_bytes(as_arrow(["x"]))  # then the others describe the data set
    assert [name for name, _ in find_files([tmp_path / "b"])] == ["t.arrow"]


def test_sha256_is_that_of_a_checksum_listing(tmp_path):
    for names in (["a.txt", "b.md"], ["c.txt", "b.md"]):
        for name, text in zip(names, ("one", "two"), strict=True):
            (tmp_path / name).write_text(text)
        listing = "".join(f"{hashlib.sha256((tmp_path / p).read_bytes()).hexdigest()}  {p}\n" for p in names)
        assert text_corpus([tmp_path / p for p in names]).sha256 == hashlib.sha256(listing.encode()).hexdigest()


def test_embedded_corpus_keeps_the_library_only(tmp_path):
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


def test_embedded_corpus_of_this_python():
    corpus = embedded_corpus()
    names = [document.name for document in corpus.documents()]
    assert {"argparse.py", "asyncio/tasks.py", "typing.py"} <= set(names)
    assert names == sorted(names)
    assert 300 < len(corpus.files) < 800
    assert 6e6 < corpus.n_bytes < 12e6
    assert embedded_corpus().sha256 == corpus.sha256


@pytest.mark.parametrize(("files", "description"), [
    (["a/x.py", "b/__init__.py"], "a/x.py, b/__init__.py"),
    ([f"{of}/{i}.py" for of in "abc" for i in range(400)], "1,200 .py files in 3 folders"),
    ([f"{i}.txt" for i in range(5)], "5 .txt files"),
    ([f"a/{i}.{end}" for end in ("txt", "md") for i in range(3)], "6 files"),
])  # fmt: skip
def test_many_files_are_told_by_number_and_kind(tmp_path, files, description):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert text_corpus([tmp_path]).description == description


FILE_FORMATS = pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])


def example(**features):
    """A serialized tf.train.Example."""
    message = Example()
    for name, value in features.items():
        kind = "int64_list" if isinstance(value, int) else "bytes_list"
        getattr(message.features.feature[name], kind).value.extend(value if isinstance(value, list) else [value])
    return message.SerializeToString()


def framed(data):
    """A TFRecord from its definition, with zeros for the checksums, which are not read."""
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


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
    return folder


def edit_info(folder, edit):
    path = folder / "dataset_info.json"
    info = json.loads(path.read_text())
    edit(info)
    path.write_text(json.dumps(info))
    return folder


@FILE_FORMATS
@pytest.mark.parametrize(("split", "start", "stop", "files"), [
    *(("", 0, 50, 3), ("[20%:]", 10, 50, 3), ("[13:40]", 13, 40, 3)),
    *(("[-10:-5]", 40, 45, 1), ("[7%:88%]", 4, 44, 3)),
])  # fmt: skip
def test_slices_are_those_of_the_records(tmp_path, file_format, split, start, stop, files):
    source = open_tfds(write_tfds(tmp_path, file_format=file_format), f"train{split}")
    assert texts_of(source) == [text for text in TEXTS[start:stop] if text]
    assert (source.description, len(source.files)) == (f"c4/en:3.0.1 train{split}", files)


def test_another_feature_can_hold_the_text(tmp_path):
    assert texts_of(open_tfds(write_tfds(tmp_path), "train", "url")) == ["http://a.b"] * 50


def test_versions_and_data_sets_are_found_by_name(tmp_path):
    for version in ("3.0.1", "10.0.0", "9.1.0"):
        write_tfds(tmp_path, version=version)
    (tmp_path / "c4/en/11.0.0.incomplete").mkdir()
    assert find_tfds(tmp_path, "c4/en").name == "10.0.0"
    assert find_tfds(tmp_path, "c4/en:3.0.1").name == "3.0.1"


def write_records(tmp_path, content, count=1):
    folder = write_tfds(tmp_path, ["a"] * count, shards=1)
    (folder / "c4-train.tfrecord-00000-of-00001").write_bytes(content)
    return folder


ONE = framed(example(text=b"one"))


@pytest.mark.parametrize(
    ("content", "number"),
    [(ONE * 2 + ONE[:-3], 2), (ONE + ONE[:5], 1), (ONE * 2, 2), (ONE + b"only some text, and no record", 1)],
)
def test_damaged_records_are_named_after_those_before(tmp_path, content, number):
    documents = open_tfds(write_records(tmp_path, content, 3), "train").documents()
    assert [next(documents).text for _ in range(number)] == ["one"] * number
    with pytest.raises(UserError, match=f"record {number} of "):
        next(documents)


@FILE_FORMATS
def test_no_module_is_imported_by_name(tmp_path, monkeypatch, file_format):
    module = f"hostile_{file_format}"
    (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    folder = write_tfds(tmp_path / "tfds", file_format=file_format)
    features = {"pythonClassName": f"{module}.Text", "featuresDict": {"features": {"text": {"text": {}}}}}
    (folder / "features.json").write_text(json.dumps(features))
    assert texts_of(open_tfds(folder, "train")) == KEPT
    assert not (tmp_path / "mark").exists()


def test_the_command_line_reads_tfds_without_tensorflow(tmp_path):
    write_tfds(tmp_path / "tfds")
    script = ROOT / "launch/prepare_data.py"
    code = f"import runpy, sys\ntry:\n    runpy.run_path({str(script)!r}, run_name='__main__')\n"
    code += "finally:\n    print('tensorflow' in sys.modules)"
    arguments = ["--tfds_dir=tfds", "--dataset=c4/en", "--split=train", "--tokenizer=bytes", "--output=tokens"]
    done = python("-c", code, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")
    wanted = np.concatenate([[*text.encode(), 257] for text in KEPT])
    np.testing.assert_array_equal(open_token_file(tmp_path / "tokens/train.bin").tokens, wanted)
