"""Reading text and tokens: token files against the tokenizer library alone, and batches of rows."""

import functools
import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orthojax.benchmarks.suite import Column, Row, Suite, measured, reason, seconds_text, spread_metrics, spread_text
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
from orthojax.train import interleaved_seconds, median_ratio, spread

_DOCUMENT_CHARACTERS = 2_000  # about those of a web page of C4
_COPIES = 3  # of the corpus, so that what a token file costs but once weighs as little as with more text
_TINY_DOCUMENTS = 50
_SHARDS = 4
_ROWS, _SEQUENCE_LENGTH, _BATCHES = 64, 512, 100


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    texts = [text for text in _texts() if text]
    texts = texts[:_TINY_DOCUMENTS] if tiny else texts
    tokenizer = make_tokenizer("bpe:300" if tiny else "bpe:8192", texts[: len(texts) // _COPIES])
    with tempfile.TemporaryDirectory() as home:
        data = Path(home) / "data"
        data.mkdir()
        jsonl = data / "text.jsonl"
        jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        sources: dict[str, Callable[[Path], list[Part]]] = {
            "jsonl": lambda folder: text_parts([str(jsonl)], ["all"], folder),
            "jsonl, divided": lambda folder: text_parts([str(jsonl)], ["train", "validation"], folder),
        }
        for name, write in {"TFRecord": _write_tfrecord, "ArrayRecord": _write_array_record}.items():
            read = functools.partial(lambda version, _: tfds_parts(version, "", ["train"], "text"), data / name)
            try:
                _write_tfds(data / name, texts, name, write)
                next(read(data)[0].source.documents())
            except ImportError as error:  # needs tensorflow-datasets, which a machine that only measures may lack
                yield Row(name, "token file", {}, reason(error))
                continue
            sources[name] = read
        rows, file = _preparation(texts, tokenizer, sources, Path(home), repeats)
        yield from rows
        folder = Path(home) / "shards"
        for index in range(_SHARDS):
            parts = sources["jsonl"](folder)
            prepare(folder, parts, str(Path(home) / "tokenizer.json"), shard=(index, _SHARDS))
        shards = open_token_files(folder / "all.bin")
        shape = (4, 8) if tiny else (_ROWS, _SEQUENCE_LENGTH)
        yield _batches(file.tokens, "one file", *shape, repeats)
        yield _batches(shards.tokens, f"{_SHARDS} shards", *shape, repeats)


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
    tokenizer: Any,
    sources: Mapping[str, Callable[[Path], list[Part]]],
    home: Path,
    repeats: int,
) -> tuple[list[Row], TokenFile]:
    """From files of text to a token file with its checksums, against the tokenizer library on texts in memory."""
    import tokenizers

    tokenizer_path = home / "tokenizer.json"
    tokenizer.save(tokenizer_path)
    made: dict[str, list[list[TokenFile]]] = {name: [] for name in sources}

    backend = tokenizers.Tokenizer.from_file(str(tokenizer_path))  # as it comes, with its own settings

    def library() -> int:
        return len(backend.encode_batch_fast(texts, add_special_tokens=False))

    def token_file(name: str) -> None:
        folder = home / f"{name}-{len(made[name])}"  # a new one, since what is there already is not made again
        made[name].append(prepare(folder, sources[name](folder), str(tokenizer_path)))

    files = {name: functools.partial(token_file, name) for name in sources}
    seconds = interleaved_seconds({"library": library, "library again": library, **files}, repeats)
    rows = []
    for name in sources:
        n_tokens, n_bytes = (sum(getattr(file.info, of) for file in made[name][0]) for of in ("n_tokens", "n_bytes"))
        metrics = {
            **spread_metrics("speed_ratio", median_ratio(seconds["library"], seconds[name])),
            **spread_metrics("control_ratio", median_ratio(seconds["library again"], seconds["library"])),
            **spread_metrics("seconds", spread(seconds[name])),
            "tokens_per_second": n_tokens / spread(seconds[name]).median,
            "repetitions": repeats,
        }
        case = f"{n_bytes / 1e6:.1f} MB of {name}, {len(texts)} documents, {tokenizer.spec}"
        rows.append(Row(case, "token file", metrics))
    return rows, made["jsonl"][0][0]


def _write_tfds(folder: Path, texts: Sequence[str], file_format: str, write: Callable[[Path, Iterator[bytes]], None]):
    """A TensorFlow Datasets folder with one shard."""
    folder.mkdir()
    values = (_field(1, _field(1, text.encode())) for text in texts)  # Feature.bytes_list.value
    examples = (_field(1, _field(1, _field(1, b"text") + _field(2, value))) for value in values)
    suffix = {"TFRecord": "tfrecord", "ArrayRecord": "array_record"}[file_format]
    path = folder / f"text-train.{suffix}-00000-of-00001"
    write(path, examples)
    split = {"name": "train", "shardLengths": [str(len(texts))], "numBytes": str(path.stat().st_size)}
    info = {"name": "text", "version": "1.0.0", "fileFormat": suffix, "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    text = {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}}
    kind = "tensorflow_datasets.core.features.features_dict.FeaturesDict"
    features = {"pythonClassName": kind, "featuresDict": {"features": {"text": text}}}
    (folder / "features.json").write_text(json.dumps(features))


def _write_tfrecord(path: Path, examples: Iterator[bytes]) -> None:
    with open(path, "wb") as file:
        for example in examples:
            for part in (struct.pack("<Q", len(example)), example):
                file.write(part + struct.pack("<I", masked_crc32c(part)))


def _write_array_record(path: Path, examples: Iterator[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")  # as TensorFlow Datasets writes
    for example in examples:
        writer.write(example)
    writer.close()


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protocol buffer message."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """A number from 0 on as a protocol buffer message stores it: seven bits a byte, the lowest first."""
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


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


SUITE = Suite(
    name="data",
    title="Token files against the speed of the tokenizer library alone (quartiles), and batches of rows; one process",
    measure=_measure,
    columns=(
        Column("speed ratio", measured("speed_ratio", spread_text("speed_ratio"))),
        Column("library to itself", measured("control_ratio", spread_text("control_ratio"))),
        Column("time", lambda m: seconds_text(m["seconds"])),
        Column("tokens/s", lambda m: f"{m['tokens_per_second']:.3g}"),
    ),
    repeats=5,
)
