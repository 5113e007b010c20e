"""Which text there is, its identity, its split, and what is said about bad files."""

import gzip
import hashlib
import itertools
import json
import shutil
import subprocess

import pytest

from orthojax.data import corpus as corpus_lib
from orthojax.data.corpus import embedded_corpus, text_corpus
from orthojax.data.splits import BY_NAME, divide, hold_out_by_text
from orthojax.data.text_files import Document
from orthojax.errors import UserError


@pytest.fixture(scope="module")
def stdlib():
    return embedded_corpus()


@pytest.fixture
def fake_stdlib(tmp_path):
    """A small standard library with one of everything that must stay out."""
    kept = {"abc.py": "a = 1\n", "json/decoder.py": "b = 'é'\n", "latest.py": "c\n", "zconfig.py": "d\n"}
    dropped = [
        *(
            "test/test_abc.py",
            "unittest/test/x.py",
            "email/tests/x.py",
            "site-packages/numpy/x.py",
            "dist-packages/y.py",
        ),
        *("idlelib/x.py", "lib2to3/pgen2/x.py", "distutils/x.py", "encodings/cp1252.py", "turtledemo/x.py"),
        *("tkinter/x.py", "ensurepip/x.py", "pydoc_data/topics.py", "__pycache__/x.py", "config-3.11-x86/x.py"),
        *("_sysconfigdata__linux_x86_64.py", "sitecustomize.py", "usercustomize.py", "x.pyc", "LICENSE.txt"),
    ]
    root = tmp_path / "python3.11"
    for name, text in [*kept.items(), *((name, "no") for name in dropped)]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "broken.py").symlink_to(root / "nowhere.py")
    return root, kept


def test_embedded_keeps_the_library_only(fake_stdlib):
    root, kept = fake_stdlib
    assert dict(embedded_corpus(root).documents()) == kept
    assert [name for name, _ in embedded_corpus(root).files] == sorted(kept)
    assert embedded_corpus(root).n_bytes == sum(len(text.encode()) for text in kept.values())


def test_real_embedded_corpus(stdlib):
    names = [name for name, _ in stdlib.files]
    assert {"argparse.py", "asyncio/tasks.py", "typing.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {
        "test",
        "tests",
        "encodings",
        "idlelib",
        "lib2to3",
        "distutils",
        "site-packages",
        "pydoc_data",
    }
    assert names == sorted(names)
    assert 300 < stdlib.file_count < 800
    assert 6e6 < stdlib.n_bytes < 12e6
    again = embedded_corpus()
    assert (again.sha256, again.files) == (stdlib.sha256, stdlib.files)


def test_embedded_split_is_by_file_and_stable(stdlib):
    train, validation = stdlib.split()
    assert not {name for name, _ in train} & {name for name, _ in validation}
    assert sorted(train + validation) == sorted(stdlib.documents())
    assert 0.05 < sum(len(text) for _, text in validation) / sum(len(text) for _, text in train + validation) < 0.10
    # A file stays where it is, whatever its text and whatever other files there are.
    _, alone = divide([Document(name, "changed") for name, _ in validation], BY_NAME)
    assert [name for name, _ in alone] == [name for name, _ in validation]


def test_sha256_is_that_of_a_checksum_listing(tmp_path):
    paths = [tmp_path / "a.txt", tmp_path / "b.md"]
    paths[0].write_text("one")
    paths[1].write_text("two")
    listing = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in paths)
    assert text_corpus(paths).sha256 == hashlib.sha256(listing.encode()).hexdigest()
    if shutil.which("sha256sum"):
        printed = subprocess.run(["sha256sum", "a.txt", "b.md"], cwd=tmp_path, capture_output=True, check=True).stdout
        assert text_corpus(paths).sha256 == hashlib.sha256(printed).hexdigest()


def test_sha256_depends_on_names_and_contents(fake_stdlib):
    root, _ = fake_stdlib
    before = embedded_corpus(root).sha256
    (root / "abc.py").write_text("a = 2\n")
    changed = embedded_corpus(root).sha256
    (root / "abc.py").rename(root / "abd.py")
    assert len({before, changed, embedded_corpus(root).sha256}) == 3


def test_no_sources(tmp_path):
    with pytest.raises(UserError, match=r"no standard library sources(.|\n)*data\.kind=text"):
        embedded_corpus(tmp_path)


def test_text_files(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffgrüße\r\n".encode())
    (tmp_path / "b.py.gz").write_bytes(gzip.compress(b"x = 1\n"))
    lines = [{"text": "one\u2028line"}, None, {"text": "", "id": 3}, {"text": "four"}]
    content = "\n".join("" if line is None else json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "c.jsonl").write_text(content, encoding="utf-8")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "e.txt").touch()
    names = ["a.txt", "b.py.gz", "c.jsonl", "d.jsonl.gz", "e.txt"]
    assert text_corpus([tmp_path / name for name in names]).documents() == [
        ("a.txt", "grüße\r\n"),
        ("b.py.gz", "x = 1\n"),
        ("c.jsonl:1", "one\u2028line"),
        ("c.jsonl:4", "four"),
        ("d.jsonl.gz:1", "one\u2028line"),
        ("d.jsonl.gz:4", "four"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine \xff", r"a\.txt is not UTF-8 text: byte 0xff at offset 5"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'\n{"content": "x"}', r'a\.jsonl, line 2: no string under "text"'),
        ("a.jsonl", b'{"text": 3}', r'a\.jsonl, line 1: no string under "text"'),
        ("a.jsonl", b'["text"]', r'a\.jsonl, line 1: no string under "text"'),
        ("a.jsonl", b'{"text": "ab\\ud800"}', r"a\.jsonl, line 1: .*not valid Unicode at character 2"),
        ("a.jsonl", b"\n\n", r"no text in a\.jsonl"),
        ("a.txt", b"", r"no text in a\.txt"),
        ("a.txt.gz", b"plain", r"a\.txt\.gz is not a complete gzip file"),
        ("a.txt.gz", gzip.compress(b"cut short" * 9, mtime=0)[:-9], r"a\.txt\.gz is not a complete gzip file"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        text_corpus([tmp_path / name]).documents()
    assert str(error.value).count("\n") <= 2


def test_bad_paths(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        text_corpus([tmp_path])
    with pytest.raises(UserError, match=r"there is no file .*missing\.txt"):
        text_corpus([tmp_path / "missing.txt"])
    with pytest.raises(UserError, match="no text files"):
        text_corpus([])


def split_by_text(documents):
    return divide(documents, hold_out_by_text(iter(documents)))


def test_text_split_of_many_documents():
    documents = [Document(str(i), f"text {i % 20}") for i in range(40)]
    train, validation = split_by_text(documents)
    assert sorted(train + validation) == sorted(documents)
    assert len(validation) == 4
    assert not {text for _, text in train} & {text for _, text in validation}  # twins stay together
    renamed = [Document("other " + name, text) for name, text in reversed(documents)]
    assert {text for _, text in split_by_text(renamed)[1]} == {text for _, text in validation}


def test_text_split_of_text_without_end():
    """A tenth of it, to four standard deviations, from a look at its beginning, whatever is repeated there."""
    repeated = (Document("", f"text {i % 3}") for i in range(9_000))
    hold_out = hold_out_by_text(itertools.chain(repeated, (Document("", f"text {i}") for i in itertools.count())))
    later = [Document("", f"later text {i}") for i in range(20_000)]
    _, validation = divide(later, hold_out)
    assert len(validation) / len(later) == pytest.approx(0.1, abs=4 * (0.09 / 4096 + 0.09 / 20_000) ** 0.5)


@pytest.mark.parametrize(
    "documents",
    [[Document("a", "0123456789" * 7), Document("b", "short")], [Document(str(i), "x" * 30) for i in range(25)]],
)
def test_text_split_of_few_or_equal_documents(documents):
    train, validation = split_by_text(documents)
    joined = {name: text for name, text in train}
    for name, text in validation:
        assert len(text) == len(documents[0].text) // 10
        joined[name] += text
    assert joined == dict(documents)


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("nine char")
    with pytest.raises(UserError, match="too little text"):
        text_corpus([tmp_path / "a.txt"]).split()


def test_rules_name_folders_only():
    assert not any("/" in name or name.endswith(".py") for name in corpus_lib.DROPPED_FOLDERS)
