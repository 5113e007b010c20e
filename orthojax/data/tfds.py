"""Text of a prepared TensorFlow Datasets folder, TFRecord or ArrayRecord, read without TensorFlow.

A folder is DATA_DIR/NAME[/CONFIG]/VERSION with dataset_info.json and the files of every split. TFDS parses the metadata
and resolves slices, Grain reads TFRecord, and the package `array_record` reads ArrayRecord. The TFDS builder of the
folder is not made, because it imports modules that the metadata name.
"""

import contextlib
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orthojax.data.sources import Document, Piece, Source
from orthojax.errors import UserError, nearest
from orthojax.files import require_file

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)$")
_READ_AT_ONCE = 64  # records of an ArrayRecord


def find_folder(data_dir: Path, dataset: str) -> Path:
    """Finds the folder of one version of a data set.

    Args:
      data_dir: Holds the data sets.
      dataset: NAME, NAME/CONFIG or either with :VERSION; by default the highest version that is present.

    Raises:
      UserError: If it is not there; the message names what is.
    """
    found: dict[str, list[str]] = {}
    for depth in ("*/*", "*/*/*"):
        for path in data_dir.glob(f"{depth}/dataset_info.json"):
            if _VERSION.match(path.parent.name):
                found.setdefault(path.parents[1].relative_to(data_dir).as_posix(), []).append(path.parent.name)
    name, _, version = dataset.partition(":")
    if name not in found:
        allowed = " | ".join(sorted(found)) or "a folder with NAME/CONFIG/VERSION/dataset_info.json, and none is there"
        raise UserError(f"there is no data set {name!r} in {data_dir}", allowed=allowed)
    versions = sorted(found[name], key=lambda each: [int(part) for part in each.split(".")])
    if version and version not in versions:
        raise UserError(f"there is no version {version!r} of {name} in {data_dir}", allowed=" | ".join(versions))
    return data_dir / name / (version or versions[-1])


def open_tfds(folder: Path, split: str, feature: str = "text") -> Source:
    """Opens one split of a data set, or a slice of it, as a source.

    Its sha256 covers the metadata, the slice and the names and sizes of the files, not their contents.

    Args:
      folder: From `find_folder`.
      split: A split, or a slice in the notation of TFDS: `train[:10%]`, `train[1000:]`, `train[-20%:]`.
      feature: The text or bytes feature that holds the text.

    Raises:
      UserError: If the metadata, the split, a file or the feature is missing or invalid.
    """
    from google.protobuf.json_format import ParseError
    from tensorflow_datasets.core import dataset_info, naming
    from tensorflow_datasets.core.splits import SplitDict

    require_file(folder / "dataset_info.json", "metadata")
    try:
        info = dataset_info.read_proto_from_builder_dir(folder)
        file_format = info.file_format or "tfrecord"
        home: Any = folder  # TFDS asks for a type of its own
        template = naming.ShardedFileTemplate(home, dataset_name=info.name, filetype_suffix=file_format)
        splits = SplitDict.from_proto(info.splits, template)
    except (ParseError, ValueError) as error:
        problem = f"{folder} does not describe a data set of TFDS: {str(error)[:200]}"
        raise UserError(problem, hint="fetch the folder again") from None
    readers = {"tfrecord": _read_tfrecord, "array_record": _read_array_record}
    if file_format not in readers:
        raise UserError(f"{folder} has the file format {file_format!r}", allowed=" | ".join(readers))
    try:
        instructions = splits[split].file_instructions
    except (KeyError, ValueError) as error:
        problem = f"split {split!r} of {folder}: {str(error).splitlines()[0]}"
        allowed = f"{' | '.join(splits)}, or a slice such as train[:10%]"
        raise UserError(problem, allowed=allowed, hint=nearest(split, splits)) from None
    digest = hashlib.sha256(repr((info.SerializeToString(deterministic=True), split, feature)).encode())
    pieces = []
    for file in instructions:
        path = Path(file.filename)
        require_file(path, f"file of {split!r}")
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        n_bytes = path.stat().st_size * file.take // file.examples_in_shard
        pieces.append(Piece(functools.partial(_read, readers[file_format], file, n_bytes, feature), n_bytes))
    described = f"{info.name}{info.config_name and '/' + info.config_name}:{info.version} {split}"
    return Source(described, digest.hexdigest(), tuple(pieces))


def _read(
    reader: Callable[[Path, int, int], Iterator[bytes]], file: Any, n_bytes: int, feature: str
) -> Iterator[tuple[Document, int]]:
    """Yields the texts of the records that a `FileInstruction` of TFDS names, and about how many bytes are read."""
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_generated_pb2

    messages: Any = tf_example_generated_pb2
    path, number, stop = Path(file.filename), file.skip, file.skip + file.take
    try:
        for record in reader(path, number, stop):
            features = messages.Example.FromString(record).features.feature
            texts = features[feature].bytes_list.value if feature in features else ()
            if len(texts) != 1:
                problem = f"record {number} of {path} has {len(texts)} texts in its feature {feature!r}"
                holding = sorted(name for name, values in features.items() if len(values.bytes_list.value) == 1)
                raise UserError(problem, allowed=" | ".join(holding), hint=nearest(feature, holding))
            if text := texts[0].decode():
                yield Document(f"record {number} of {path}", text), n_bytes * (number + 1 - file.skip) // file.take
            number += 1
        if number < stop:
            raise ValueError(f"the file ends, but dataset_info.json says that there are {stop}")
    except UserError:
        raise
    except (DecodeError, IndexError, MemoryError, OverflowError, RuntimeError, ValueError) as error:
        problem = f"record {number} of {path}: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
        raise UserError(problem, hint="the file is damaged or of another kind: fetch it again") from None


def _read_tfrecord(path: Path, start: int, stop: int) -> Iterator[bytes]:
    from grain.experimental import TFRecordIterDataset

    return itertools.islice(iter(TFRecordIterDataset(str(path))), start, stop)


def _read_array_record(path: Path, start: int, stop: int) -> Iterator[bytes]:
    from array_record.python.array_record_module import ArrayRecordReader

    with contextlib.closing(ArrayRecordReader(str(path), "readahead_buffer_size:0")) as reader:
        stop = min(stop, reader.num_records())
        for i in range(start, stop, _READ_AT_ONCE):
            yield from reader.read(i, min(i + _READ_AT_ONCE, stop))
