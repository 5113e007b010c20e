"""Documents and their sources: text files, tables, data sets of the hub and of TFDS, and Python's standard library.

Text and .jsonl files, plain or with .gz, are read here. Tables (.parquet, .arrow), other compressed files and addresses
such as hf://datasets/NAME/data/train-*.parquet are read by Hugging Face `datasets`, which is an extra.
"""

import contextlib
import dataclasses
import functools
import glob
import gzip
import hashlib
import itertools
import json
import logging
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

from orthojax.errors import UserError, nearest, needing
from orthojax.files import nearest_path, require_file

# Left out of the standard library: what is not part of it or not text; what Debian and slim images lack, so that the
# corpus does not depend on the packaging; generated tables and documentation rather than code.
DROPPED_FOLDERS = frozenset(
    ("site-packages dist-packages __pycache__ test tests idlelib idle_test lib2to3 distutils tkinter turtledemo "
     "ensurepip encodings pydoc_data").split()
)  # fmt: skip
# Written by whoever built or packaged this Python: they hold its paths and settings.
DROPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
# The names in Hugging Face `datasets` of the formats that it reads.
_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".txt": "text"}
_TABLES = (".parquet", ".arrow")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)$")
_READ_AT_ONCE = 64  # records of an ArrayRecord


class Document(NamedTuple):
    """One text; token files put an end-of-text token after each."""

    name: str
    text: str


class Piece(NamedTuple):
    """One file of a source."""

    read: Callable[[], Iterator[tuple[Document, int]]]  # its documents, and how many of its bytes are read after each
    n_bytes: int  # on disk
    line: Callable[[], str]  # that identifies it; of text files, what `sha256sum` prints


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in a fixed order."""

    description: str  # for reports
    files: tuple[Piece, ...]
    identity: bytes = b""  # what the lines of the files do not say

    @functools.cached_property
    def sha256(self) -> str:
        """The identity; of text files, the sha256 of the listing that `sha256sum` prints for them, which reads all."""
        lines = (piece.line().encode("utf-8", "surrogateescape") for piece in self.files)
        return hashlib.sha256(self.identity + b"".join(lines)).hexdigest()

    def group(self, i: int, n: int) -> "Source":
        """Returns the i-th of n groups of neighbouring files."""
        first, last = (len(self.files) * k // n for k in (i, i + 1))
        return dataclasses.replace(self, files=self.files[first:last])

    @property
    def n_bytes(self) -> int:
        """The size on disk."""
        return sum(piece.n_bytes for piece in self.files)

    def documents(self) -> Iterator[Document]:
        """Yields all documents."""
        for piece in self.files:
            for document, _ in piece.read():
                yield document


def embedded_corpus(root: str | os.PathLike[str] | None = None) -> Source:
    """Finds the sources of the running Python's standard library, about 8 MB in 390 files.

    They are all .py files that are valid UTF-8, sorted by path, except `DROPPED_FOLDERS` and folders named config-* at
    any depth, and files whose names start as in `DROPPED_FILES`. The text differs between versions of Python and,
    slightly, between their packagings; the sha256 identifies it. It is code, so losses on it are comparable only with
    each other. `root` may name another folder. Raises UserError if there are no sources (some minimal images keep only
    compiled files).
    """
    folder = Path(sysconfig.get_path("stdlib") if root is None else root)
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if n not in DROPPED_FOLDERS and not n.startswith("config-")]
        paths += [Path(parent, name) for name in names if name.endswith(".py") and not name.startswith(DROPPED_FILES)]
    named = sorted((path.relative_to(folder).as_posix(), path) for path in paths)
    files = []
    for name, path in named:
        with contextlib.suppress(UnicodeDecodeError, OSError):  # OSError: a dangling link
            path.read_bytes().decode()
            files.append((name, path))
    if not files:
        allowed = "a Python with its .py files, or your own text: data.kind=text data.paths=FILE[,FILE...]"
        raise UserError(f"this Python keeps no standard library sources in {folder}", allowed=allowed)
    return _of_files("the standard library of the running Python", files)


def text_corpus(paths: Sequence[str | os.PathLike[str]]) -> Source:
    """Opens files of text as a source.

    A .jsonl file has one document per line, the string under "text"; tables have one in each row of their column
    `text`. Any other file is one document. Empty documents are left out.

    Args:
      paths: Files, folders and patterns, as `find_files` takes them; or addresses of files, folders and patterns on any
        file system that fsspec knows, such as hf://.

    Raises:
      UserError: If there is no path, one is missing or unreadable, or addresses and paths are mixed. Errors in the
        contents are raised when they are read.
    """
    remote = ["://" in str(path) for path in paths]
    if any(remote):
        if not all(remote):
            raise UserError("addresses and files on disk are mixed", allowed="one kind of them")
        return _of_addresses(list(map(str, paths)))
    files = find_files(paths)
    return _of_files(_listed([name for name, _ in files], [str(path) for _, path in files]), files)


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[str, Path]]:
    """Lists names and paths of text files, with folders and patterns expanded.

    Of folders it takes every file at any depth that is not hidden, sorted, or only the tables (.parquet, .arrow) if
    there are any; patterns are such as `data/*.jsonl.gz` or `data/**/*.txt`, sorted. A file in a folder is named by its
    path there, others by their last part.
    """
    all_files: list[tuple[str, Path]] = []
    for path in map(Path, paths):
        if os.path.isdir(path):
            named = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
            files = [(name, file) for name, file in named if not any(part[0] == "." for part in name.split("/"))]
            # The other files of a data set's folder describe it.
            files = [(name, file) for name, file in files if file.suffix in _TABLES] or files
        elif glob.has_magic(str(path)) and not os.path.lexists(path):
            matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
            files = [(file.name, file) for file in matches if file.is_file()]
        else:
            if not os.path.lexists(path):
                allowed = "files, folders or patterns of text, .jsonl and tables"
                raise UserError(f"no such text file: {path}", allowed=allowed, hint=nearest_path(path))
            require_file(path, "text file")
            files = [(path.name, path)]
        if not files:
            raise UserError(f"there are no files in {path}", allowed="paths of text files, folders or patterns")
        all_files += files
    if not all_files:
        raise UserError("no text files", allowed="at least one path")
    return all_files


def _of_files(description: str, files: Sequence[tuple[str, Path]]) -> Source:
    pieces = []
    for name, path in files:
        own = path.suffix not in (*_TABLES, *_COMPRESSED) or (path.suffix == ".gz" and _format(path) != ".json")
        read = functools.partial(_read, name, path) if own else functools.partial(_stream, name, str(path))
        pieces.append(Piece(read, path.stat().st_size, functools.partial(_checksum_line, name, path)))
    return Source(description, tuple(pieces))


def _checksum_line(name: str, path: Path) -> str:
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"


def _of_addresses(addresses: Sequence[str]) -> Source:
    """Opens files that are not on disk; the sha256 covers their names and signs of a change."""
    _hugging_face(addresses[0])
    import fsspec  # type: ignore[import-not-found]  # which `datasets` brings

    pieces, names = [], []
    for address in addresses:
        try:
            system, path = fsspec.core.url_to_fs(address)
            stored = sorted(system.glob(path) if glob.has_magic(path) else system.find(path))
            for file in (file for file in stored if _format(PurePosixPath(file)) in _FORMATS):
                name, size = system.unstrip_protocol(file), int(system.info(file)["size"])
                line = functools.partial(str, f"{name} {size} {system.ukey(file)}\n")
                pieces.append(Piece(functools.partial(_stream, PurePosixPath(name).name, name), size, line))
                names.append(name)
        except Exception as error:  # every file system has errors of its own
            raise _unreadable(address, error) from None
    if not pieces:
        allowed = f"files that end in {', '.join(_FORMATS)}"
        raise UserError(f"{_listed(addresses, addresses)} matches no files", allowed=allowed)
    return Source(_listed(names, names), tuple(pieces))


def _read(name: str, path: Path) -> Iterator[tuple[Document, int]]:
    try:
        with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            if _format(path) == ".jsonl":
                for number, line in enumerate(file, 1):
                    if line.strip() and (text := _text_of_json(line, f"{path}, line {number}")):
                        yield Document(f"{name}:{number}", text), raw.tell()
            elif text := file.read().decode().removeprefix("\ufeff"):  # some editors write a byte order mark
                yield Document(name, text), raw.tell()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", allowed="UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a complete gzip file: {error}") from None


def _stream(name: str, path: str) -> Iterator[tuple[Document, int]]:
    """Yields the documents of a file or address, by Hugging Face `datasets`; their bytes count when all are read."""
    datasets, kind = _hugging_face(path), _FORMATS.get(_format(PurePosixPath(path)), "text")
    options: dict[str, Any] = {"text": {"sample_by": "document"}, "parquet": {"columns": ["text"]}}.get(kind, {})
    allowed = "a column of strings called 'text'"
    try:
        rows = datasets.load_dataset(kind, data_files=[path], split="train", streaming=True, **options)
        for number, row in enumerate(rows, 1):
            text = row.get("text", 0)
            if not isinstance(text, str | None):
                raise UserError(f"{path}, row {number}: no text, but the columns {', '.join(row)}", allowed=allowed)
            if text:
                yield Document(name if kind == "text" else f"{name}:{number}", text), 0
    except UserError:
        raise
    except Exception as error:  # every format and file system has errors of its own
        raise _unreadable(path, error) from None


def _hugging_face(what: str) -> Any:
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # else it reports every file on disk to the hub
    with needing(what, "datasets"):
        import datasets  # type: ignore[import-not-found]
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # errors are raised; it would print them as well
    return datasets


def _format(path: PurePath) -> str:
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix


def _listed(names: Sequence[str], paths: Sequence[str]) -> str:
    """Returns the names of up to four files; else their number, kind and folders: '1,200 .py files in 3 folders'."""
    if len(names) <= 4:
        return ", ".join(names)
    kinds = {PurePosixPath(name).suffix for name in names}
    parts = [PurePosixPath(path).parts for path in paths]
    folders_of = zip(*(folder[:-1] for folder in parts), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, folders_of))
    folders = {folder[shared] for folder in parts if len(folder) > shared + 1}
    kind = f"{kinds.pop()} files".strip() if len(kinds) == 1 else "files"
    return f"{len(names):,} {kind}" + (f" in {len(folders)} folders" if len(folders) > 1 else "")


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(f"cannot read {path}: {(str(error) or type(error).__name__).splitlines()[0][:200]}")


def _text_of_json(line: bytes, where: str) -> str:
    try:
        text = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())["text"]
        text.encode()  # JSON may escape half of a surrogate pair, which is not text
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        problem = f"{where} has no string under 'text': {error!r:.150}"
        raise UserError(problem, allowed='an object such as {"text": "..."} on every line') from None
    return text


# Prepared folders of TensorFlow Datasets, DATA_DIR/NAME[/CONFIG]/VERSION, read without TensorFlow: TFDS parses the
# metadata and resolves slices, Grain reads TFRecord, and the package `array_record` reads ArrayRecord. The TFDS builder
# of the folder is not made, because it imports modules that the metadata name.


def find_tfds(data_dir: Path, dataset: str) -> Path:
    """Finds the folder of a data set NAME, NAME/CONFIG or either with :VERSION, by default the highest version."""
    sets: dict[str, list[str]] = {}
    for depth in ("*/*", "*/*/*"):
        for path in data_dir.glob(f"{depth}/dataset_info.json"):
            if _VERSION.match(path.parent.name):
                sets.setdefault(path.parents[1].relative_to(data_dir).as_posix(), []).append(path.parent.name)
    name, _, version = dataset.partition(":")
    if name not in sets:
        allowed = " | ".join(sorted(sets)) or "a folder with NAME/CONFIG/VERSION/dataset_info.json, and none is there"
        raise UserError(f"there is no data set {name!r} in {data_dir}", allowed=allowed)
    versions = sorted(sets[name], key=lambda each: [int(part) for part in each.split(".")])
    if version and version not in versions:
        raise UserError(f"there is no version {version!r} of {name} in {data_dir}", allowed=" | ".join(versions))
    return data_dir / name / (version or versions[-1])


def open_tfds(folder: Path, split: str, feature: str = "text") -> Source:
    """Opens one split of a data set, or a slice of it, as a source.

    `folder` comes from `find_tfds`, `split` is in the notation of TFDS, such as `train[:10%]`, `train[1000:]` or
    `train[-20%:]`, and `feature` holds text or bytes. The sha256 covers the metadata, the slice and the names and sizes
    of the files, not their contents.
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
    identity = repr((info.SerializeToString(deterministic=True), split, feature)).encode()
    pieces = []
    for file in instructions:
        path = Path(file.filename)
        require_file(path, f"file of {split!r}")
        line = functools.partial(str, f"{path.name} {path.stat().st_size}\n")
        n_bytes = path.stat().st_size * file.take // file.examples_in_shard
        read = functools.partial(_read_examples, readers[file_format], file, n_bytes, feature)
        pieces.append(Piece(read, n_bytes, line))
    described = f"{info.name}{info.config_name and '/' + info.config_name}:{info.version} {split}"
    return Source(described, tuple(pieces), identity)


def _read_examples(
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
