"""Documents of .parquet and .arrow files: every row once, from any row on, and what is refused."""

import subprocess
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet
from test_commands import run

from orthojax.data import text_corpus
from orthojax.data.documents import find_files, read_documents
from orthojax.errors import UserError

TEXTS = ["first text", "", "größer", None, *(f"row {i}" for i in range(4, 25))]
TABLE = pa.table({"id": list(range(25)), "text": TEXTS})
EXPECTED = [(f"t:{i + 1}", text) for i, text in enumerate(TEXTS) if text]


def parquet_file(folder, table=TABLE):
    parquet.write_table(table, folder / "t.parquet", row_group_size=7)
    return folder / "t.parquet"


def arrow_file(folder, table=TABLE):
    with pa.OSFile(str(folder / "t.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    return folder / "t.arrow"


KINDS = pytest.mark.parametrize("write", [parquet_file, arrow_file])


@KINDS
def test_every_row_is_a_document_also_from_the_middle_on(tmp_path, write):
    path = write(tmp_path)
    items = list(read_documents("t", path))
    assert [tuple(item.document) for item in items] == EXPECTED
    assert items[-1].position == len(TEXTS)
    offsets = [item.offset for item in items]
    assert offsets == sorted(offsets)
    assert 0 < offsets[0] < offsets[-1] <= path.stat().st_size
    for i, item in enumerate(items):
        assert list(read_documents("t", path, item.position)) == items[i + 1 :]


@KINDS
def test_texts_may_be_large_strings(tmp_path, write):
    table = pa.table({"text": pa.array(["a", "b"], pa.large_string())})
    assert [item.document.text for item in read_documents("t", write(tmp_path, table))] == ["a", "b"]


@KINDS
def test_a_table_without_rows_has_no_documents(tmp_path, write):
    assert list(read_documents("t", write(tmp_path, TABLE.slice(0, 0)))) == []


def test_of_a_folder_of_tables_nothing_else_is_read(tmp_path):
    (tmp_path / "dataset_info.json").write_text("{}")
    assert [name for name, _ in find_files([tmp_path])] == ["dataset_info.json"]
    arrow_file(tmp_path)
    assert [name for name, _ in find_files([tmp_path])] == ["t.arrow"]
    assert [document.text for document in text_corpus([tmp_path]).documents()] == [text for _, text in EXPECTED]


@KINDS
def test_the_command_prepares_them(tmp_path, write):
    write(tmp_path)
    done = run("prepare", f"--input=t{write(tmp_path).suffix}", "--split=all", "--output=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    size = sum(len(text.encode()) for _, text in EXPECTED)
    assert f"{size + len(EXPECTED)} tokens, {len(EXPECTED)} documents, {size} bytes" in done.stdout


@KINDS
@pytest.mark.parametrize(
    ("table", "says"),
    [
        (pa.table({"body": ["x"], "id": [1]}), r"no column 'text'\nallowed: one; it has body, id"),
        (pa.table({"text": [1, 2]}), r"has the type int64\nallowed: string"),
    ],
)
def test_tables_without_texts_are_refused(tmp_path, write, table, says):
    with pytest.raises(UserError, match=says):
        list(read_documents("t", write(tmp_path, table)))


@KINDS
def test_damaged_files_are_refused(tmp_path, write):
    path = write(tmp_path)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"no table"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"is not a complete {path.suffix} file"):
            list(read_documents("t", path))


def test_without_the_package_the_extra_is_named(tmp_path):
    code = "import sys\nsys.modules['pyarrow'] = None\nfrom orthojax.data.tables import read_texts\n"
    code += f"from pathlib import Path\nprint(next(read_texts(Path({str(parquet_file(tmp_path))!r}))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'orthojax[parquet]'" in done.stderr
