"""Preparing token files: the same bytes after a kill at any moment, and from several processes; what is refused."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from orthojax.data import token_writer
from orthojax.data.documents import Document, text_corpus
from orthojax.data.preparation import HoldOut, prepare, renamed, require_usable, text_parts
from orthojax.data.token_files import open_token_file, open_token_files
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError

TEXTS = [f"text {i} größer " * (1 + i % 7) for i in range(60)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINES)
    return tmp_path / "a.jsonl"


def prepared(folder, path, tokenizer="bytes", splits=("all",), **options):
    return prepare(folder, text_parts([str(path)], splits, folder), tokenizer, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "source.json"}


def killed(*_):
    raise KeyboardInterrupt


def test_what_was_found_out_about_the_text_is_kept(text, tmp_path):
    notes = tmp_path / "out/source.json"

    def part():
        return text_parts([str(text)], ["validation"], tmp_path / "out")[0]

    def edit(**changes):  # as earlier versions wrote it, without a checksum
        values = json.loads(notes.read_text()) | changes
        values.pop("content_sha256", None)
        notes.write_text(json.dumps(values))

    sha256 = part().source.sha256
    assert json.loads(notes.read_text())["sha256"] == sha256 == text_corpus([text]).sha256
    # A rule that an earlier version found stays that of the folder, also if only the date of the file is another.
    edit(hold_out={"rule": "text", "limit": 2**62})
    wanted = [HoldOut("text", 2**62).part("validation", Document("", text)) for text in TEXTS]
    for seconds in (None, 0, 1_000):
        if seconds is not None:
            os.utime(text, (seconds, seconds))
        assert part().source.sha256 == sha256
        assert list(map(part().text, part().source.documents())) == wanted
    # As long as nothing changed, the text is not even read again for its sha256.
    edit(sha256="0" * 64)
    assert part().source.sha256 == "0" * 64
    text.write_text(LINES + '{"text": "more"}\n')
    assert part().source.sha256 == text_corpus([text]).sha256


def test_an_edited_rule_is_noticed(text, tmp_path):
    """Otherwise a smaller limit would move documents of validation into train."""
    notes = tmp_path / "out/source.json"
    text_parts([str(text)], ["train"], notes.parent)
    values = json.loads(notes.read_text())
    values["hold_out"]["limit"] //= 2
    notes.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"source\.json was edited: it does not match its checksum\ndelete it, and"):
        text_parts([str(text)], ["train"], notes.parent)


def test_splits_of_one_text_are_made_in_one_pass(text, tmp_path):
    parts, reads, reported = text_parts([str(text)], ["train", "validation"], tmp_path / "out"), [], []
    source = dataclasses.replace(parts[0].source, pieces=lambda *shard: reads.append(shard) or pieces(*shard))
    pieces = parts[0].source.pieces
    parts = [dataclasses.replace(part, source=source) for part in parts]
    prepare(tmp_path / "out", parts, "bytes", progress=lambda *call: reported.append(call))
    assert reads == [(0, 1)]
    assert {what for what, *_ in reported} == {"train and validation"}
    assert reported[-1][1] == reported[-1][2] == text.stat().st_size
    for part in parts:
        file = open_token_file(tmp_path / f"out/{part.name}.bin", verify=True)
        assert ByteTokenizer().decode(file.tokens) == "".join(map(part.text, source.documents()))


# Interrupted at any moment.

KILLED = """
import sys, time
from orthojax.data import preparation, token_writer, tokenizers
token_writer._BATCH_CHARACTERS, token_writer._SAVE_SECONDS = 300, 0.0
encode = tokenizers.Tokenizer.encode_batch
def slow(self, texts):
    time.sleep(float(sys.argv[2]))
    return encode(self, texts)
tokenizers.Tokenizer.encode_batch = slow
from pathlib import Path
folder = Path(sys.argv[1])
parts = preparation.text_parts([str(folder.parent / "a.jsonl")], ["train", "validation"], folder)
preparation.prepare(folder, parts, "bpe:300")
"""


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_files_are_the_same(text, tmp_path, kills):
    text.write_text(LINES * 4)
    prepared(tmp_path / "whole", text, "bpe:300", ("train", "validation"))
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


@pytest.mark.parametrize("moment", ["before the file", "before the sidecar", "before the note goes"])
def test_killed_while_it_is_moved_into_place(text, tmp_path, monkeypatch, moment):
    prepared(tmp_path / "whole", text)
    with monkeypatch.context() as patch:
        if moment == "before the file":
            real = os.replace
            patch.setattr(os, "replace", lambda a, b: killed() if str(b).endswith(".bin") else real(a, b))
        elif moment == "before the sidecar":
            patch.setattr(token_writer, "write_sidecar", killed)
        else:
            patch.setattr(type(tmp_path), "unlink", lambda path, **_: killed() if "partial" in path.name else None)
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path / "killed", text)
    for path in (tmp_path / "killed").glob(".*"):  # temporary files stay
        os.remove(path)
    prepared(tmp_path / "killed", text)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


# Refused.


def test_what_was_created_from_something_else_is_kept(text, tmp_path, monkeypatch):
    (tmp_path / "b.jsonl").write_text(LINES + LINES)
    out, partial = tmp_path / "out", tmp_path / "out/all.bin.partial"

    def refused(message, path=text, tokenizer="bytes"):
        before = contents(out)
        with pytest.raises(UserError, match=message):
            prepared(out, path, tokenizer)
        assert contents(out) == before

    with monkeypatch.context() as patch:
        patch.setattr(token_writer, "write_sidecar", killed)
        with pytest.raises(KeyboardInterrupt):
            prepared(out, text)
    (out / "all.bin").rename(partial)
    different = r"was created with a different source: 'a\.jsonl', not 'b\.jsonl'"
    refused(rf"all\.bin\.partial\.json {different}", tmp_path / "b.jsonl")
    refused(r"tokenizer\.json is not the tokenizer 'bpe:270'", tokenizer="bpe:270")
    partial.write_bytes(b"short")
    refused(r"all\.bin\.partial is shorter than .*\ndelete both files")
    (out / "all.bin.partial.json").write_text("{")
    refused(r"partial\.json is not valid JSON: .*\ndelete it and all\.bin\.partial")
    for path in out.glob("*.partial*"):
        path.unlink()
    prepared(out, text)
    whole = contents(out)
    refused(rf"all\.bin {different}", tmp_path / "b.jsonl")
    (out / "all.json").unlink()
    refused(r"has no sidecar all\.json\ndelete it and rebuild it")
    for left in ([], ["all.json"]):  # what was deleted is made again
        for name in {"all.bin", "all.json"}.difference(left):
            (out / name).unlink(missing_ok=True)
        prepared(out, text)
        assert contents(out) == whole


def test_two_processes_do_not_write_one_file(text, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "out"
    out.mkdir()
    with open(out / "all.bin.partial", "ab") as other:
        (out / "tokenizer.json").write_text(ByteTokenizer().serialized)
        fcntl.flock(other, fcntl.LOCK_EX)
        message = r"another process is writing .*all\.bin\nallowed: one process for each shard"
        with pytest.raises(UserError, match=message):
            prepared(out, text)
        assert (out / "all.bin.partial").exists()
        train, all_of_it = text_parts([str(text)], ["train", "all"], out)
        with pytest.raises(UserError, match=message):
            prepare(out, [train, all_of_it], "bytes")
        assert not list(out.glob("train.*"))
    prepared(out, text)


@pytest.mark.parametrize("complete", [False, True])
def test_a_process_that_comes_while_a_file_is_moved_into_place_takes_nothing_away(
    text, tmp_path, monkeypatch, complete
):
    pytest.importorskip("fcntl")
    real, out, came = token_writer.write_sidecar, tmp_path / "out", []

    def interrupted(path, info):
        monkeypatch.setattr(token_writer, "write_sidecar", real)
        if complete:
            real(path, info)
            came.extend(prepared(out, text))
            return
        with pytest.raises(UserError, match="another process is writing") as error:
            prepared(out, text)
        came.append(error)
        real(path, info)

    monkeypatch.setattr(token_writer, "write_sidecar", interrupted)
    prepared(out, text)
    assert came
    assert {path.name for path in out.iterdir()} == {"all.bin", "all.json", "tokenizer.json"}
    open_token_file(out / "all.bin", verify=True)


@pytest.mark.parametrize(("before", "after"), [((0, 1), (0, 2)), ((0, 2), (0, 1)), ((0, 2), (1, 3))])
def test_one_file_and_shards_of_it_are_not_mixed(text, tmp_path, before, after):
    prepared(tmp_path / "out", text, shard=before)
    with pytest.raises(UserError, match=r"all\.bin is there already, .*\.bin\nallowed: the same --shard=i/n"):
        prepared(tmp_path / "out", text, shard=after)
    prepared(tmp_path / "other", text, shard=after)
    shutil.copytree(tmp_path / "other", tmp_path / "out", dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"exists both as one file and as shards|names shards of 2 and of 3 files"):
        open_token_files(tmp_path / "out/all.bin")


def test_wrong_requests(tmp_path):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("text")
    with pytest.raises(UserError, match=r"no split 'test' of text\nallowed: train \| validation \| all"):
        prepared(out, path, splits=["test"])
    with pytest.raises(UserError, match=r"no text for the token file validation\.bin in a\.txt"):
        prepared(out, path, splits=["validation"])
    assert not [name for name in contents(out) if name != "tokenizer.json"]
    parts = text_parts([str(path)], ["all"], out)
    for name in ("a/b", "source"):  # the sidecar of the latter would be the folder's source.json
        with pytest.raises(UserError, match=rf"--name={name} is not the name"):
            renamed(parts, name)
    with pytest.raises(UserError, match="one name: x, x"):
        prepare(out, renamed(parts * 2, "x"), "bytes")
    with pytest.raises(UserError, match="already exists and holds no token files"):
        require_usable(tmp_path, "bytes")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / ".tokenizer.json.1-ab").touch()  # what another process is just writing there
    require_usable(tmp_path / "begun", "bytes")
    with pytest.raises(UserError, match=r"a\.txt is a file"):
        require_usable(path, "bytes")
    (file,) = prepare(out, renamed(parts, "mine"), "bytes")
    assert (file.path.name, file.info.split) == ("mine.bin", "all")
