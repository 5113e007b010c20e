"""Text of a prepared TensorFlow Datasets folder, TFRecord or ArrayRecord, read without TensorFlow.

A folder is DATA_DIR/NAME[/CONFIG]/VERSION with dataset_info.json and the files of every split. TFDS resolves slices;
the package `array_record` reads ArrayRecord. The metadata are read here, because TFDS imports modules that they name,
and TFRecord, which TFDS does not read without TensorFlow: a length (uint64), its masked CRC-32C, the data and their
masked CRC-32C, all little-endian (tensorflow/core/lib/io/record_writer.h).
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orthojax.data.sources import Document, Piece, Source
from orthojax.errors import UserError, nearest
from orthojax.files import read_json

_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"  # of the names of files, if a data set has none of its own
_AGAIN = "fetch the folder again"
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)$")
_HEADER = struct.Struct("<QI")
_READ_AT_ONCE = 64  # records of an ArrayRecord


def find_folder(data_dir: Path, dataset: str) -> Path:
    """Finds the folder of one version of a data set.

    Args:
      data_dir: Holds the data sets; or the folder of a version itself, if `dataset` is ''.
      dataset: NAME, NAME/CONFIG or either with :VERSION; by default the highest version that is present.

    Raises:
      UserError: If it is not there; the message names what is.
    """
    if not os.path.isdir(data_dir):
        raise UserError(f"there is no folder {data_dir}", allowed="--tfds_dir=DATA_DIR of TensorFlow Datasets")
    if not dataset:
        if (data_dir / "dataset_info.json").is_file():
            return data_dir
        raise UserError(f"{data_dir} has no dataset_info.json", allowed=_present(data_dir))
    name, _, version = dataset.partition(":")
    infos = (data_dir / name).glob("*/dataset_info.json") if os.path.isdir(data_dir / name) else ()
    versions = [path.parent.name for path in infos if _VERSION.match(path.parent.name)]
    versions.sort(key=lambda found: [int(part) for part in found.split(".")])
    if not versions:
        raise UserError(f"there is no data set {name!r} in {data_dir}", allowed=_present(data_dir))
    if version and version not in versions:
        raise UserError(f"there is no version {version!r} of {name} in {data_dir}", allowed=" | ".join(versions))
    return data_dir / name / (version or versions[-1])


def _present(data_dir: Path) -> str:
    infos = [path for depth in ("*/*", "*/*/*") for path in data_dir.glob(f"{depth}/dataset_info.json")]
    names = sorted({path.parents[1].relative_to(data_dir).as_posix() for path in infos})
    return " | ".join(names) or "a folder with NAME/CONFIG/VERSION/dataset_info.json, and none is there"


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
    info = read_json(folder / "dataset_info.json", "metadata")
    try:
        name, version, config = info["name"], info["version"], info.get("configName", "")
        file_format = info.get("fileFormat", "tfrecord")
        # In the JSON of protocol buffers 64-bit integers are strings.
        lengths = {found["name"]: [int(n) for n in found.get("shardLengths", ())] for found in info["splits"]}
        templates = {found["name"]: found.get("filepathTemplate") or _TEMPLATE for found in info["splits"]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder} does not describe a data set of TFDS: {error!r}", hint=_AGAIN) from None
    split_name, begin, end = _resolve(split, lengths)
    readers = {"tfrecord": _read_tfrecord, "array_record": _read_array_record}
    if file_format not in readers:
        raise UserError(f"{folder} has the file format {file_format!r}", allowed=" | ".join(readers))
    counts = lengths[split_name]
    fields = {"DATASET": name, "SPLIT": split_name, "FILEFORMAT": file_format}
    paths = _files(folder, templates[split_name], fields, len(counts))
    sizes, pieces, first = [path.stat().st_size for path in paths], [], 0
    for path, count, size in zip(paths, counts, sizes, strict=True):
        start, stop = max(begin - first, 0), min(end - first, count)
        n_bytes = size * (stop - start) // count if start < stop else 0
        pieces.append(Piece(functools.partial(_read, readers[file_format], path, count, start, stop, feature), n_bytes))
        first += count
    digest = hashlib.sha256(json.dumps([info, split, feature]).encode())
    digest.update("".join(f"{path.name} {size}\n" for path, size in zip(paths, sizes, strict=True)).encode())
    described = f"{name}{config and '/' + config}:{version} {split}"
    return Source(described, digest.hexdigest(), tuple(pieces))


def _files(folder: Path, template: str, fields: dict[str, str], count: int) -> list[Path]:
    """Lists the files of a split, which have to lie in the folder."""
    digits, home, paths = max(5, len(str(count))), folder.resolve(), []
    for index in range(count):
        number, of = f"{index:0{digits}d}", f"{count:0{digits}d}"
        values = fields | {"SHARD_INDEX": number, "NUM_SHARDS": of, "SHARD_X_OF_Y": f"{number}-of-{of}"}
        # Not str.format, which follows attributes and pads to any width.
        name = re.sub(r"\{(\w+)\}", lambda found, values=values: values.get(found[1], found[0]), template)
        if not (folder / name).resolve().is_relative_to(home):
            raise UserError(f"{template!r} of {folder} names files outside the folder", hint=_AGAIN)
        paths.append(folder / name)
    missing = [path.name for path in paths if not os.path.isfile(path)]
    if missing:
        problem = f"{folder} lacks {missing[0]} and {len(missing) - 1} more of the {count} files of {fields['SPLIT']!r}"
        raise UserError(problem, hint="fetch the rest; a slice of the split needs all of its files as well")
    return paths


def _resolve(split: str, splits: dict[str, list[int]]) -> tuple[str, int, int]:
    """Resolves a split in the notation of TFDS as (name, first example, the one after the last)."""
    import tensorflow_datasets as tfds

    name = split.partition("[")[0]
    if not re.fullmatch(r"[\w-]+(\[[-\d%]*:[-\d%]*\])?", split):
        raise UserError(f"split {split!r} cannot be read", allowed="NAME or NAME[a:b], each bound a number or N%")
    size = sum(splits.get(name, ()))
    if not size:
        present = [name for name, lengths in splits.items() if sum(lengths)]
        raise UserError(f"there is no split {name!r}", allowed=" | ".join(present), hint=nearest(name, present))
    # Under a name of our own, since TFDS would take some for more than a split.
    infos = {"split": tfds.core.SplitInfo(name="split", shard_lengths=splits[name], num_bytes=0)}
    try:
        (bounds,) = tfds.core.ReadInstruction.from_spec("split" + split.removeprefix(name)).to_absolute(infos)
    except ValueError as error:
        raise UserError(f"split {split!r} cannot be read: {str(error).splitlines()[0]}") from None
    begin, end = bounds.from_ or 0, size if bounds.to is None else bounds.to
    if begin >= end:
        raise UserError(f"split {split!r} is empty", allowed=f"a part of the {size} examples of {name}")
    return name, begin, end


def _read(
    reader: Callable[[Path, int], Iterator[bytes]], path: Path, count: int, start: int, stop: int, feature: str
) -> Iterator[tuple[Document, int]]:
    """Yields the texts of the records [start, stop) of a file of `count`, and about how many bytes are read so far."""
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_generated_pb2

    messages: Any = tf_example_generated_pb2
    size, number = path.stat().st_size / max(count, 1), start
    try:
        for record in reader(path, start):
            if number == stop:
                if stop < count:
                    return
                raise ValueError(f"dataset_info.json says that there are {count}")
            features = messages.Example.FromString(record).features.feature
            texts = features[feature].bytes_list.value if feature in features else ()
            if len(texts) != 1:
                problem = f"record {number} of {path} has {len(texts)} texts in its feature {feature!r}"
                holding = sorted(name for name, values in features.items() if len(values.bytes_list.value) == 1)
                raise UserError(problem, allowed=" | ".join(holding), hint=nearest(feature, holding))
            if text := texts[0].decode():
                yield Document(f"record {number} of {path}", text), round((number + 1 - start) * size)
            number += 1
        if number < stop:
            raise ValueError(f"the file ends, but dataset_info.json says that there are {count}")
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (DecodeError, IndexError, RuntimeError, ValueError) as error:
        problem = f"record {number} of {path}: {str(error).splitlines()[0][:200]}"
        raise UserError(problem, hint="the file is damaged or of another kind: fetch it again") from None


def _read_tfrecord(path: Path, start: int) -> Iterator[bytes]:
    """Yields the records of a TFRecord file from `start` on; of those before, only the lengths are read."""
    number = 0
    with open(path, "rb", buffering=1 << 18) as file:
        size = os.fstat(file.fileno()).st_size
        while header := file.read(_HEADER.size):
            length, masked = _HEADER.unpack(header.ljust(_HEADER.size))
            if masked_crc32c(header[:8]) != masked:
                raise ValueError("the length does not match its checksum")
            if file.tell() + length + 4 > size:
                raise ValueError("the file is cut short")
            if number < start:
                file.seek(length + 4, os.SEEK_CUR)
            else:
                data = file.read(length)
                if masked_crc32c(data) != int.from_bytes(file.read(4), "little"):
                    raise ValueError("the data do not match their checksum")
                yield data
            number += 1


def masked_crc32c(data: bytes) -> int:
    """Computes CRC-32C as TFRecord stores it: rotated right by 15 bits, plus a constant."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read_array_record(path: Path, start: int) -> Iterator[bytes]:
    """Yields the records of an ArrayRecord file from `start` on."""
    from array_record.python.array_record_module import ArrayRecordReader

    with contextlib.closing(ArrayRecordReader(str(path), "readahead_buffer_size:0")) as reader:
        count = reader.num_records()
        for i in range(start, count, _READ_AT_ONCE):
            yield from reader.read(i, min(i + _READ_AT_ONCE, count))
