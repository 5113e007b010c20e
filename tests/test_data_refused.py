"""What data refuses: requests, names, damaged files and files of another kind."""

import bz2
import dataclasses
import gzip
import json
import lzma
import os
import struct

import numpy as np
import test_data_sources
from refusals import refused
from test_data_batches import ROWS, batches
from test_data_preparation import make
from test_data_sources import as_arrow, as_parquet, edit_info, example, framed, texts_of, write_records, write_tfds

from orthojax.config import DataConfig
from orthojax.data import BigramBackcopy, embedded_corpus, open_dataset, prepare, text_corpus, text_parts
from orthojax.data.sources import find_files, find_tfds, open_tfds
from orthojax.data.token_files import open_token_file
from orthojax.data.tokenizers import load_tokenizer, make_tokenizer, tokenizer_identity


def put(folder, name="a.txt", content=b"text"):
    (folder / name).write_bytes(content)
    return folder / name


def misleading_arrow(*offsets):
    """A file whose texts lie at these bytes."""
    there, given = (struct.pack("<4q", *each) for each in ((0, 5, 12, 17), offsets))
    content = as_arrow(["hello", "world!!", "third"])
    assert content.count(there) == 1
    return content.replace(there, given)


TEXTS = [f"text {i}" for i in range(50)]
BAD_TEXTS = [
    ("a.txt", b"plain\xff", "UTF-8"),
    ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "line 2"),
    ("a.jsonl", b'\n{"content": "x"}', "line 2"),
    ("a.jsonl", b'{"text": 3}', "line 1"),
    ("a.jsonl", b'["text"]', "line 1"),
    ("a.jsonl", b"\n" + b"[" * 100_000, "line 2"),
    ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "line 1"),
    ("a.jsonl", b'{"text": "ab\\ud800"}', "line 1"),
    ("a.txt.gz", b"plain", "gzip"),
    ("a.jsonl.gz", gzip.compress(test_data_sources.lines(TEXTS))[:-9], "gzip"),
    ("a.parquet", as_parquet(TEXTS)[:200], ""),
    ("a.parquet", as_parquet(TEXTS, "body"), ""),
    ("a.arrow", as_arrow(TEXTS)[:-300], ""),
    ("a.arrow", misleading_arrow(0, 5, 12, 2**50), "out of bounds"),  # which would end the process
    ("a.arrow", misleading_arrow(0, 12, 5, 17), "non-monotonic"),
    ("a.arrow", misleading_arrow(-(2**50), 5, 12, 17), "negative"),
    ("a.arrow", as_arrow(["größer"]).replace("ö".encode(), b"\xf6\xf6"), "UTF8"),
    ("a.jsonl.bz2", bz2.compress(b'{"body": "x"}\n'), "body"),
    ("a.jsonl.xz", lzma.compress(b'{"text": 3}\n'), "text"),
    ("a.txt.xz", b"plain", ""),
]  # fmt: skip


def read_text(folder, name, content):
    texts_of(text_corpus([put(folder, name, content)]))


def find(folder, pattern):
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe.txt")  # reading would wait for ever
    find_files([folder / pattern])


SOURCES = [
    (read_text, [(name, content, (name, word)) for name, content, word in BAD_TEXTS]),
    (find, [("empty", "empty"), ("d*.txt", "d*.txt"), ("missing.txt", "missing.txt"), ("pipe.txt", "pipe"),
            ("long" * 999, "long")]),
    (lambda _: find_files([]), "no text files"),
    (lambda _, *paths: text_corpus(paths), [
        ("memory://nothing/*.txt", "matches no files"), ("memory://nowhere/a.parquet", "memory://nowhere"),
        ("nosuch://data", "nosuch"), ("a.txt", "memory://data/a.parquet", "mixed")]),
    (lambda d: embedded_corpus(d / "nothing"), "standard library"),
    (lambda _, *task: BigramBackcopy.from_text(*task), [
        ("", 1, "1 triggers"), ("aaaa", 1, "1 triggers"), ("abc", 3, "3 triggers")]),
]  # fmt: skip


def find_version(folder, home, dataset):
    for version in ("3.0.1", "10.0.0", "9.1.0"):
        write_tfds(folder, version=version)
    find_tfds(folder / home, dataset)


def read_tfds(folder, change, **options):
    """Reads a data set of which something was changed."""
    made = write_tfds(folder, **options)
    change(made)
    texts_of(open_tfds(made, "train"))


def zero(made):
    path = made / "c4-train.array_record-00000-of-00003"
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes(300) + content[400:])


def too_few(made):
    edit_info(made, lambda info: info["splits"][0]["shardLengths"].__setitem__(1, "18"))


TFDS = [
    (lambda d, split: open_tfds(write_tfds(d), split), [
        ("test", ("'test'", "allowed: train")), ("trian", "did you mean 'train'"), ("train[60:]", "50 examples"),
        ("train+test", "test"), ("train[a:b]", "a:b"), ("", "''")]),
    (find_version, [
        (".", "c4/en:3.1.0", "3.0.1 | 9.1.0 | 10.0.0"), (".", "c4", "allowed: c4/en"), (".", "lm1b:1.1.0", "'lm1b'"),
        ("c4/en/3.0.1", "c4", "none is there"), ("nowhere", "c4", "nowhere")]),
    (read_tfds, [
        (lambda made: (made / "c4-train.tfrecord-00001-of-00003").unlink(), "00001-of-00003"),
        (too_few, ("00001-of-00003", "18")),
        (lambda made: edit_info(made, lambda info: info.update(fileFormat="riegeli")),
         ("riegeli", "tfrecord | array_record")),
        *((lambda made, text=text: put(made, "dataset_info.json", text), "c4/en/3.0.1")
          for text in (b"{", b"[]", b'{"name": "c4", "version": "1.0.0", "splits": {"train": 1}}'))]),
    (lambda d, *change: read_tfds(d, *change, file_format="array_record"), [
        (zero, "00000-of-00003"), (too_few, ("00001-of-00003", "18"))]),
    (lambda d, record: texts_of(open_tfds(write_records(d, framed(record)), "train")), [
        (example(text=[b"one", b"two"]), "2 texts"), (example(url=b"u"), "'text'\nallowed: url"),
        (example(text=3), "0 texts"), (example(text=b"ab\xff"), "utf-8"), (b"\x0a\x05abc", "record 0")]),
]  # fmt: skip


def open_changed(folder, name, change):
    """Opens a token file, itself or its sidecar changed or replaced."""
    path = make(folder / "train.bin").path
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if isinstance(new := change(content if name == "train.bin" else json.loads(content)), bytes):
        put(folder, name, new)
    elif new:
        new(folder / name)
    open_token_file(path)


TOKEN_FILES = [
    (open_changed, [
        ("train.bin", lambda content: content[:-2], "10 bytes"), ("train.bin", lambda content: 2 * content, "24 bytes"),
        ("train.bin", lambda content: b"\x01" + content[1:], "sha256"),
        *(("train.json", lambda _, text=text: text, "train.bin") for text in (b"", b"{", b"[]", b"[" * 100_000, b"{}")),
        *(("train.json", lambda old, new=new: json.dumps(old | new).encode(), "train.bin")
          for new in ({"format_version": 1}, {"unknown": 1}, {"n_bytes": "4"}, {"dtype": "u2"})),
        *((name, lambda _, kind=kind: kind, word or name) for name in ("train.bin", "train.json")
          for kind, word in ((os.mkfifo, "pipe"), (os.mkdir, "folder"), (None, "")))]),
]  # fmt: skip
VOCABULARY = b'{"a": 0, "b": 1, "<|endoftext|>": 2}'


def read_tokenizer(folder, name, content, merges=None):
    if merges is not None:
        put(folder, "merges.txt", merges)
    make_tokenizer(str(put(folder, name, content)), ())


def each_reader(folder, name, read):
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    read(str(folder / name))


TOKENIZERS = [
    (read_tokenizer, [
        *(("a.json", content, "a.json") for content in (
            b"{", b"\xff", b"[1]", b'{"model": 1}', b"[" * 100_000,
            b'{"orthojax_tokenizer": "sentencepiece", "model": "\xc3\xa9"}')),
        ("tokenizer.model", b"\x0a\x01", "tokenizer.model"), ("vocab.json", VOCABULARY, "merges.txt"),
        *(("vocab.json", VOCABULARY, merges, "GPT-2") for merges in (b"a c\n", b"a b c\n", b"a b\n"))]),
    (each_reader, [
        (name, read, word) for read in (load_tokenizer, tokenizer_identity, lambda path: make_tokenizer(path, ()))
        for name, word in (("missing.json", "missing.json"), ("pipe", "pipe"), ("folder", "without a tokenizer"))]),
    (lambda _, name: make_tokenizer(name, ["some text"]), [
        ("byte", "did you mean 'bytes'"), ("bpe", "did you mean 'bpe:N'"), ("", "tokenizer"),
        ("bpe:5000", "needs more text"), *((name, name) for name in ("bpe:", "bpe:-300", "bpe:2k")),
        *((name, "at least 260") for name in ("bpe:259", "bpe:2" + 30 * "0", "bpe:" + 5000 * "2"))]),
]  # fmt: skip


def prepared(folder, names, split="all", output="out"):
    (part,) = text_parts([str(put(folder))], [split])
    prepare(folder / output, [dataclasses.replace(part, name=name) for name in names], "bytes")


def opened(folder, change=lambda path: None, tokenizer="bytes", cache="cache"):
    config = DataConfig(kind="text", paths=(str(put(folder, content=b"some text. " * 90)),), tokenizer=tokenizer)
    change(open_dataset(config, folder / cache).tokenizer_path.parent / "train.bin")
    open_dataset(config, folder / cache)


PREPARED = [
    (prepared, [
        *(([name], name) for name in ("a/b", "tokenizer", ".hidden")), (["all", "all"], "'all'"),
        (["validation"], "validation", "no text for the token file validation.bin"),
        (["test"], "test", ("'test'", "train | validation | all")), (["all"], "all", "a.txt", "a.txt is a file")]),
    (opened, [
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "train.bin"), (None, "bpe:5000", "needs more text"),
        (None, "bytes", "a.txt", "a.txt")]),
    (lambda d: open_dataset(DataConfig(kind="bigram_backcopy"), d), "bigram_backcopy", ValueError),
    (lambda _, n, bos_id: batches(tokens=np.arange(n), bos_id=bos_id), [
        (12, None, ("12 tokens", "13")), (11, 0, ("11 tokens", "12")), (0, None, "too few")]),
    (lambda _: batches().spread_rows(ROWS + 1), "at most 12 rows"),
    (lambda _: batches(batch_size=8).rows(0, 4, 9), "rows 4:9 of a batch of 8", IndexError),
]  # fmt: skip


test_refused = refused(*SOURCES, *TFDS, *TOKEN_FILES, *TOKENIZERS, *PREPARED)
