"""Text of a prepared TensorFlow Datasets folder, read without TensorFlow.

A folder is DATA_DIR/NAME[/CONFIG]/VERSION with dataset_info.json, features.json and the shards of every split. TFDS
reads ArrayRecord without TensorFlow, TFRecord only with it: those files are read by `orthojax.data.tfrecord`.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orthojax.data.sources import Piece, Source
from orthojax.data.text_files import Document, Item
from orthojax.data.tfrecord import bytes_feature, read_records
from orthojax.errors import UserError, nearest

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)$")
_SPLIT = re.compile(r"([\w-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?$")
_READ_AT_ONCE = 1 << 21  # bytes of an ArrayRecord, by the mean size of its records


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of a split.

    Attributes:
      path: The file.
      records: Its number of examples.
    """

    path: Path
    records: int


def find_folder(data_dir: Path, dataset: str) -> Path:
    """The folder of one version of a data set.

    Args:
      data_dir: Holds the data sets; or the folder of a version itself, where `dataset` is ''.
      dataset: NAME, NAME/CONFIG or either with :VERSION; the highest version that is there without one.

    Raises:
      UserError: Where it is not there; the message names what is.
    """
    if not data_dir.is_dir():
        raise UserError(f"there is no folder {data_dir}", allowed="--tfds_dir=DATA_DIR of TensorFlow Datasets")
    if not dataset:
        if (data_dir / "dataset_info.json").is_file():
            return data_dir
        raise UserError(f"{data_dir} has no dataset_info.json", allowed=_present(data_dir, ""))
    name, _, version = dataset.partition(":")
    versions = _versions(data_dir / name)
    if not versions:
        raise UserError(f"there is no data set {name!r} in {data_dir}", allowed=_present(data_dir, name))
    if version and version not in versions:
        raise UserError(f"there is no version {version!r} of {name} in {data_dir}", allowed=" | ".join(versions))
    return data_dir / name / (version or versions[-1])


def open_tfds(folder: Path, split: str, feature: str = "text") -> Source:
    """One split of a data set, or a slice of it, as a source.

    Its sha256 is that of the metadata, the slice and the names and sizes of the shards; their contents are not read.

    Args:
      folder: From `find_folder`.
      split: A split, or a slice in the notation of TFDS: `train[:10%]`, `train[1000:]`, `train[-20%:]`.
      feature: The text or bytes feature that holds the text.

    Raises:
      UserError: Where the metadata, the split, a shard or the feature is missing.
    """
    info = _read_info(folder)
    name, begin, end = resolve_split(split, _split_sizes(info, folder))
    present = _read_features(folder)
    if present is not None and feature not in present:
        raise UserError(
            f"{folder} has no feature {feature!r}", allowed=" | ".join(present), hint=nearest(feature, present)
        )
    shards = _shards(folder, info, name)
    digest = hashlib.sha256(json.dumps([info, split, feature]).encode())
    digest.update("".join(f"{shard.path.name} {shard.path.stat().st_size}\n" for shard in shards).encode())
    if info.get("fileFormat", "tfrecord") == "tfrecord":
        pieces = functools.partial(_tfrecord_pieces, shards, feature, begin, end)
    else:
        size = sum(shard.path.stat().st_size for shard in shards) / max(1, sum(shard.records for shard in shards))
        pieces = functools.partial(_array_record_pieces, folder, name, feature, size, begin, end)
    config = info.get("configName", "")
    description = f"{info['name']}{config and '/' + config}:{info['version']} {split}"
    return Source(description, digest.hexdigest(), len(shards), pieces)


def resolve_split(split: str, sizes: dict[str, int]) -> tuple[str, int, int]:
    """A split in the notation of TFDS as (name, first example, the one after the last).

    As TFDS does, percentages are rounded to the closest example, and where one bound is one, both are.

    >>> resolve_split("train[10%:]", {"train": 44}), resolve_split("train[-10:-5]", {"train": 44})
    (('train', 4, 44), ('train', 34, 39))

    Raises:
      UserError: For an unknown split, another notation, or an empty slice.
    """
    match = _SPLIT.match(split)
    if not match:
        raise UserError(f"split {split!r} cannot be read", allowed="NAME or NAME[a:b], each bound a number or N%")
    name = match[1]
    if name not in sizes:
        raise UserError(f"there is no split {name!r}", allowed=" | ".join(sizes), hint=nearest(name, sizes))
    size = sizes[name]
    bounds, percent = [], "%" in split
    for text, default in ((match[2], 0), (match[3], size)):
        bound = default if text is None else int(text.rstrip("%"))
        if text and percent:
            bound = round(bound * size / 100)
        bounds.append(min(max(bound + size if bound < 0 else bound, 0), size))
    if bounds[0] >= bounds[1]:
        raise UserError(f"split {split!r} is empty", allowed=f"a part of the {size} examples of {name}")
    return name, *bounds


def _versions(folder: Path) -> list[str]:
    found = [path for path in folder.glob("*/dataset_info.json") if _VERSION.match(path.parent.name)]
    return sorted((path.parent.name for path in found), key=lambda name: [int(part) for part in name.split(".")])


def _present(data_dir: Path, name: str) -> str:
    found = {
        path.parents[1].relative_to(data_dir).as_posix()
        for depth in ("*/*", "*/*/*")
        for path in data_dir.glob(f"{depth}/dataset_info.json")
    }
    if not found:
        return "a folder with NAME/CONFIG/VERSION/dataset_info.json, and none is there"
    return " | ".join(sorted(found)[:20]) + (f" | {len(found) - 20} more" if len(found) > 20 else "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is not JSON", hint="fetch the folder again") from None


def _read_info(folder: Path) -> dict[str, Any]:
    """dataset_info.json, with what is read of it where TFDS writes it."""
    path = folder / "dataset_info.json"
    info = _read_json(path)
    try:
        texts = [info["name"], info["version"], *(split["name"] for split in info.get("splits", []))]
        for split in info.get("splits", []):
            texts.append(split.get("filepathTemplate", ""))
            texts += map(str, map(int, split.get("shardLengths", [])))
        if not all(isinstance(text, str) for text in texts):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path} does not describe a data set of TFDS", hint="fetch the folder again") from None
    return info


def _read_features(folder: Path) -> dict[str, Any] | None:
    """The features by name; None where the folder does not tell."""
    path = folder / "features.json"
    if not path.is_file():
        return None
    try:
        return dict(_read_json(path).get("featuresDict", {}).get("features", {}))
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"{path} does not describe features of TFDS", hint="fetch the folder again") from None


def _split_sizes(info: dict[str, Any], folder: Path) -> dict[str, int]:
    sizes = {split["name"]: sum(map(int, split.get("shardLengths", []))) for split in info.get("splits", [])}
    if not any(sizes.values()):
        raise UserError(f"dataset_info.json of {folder} lists no splits with examples")
    return sizes


def _shards(folder: Path, info: dict[str, Any], split: str) -> list[Shard]:
    file_format = info.get("fileFormat", "tfrecord")
    if file_format not in ("tfrecord", "array_record"):
        raise UserError(f"{folder} has the file format {file_format!r}", allowed="tfrecord | array_record")
    entry = next(entry for entry in info["splits"] if entry["name"] == split)
    template = entry.get("filepathTemplate") or "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    lengths = list(map(int, entry["shardLengths"]))
    shards = []
    for index, length in enumerate(lengths):
        place = f"{index:05d}-of-{len(lengths):05d}"
        values = {"DATASET": info["name"], "SPLIT": split, "FILEFORMAT": file_format, "SHARD_X_OF_Y": place}
        values |= {"SHARD_INDEX": f"{index:05d}", "NUM_SHARDS": f"{len(lengths):05d}"}
        try:
            shards.append(Shard(folder / template.format(**values), length))
        except (AttributeError, LookupError, ValueError):
            raise UserError(
                f"dataset_info.json of {folder} names its files {template!r}", allowed="{" + "}, {".join(values) + "}"
            ) from None
    missing = [shard.path.name for shard in shards if not shard.path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{folder} lacks {missing[0]}{more} of the {len(shards)} files of {split!r}",
            hint="fetch the rest; a slice of the split needs all of its files too",
        )
    return shards


def _document(record: bytes, where: str, feature: str) -> Document:
    try:
        texts = bytes_feature(record, feature)
    except ValueError as error:
        raise UserError(f"{where} is no tf.train.Example: {error}") from None
    if len(texts) != 1:
        what = f"{len(texts)} texts in its feature" if texts else "no bytes feature"
        raise UserError(f"{where} has {what} {feature!r}", allowed="--text_feature=NAME of one that holds one text")
    try:
        return Document(where, texts[0].decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}", allowed="UTF-8") from None


def _part(begin: int, end: int, index: int, count: int) -> tuple[int, int]:
    return begin + (end - begin) * index // count, begin + (end - begin) * (index + 1) // count


def _tfrecord_pieces(shards: list[Shard], feature: str, begin: int, end: int, index: int, count: int) -> list[Piece]:
    begin, end = _part(begin, end, index, count)
    found, first = [], 0
    for shard in shards:
        start, stop = max(begin - first, 0), min(end - first, shard.records)
        if start < stop:
            size = shard.path.stat().st_size / shard.records
            read = functools.partial(_read_tfrecord, shard, feature, size, stop=stop)
            found.append(Piece(read, start, round((stop - start) * size), round(start * size)))
        first += shard.records
    return found


def _read_tfrecord(shard: Shard, feature: str, size: float, start: int, *, stop: int) -> Iterator[Item]:
    number = start
    for number, record in enumerate(itertools.islice(read_records(shard.path, start), stop - start), start + 1):
        document = _document(record, f"record {number - 1} of {shard.path}", feature)
        if document.text:
            yield Item(document, number, round(number * size))
    if number < stop:
        raise UserError(
            f"{shard.path} has fewer than the {shard.records} records of dataset_info.json", hint="fetch the file again"
        )


def _array_record_pieces(
    folder: Path, split: str, feature: str, size: float, begin: int, end: int, index: int, count: int
) -> list[Piece]:
    begin, end = _part(begin, end, index, count)
    if begin == end:
        return []
    read = functools.partial(_read_array_record, folder, split, feature, size, stop=end)
    return [Piece(read, begin, round((end - begin) * size), round(begin * size))]


def _read_array_record(folder: Path, split: str, feature: str, size: float, start: int, *, stop: int) -> Iterator[Item]:
    import tensorflow_datasets as tfds  # slow to import

    builder: Any = tfds.builder_from_directory(str(folder))
    source = builder.as_data_source(split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    at_once = round(_READ_AT_ONCE / min(max(size, 1), _READ_AT_ONCE))
    for first in range(start, stop, at_once):
        numbers = range(first, min(first + at_once, stop))
        for number, record in zip(numbers, source.__getitems__(list(numbers)), strict=True):
            document = _document(record, f"example {number} of {split!r} in {folder}", feature)
            if document.text:
                yield Item(document, number + 1, round((number + 1) * size))
