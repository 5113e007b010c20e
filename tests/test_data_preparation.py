"""Preparing token files: the same bytes however the work was cut, shared out or killed; and what is refused."""

import bz2
import dataclasses
import gzip
import itertools
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from orthojax.data import token_writer
from orthojax.data.corpus import embedded_corpus, text_corpus
from orthojax.data.datasets import build_dataset
from orthojax.data.preparation import prepare, renamed, require_usable, text_parts
from orthojax.data.sources import documents, sample, text_source
from orthojax.data.splits import HoldOut
from orthojax.data.text_files import Document, find_files, read_documents
from orthojax.data.token_files import open_token_file
from orthojax.data.token_shards import open_token_files
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError

TEXTS = [f"text {i} größer " * (1 + i % 7) for i in range(60)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


def prepared(folder, paths, tokenizer="bytes", splits=("all",), **options):
    return prepare(folder, text_parts([str(path) for path in paths], splits, folder), tokenizer, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "source.json"}


# Reading.


def zstd(content):
    return pytest.importorskip("zstandard").compress(content)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_files(tmp_path, ending):
    compress, half = COMPRESS[ending], len(LINES) // 2
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(compress(LINES[:half].encode()) + compress(LINES[half:].encode()))  # as `cat a.gz b.gz` makes it
    items = list(read_documents("a", path))
    assert [item.document.text for item in items] == TEXTS
    assert items[-1].offset <= path.stat().st_size
    for i in (0, 20, 59):
        again = [item.document.text for item in read_documents("a", path, items[i].position)]
        assert again == TEXTS[i + 1 :]
    text = tmp_path / f"b.txt{ending}"
    text.write_bytes(compress(LINES.encode()))
    assert [item.document.text for item in read_documents("b", text)] == [LINES]
    text.write_bytes(compress(LINES.encode())[:-20])
    with pytest.raises(UserError, match=rf"b\.txt\{ending} is not a complete \w+ file"):
        list(read_documents("b", text))
    text.write_bytes(b"no compressed file at all")
    with pytest.raises(UserError, match=rf"b\.txt\{ending} is not a complete \w+ file"):
        list(read_documents("b", text))


def test_every_byte_of_a_jsonl_file_belongs_to_one_part(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + LINES + json.dumps({"text": "no end"}), encoding="utf-8")
    size = path.stat().st_size
    cuts = [0, 1, 2, *random.Random(0).sample(range(3, size), 30), size]
    cuts += [item.position for item in list(read_documents("a", path))[::9]]
    cuts = sorted(set(cuts))
    parts = [
        item.document.text
        for start, stop in itertools.pairwise(cuts)
        for item in read_documents("a", path, start, stop)
    ]
    assert parts == [*TEXTS, "no end"]


def test_a_bad_line_is_named_by_its_byte_where_its_number_is_unknown(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"text": 1}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, the line at byte 14: no string"):
        list(read_documents("a", path, 5))
    path.write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match="byte 0xff at offset 24"):
        list(read_documents("a", path, 14))


def test_folders_and_patterns(tmp_path):
    for name in ("b/2.txt", "b/1.jsonl", "b/deep/3.txt", "b/.hidden", "b/.git/x", "c1.txt", "c2.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    found = find_files([tmp_path / "c2.txt", tmp_path / "b", tmp_path / "c?.txt"])
    assert [name for name, _ in found] == ["c2.txt", "1.jsonl", "2.txt", "deep/3.txt", "c1.txt", "c2.txt"]
    assert [name for name, _ in find_files([tmp_path / "**/*.txt"])] == ["2.txt", "3.txt", "c1.txt", "c2.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty is a folder without files"):
        find_files([tmp_path / "empty"])
    with pytest.raises(UserError, match=r"d\*\.txt is a pattern that no file matches"):
        find_files([tmp_path / "d*.txt"])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_parts_of_text_are_the_whole_in_order(tmp_path, count):
    half = len(LINES) // 2
    (tmp_path / "a.jsonl").write_text(LINES[:half].rsplit("\n", 1)[0])
    for i in range(4):
        (tmp_path / f"b{i}.txt").write_text(f"whole file {i} " * 200)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "d.txt").touch()
    source = text_source(text_corpus([tmp_path]))
    whole = list(documents(source.pieces(0, 1)))
    assert {document.name.split(":")[0].split("@")[0] for document in whole} == {
        "a.jsonl", "b0.txt", "b1.txt", "b2.txt", "b3.txt", "c.jsonl.gz"
    }  # fmt: skip
    joined = [document for i in range(count) for document in documents(source.pieces(i, count))]
    assert [document.text for document in joined] == [document.text for document in whole]
    assert sum(piece.n_bytes for i in range(count) for piece in source.pieces(i, count)) == sum(
        path.stat().st_size for path in tmp_path.iterdir()
    )


def test_the_sample_of_a_long_source_comes_from_everywhere(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i:04d}"}) + "\n" for i in range(1000)))
    source = text_source(text_corpus([tmp_path / "a.jsonl"]))
    numbers = [int(document.text) for document in sample(source, 80, parts=4)]
    assert numbers == [n for start in (0, 250, 500, 750) for n in range(start, start + 5)]
    assert len(list(sample(source, 1 << 20))) == 1000


# Splits.


def test_the_split_is_that_of_a_corpus_in_memory(tmp_path):
    """One rule, whether all documents are in memory (data.kind=text) or pass by."""
    (tmp_path / "many.jsonl").write_text(LINES)
    (tmp_path / "few.txt").write_text("".join(TEXTS))
    for name in ("many.jsonl", "few.txt"):
        corpus = text_corpus([tmp_path / name])
        build_dataset(tmp_path / "memory" / name, corpus, "bpe:270", None)
        prepared(tmp_path / "stream" / name, [tmp_path / name], "bpe:270", ("train", "validation"))
        assert contents(tmp_path / "memory" / name) == contents(tmp_path / "stream" / name)


def test_the_embedded_corpus(tmp_path, monkeypatch):
    small = dataclasses.replace(embedded_corpus(), files=embedded_corpus().files[:40])
    monkeypatch.setattr("orthojax.data.preparation.embedded_corpus", lambda: small)
    build_dataset(tmp_path / "memory", small, "bytes", None)
    prepare(tmp_path / "stream", text_parts(None, ["train", "validation"], tmp_path), "bytes")
    assert contents(tmp_path / "memory") == contents(tmp_path / "stream")


def test_what_was_found_out_about_the_text_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    first = text_parts([str(path)], ["validation"], tmp_path / "out")[0]
    notes = json.loads((tmp_path / "out/source.json").read_text())
    assert notes["sha256"] == text_corpus([path]).sha256
    monkeypatch.setattr("orthojax.data.corpus.hashlib.file_digest", lambda *_: pytest.fail("read again"))
    again = text_parts([str(path)], ["validation"], tmp_path / "out")[0]
    assert again.source.sha256 == first.source.sha256
    monkeypatch.undo()
    # A rule that an earlier version found stays that of the folder, also where only the date of the file is another.
    notes["hold_out"]["limit"], wanted = 2**62, HoldOut("text", 2**62)
    (tmp_path / "out/source.json").write_text(json.dumps(notes))
    for seconds in (0, 1_000):
        os.utime(path, (seconds, seconds))
        part = text_parts([str(path)], ["validation"], tmp_path / "out")[0]
        found = [part.text(document) for document in documents(part.source.pieces(0, 1))]
        assert found == [wanted.part(Document("", text), "validation") for text in TEXTS]
    path.write_text(LINES + '{"text": "more"}\n')
    assert text_parts([str(path)], ["validation"], tmp_path / "out")[0].source.sha256 != first.source.sha256


def test_splits_of_one_text_are_made_in_one_pass(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(LINES)
    parts = text_parts([str(tmp_path / "a.jsonl")], ["train", "validation"], tmp_path / "out")
    opened = []
    monkeypatch.setattr("orthojax.data.text_files._decompressed", lambda path, raw: opened.append(path) or raw)
    told = []
    prepare(tmp_path / "out", parts, "bytes", report=lambda what: told.append(what) or (lambda *_: None))
    assert (opened, told) == ([tmp_path / "a.jsonl"], ["train and validation"])


# Stopping and going on.


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr("orthojax.data.encoding._BATCH_CHARACTERS", 60)
    monkeypatch.setattr(token_writer, "_SAVE_SECONDS", 0.0)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("splits", [("all",), ("train", "validation")])
@pytest.mark.parametrize("shard", [(0, 1), (1, 3)])
def test_a_failed_call_goes_on_where_it_was(tmp_path, monkeypatch, shard, splits):
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.txt").write_text("one more file")
    paths = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    prepared(tmp_path / "whole", paths, splits=splits, shard=shard)
    real, batches = ByteTokenizer.encode_batch, []

    def failing(tokenizer, batch):
        batches.append(batch)
        if len(batches) % 7 == 0:
            raise OSError(28, "No space left on device")
        return real(tokenizer, batch)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", failing)
    reported, calls = [], 0
    options = {"splits": splits, "shard": shard, "report": lambda _: lambda *call: reported.append(call)}
    while calls < 30 and (not reported or reported[-1][0] < reported[-1][1]):
        calls += 1
        try:
            prepared(tmp_path / "parts", paths, **options)
        except UserError as error:
            assert "No space left" in str(error)  # noqa: PT017
            assert [name for name in contents(tmp_path / "parts") if name.endswith(".partial")]
    assert calls > 2
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert [done for done, *_ in reported] == sorted(done for done, *_ in reported)
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda *_: pytest.fail("made again"))
    prepared(tmp_path / "parts", paths, splits=splits, shard=shard)


KILLED = """
import sys, time
from orthojax.data import encoding, preparation, token_writer, tokenizers
encoding._BATCH_CHARACTERS, token_writer._SAVE_SECONDS = 300, 0.0
encode = tokenizers.HuggingFaceTokenizer.encode_batch
def slow(self, texts):
    time.sleep(float(sys.argv[2]))
    return encode(self, texts)
tokenizers.HuggingFaceTokenizer.encode_batch = slow
from pathlib import Path
folder = Path(sys.argv[1])
parts = preparation.text_parts([str(folder.parent / "a.jsonl")], ["train", "validation"], folder)
preparation.prepare(folder, parts, "bpe:300")
"""


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_files_are_the_same(tmp_path, kills):
    (tmp_path / "a.jsonl").write_text(LINES * 4)
    prepared(tmp_path / "whole", [tmp_path / "a.jsonl"], "bpe:300", ("train", "validation"))
    chance = random.Random(kills)
    progress = []
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "killed"), "0.02"])
        before, deadline = state(tmp_path / "killed"), time.monotonic() + 60
        while process.poll() is None and state(tmp_path / "killed") == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.04)
        process.send_signal(signal.SIGKILL)
        process.wait()
        progress.append(state(tmp_path / "killed"))
    assert len(set(progress)) > 2
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "killed"), "0"], check=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    for name in ("train", "validation"):
        open_token_file(tmp_path / "killed" / f"{name}.bin", verify=True)


def state(folder):
    """Name and contents of the note on how far it is."""
    try:
        return next((path.name, path.read_bytes()) for path in sorted(folder.glob("*.partial.json")))
    except (StopIteration, OSError):
        return None


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("moment", ["before the file", "before the sidecar", "before the note goes"])
def test_killed_while_it_is_put_in_place(tmp_path, monkeypatch, moment):
    (tmp_path / "a.jsonl").write_text(LINES)
    prepared(tmp_path / "whole", [tmp_path / "a.jsonl"])
    names = {
        "before the file": "os.replace",
        "before the sidecar": "write_sidecar",
        "before the note goes": "Path.unlink",
    }
    name = names[moment]
    with monkeypatch.context() as patch:
        if name == "os.replace":
            real = os.replace
            patch.setattr(os, "replace", lambda a, b: _killed() if str(b).endswith(".bin") else real(a, b))
        elif name == "write_sidecar":
            patch.setattr(token_writer, "write_sidecar", lambda *_: _killed())
        else:
            patch.setattr(type(tmp_path), "unlink", lambda path, **_: _killed() if "partial" in path.name else None)
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path / "killed", [tmp_path / "a.jsonl"])
    prepared(tmp_path / "killed", [tmp_path / "a.jsonl"])
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def _killed():
    raise KeyboardInterrupt


# Refused.


@pytest.mark.usefixtures("small_batches")
def test_what_is_of_another_making_is_kept(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.jsonl").write_text(LINES + LINES)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(token_writer, "write_sidecar", lambda *_: _killed())
        with pytest.raises(KeyboardInterrupt):
            prepared(out, [tmp_path / "a.jsonl"])
    (out / "all.bin").rename(out / "all.bin.partial")
    before = contents(out)
    with pytest.raises(
        UserError, match=r"all\.bin\.partial\.json is of another making: source was 'a\.jsonl', is 'b\.jsonl'"
    ):
        prepared(out, [tmp_path / "b.jsonl"])
    with pytest.raises(UserError, match=r"tokenizer\.json is not the tokenizer 'bpe:270'"):
        prepared(out, [tmp_path / "a.jsonl"], "bpe:270")
    assert contents(out) == before
    (out / "all.bin.partial").write_bytes(b"short")
    with pytest.raises(UserError, match=r"all\.bin\.partial is shorter than .*\ndelete both files"):
        prepared(out, [tmp_path / "a.jsonl"])
    (out / "all.bin.partial.json").write_text("{")
    with pytest.raises(UserError, match=r"partial\.json is damaged\ndelete it and all\.bin\.partial"):
        prepared(out, [tmp_path / "a.jsonl"])
    for path in out.glob("*.partial*"):
        path.unlink()
    prepared(out, [tmp_path / "a.jsonl"])
    with pytest.raises(UserError, match=r"all\.bin is of another making: source was 'a\.jsonl', is 'b\.jsonl'"):
        prepared(out, [tmp_path / "b.jsonl"])
    open_token_file(out / "all.bin", verify=True)


def test_two_processes_do_not_write_one_file(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out/all.bin.partial", "ab") as other:
        (tmp_path / "out/tokenizer.json").write_text(ByteTokenizer().serialized)
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(
            UserError, match=r"another process is writing .*all\.bin\nallowed: one process for each shard"
        ):
            prepared(tmp_path / "out", [tmp_path / "a.jsonl"])
        assert (tmp_path / "out/all.bin.partial").exists()
        parts = [*text_parts([str(tmp_path / "a.jsonl")], ["train"], tmp_path / "out")] * 2
        parts[1] = dataclasses.replace(parts[1], name="all")
        with pytest.raises(UserError, match=r"another process is writing .*all\.bin"):
            prepare(tmp_path / "out", parts, "bytes")
        assert not list((tmp_path / "out").glob("train.*"))
    prepared(tmp_path / "out", [tmp_path / "a.jsonl"])


@pytest.mark.parametrize("complete", [False, True])
def test_a_process_that_comes_while_a_file_is_put_in_place_takes_nothing_away(tmp_path, monkeypatch, complete):
    pytest.importorskip("fcntl")
    (tmp_path / "a.jsonl").write_text(LINES)
    real, out, said = token_writer.write_sidecar, tmp_path / "out", []

    def interrupted(path, info):
        monkeypatch.setattr(token_writer, "write_sidecar", real)
        if complete:
            real(path, info)
            said.extend(prepared(out, [tmp_path / "a.jsonl"]))
            return
        with pytest.raises(UserError, match="another process is writing") as error:
            prepared(out, [tmp_path / "a.jsonl"])
        said.append(error)
        real(path, info)

    monkeypatch.setattr(token_writer, "write_sidecar", interrupted)
    prepared(out, [tmp_path / "a.jsonl"])
    assert said
    assert {path.name for path in out.iterdir()} == {"all.bin", "all.json", "tokenizer.json"}
    open_token_file(out / "all.bin", verify=True)


def test_what_was_deleted_is_made_again(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINES)
    prepared(tmp_path / "whole", [tmp_path / "a.jsonl"], splits=("train", "validation"))
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    (tmp_path / "out/train.bin").unlink()
    (tmp_path / "out/validation.json").unlink()
    with pytest.raises(UserError, match=r"has no sidecar validation\.json\ndelete it and make it again"):
        prepared(tmp_path / "out", [tmp_path / "a.jsonl"], splits=("train", "validation"))
    (tmp_path / "out/validation.bin").unlink()
    prepared(tmp_path / "out", [tmp_path / "a.jsonl"], splits=("train", "validation"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(("before", "after"), [((0, 1), (0, 2)), ((0, 2), (0, 1)), ((0, 2), (1, 3))])
def test_one_file_and_shards_of_it_are_not_mixed(tmp_path, before, after):
    (tmp_path / "a.jsonl").write_text(LINES)
    prepared(tmp_path / "out", [tmp_path / "a.jsonl"], shard=before)
    with pytest.raises(UserError, match=r"all\.bin is there already, .*\.bin\nallowed: the same --shard=i/n"):
        prepared(tmp_path / "out", [tmp_path / "a.jsonl"], shard=after)
    prepared(tmp_path / "other", [tmp_path / "a.jsonl"], shard=after)
    shutil.copytree(tmp_path / "other", tmp_path / "out", dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"is there as one file and in shards|names shards of 2 and of 3 files"):
        open_token_files(tmp_path / "out/all.bin")


def test_wrong_requests(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"no split 'test' of text\nallowed: train \| validation \| all"):
        prepared(tmp_path / "out", [tmp_path / "a.txt"], splits=["test"])
    with pytest.raises(UserError, match=r"no documents for .*validation\.bin"):
        prepared(tmp_path / "out", [tmp_path / "a.txt"], splits=["validation"])
    with pytest.raises(UserError, match=r"no documents for .*00001-of-00002\.bin\nallowed: .*take fewer"):
        prepared(tmp_path / "out", [tmp_path / "a.txt"], shard=(1, 2))
    assert not [name for name in contents(tmp_path / "out") if name != "tokenizer.json"]
    parts = text_parts([str(tmp_path / "a.txt")], ["all"], tmp_path / "out")
    for name in ("a/b", "source"):  # the sidecar of the latter would be the folder's source.json
        with pytest.raises(UserError, match=rf"--name={name} is no name"):
            renamed(parts, name)
    with pytest.raises(UserError, match="one name: x, x"):
        prepare(tmp_path / "out", renamed(parts * 2, "x"), "bytes")
    with pytest.raises(UserError, match="already exists and holds no token files"):
        require_usable(tmp_path, "bytes")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / ".tokenizer.json.1-ab").touch()  # what another process is just writing there
    require_usable(tmp_path / "begun", "bytes")
    with pytest.raises(UserError, match=r"a\.txt is a file"):
        require_usable(tmp_path / "a.txt", "bytes")
    (file,) = prepare(tmp_path / "out", renamed(parts, "mine"), "bytes")
    assert (file.path.name, file.info.split) == ("mine.bin", "all")
