"""Text of a prepared TensorFlow Datasets folder, TFRecord or ArrayRecord, read without TensorFlow.

A folder is DATA_DIR/NAME[/CONFIG]/VERSION with dataset_info.json, features.json and the shards of every split. TFDS
reads the metadata and resolves slices; the `array_record` package reads ArrayRecord. TFRecord is read here: without
TensorFlow, TFDS does not read it, and the reader of `grain` does not compare checksums. A TFRecord is a length
(uint64), its masked CRC, the data and their masked CRC, all little-endian (tensorflow/core/lib/io/record_writer.h).
"""

import functools
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orthojax.data.documents import Document, Item, Piece, Source
from orthojax.errors import UserError, nearest

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)$")
_READ_AT_ONCE = 1 << 21  # bytes of an ArrayRecord, by the mean size of its records
_HEADER = struct.Struct("<QI")
_CRC_BLOCK = 512  # bytes whose CRC is one vectorised table look-up


class _Records(NamedTuple):
    """Consecutive records of a split."""

    where: str
    count: int
    n_bytes: int
    read: Callable[[int, int], Iterator[bytes]]  # the records [start, stop)


def find_folder(data_dir: Path, dataset: str) -> Path:
    """The folder of one version of a data set.

    Args:
      data_dir: Holds the data sets; or the folder of a version itself, if `dataset` is ''.
      dataset: NAME, NAME/CONFIG or either with :VERSION; by default the highest version that is present.

    Raises:
      UserError: If it is not there; the message names what is.
    """
    if not data_dir.is_dir():
        raise UserError(f"there is no folder {data_dir}", allowed="--tfds_dir=DATA_DIR of TensorFlow Datasets")
    if not dataset:
        if (data_dir / "dataset_info.json").is_file():
            return data_dir
        raise UserError(f"{data_dir} has no dataset_info.json", allowed=_present(data_dir))
    name, _, version = dataset.partition(":")
    infos = (data_dir / name).glob("*/dataset_info.json")
    versions = [path.parent.name for path in infos if _VERSION.match(path.parent.name)]
    versions.sort(key=lambda found: [int(part) for part in found.split(".")])
    if not versions:
        raise UserError(f"there is no data set {name!r} in {data_dir}", allowed=_present(data_dir))
    if version and version not in versions:
        raise UserError(f"there is no version {version!r} of {name} in {data_dir}", allowed=" | ".join(versions))
    return data_dir / name / (version or versions[-1])


def open_tfds(folder: Path, split: str, feature: str = "text") -> Source:
    """One split of a data set, or a slice of it, as a source.

    Its sha256 covers the metadata, the slice and the names and sizes of the shards, not their contents.

    Args:
      folder: From `find_folder`.
      split: A split, or a slice in the notation of TFDS: `train[:10%]`, `train[1000:]`, `train[-20%:]`.
      feature: The text or bytes feature that holds the text.

    Raises:
      UserError: If the metadata, the split, a shard or the feature is missing or invalid.
    """
    content, description, splits, present = _read_metadata(folder)
    name, begin, end = _resolve(split, splits)
    if present is not None and feature not in present:
        raise UserError(
            f"{folder} has no feature {feature!r}", allowed=" | ".join(present), hint=nearest(feature, present)
        )
    paths, lengths = list(map(Path, splits[name].filepaths)), splits[name].shard_lengths
    if missing := [path.name for path in paths if not path.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{folder} lacks {missing[0]}{more} of the {len(paths)} files of {name!r}",
            hint="fetch the rest; a slice of the split needs all of its files too",
        )
    sizes = [path.stat().st_size for path in paths]
    file_format = content.get("fileFormat", "tfrecord")
    if file_format == "tfrecord":
        reads = [functools.partial(_read_tfrecord, path) for path in paths]
        records = list(map(_Records, map(str, paths), lengths, sizes, reads))
    elif file_format == "array_record":
        where, files = f"split {name!r} of {folder}", splits[name].file_instructions
        read = functools.partial(_read_array_record, where, files, sum(sizes) / sum(lengths))
        records = [_Records(where, sum(lengths), sum(sizes), read)]
    else:
        raise UserError(f"{folder} has the file format {file_format!r}", allowed="tfrecord | array_record")
    digest = hashlib.sha256(json.dumps([content, split, feature]).encode())
    digest.update("".join(f"{path.name} {size}\n" for path, size in zip(paths, sizes, strict=True)).encode())
    pieces = functools.partial(_pieces, records, feature, begin, end)
    return Source(f"{description} {split}", digest.hexdigest(), len(paths), pieces)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720) of some bytes.

    A CRC is linear over XOR, so the bytes of a block are looked up independently of each other.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    # A CRC that starts from zero ignores leading zero bytes, and `_INITIAL` turns it into the initial 0xffffffff.
    padded = bytes(-(len(data) + len(_INITIAL)) % _CRC_BLOCK) + _INITIAL + data
    places = np.frombuffer(padded, np.uint8).reshape(-1, _CRC_BLOCK) + _OFFSETS
    table, (a, b, c, d) = _crc_tables()
    crc = 0
    for block in np.bitwise_xor.reduce(table.take(places, mode="clip"), axis=1).tolist():
        # The CRC so far acts on a block as if its first four bytes were XORed with it.
        crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24] ^ block
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """CRC-32C as TFRecord stores it: rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


_INITIAL = bytes.fromhex("54641f64")  # whose CRC, starting from zero, is 0xffffffff
_OFFSETS = np.arange(_CRC_BLOCK, dtype=np.int64) * 256
_masked_crc_of_length = functools.lru_cache(1 << 14)(masked_crc32c)  # lengths repeat


@functools.cache
def _crc_tables() -> tuple[np.ndarray, list[list[int]]]:
    """What each byte value adds to a CRC by its place in a block: uint32 [_CRC_BLOCK * 256], and the first 4 places."""
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(0x82F63B78), byte >> 1)
    rows = [byte]
    for _ in range(_CRC_BLOCK - 1):
        rows.append((rows[-1] >> 8) ^ byte[rows[-1] & 255])
    table = np.stack(rows[::-1])
    return table.reshape(-1), table[:4].tolist()


def _read_metadata(folder: Path) -> tuple[dict[str, Any], str, Any, list[str] | None]:
    """dataset_info.json, the full name, the `tfds.core.SplitDict`, and the features if features.json names them."""
    from etils import epath
    from tensorflow_datasets.core import dataset_info, naming, splits  # slow to import

    try:
        content = json.loads((folder / "dataset_info.json").read_bytes())
        config = content.get("configName", "")
        description = f"{content['name']}{config and '/' + config}:{content['version']}"
        proto = dataset_info.read_proto_from_builder_dir(folder)
        file_format, place = proto.file_format or "tfrecord", epath.Path(folder)
        template = naming.ShardedFileTemplate(place, dataset_name=proto.name, filetype_suffix=file_format)
        found = splits.SplitDict.from_proto(proto.splits, template)
        for split in found.values():
            _ = split.filepaths  # computed from a template, which may be wrong
        features = folder / "features.json"  # not written by early versions of TFDS
        present = sorted(json.loads(features.read_bytes())["featuresDict"]["features"]) if features.exists() else None
    except Exception as error:  # its own errors, those of protocol buffers, of JSON and of the file system
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{folder} does not describe a data set of TFDS: {problem[:200]}", hint="fetch the folder again"
        ) from None
    return content, description, found, present


def _resolve(split: str, splits: Any) -> tuple[str, int, int]:
    """A split in the notation of TFDS as (name, first example, the one after the last)."""
    import tensorflow_datasets as tfds

    name = split.partition("[")[0]
    if not re.fullmatch(r"[\w-]+(\[[-\d%]*:[-\d%]*\])?", split):
        raise UserError(f"split {split!r} cannot be read", allowed="NAME or NAME[a:b], each bound a number or N%")
    if name not in splits or not splits[name].num_examples:
        present = [name for name, found in splits.items() if found.num_examples]
        raise UserError(f"there is no split {name!r}", allowed=" | ".join(present), hint=nearest(name, present))
    try:
        (bounds,) = tfds.core.ReadInstruction.from_spec(split).to_absolute(splits)
    except ValueError as error:
        raise UserError(f"split {split!r} cannot be read: {str(error).splitlines()[0]}") from None
    size = splits[name].num_examples
    begin, end = bounds.from_ or 0, size if bounds.to is None else bounds.to
    if begin >= end:
        raise UserError(f"split {split!r} is empty", allowed=f"a part of the {size} examples of {name}")
    return name, begin, end


def _present(data_dir: Path) -> str:
    found = {
        path.parents[1].relative_to(data_dir).as_posix()
        for depth in ("*/*", "*/*/*")
        for path in data_dir.glob(f"{depth}/dataset_info.json")
    }
    if not found:
        return "a folder with NAME/CONFIG/VERSION/dataset_info.json, and none is there"
    return " | ".join(sorted(found)[:20]) + (f" | {len(found) - 20} more" if len(found) > 20 else "")


def _pieces(records: list[_Records], feature: str, begin: int, end: int, index: int, count: int) -> list[Piece]:
    begin, end = (begin + (end - begin) * i // count for i in (index, index + 1))
    found, first = [], 0
    for part in records:
        start, stop = max(begin - first, 0), min(end - first, part.count)
        if start < stop:
            size = part.n_bytes / part.count
            read = functools.partial(_read, part, feature, stop=stop)
            found.append(Piece(read, start, round((stop - start) * size), round(start * size)))
        first += part.count
    return found


def _read(records: _Records, feature: str, start: int, *, stop: int) -> Iterator[Item]:
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_generated_pb2

    messages: Any = tf_example_generated_pb2
    number, size = start, records.n_bytes / records.count
    for record in records.read(start, stop):
        where = f"record {number} of {records.where}"
        try:
            texts = messages.Example.FromString(record).features.feature[feature].bytes_list.value
            if len(texts) != 1:
                what = f"{len(texts)} texts in its feature" if texts else "no bytes feature"
                allowed = "--text_feature=NAME of one that holds one text"
                raise UserError(f"{where} has {what} {feature!r}", allowed=allowed)
            text = texts[0].decode()
        except DecodeError as error:
            raise UserError(f"{where} is not a tf.train.Example: {error}") from None
        except UnicodeDecodeError as error:
            problem = f"{error.reason} at byte {error.start}"
            raise UserError(f"{where} is not UTF-8 text: {problem}", allowed="UTF-8") from None
        number += 1
        if text:
            yield Item(Document(where, text), number, round(number * size))
    if number < stop:
        raise UserError(
            f"{records.where} has fewer than the {records.count} records of dataset_info.json",
            hint="fetch the file again",
        )


def _read_tfrecord(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """The records [start, stop), or fewer at the end of the file; of those before only the lengths are read."""
    number = offset = 0
    try:
        with open(path, "rb", buffering=1 << 18) as file:
            while number < stop and (header := file.read(_HEADER.size)):
                length, crc = _HEADER.unpack(header.ljust(_HEADER.size))
                if len(header) == _HEADER.size and _masked_crc_of_length(header[:8]) != crc:
                    raise ValueError("has a corrupt length")
                if number < start:
                    file.seek(length + 4, 1)
                else:
                    data = file.read(length + 4) if len(header) == _HEADER.size else b""
                    if len(data) < length + 4:
                        raise ValueError("is cut short")
                    if masked_crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
                        raise ValueError("does not match its checksum")
                    yield data[:-4]
                number, offset = number + 1, offset + _HEADER.size + length + 4
    except ValueError as error:
        raise UserError(
            f"record {number} of {path}, at byte {offset}, {error}", hint="not a TFRecord file, or fetch it again"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _read_array_record(where: str, files: Any, size: float, start: int, stop: int) -> Iterator[bytes]:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    at_once = round(_READ_AT_ONCE / min(max(size, 1), _READ_AT_ONCE))
    try:
        with ArrayRecordDataSource(files) as source:
            for first in range(start, stop, at_once):
                yield from source.__getitems__(range(first, min(first + at_once, stop)))
    except (IndexError, RuntimeError, ValueError) as error:
        raise UserError(f"{where} is corrupt: {str(error).splitlines()[0][:200]}", hint="fetch it again") from None
