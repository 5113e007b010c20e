"""Reading text and tokens: token files against the tokenizer library alone, and batches of rows."""

import functools
import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from orthojax.benchmarks.suite import Column, Row, Suite, reason, spread_metrics
from orthojax.data import (
    Part,
    TokenBatches,
    TokenFile,
    Tokens,
    embedded_corpus,
    make_tokenizer,
    masked_crc32c,
    open_token_files,
    prepare,
    text_parts,
    tfds_parts,
)
from orthojax.timing import interleaved_seconds, median_ratio, spread

_DOCUMENT_CHARACTERS = 2_000  # about those of a web page of C4
_COPIES = 3  # of the corpus, so that what a token file costs but once weighs as little as with more text
_TINY_DOCUMENTS = 50
_SHARDS = 4
_ROWS, _SEQUENCE_LENGTH, _BATCHES = 64, 512, 100


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    texts = [text for text in _texts() if text]
    texts = texts[:_TINY_DOCUMENTS] if tiny else texts
    tokenizer = make_tokenizer("bpe:300" if tiny else "bpe:8192", texts[: len(texts) // _COPIES])
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        jsonl, tokenizer_path = home / "text.jsonl", home / "tokenizer.json"
        jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        tokenizer.save(tokenizer_path)
        sources: dict[str, Callable[[Path], list[Part]]] = {
            "jsonl": lambda folder: text_parts([str(jsonl)], ["all"], folder),
            "jsonl, divided": lambda folder: text_parts([str(jsonl)], ["train", "validation"], folder),
        }
        for name, write in {"TFRecord": _write_tfrecord, "ArrayRecord": _write_array_record}.items():
            read = functools.partial(lambda name, _: tfds_parts(home / name, "", ["train"], "text"), name)
            try:
                _write_tfds(home / name, texts, name, write)
                next(read(home)[0].source.documents())
            except ImportError as error:  # needs tensorflow-datasets, which a machine that only measures may lack
                yield Row(name, "token file", {}, reason(error))
            else:
                sources[name] = read
        what = f"{len(texts)} documents, {tokenizer.spec}"
        yield from _preparation(texts, what, sources, tokenizer_path, repeats)
        for index in range(_SHARDS):
            prepare(home / "shards", sources["jsonl"](home / "shards"), str(tokenizer_path), shard=(index, _SHARDS))
        (file,) = prepare(home / "file", sources["jsonl"](home / "file"), str(tokenizer_path))
        shape = (4, 8) if tiny else (_ROWS, _SEQUENCE_LENGTH)
        yield _batches(file.tokens, "one file", *shape, repeats)
        yield _batches(open_token_files(home / "shards" / "all.bin").tokens, f"{_SHARDS} shards", *shape, repeats)


def _texts() -> Iterator[str]:
    """The corpus some times over, each time cut elsewhere, so that almost all documents are different ones."""
    whole = [document.text for document in embedded_corpus().documents()]
    size = _DOCUMENT_CHARACTERS
    for copy in range(_COPIES):
        for text in whole:
            cuts = range(size * copy // _COPIES, len(text), size)
            yield from (text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))


def _preparation(
    texts: Sequence[str],
    what: str,
    sources: Mapping[str, Callable[[Path], list[Part]]],
    tokenizer_path: Path,
    repeats: int,
) -> Iterator[Row]:
    """From files of text to a token file with its checksums, against the tokenizer library on texts in memory."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(tokenizer_path))  # as it comes, with its own settings
    found: dict[str, list[TokenFile]] = {}
    folders = (tokenizer_path.parent / str(i) for i in range(10**9))  # new ones: what exists is not prepared again

    def library() -> int:
        return len(backend.encode_batch_fast(texts, add_special_tokens=False))

    def token_files(name: str) -> None:
        folder = next(folders)
        found[name] = prepare(folder, sources[name](folder), str(tokenizer_path))

    files = {name: functools.partial(token_files, name) for name in sources}
    seconds = interleaved_seconds({"library": library, "library again": library, **files}, repeats)
    for name in sources:
        n_tokens, n_bytes = (sum(getattr(file.info, of) for file in found[name]) for of in ("n_tokens", "n_bytes"))
        metrics = {
            **spread_metrics("speed_ratio", median_ratio(seconds["library"], seconds[name])),
            **spread_metrics("control_ratio", median_ratio(seconds["library again"], seconds["library"])),
            **spread_metrics("seconds", spread(seconds[name])),
            "tokens_per_second": n_tokens / spread(seconds[name]).median,
            "repetitions": repeats,
        }
        yield Row(f"{n_bytes / 1e6:.1f} MB of {name}, {what}", "token file", metrics)


def _write_tfds(folder: Path, texts: Sequence[str], file_format: str, write: Callable[[Path, Iterator[bytes]], None]):
    """A TensorFlow Datasets folder with one shard."""

    def field(number: int, content: bytes) -> bytes:  # of a protocol buffer message, length-delimited
        length, digits = len(content), []
        while length >= 128:
            digits.append(length & 127 | 128)
            length >>= 7
        return bytes([number << 3 | 2, *digits, length]) + content

    folder.mkdir()
    values = (field(1, field(1, text.encode())) for text in texts)  # Feature.bytes_list.value
    suffix = {"TFRecord": "tfrecord", "ArrayRecord": "array_record"}[file_format]
    path = folder / f"text-train.{suffix}-00000-of-00001"
    write(path, (field(1, field(1, field(1, b"text") + field(2, value))) for value in values))
    split = {"name": "train", "shardLengths": [str(len(texts))], "numBytes": str(path.stat().st_size)}
    info = {"name": "text", "version": "1.0.0", "fileFormat": suffix, "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    text = {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}}
    kind = "tensorflow_datasets.core.features.features_dict.FeaturesDict"
    features = {"pythonClassName": kind, "featuresDict": {"features": {"text": text}}}
    (folder / "features.json").write_text(json.dumps(features))


def _write_tfrecord(path: Path, examples: Iterator[bytes]) -> None:
    with path.open("wb") as file:
        for example in examples:
            for part in (struct.pack("<Q", len(example)), example):
                file.write(part + struct.pack("<I", masked_crc32c(part)))


def _write_array_record(path: Path, examples: Iterator[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")  # as TensorFlow Datasets writes
    for example in examples:
        writer.write(example)
    writer.close()


def _batches(tokens: Tokens, of: str, rows: int, sequence_length: int, repeats: int) -> Row:
    """Batches of shuffled rows as a training run takes them, one after the other."""
    batches = TokenBatches(tokens, sequence_length, rows, seed=0)
    position = iter(range(10**9))  # every batch is a new one

    def read() -> int:
        return sum(batches(next(position)).size for _ in range(_BATCHES))

    case = f"{_BATCHES} batches of {rows} x {sequence_length} of {of}"
    try:
        seconds = spread(interleaved_seconds({"": read}, repeats)[""])
    except ImportError as error:  # grain shuffles, and a machine that only measures need not have it
        return Row(case, "batches", {}, reason(error))
    metrics = {
        **spread_metrics("seconds", seconds),
        "tokens_per_second": _BATCHES * rows * sequence_length / seconds.median,
        "repetitions": repeats,
    }
    return Row(case, "batches", metrics)


DATA = Suite(
    name="data",
    title="Token files against the speed of the tokenizer library alone (quartiles), and batches of rows; one process",
    measure=_measure,
    columns=(
        Column("speed ratio", "speed_ratio"),
        Column("library to itself", "control_ratio"),
        Column("time", "seconds", "seconds"),
        Column("tokens/s", "tokens_per_second", "{:.3g}"),
    ),
    repeats=5,
)
