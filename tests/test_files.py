"""Files: written in one step, read with an error that names them, whatever is in their place."""

import errno
import os
import re

import pytest

from orthojax import files
from orthojax.errors import UserError, advice


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[1]", "holds a JSON list"),
        (b"null", "holds a JSON NoneType"),
    ],
    ids=["empty", "cut", "encoding", "integer", "lists", "objects", "list", "null"],
)
def test_damaged_json_names_the_file(tmp_path, content, problem):
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem) as raised:
        files.read_json(path, "report")
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 600


def test_read_json_returns_the_object(tmp_path):
    path = tmp_path / "report.json"
    files.write_text(path, '{"a": [1, 2.5, "\u00e9"]}')
    assert files.read_json(path, "report") == {"a": [1, 2.5, "\u00e9"]}


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    cases = {"folder": "is a folder", "pipe": "a pipe", "link": "a link to nowhere", "absent": "no such report"}
    for name, problem in cases.items():
        with pytest.raises(UserError, match=re.escape(problem)):
            files.read_json(tmp_path / name, "report")  # a pipe would block
    with pytest.raises(UserError, match="no such report"):
        files.read_json(tmp_path / ("a" * 300), "report")


def test_a_folder_that_cannot_be_used_is_refused_with_the_reason_before_the_work(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("nowhere")
    cases = {
        "file": f"workdir {tmp_path}/file is a file",
        "file/new": f"workdir {tmp_path}/file/new: {tmp_path}/file is a file",
        "link": f"workdir {tmp_path}/link is a link to nowhere, which does not exist",
        "link/new": f"{tmp_path}/link is a link to nowhere, which does not exist",
        "a" * 300: "File name too long",
    }
    for name, problem in cases.items():
        with pytest.raises(UserError) as raised:
            files.make_folder(tmp_path / name, "workdir")
        assert problem in str(raised.value)
        assert len(str(raised.value)) < 500
    (tmp_path / "report.md").mkdir()
    with pytest.raises(UserError, match=r"report\.md is a folder"):
        files.make_folder(tmp_path, "workdir", files=("results.json", "report.md"))
    files.make_folder(tmp_path / "new/folder", "workdir", files=("report.md",))
    assert not list((tmp_path / "new/folder").iterdir())


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="needs a folder that nobody can write to")
def test_a_folder_that_exists_and_cannot_be_written_is_refused():
    with pytest.raises(UserError, match="workdir /proc/self cannot be written: "):
        files.make_folder(files.Path("/proc/self"), "workdir")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "free some space"), (errno.EDQUOT, "quota"), (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "ulimit -n"), (errno.EACCES, "permissions"), (errno.EROFS, "file system that can be written"),
        (errno.ENAMETOOLONG, "shorter name"), (errno.EISDIR, "folder"), (errno.ENOENT, ""), (errno.EINTR, ""),
    ],
)  # fmt: skip
def test_every_error_of_the_system_has_its_own_advice_also_where_a_library_wrapped_it(code, words):
    error = OSError(code, os.strerror(code), "file")
    assert words in advice(error)
    assert bool(advice(error)) == bool(words)
    wrapped = RuntimeError("writing failed")
    wrapped.__cause__ = error
    assert advice(wrapped) == advice(error) == advice(ValueError(f"UNKNOWN: {os.strerror(code)} [file]"))
    assert advice(KeyError("a defect")) == ""


def test_messages_are_short_and_do_not_steer_the_terminal():
    error = UserError("no " + "a" * 5000 + " in /" + "/".join(["b" * 50] * 200), allowed="\x1b[31mred\r\x9b", hint="c")
    first, second, third = str(error).splitlines()
    assert len(first) < 1000
    assert first.startswith("no aaaa")
    assert (second, third) == ("allowed: \\x1b[31mred\\r\\x9b", "c")
    name = "/tmp/" + "d" * 100 + "/é e.txt"
    assert str(UserError(name)) == name


def test_a_write_reaches_the_disk_before_its_name_does(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, files.Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(files.Path, "replace", lambda self, target: (order.append("rename"), replace(self, target)))
    files.write_text(tmp_path / "a", "text")
    assert order == ["fsync", "rename"]
    assert (tmp_path / "a").read_text() == "text"
