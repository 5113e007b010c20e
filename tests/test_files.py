"""Files: written in one step, read with an error that names them, whatever is in their place."""

import os
import re

import pytest

from orthojax import files
from orthojax.errors import UserError


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


def test_a_write_reaches_the_disk_before_its_name_does(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, files.Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(files.Path, "replace", lambda self, target: (order.append("rename"), replace(self, target)))
    files.write_text(tmp_path / "a", "text")
    assert order == ["fsync", "rename"]
    assert (tmp_path / "a").read_text() == "text"
