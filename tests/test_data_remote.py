"""Text behind addresses: the same token files as from disk, shards, resuming, and what is refused."""

import gzip
import json

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from orthojax.data import prepare, text_parts
from orthojax.data.remote import is_remote, remote_corpus, remote_files
from orthojax.errors import UserError

TEXTS = [f"document {i}, " + "some words " * (i % 5) for i in range(60)]
FILES = {"part-0.parquet": TEXTS[:30], "part-1.parquet": TEXTS[30:50], "part-2.jsonl.gz": TEXTS[50:]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same files on disk and in fsspec's file system in memory."""
    folder, memory = tmp_path_factory.mktemp("data"), fsspec.filesystem("memory")
    for name, texts in FILES.items():
        if name.endswith(".parquet"):
            parquet.write_table(pa.table({"text": texts}), folder / name, row_group_size=7)
        else:
            (folder / name).write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode()))
        memory.pipe_file(f"/data/{name}", (folder / name).read_bytes())
    memory.pipe_file("/data/README.md", b"# a card")
    return folder


def tokens(paths, folder, **shard):
    return [np.fromfile(file.path, np.uint16) for file in
            prepare(folder, text_parts(paths, ["train", "validation"], folder), "bytes", **shard)]  # fmt: skip


def test_token_files_are_those_of_the_files_on_disk(data, tmp_path):
    local = tokens([str(data / name) for name in FILES], tmp_path / "local")
    for addresses in (["memory://data"], ["memory://data/part-*.parquet", "memory://data/part-2.jsonl.gz"]):
        remote = tokens(addresses, tmp_path / f"remote{len(addresses)}")
        for a, b in zip(local, remote, strict=True):
            np.testing.assert_array_equal(a, b)
    again = tokens(["memory://data"], tmp_path / "remote1")  # what is there is not made again
    np.testing.assert_array_equal(again[0], local[0])


def test_shards_divide_the_files_and_a_piece_resumes(data):
    source = remote_corpus(remote_files([f"file://{data}"]))
    assert source.file_count == 3
    documents = [[document.text for document in source.documents(i, 3)] for i in range(3)]
    assert [text for part in documents for text in part] == TEXTS
    assert len(documents[0]) < len(TEXTS)
    piece = source.pieces(0, 1)[0]
    items = list(piece.read(0))
    assert list(piece.read(items[11].position)) == items[12:]


def test_a_changed_file_is_another_source(data):
    before = remote_corpus(remote_files(["memory://data"])).sha256
    assert before == remote_corpus(remote_files(["memory://data"])).sha256
    fsspec.filesystem("memory").pipe_file("/other/part-0.parquet", (data / "part-1.parquet").read_bytes())
    assert before != remote_corpus(remote_files(["memory://other"])).sha256


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://data/*.txt", "matches no files"),
        ("memory://nowhere/a.parquet", "cannot read memory://nowhere/a.parquet"),
        ("nosuch://data", "Protocol not known"),
    ],
)
def test_refusals(data, address, message):
    with pytest.raises(UserError, match=message):
        remote_files([address])


def test_addresses_and_paths_do_not_mix():
    assert not is_remote(["a.txt", "b/"])
    with pytest.raises(UserError, match="are mixed"):
        is_remote(["a.txt", "hf://datasets/a/b.parquet"])
