"""Preparing token files: the rule that divides text, repeated passages, kills, and the bytes in them."""

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_commands import run

from orthojax.config import DataConfig
from orthojax.data import PackedBatches, Part, open_dataset, prepare, repeat_passages, text_parts
from orthojax.data.preparation import hold_out_by_text
from orthojax.data.sources import Document, Piece, Source
from orthojax.data.token_files import JoinedTokens, open_token_file, sidecar_path, write_token_file
from orthojax.data.tokenizers import ByteTokenizer, load_tokenizer
from orthojax.errors import UserError
from orthojax.files import one_writer, read_with_digest

TEXTS = [f"text {i} größer " * (1 + i % 7) for i in range(60)]
SPLITS = ("train", "validation")


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(TEXTS))
    return tmp_path / "a.jsonl"


def prepared(folder, path, tokenizer="bytes", splits=("all",), **options):
    return prepare(folder, text_parts([str(path)], splits), tokenizer, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ids_of(texts):
    return [i for text in texts for i in (*text.encode(), 257)]


def split_by_text(documents):
    rule = hold_out_by_text(iter(documents))
    parts = [[Document(d.name, rule(split, d)) for d in documents] for split in SPLITS]
    return [[document for document in part if document.text] for part in parts]


def test_equal_texts_are_on_the_same_side():
    documents = [Document(str(i), f"text {i % 20}") for i in range(40)]
    train, validation = split_by_text(documents)
    assert sorted(train + validation) == sorted(documents)
    assert len(validation) == 4
    held_out = {text for _, text in validation}
    assert held_out.isdisjoint(text for _, text in train)
    renamed = [Document("other " + name, text) for name, text in reversed(documents)]
    assert {text for _, text in split_by_text(renamed)[1]} == held_out


def test_a_tenth_of_endless_text_is_held_out():
    """To four standard deviations, from its beginning, whatever is repeated there."""
    repeated = (Document("", f"text {i % 3}") for i in range(9_000))
    rule = hold_out_by_text(itertools.chain(repeated, (Document("", f"text {i}") for i in itertools.count())))
    later = [rule("validation", Document("", f"later text {i}")) for i in range(20_000)]
    assert sum(map(bool, later)) / len(later) == pytest.approx(0.1, abs=4 * (0.09 / 4096 + 0.09 / 20_000) ** 0.5)


@pytest.mark.parametrize(
    "documents",
    [[Document("a", "0123456789" * 7), Document("b", "short")], [Document(str(i), "x" * 30) for i in range(25)]],
)
def test_few_or_equal_documents_lose_their_ends(documents):
    train, validation = split_by_text(documents)
    joined = {name: text for name, text in train}
    for name, text in validation:
        assert len(text) == len(documents[0].text) // 10
        joined[name] += text
    assert joined == dict(documents)


# Every character differs from its neighbours for 20,000 characters, so that a repeat cannot be mistaken.
NUMBERED = "".join(chr(0x4E00 + i) for i in range(20_000))


def passages(text):
    """The passages of a text made of `NUMBERED`, and how often each is written; neighbours written once are joined."""
    found, start = [], 0
    while start < len(text):
        first = text[start]
        later = {i for i in (text.find(first, start + 1), text.rfind(first, start + 1)) if i > 0}
        end = min(later) if later else next((i for i in range(start + 1, len(text)) if text.count(text[i]) > 1), None)
        found.append((text[start:end], 1 + len(later)))
        start += len(found[-1][0]) * found[-1][1]
    return found


def test_every_passage_is_written_two_or_three_times():
    found = passages(repeat_passages(NUMBERED, 1.0))
    assert "".join(passage for passage, _ in found) == NUMBERED
    lengths = [len(passage) for passage, _ in found]
    assert set(lengths[:-1]) <= set(range(40, 111))
    assert len(set(lengths)) > 60  # of 71 lengths, with 266 passages
    times = np.array([many for _, many in found])
    assert set(times.tolist()) == {2, 3}
    assert abs(np.mean(times == 3) - 0.3) < 3 * np.sqrt(0.3 * 0.7 / len(times))


def test_larger_share_repeats_what_a_smaller_one_does():
    third, two_thirds = ({p for p, many in passages(repeat_passages(NUMBERED, s)) if many > 1} for s in (1 / 3, 2 / 3))
    assert third < two_thirds
    assert 0.23 < sum(map(len, third)) / len(NUMBERED) < 0.43


@given(st.text(max_size=600), st.floats(0, 1))
def test_any_text_can_be_repeated(text, share):
    made = repeat_passages(text, share)
    assert made == repeat_passages(text, share)
    assert len(text) <= len(made) <= 3 * len(text)
    assert made.startswith(text[:40])
    assert repeat_passages(text, 0.0) == text


def test_files_hold_the_documents_of_their_splits(text, tmp_path):
    """A BPE is trained on the first of them."""
    parts, reported = text_parts([str(text)], SPLITS), []
    files = prepare(tmp_path / "out", parts, "bpe:270", progress=lambda *call: reported.append(call))
    assert [what for what, *_ in reported][:2] == ["training bpe:270", "train"]
    assert reported[-1] == ("validation", *(text.stat().st_size,) * 2, len(files[1].tokens))
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer.json")
    for part, file in zip(parts, files, strict=True):
        wanted = [kept for document in part.source.documents() if (kept := part.text(document))]
        assert tokenizer.decode(file.tokens) == "".join(wanted)
        assert (file.info.n_documents, file.info.n_bytes) == (len(wanted), sum(len(kept.encode()) for kept in wanted))


def test_text_of_many_batches_is_whole(tmp_path):
    texts = [f"{i} " + "word " * 9_000 for i in range(60)]  # 2.7 million characters
    (tmp_path / "a.jsonl").write_text(lines(texts))
    (file,) = prepared(tmp_path / "out", tmp_path / "a.jsonl")
    assert file.tokens.tolist() == ids_of(texts)


def test_a_long_document_is_tokenised_in_pieces(tmp_path):
    """As one document, also if it has no lines to cut it at."""
    texts = {"lines.txt": "0123 5678\n" * 500_000, "none.txt": "x" * 5_000_000}
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
    files = [str(tmp_path / name) for name in texts]
    (file,) = prepare(tmp_path / "out", text_parts(files, ["all"]), "bytes")
    assert file.info.n_documents == 2
    np.testing.assert_array_equal(file.tokens, ids_of(texts.values()))


def test_a_bpe_of_much_text_sees_all_files(tmp_path):
    """Of 72 MB in three files, in the last of which alone is a word."""
    for i, word in enumerate(("aa ", "bb ", "zqzq ")):
        (tmp_path / f"{i}.txt").write_text(word * (24_000_000 // len(word)))
    (tmp_path / "small.txt").write_text("some")
    parts = text_parts([str(tmp_path / f"{i}.txt") for i in range(3)], ["all"])
    small = Part("all", "all", parts[0].source, lambda document: document.text[:1000])  # what is read, not all of it
    prepare(tmp_path / "out", [small], "bpe:262")
    assert len(load_tokenizer(tmp_path / "out/tokenizer.json").encode_batch(["zqzqzqzq"])[0]) < 8


def test_the_command_prepares_what_datasets_reads(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "t.parquet")
    done = run("prepare", "--input=t.parquet", "--split=all", "--name=mine", "--output=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert open_token_file(tmp_path / "out/mine.bin", verify=True).tokens.tolist() == ids_of(TEXTS)
    (tmp_path / "t.parquet").write_bytes(b"no table")
    done = run("prepare", "--input=t.parquet", "--split=all", "--output=other", cwd=tmp_path)
    assert done.returncode == 2
    assert "t.parquet" in done.stderr.splitlines()[-1]
    assert sum("%" not in line for line in done.stderr.splitlines()) <= 3


def joined(folder, name):
    return b"".join(path.read_bytes() for path in sorted(folder.glob(f"{name}*.bin")))


@pytest.mark.parametrize(("kills", "workers"), [(3, 1), pytest.param(20, 2, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(tmp_path, kills, workers):
    """Only complete files are there after a kill, and those stay as they are."""
    for i in range(8):
        (tmp_path / f"{i}.jsonl").write_text(lines(f"{i} {text}" * 500 for text in TEXTS * 2))
    inputs = text_parts([str(tmp_path / "*.jsonl")], SPLITS)
    prepare(tmp_path / "whole", inputs, "bytes")
    flags = ["--input=*.jsonl", "--output=killed", "--tokenizer=bytes", "--shards=8", f"--workers={workers}"]
    random, kept, killed = np.random.default_rng(0), {}, tmp_path / "killed"
    for _ in range(kills):
        left = {*killed.glob(".*.tmp")}
        process = subprocess.Popen([sys.executable, "-m", "orthojax", "prepare", *flags], cwd=tmp_path)
        deadline = time.monotonic() + 60
        while process.poll() is None and not {*killed.glob(".*.tmp")} - left and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        complete = {path: path.stat().st_mtime_ns for path in killed.glob("*.bin")}
        assert kept.items() <= complete.items()
        kept = complete
        for path in kept:
            open_token_file(path, verify=True)
    prepare(killed, inputs, "bytes", shards=8)
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in killed.glob("*.bin")}.items()
    assert not list(killed.glob(".*.tmp"))
    for split in SPLITS:
        assert joined(killed, split) == joined(tmp_path / "whole", split)


def test_machines_and_processes_divide_the_work(tmp_path):
    """Files that several make together have the tokens of one file, in its order, and are opened when all are there."""
    for i in range(5):
        (tmp_path / f"{i}.jsonl").write_text(lines(f"{i} {text}" for text in TEXTS[: 7 * i]))  # the first has none
    parts, pattern = text_parts([str(tmp_path / "*.jsonl")], SPLITS), str(tmp_path / "out/train-*.bin")
    whole, *_ = prepare(tmp_path / "whole", parts, "bpe:270")
    reported = []
    first = prepare(tmp_path / "out", parts, "bpe:270", shards=5, share=(1, 2), workers=2,
                    progress=lambda *call: reported.append(call))  # fmt: skip
    assert [file.path.name for file in first][:2] == ["train-00001-of-00005.bin", "train-00003-of-00005.bin"]
    assert {what: (done, of) for what, done, of, _ in reported}["train"] == 2 * (parts[0].source.group(1, 5).n_bytes
        + parts[0].source.group(3, 5).n_bytes,)  # fmt: skip
    with pytest.raises(UserError, match=r"3 token files of .*train-\*-of-00005 are missing, the first is number 0"):
        open_token_file(pattern)
    prepare(tmp_path / "out", parts, "bpe:270", shards=5, share=(0, 2))
    tokens = open_token_file(pattern, verify=True).tokens
    assert isinstance(tokens, JoinedTokens)
    np.testing.assert_array_equal(tokens[:], whole.tokens)
    n = len(tokens)
    for start, stop in [(0, 1), (n // 2, n // 2 + 400), (n - 3, n + 9), (5, 5), (n, n + 1)]:
        np.testing.assert_array_equal(tokens[start:stop], whole.tokens[start:stop])
    prepare(tmp_path / "out", parts[:1], "bpe:270", shards=2)
    with pytest.raises(UserError, match=r"matches more than .*of-00002"):
        open_token_file(pattern)
    with pytest.raises(UserError, match="6 token files of 5 input files"):
        prepare(tmp_path / "out", parts, "bpe:270", shards=6)


@pytest.mark.slow
def test_a_failure_in_a_process_is_reported_and_ends_the_others(text, tmp_path):
    (tmp_path / "b.jsonl").write_text("no JSON\n")
    with pytest.raises(UserError, match=r"b\.jsonl, line 1"):
        prepare(tmp_path / "out", text_parts([str(tmp_path)], ["all"]), "bytes", shards=2, workers=2)
    assert not multiprocessing.active_children() or time.sleep(2) or not multiprocessing.active_children()


def write_datatrove(path, documents, dtype):
    """As its TokenizedFile does: struct.pack("<nH") of the ids and ("<nQ") of the ends of documents."""
    ids = [i for document in documents for i in document]
    ends = list(itertools.accumulate(map(len, documents)))
    path.write_bytes(struct.pack(f"<{len(ids)}{dtype}", *ids))
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))


@pytest.mark.parametrize("dtype", ["H", "I"])
def test_files_of_datatrove_are_read(tmp_path, dtype):
    documents = [[*text.encode(), 257] for text in TEXTS]
    write_datatrove(tmp_path / "0_shuffled.ds", documents[:20], dtype)
    write_datatrove(tmp_path / "1_shuffled.ds", documents[20:], dtype)
    paths = (str(tmp_path / "*_shuffled.ds"), str(tmp_path / "0_shuffled.ds"))
    config = DataConfig(kind="tokens", paths=paths, tokenizer="bytes", sequence_length=8, pack=True)
    opened = open_dataset(config, tmp_path / "cache")
    assert opened.train[:].tolist() == ids_of(TEXTS)
    assert opened.validation.tolist() == ids_of(TEXTS[:20])
    assert (opened.vocab_size, opened.validation_bytes) == (258, 0)
    assert opened.provenance["train"]["n_documents"] == len(TEXTS)
    whole = PackedBatches(np.array(ids_of(TEXTS)), 8, 4, 0, eos_id=257)
    np.testing.assert_array_equal(PackedBatches(opened.train, 8, 4, 0, eos_id=257)(3), whole(3))
    with pytest.raises(UserError, match="does not say what its ids mean"):
        open_token_file(paths[1])
    write_datatrove(tmp_path / "0_shuffled.ds", [[5, 6]], dtype)
    with pytest.raises(UserError, match="ends with the id 6, not 257"):
        open_dataset(dataclasses.replace(config, paths=(paths[1], paths[1])), tmp_path)
    write_datatrove(tmp_path / "0_shuffled.ds", [[5, 7, 257], [258, 257]], dtype)
    with pytest.raises(UserError, match=r"has token 258, data\.tokenizer has 258"):
        open_token_file(paths[1], tokenizer="bytes")
    digests = []  # other text in documents of the same lengths is other data
    for document in ([5, 7, 257], [7, 5, 257]):
        write_datatrove(tmp_path / "0_shuffled.ds", [document], dtype)
        digests.append(open_token_file(paths[1], tokenizer="bytes").info.data_sha256)
    assert digests[0] != digests[1]
    (tmp_path / "0_shuffled.ds").write_bytes(b"123456789")
    with pytest.raises(UserError, match="its index says"):
        open_token_file(paths[1], tokenizer="bytes")


def test_two_at_once_do_not_mix_two_texts(text, tmp_path):
    (tmp_path / "b.jsonl").write_text(lines(TEXTS * 2))
    refused = []

    def second():
        try:
            prepared(tmp_path / "out", tmp_path / "b.jsonl")
        except UserError as error:
            refused.append(str(error))

    prepared(tmp_path / "other", text)
    (tmp_path / "out").mkdir()
    thread = threading.Thread(target=second)
    with one_writer(tmp_path / "out/all.bin"):  # as the first, which is not ready
        thread.start()
        thread.join(1)
        assert thread.is_alive()
        for path in (tmp_path / "other").iterdir():
            shutil.copy(path, tmp_path / "out")
    thread.join(30)
    assert len(refused) == 1
    assert "was created with a different source" in refused[0]
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_a_failure_leaves_nothing_behind(text, tmp_path):
    text.write_text(lines(TEXTS) + "no JSON\n")
    with pytest.raises(UserError, match="line 61"):
        prepared(tmp_path / "out", text)
    assert [*contents(tmp_path / "out")] == ["tokenizer.json"]


def test_files_of_something_else_are_kept(text, tmp_path):
    (tmp_path / "b.jsonl").write_text(lines(TEXTS * 2))
    prepared(tmp_path / "out", text)
    before = contents(tmp_path / "out")
    for path, tokenizer, message in (
        (tmp_path / "b.jsonl", "bytes", r"all\.bin was created with a different source"),
        (text, "bpe:270", r"tokenizer\.json is not the tokenizer 'bpe:270'"),
    ):
        with pytest.raises(UserError, match=message):
            prepared(tmp_path / "out", path, tokenizer)
        assert contents(tmp_path / "out") == before


# The bytes in a file, and what its sidecar says.


def make(path, texts=("hé", "x")):
    """A token file of some texts."""
    piece = Piece(lambda: ((Document("", text), 1) for text in texts), 1, lambda: "a.txt")
    part = Part(path.stem, "train", Source("test", (piece,)), lambda document: document.text)
    return prepare(path.parent, [part], "bytes")[0]


def test_contents_and_sidecar_are_these_bytes(tmp_path):
    file = make(tmp_path / "train.bin")
    assert file.tokens.tolist() == [104, 195, 169, 257, 120, 257]
    assert isinstance(file.tokens, np.memmap)
    assert not file.tokens.flags.writeable
    raw = (tmp_path / "train.bin").read_bytes()
    assert raw == bytes([104, 0, 195, 0, 169, 0, 1, 1, 120, 0, 1, 1])  # little-endian
    assert read_with_digest(sidecar_path(file.path), "sidecar") == {
        "format_version": 2, "dtype": "uint16", "n_tokens": 6, "n_bytes": 4, "n_documents": 2, "vocab_size": 258,
        "bos_id": 256, "eos_id": 257, "tokenizer": "bytes", "tokenizer_sha256": ByteTokenizer().sha256,
        "source": "test", "source_sha256": hashlib.sha256(b"a.txt").hexdigest(), "file_count": 1, "split": "train",
        "data_sha256": hashlib.sha256(raw).hexdigest(),
    }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "train.bin", "train.json"]


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 2), ("uint32", 4)])
def test_ids_have_the_width_of_the_sidecar(tmp_path, dtype, size):
    make(tmp_path / "train.bin")
    created_from = read_with_digest(tmp_path / "train.json", "sidecar") | {"dtype": dtype}
    del created_from["data_sha256"]
    write_token_file(tmp_path / "b.bin", created_from, [(np.array([5, 65_535, 257], np.int32), 1, 9)] * 2)
    file = open_token_file(tmp_path / "b.bin", verify=True)
    assert (file.tokens.tolist(), file.tokens.dtype) == ([5, 65_535, 257] * 2, dtype)
    assert (file.info.n_tokens, file.info.n_documents, file.info.n_bytes) == (6, 2, 18)
    assert file.path.stat().st_size == 6 * size


def test_complete_files_are_kept(text, tmp_path):
    prepared(tmp_path / "out", text)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    prepared(tmp_path / "out", text)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    whole = contents(tmp_path / "out")
    (tmp_path / "out/all.bin").unlink()  # is made again
    prepared(tmp_path / "out", text)
    assert contents(tmp_path / "out") == whole
