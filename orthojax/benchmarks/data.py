"""Reading text and tokens: token files against the tokenizer library alone, and batches of rows."""

import functools
import itertools
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
    open_token_files,
    prepare,
    text_parts,
    tfds_parts,
)
from orthojax.data.tfds import masked_crc32c
from orthojax.timing import interleaved_seconds, median_ratio, spread

Source = Callable[[Path], list[Part]]  # from the folder of the token files

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
        jsonl, tokenizer_path = home / "text", home / "tokenizer.json"
        jsonl.mkdir()
        for index in range(_SHARDS):  # whose shards are whole files
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[index::_SHARDS])
            (jsonl / f"{index}.jsonl").write_text(lines, encoding="utf-8")
        tokenizer.save(tokenizer_path)
        sources: dict[str, Source] = {
            "jsonl": lambda _: text_parts([str(jsonl)], ["all"]),
            "jsonl, divided": lambda _: text_parts([str(jsonl)], ["train", "validation"]),
        }
        for name, suffix in {"TFRecord": "tfrecord", "ArrayRecord": "array_record"}.items():
            try:
                _write_tfds(home / suffix, texts, suffix)
            except ImportError as error:  # needs tensorflow-datasets, which a machine that only measures may lack
                yield Row(name, "token file", {}, reason(error))
            else:
                sources[name] = lambda _, suffix=suffix: tfds_parts(home / suffix, "", ["train"], "text")
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
    texts: Sequence[str], what: str, sources: Mapping[str, Source], tokenizer_path: Path, repeats: int
) -> Iterator[Row]:
    """From files of text to a token file with its checksums, against the tokenizer library on texts in memory."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(tokenizer_path))  # as it comes, with its own settings
    found: dict[str, list[TokenFile]] = {}
    folders = (tokenizer_path.parent / str(i) for i in itertools.count())  # new ones: what exists is not prepared again

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


def _write_tfds(folder: Path, texts: Sequence[str], suffix: str) -> None:
    """A TensorFlow Datasets folder with one shard."""
    from tensorflow_datasets.proto import tf_example_pb2

    def example(text: str) -> bytes:
        message = tf_example_pb2.Example()  # pyright: ignore[reportAttributeAccessIssue]
        message.features.feature["text"].bytes_list.value.append(text.encode())
        return message.SerializeToString()

    folder.mkdir()
    path = folder / f"text-train.{suffix}-00000-of-00001"
    if suffix == "array_record":
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:1")  # as TensorFlow Datasets writes
        for text in texts:
            writer.write(example(text))
        writer.close()
    else:
        with path.open("wb") as file:
            for text in texts:
                for part in (struct.pack("<Q", len(data := example(text))), data):
                    file.write(part + struct.pack("<I", masked_crc32c(part)))
    split = {"name": "train", "shardLengths": [str(len(texts))], "numBytes": str(path.stat().st_size)}
    info = {"name": "text", "version": "1.0.0", "fileFormat": suffix, "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    classes = "tensorflow_datasets.core.features"
    text = {"pythonClassName": f"{classes}.text_feature.Text", "text": {}}
    features = {
        "pythonClassName": f"{classes}.features_dict.FeaturesDict",
        "featuresDict": {"features": {"text": text}},
    }
    (folder / "features.json").write_text(json.dumps(features))


def _batches(tokens: Tokens, of: str, rows: int, sequence_length: int, repeats: int) -> Row:
    """Batches of shuffled rows as a training run takes them, one after the other."""
    batches = TokenBatches(tokens, sequence_length, rows, seed=0)
    position = itertools.count()  # every batch is a new one

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
