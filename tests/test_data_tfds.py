"""TensorFlow Datasets folders: texts of TFRecord and ArrayRecord, slices, damage, and no TensorFlow."""

import json
import struct

import numpy as np
import pytest
from small_runs import ROOT, python
from tensorflow_datasets.proto.tf_example_generated_pb2 import Example  # type: ignore[attr-defined]
from test_data_sources import KEPT, TEXTS, texts_of

from orthojax.data import open_token_file
from orthojax.data.sources import find_tfds, open_tfds
from orthojax.errors import UserError

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
@pytest.mark.parametrize(
    ("split", "start", "stop", "files"),
    [
        *(("", 0, 50, 3), ("[20%:]", 10, 50, 3), ("[13:40]", 13, 40, 3)),
        *(("[-10:-5]", 40, 45, 1), ("[7%:88%]", 4, 44, 3)),
    ],
)
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
