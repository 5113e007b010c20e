"""Text of a prepared TensorFlow Datasets folder, TFRecord or ArrayRecord, read without TensorFlow.

A folder is DATA_DIR/NAME[/CONFIG]/VERSION with dataset_info.json, features.json and the shards of every split. The
metadata is read here: it may come from anywhere, and TFDS imports modules that it names and formats templates that it
holds. TFDS resolves slices.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from orthojax.data.documents import Document, Item, Piece, Source
from orthojax.data.records import REFETCH, read_array_record, read_tfrecord
from orthojax.data.sealed import is_count
from orthojax.errors import UserError, nearest
from orthojax.files import read_json

_TEMPLATE = (
    "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"  # of the names of shards, where a data set has none of its own
)
_LONGEST_NAME = 255
_AGAIN = "fetch the folder again"
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)$")


class _Metadata(NamedTuple):
    """What is read of dataset_info.json and features.json."""

    content: dict[str, Any]  # all of dataset_info.json
    name: str  # of the data set
    description: str  # NAME[/CONFIG]:VERSION
    file_format: str
    splits: dict[str, tuple[str, list[int]]]  # the template of its files, and the number of records in each
    features: dict[str, bool] | None  # whether each holds text; None without features.json


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
    info = _read_metadata(folder)
    name, begin, end = _resolve(split, {name: lengths for name, (_, lengths) in info.splits.items()})
    if info.features is not None and not info.features.get(feature):
        present = [name for name, holds_text in info.features.items() if holds_text]
        problem = f"feature {feature!r} of {folder} holds no text"
        if feature not in info.features:
            problem, present = f"{folder} has no feature {feature!r}", list(info.features)
        raise UserError(problem, allowed=_listed(sorted(present)), hint=nearest(feature, present))
    if info.file_format not in ("tfrecord", "array_record"):
        raise UserError(f"{folder} has the file format {info.file_format!r}", allowed="tfrecord | array_record")
    paths, lengths = _shards(folder, info, name), info.splits[name][1]
    sizes = [path.stat().st_size for path in paths]
    if info.file_format == "tfrecord":
        reads = [functools.partial(read_tfrecord, path, count) for path, count in zip(paths, lengths, strict=True)]
        records = list(map(_Records, map(str, paths), lengths, sizes, reads))
        for read, count in zip(reads, lengths, strict=True):
            if count == 0:
                next(read(0, 0), None)  # no piece reads it, but it has to be empty
    else:
        where = f"split {name!r} of {folder}"
        read = functools.partial(read_array_record, paths, lengths, sum(sizes) / sum(lengths))
        records = [_Records(where, sum(lengths), sum(sizes), read)]
    try:
        digest = hashlib.sha256(json.dumps([info.content, split, feature]).encode())
    except RecursionError:
        raise UserError(f"dataset_info.json of {folder} is nested too deeply", hint=_AGAIN) from None
    digest.update("".join(f"{path.name} {size}\n" for path, size in zip(paths, sizes, strict=True)).encode())
    pieces = functools.partial(_pieces, records, feature, begin, end)
    return Source(f"{info.description} {split}", digest.hexdigest(), len(paths), pieces)


def _read_metadata(folder: Path) -> _Metadata:
    """What the two JSON files say, which is believed in nothing.

    Raises:
      UserError: Where a field that is needed is missing or of the wrong type; others are not looked at.
    """

    def refused(problem: str) -> UserError:
        return UserError(f"{folder} does not describe a data set of TFDS: {problem}", hint=_AGAIN)

    def text(values: dict[str, Any], name: str, default: str | None = None) -> str:
        value = values.get(name, default)
        if type(value) is not str or len(value) > _LONGEST_NAME or not value.isprintable():
            raise refused(f"{name!r} is not a name")
        return value

    def read(name: str) -> dict[str, Any]:
        try:
            return read_json(folder / name, "metadata")
        except UserError as error:
            raise refused(str(error).partition("\n")[0]) from None

    content = read("dataset_info.json")
    name, config, version = text(content, "name"), text(content, "configName", ""), text(content, "version")
    splits: dict[str, tuple[str, list[int]]] = {}
    listed = content.get("splits")
    if type(listed) is not list or any(type(values) is not dict for values in listed):
        raise refused("'splits' is not a list of objects")
    for values in listed:
        lengths: Any = values.get("shardLengths", [])
        if type(lengths) is list:  # in the JSON of protocol buffers 64-bit integers are strings
            lengths = [int(n) if type(n) is str and re.fullmatch("[0-9]{1,18}", n) else n for n in lengths]
        if type(lengths) is not list or not all(map(is_count, lengths)):
            raise refused("'shardLengths' is not a list of numbers")
        splits[text(values, "name")] = (text(values, "filepathTemplate", "") or _TEMPLATE, lengths)
    if not name or "" in splits or len(splits) < len(listed):
        raise refused("the data set or a split has no name, or two splits have the same")
    features = None
    if os.path.lexists(folder / "features.json"):  # not written by early versions of TFDS
        match read("features.json"):
            case {"featuresDict": {"features": dict(found)}} if all(type(kinds) is dict for kinds in found.values()):
                features = {key: not kinds.keys().isdisjoint(("text", "tensor")) for key, kinds in found.items()}
            case _:
                raise refused("features.json holds no features")
    description = f"{name}{config and '/' + config}:{version}"
    return _Metadata(content, name, description, text(content, "fileFormat", "tfrecord"), splits, features)


def _shards(folder: Path, info: _Metadata, split: str) -> list[Path]:
    """The files of a split, in the folder.

    Raises:
      UserError: Where one is missing or outside the folder, or the template has other fields than TFDS knows.
    """
    template, lengths = info.splits[split]
    count, home, paths = len(lengths), os.path.realpath(folder), []
    digits = max(5, len(str(count)))
    for index in range(count):
        number, of = f"{index:0{digits}d}", f"{count:0{digits}d}"
        fields = {"DATASET": info.name, "SPLIT": split, "FILEFORMAT": info.file_format}
        fields |= {"SHARD_INDEX": number, "NUM_SHARDS": of, "SHARD_X_OF_Y": f"{number}-of-{of}"}
        # Not str.format: it follows attributes, and pads to any width.
        name = re.sub(r"\{(\w+)\}", lambda found, fields=fields: fields.get(found[1], found[0]), template)
        path = folder / name
        inside = len(name) <= _LONGEST_NAME and Path(os.path.realpath(path)).is_relative_to(home)
        if not inside or set("{}") & set(name) or path in paths[:1]:
            raise UserError(
                f"the names of the files of {split!r} in {folder} are {template!r}",
                allowed="different names of files in this folder, with {" + "}, {".join(fields) + "}",
                hint=_AGAIN,
            )
        paths.append(path)
    missing = [path.name for path in paths if not os.path.isfile(path)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{folder} lacks {missing[0]}{more} of the {len(paths)} files of {split!r}",
            hint="fetch the rest; a slice of the split needs all of its files too",
        )
    return paths


def _resolve(split: str, splits: dict[str, list[int]]) -> tuple[str, int, int]:
    """A split in the notation of TFDS as (name, first example, the one after the last)."""
    import tensorflow_datasets as tfds

    name = split.partition("[")[0]
    if not re.fullmatch(r"[\w-]+(\[[-\d%]*:[-\d%]*\])?", split):
        raise UserError(f"split {split!r} cannot be read", allowed="NAME or NAME[a:b], each bound a number or N%")
    size = sum(splits.get(name, ()))
    if not size:
        present = [name for name, lengths in splits.items() if sum(lengths)]
        raise UserError(f"there is no split {name!r}", allowed=_listed(present), hint=nearest(name, present))
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


def _listed(names: list[str]) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:20]]
    return " | ".join(shown) + (f" | {len(names) - 20} more" if len(names) > 20 else "")


def _present(data_dir: Path) -> str:
    found = {
        path.parents[1].relative_to(data_dir).as_posix()
        for depth in ("*/*", "*/*/*")
        for path in data_dir.glob(f"{depth}/dataset_info.json")
    }
    if not found:
        return "a folder with NAME/CONFIG/VERSION/dataset_info.json, and none is there"
    return _listed(sorted(found))


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
            hint=REFETCH,
        )
