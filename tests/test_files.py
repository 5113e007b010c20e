"""Files: written in one step, read with an error that names them, whatever is in their place."""

import errno
import os
import re
import threading
from pathlib import Path

import pytest

from orthojax import files
from orthojax.errors import UserError, as_user_error
from orthojax.places import find_checkpoint, find_place


@pytest.mark.parametrize("content", [
    b"", b'{"a": ', b"\xff\xfe", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000, b"[1]", b"null", b"3", bytes(100),
    '{"é": 1}'.encode("latin-1"), '{"a": 1}'.encode("utf-16"), b'\xef\xbb\xbf{"a": 1}',
], ids="empty cut encoding integer nested list null number zeros latin-1 utf-16 marked".split())  # fmt: skip
def test_damaged_json_names_the_file(tmp_path, content):
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"report\.json") as raised:
        files.read_json(path, "report")
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("address", ["gs://bucket/x", "s3://bucket", "hf://datasets/x", "file:///x", "memory://x"])
def test_addresses_are_no_paths(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "C").mkdir()
    for refuse in (
        lambda path: files.make_folder(path, "workdir"),
        lambda path: files.require_file(path, "token file"),
        lambda path: files.read_json(path, "config"),
        find_place,
        find_checkpoint,
    ):
        with pytest.raises(UserError, match=re.escape(address.replace(":///", "://")) + " is an address"):
            refuse(Path(address))
    for path in ("a:b", "C:/x", "a/b://c", "C"):
        files.require_local(path, "workdir")
    assert [path.name for path in tmp_path.iterdir()] == ["C"]


def test_files_with_a_digest_are_read_until_they_are_changed(tmp_path):
    path = tmp_path / "computed.json"
    path.with_suffix(".npz").write_bytes(b"arrays")
    files.write_with_digest(path, {"rows": [{"metrics": {"x": 0.1}, "axes": (1, 2)}]})
    content = path.read_bytes()
    assert files.read_with_digest(path, "rows") == {"rows": [{"metrics": {"x": 0.1}, "axes": [1, 2]}]}
    for changed, new in ((path, content.replace(b"0.1", b"0.2")), (path.with_suffix(".npz"), b"others")):
        path.write_bytes(content)
        changed.write_bytes(new)
        with pytest.raises(UserError, match=r"computed\.json or its arrays were changed"):
            files.read_with_digest(path, "rows")


def test_what_is_kept_is_made_once(tmp_path):
    made = []
    for _ in range(2):
        assert files.kept(tmp_path / "a.json", "note", lambda: made.append(1) or {"x": 0.1}) == {"x": 0.1}
    assert made == [1]
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("0.1", "0.2"))
    with pytest.raises(UserError, match=r"a\.json or its arrays were changed"):
        files.kept(tmp_path / "a.json", "note", dict)


def test_lines_that_are_no_objects_are_left_out(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"a": 1}\n{"a"\n[2]\n\xff\n{"a": 3}')
    assert files.read_json_lines(tmp_path / "log.jsonl", "log") == [{"a": 1}, {"a": 3}]
    with pytest.raises(UserError, match="no such log"):
        files.read_json_lines(tmp_path / "lg.jsonl", "log")


def test_identity_of_a_folder_changes_with_its_files_outside_of_the_workdir(tmp_path):
    (tmp_path / "model").write_text("a")
    (tmp_path / "work").mkdir()
    before = files.identity(tmp_path, tmp_path / "work")
    assert before == files.identity(tmp_path / "model")
    (tmp_path / "work/report").write_text("b")
    assert files.identity(tmp_path, tmp_path / "work") == before != files.identity(tmp_path)
    os.utime(tmp_path / "model", ns=(0, 0))
    assert files.identity(tmp_path, tmp_path / "work") != before


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "pipe", "link", "absent", "a" * 300):  # a pipe would block
        with pytest.raises(UserError, match=f"report .*{name}|report: .*{name}"):
            files.read_json(tmp_path / name, "report")
    with pytest.raises(UserError, match=r"did you mean '.*/folder'"):
        files.require_file(tmp_path / "foldr", "report")


def test_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "file/new", "link", "link/new", "a" * 300):
        with pytest.raises(UserError, match="workdir .*/" + name):
            files.make_folder(tmp_path / name, "workdir")
    (tmp_path / "report.md").mkdir()
    with pytest.raises(UserError, match=r"report\.md is a folder"):
        files.make_folder(tmp_path, "workdir", files=("results.json", "report.md"))
    files.make_folder(tmp_path / "new/folder", "workdir", files=("report.md",))
    assert not list((tmp_path / "new/folder").iterdir())


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="needs a folder that nobody can write to")
def test_folder_that_cannot_be_written_to_is_refused():
    with pytest.raises(UserError, match="workdir /proc/self"):
        files.make_folder(files.Path("/proc/self"), "workdir")


def test_failed_write_keeps_the_old_content(tmp_path):
    path = tmp_path / "a"
    files.write_text(path, "old")

    def fail(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"/a'"):  # the error has the name of the file
        files.write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    path, left, other = tmp_path / "a.json", tmp_path / ".a.json.99-00ff.tmp", tmp_path / ".b.json.99-00ff.tmp"
    for file in (left, other):
        file.write_text("half")
        os.utime(file, (0, 0))

    def write(file):
        (own,) = (found for found in tmp_path.glob(".a.json*") if found != left)
        os.utime(own, (0, 0))
        files.write_text(path, "inner")  # by another writer, which leaves that of a living one alone
        assert own.exists()
        file.write(b"outer")

    files.write_atomically(path, write)
    assert path.read_text() == "outer"
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_bytes_that_are_not_utf8_are_escaped_in_texts_and_refused_in_paths(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    files.write_text(tmp_path / "report.md", f"of {name}")
    assert (tmp_path / "report.md").read_bytes() == rb"of caf\udce9"
    files.require_utf8(tmp_path / "größer", "workdir")
    with pytest.raises(UserError, match=r"workdir .*caf"):
        files.require_utf8(tmp_path / name / "run", "workdir")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS])
def test_full_or_protected_disk_is_a_user_error(code):
    assert "report.json" in str(as_user_error(OSError(code, os.strerror(code), "report.json")))


def test_missing_file_is_a_crash_unless_said_otherwise():
    assert as_user_error(FileNotFoundError(errno.ENOENT, "No such file", "report.json")) is None


def test_messages_do_not_steer_the_terminal():
    error = UserError("no a", allowed="\x1b[31mred\r\x9b", hint="c")
    assert str(error).splitlines() == ["no a", "allowed: \\x1b[31mred\\r\\x9b", "c"]
    assert str(UserError("/tmp/\u00e9 e.txt", hint="c")) == "/tmp/\u00e9 e.txt\nc"


def test_what_a_killed_process_left_is_removed_at_once_and_what_is_being_written_stays(tmp_path):
    left, written = (tmp_path / f".a.json.{i}-0.tmp" for i in range(2))
    left.touch()
    with written.open("wb") as file:
        assert files.try_lock(file)
        files.write_text(tmp_path / "a.json", "{}")
        assert sorted(tmp_path.iterdir()) == [written, tmp_path / "a.json"]


def test_a_file_that_another_process_takes_for_left_over_is_begun_again(tmp_path, monkeypatch):
    def try_lock(file):
        if not taken:  # as by another process, between its creation and its lock
            taken.append(Path(file.name).unlink())
        return lock(file)

    taken, lock = [], files.try_lock
    monkeypatch.setattr(files, "try_lock", try_lock)
    files.write_text(tmp_path / "a.json", "{}")
    assert taken
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_one_process_makes_a_file_and_has_a_folder(tmp_path, capsys):
    made = []

    def make():
        with files.one_writer(tmp_path / "a"):
            made.append(len(made))

    with files.one_writer(tmp_path / "a"):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert not made
    thread.join(10)
    assert made == [0]
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err.count("waiting for another process") == 1
    with files.folder_of_one(tmp_path / "b", "workdir"), pytest.raises(UserError, match="another process is working"):
        with files.folder_of_one(tmp_path / "b", "workdir"):
            pass
