"""Reading text and tokens: token files against the tokenizer library alone, and batches of rows."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orthojax.benchmarks.suite import Column, Row, Suite, measured, reason, seconds_text, spread_metrics, spread_text
from orthojax.data.batches import TokenBatches
from orthojax.data.corpus import embedded_corpus
from orthojax.data.preparation import prepare, text_parts
from orthojax.data.token_files import TokenFile
from orthojax.data.tokenizers import make_tokenizer
from orthojax.train import interleaved_seconds, median_ratio, spread

_DOCUMENT_CHARACTERS = 2_000  # about those of a web page of C4
_TINY_DOCUMENTS = 50
_ROWS, _SEQUENCE_LENGTH, _BATCHES = 64, 512, 100


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    whole = [document.text for document in embedded_corpus().documents()]
    size = _DOCUMENT_CHARACTERS
    texts = [text[i : i + size] for text in whole for i in range(0, len(text), size)]
    texts = texts[:_TINY_DOCUMENTS] if tiny else texts
    with tempfile.TemporaryDirectory() as home:
        row, file = _preparation(texts, "bpe:300" if tiny else "bpe:8192", Path(home), repeats)
        yield row
        yield _batches(file, 4 if tiny else _ROWS, 8 if tiny else _SEQUENCE_LENGTH, repeats)


def _preparation(texts: list[str], tokenizer_spec: str, home: Path, repeats: int) -> tuple[Row, TokenFile]:
    """From a jsonl file to a token file with its checksums, against the tokenizer library on texts in memory."""
    source, tokenizer_path = home / "text.jsonl", home / "tokenizer.json"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    tokenizer: Any = make_tokenizer(tokenizer_spec, texts)
    tokenizer.save(tokenizer_path)
    made: list[TokenFile] = []

    def library() -> int:
        return len(tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False))

    def token_file() -> None:
        folder = home / str(len(made))  # a new one, since what is there already is not made again
        made.extend(prepare(folder, text_parts([str(source)], ["all"], folder), str(tokenizer_path)))

    functions = {"library": library, "library again": library, "token file": token_file}
    seconds = interleaved_seconds(functions, repeats)
    info = made[0].info
    metrics = {
        **spread_metrics("speed_ratio", median_ratio(seconds["library"], seconds["token file"])),
        **spread_metrics("control_ratio", median_ratio(seconds["library again"], seconds["library"])),
        **spread_metrics("seconds", spread(seconds["token file"])),
        "tokens_per_second": info.n_tokens / spread(seconds["token file"]).median,
        "repetitions": repeats,
    }
    name = f"{info.n_bytes / 1e6:.1f} MB of jsonl, {len(texts)} documents, {tokenizer_spec}"
    return Row(name, "token file", metrics), made[0]


def _batches(file: TokenFile, rows: int, sequence_length: int, repeats: int) -> Row:
    """Batches of shuffled rows as a training run takes them, one after the other."""
    batches = TokenBatches(file.tokens, sequence_length, rows, seed=0)
    position = iter(range(10**9))  # every batch is a new one

    def read() -> int:
        return sum(batches(next(position)).size for _ in range(_BATCHES))

    case = f"{_BATCHES} batches of {rows} x {sequence_length}"
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
