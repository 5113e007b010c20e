"""JSON files of data, with any value replaced by any other: they are refused in plain words, or read correctly."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_data_sources import KEPT, Failing, opened_tfds, write_tfds

from orthojax.data import token_writer
from orthojax.data.preparation import prepare, text_parts
from orthojax.data.token_files import open_token_file
from orthojax.data.token_writer import write_token_files
from orthojax.data.tokenizers import ByteTokenizer, load_tokenizer, train_bpe
from orthojax.errors import UserError

TEXTS = [f"text {i} and größer words\n" * (1 + i % 3) for i in range(24)]
DEEP = "[" * 2_000 + "]" * 2_000
VALUES = ["null", "[]", "{}", '"x"', "-1", "1e400", "true", "4294967295", "9" * 5_000, DEEP]


def replaced(value, text):
    """The JSON text of a value, once for each place in it, with another text there."""
    yield text
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, part in items[: 3 if len(items) > 30 else None]:
        for inner in replaced(part, text):
            whole: Any = value.copy()
            whole[key] = "MARK"
            yield json.dumps(whole).replace('"MARK"', inner, 1)


def parts_of(folder, splits=("train",)):
    text = folder.with_suffix(".jsonl")
    if not text.exists():
        text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return text_parts([str(text)], splits, folder)


def write_tokens(folder):
    prepare(folder, parts_of(folder), "bytes")


def read_tokens(folder):
    file = open_token_file(folder / "train.bin", verify=True)
    ids, info = file.tokens.tolist(), file.info
    assert ids == np.fromfile(folder / "train.bin", "<u2").tolist()
    assert info.vocab_size > max(*ids, info.bos_id, info.eos_id)
    assert min(info.bos_id, info.n_bytes - 1, info.file_count) >= 0
    assert ids[-1] == info.eos_id
    assert ids.count(info.eos_id) >= info.n_documents > 0


def read_notes(folder):
    train, validation = parts_of(folder, ("train", "validation"))
    texts = [(train.text(document), validation.text(document)) for document in train.source.documents()]
    assert [a + b for a, b in texts] == TEXTS


def resume(folder):
    """Goes on where the notes say, up to the next batch, which fails."""
    with pytest.raises(UserError) as error:
        write_token_files(folder, parts_of(folder), Failing())
    if "No space left" not in str(error.value):
        raise error.value


def write_partial(folder):
    parts_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_writer, "_BATCH_CHARACTERS", 300)
        Failing.successes = 2
        resume(folder)


def read_tfds(folder):
    assert [document.text for document in opened_tfds(folder).documents()] == KEPT


def read_tokenizer(path):
    tokenizer = load_tokenizer(path)
    (ids,) = tokenizer.encode_batch(["the token größer"])
    tokenizer.decode(ids)
    ids = [*ids, tokenizer.bos_id, tokenizer.eos_id]
    assert 0 <= min(ids) <= max(ids) < tokenizer.vocab_size < 1 << 32


class Case(NamedTuple):
    """A file in a folder, and what writes and reads that folder."""

    path: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    sealed: bool = False
    needed: bool = True  # the folder cannot be read without it


CASES = {
    "sidecar": Case("train.json", write_tokens, read_tokens, sealed=True),
    "source": Case("source.json", parts_of, read_notes, sealed=True, needed=False),
    "partial": Case("train.bin.partial.json", write_partial, resume, sealed=True, needed=False),
}
for kind in ("tfrecord", "array_record"):
    for name in ("dataset_info", "features"):
        CASES[f"{name} {kind}"] = Case(
            f"c4/en/3.0.1/{name}.json",
            lambda folder, kind=kind: write_tfds(folder, shards=2, file_format=kind),
            read_tfds,
            needed=name == "dataset_info",
        )
for name, values in {
    "bpe.json": json.loads(train_bpe(TEXTS, 270).serialized),
    "bytes.json": json.loads(ByteTokenizer().serialized),
    "sentencepiece.json": {"orthojax_tokenizer": "sentencepiece", "model": "é"},
    "vocab.json": {"a": 0, "b": 1, "<|endoftext|>": 2},
}.items():

    def write_files(folder, name=name, values=values):
        (folder / "merges.txt").write_text("#version: 0.2\n")
        (folder / name).write_text(json.dumps(values))

    CASES[name] = Case(name, write_files, lambda folder, name=name: read_tokenizer(folder / name))


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("json") / "files"
    folder.mkdir()
    CASES[request.param].write(folder)
    return CASES[request.param], folder, folder / CASES[request.param].path


def refused(read, folder):
    try:
        read(folder)
    except UserError as error:
        return str(error).count("\n") <= 2
    return False


def test_any_value_replaced(case):
    kind, folder, path = case
    values = json.loads(path.read_text())
    outcomes = []
    for value in VALUES:
        for text in replaced(values, value):
            path.write_text(text)
            outcomes.append(refused(kind.read, folder))
    assert all(outcomes) if kind.sealed else outcomes.count(True) > len(VALUES)
    if kind.sealed:  # as earlier versions wrote it
        del values["content_sha256"]
        for value in VALUES:
            for text in replaced(values, value):
                path.write_text(text)
                refused(kind.read, folder)


def test_what_is_no_json(case):
    kind, folder, path = case
    for content in (b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5_000):
        path.write_bytes(content)
        assert refused(kind.read, folder)
    for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("nowhere", path)):
        path.unlink()
        assert refused(kind.read, folder) == kind.needed
        path.unlink(missing_ok=True)
        make(path)
        assert refused(kind.read, folder)
        if path.is_dir():
            path.rmdir()
            path.touch()
