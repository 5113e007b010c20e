"""From a config to tokens: the cache is reused, rebuilt after a change, and safe when two processes build it."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from orthojax.config import DataConfig
from orthojax.data import datasets, embedded_corpus, load_tokenizer, open_dataset, prepare, text_corpus, text_parts
from orthojax.data.preparation import HoldOut, hold_out_by_text
from orthojax.errors import UserError

TEXT = "Some words that come again, and again some words.\n" * 40


@pytest.fixture
def text_config(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT.upper())
    return DataConfig(kind="text", paths=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), tokenizer="bytes")


def folders(cache):
    return sorted(path.name for path in cache.iterdir())


def modified(cache):
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*")}


def test_text_with_bytes(text_config, tmp_path):
    dataset = open_dataset(text_config, tmp_path / "cache")
    cut = len(TEXT) - len(TEXT) // 10  # of few documents, the last tenth of each is held out
    for split, part in ((dataset.train, slice(cut)), (dataset.validation, slice(cut, None))):
        assert split.tolist() == [i for text in (TEXT, TEXT.upper()) for i in (*text[part].encode(), 257)]
    assert (dataset.vocab_size, dataset.bos_id, dataset.eos_id) == (258, 256, 257)
    assert dataset.validation_bytes == 400
    facts = dataset.provenance
    assert facts["source"] == "a.txt, b.txt"
    assert facts["source_sha256"] == text_corpus(text_config.paths).sha256
    assert facts["file_count"] == 2
    assert facts["bos_id"] == 256
    assert facts["validation"]["n_tokens"] == len(dataset.validation) == 402
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("kind", ["embedded", "few", "many"])
def test_the_cache_is_what_launch_prepare_data_writes(tmp_path, monkeypatch, kind):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.py").write_text(f"some words and {i}\n" * 9)
    files = sorted(folder.iterdir())[: 3 if kind == "few" else None]
    config = DataConfig(tokenizer="bpe:270")
    if kind == "embedded":
        small = embedded_corpus(folder)
        for module in ("datasets", "preparation"):
            monkeypatch.setattr(f"orthojax.data.{module}.embedded_corpus", lambda: small)
    else:
        config = dataclasses.replace(config, kind="text", paths=tuple(map(str, files)))
    calls, reports = [], []
    dataset = open_dataset(config, tmp_path / "cache", progress=lambda *call: calls.append(call))
    assert [calls[0][0], calls[-1][0]] == ["training bpe:270", "train and validation"]
    assert calls[-1][1] == calls[-1][2] == sum(path.stat().st_size for path in files)
    parts = text_parts(list(config.paths) or None, ["train", "validation"], tmp_path / "out")
    prepare(tmp_path / "out", parts, "bpe:270", progress=lambda *call: reports.append(call))
    assert reports == calls
    source, rule = parts[0].source, HoldOut("name")
    if kind != "embedded":
        rule = hold_out_by_text(source.documents())
        assert rule.rule == {"few": "end", "many": "text"}[kind]
    for split, tokens in (("train", dataset.train), ("validation", dataset.validation)):
        wanted = "".join(rule.part(split, document) for document in source.documents())
        assert load_tokenizer(dataset.tokenizer_path).decode(tokens) == wanted != ""
    made = {path.name: path.read_bytes() for path in dataset.tokenizer_path.parent.iterdir()}
    assert made == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != "source.json"}
    before = modified(tmp_path / "cache")
    again = open_dataset(config, tmp_path / "cache")
    assert modified(tmp_path / "cache") == before
    assert again.provenance == dataset.provenance


def test_reuse_imports_no_tokenizers(text_config, tmp_path):
    config = dataclasses.replace(text_config, tokenizer="bpe:270")
    open_dataset(config, tmp_path / "cache")
    code = (
        "import sys\nfrom orthojax.config import DataConfig\nfrom orthojax.data import datasets\n"
        f"dataset = datasets.open_dataset({config!r}, {str(tmp_path / 'cache')!r})\n"
        "print(len(dataset.train) > 100, 'tokenizers' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "True False\n"


def test_changes_make_a_new_folder(text_config, tmp_path, monkeypatch):
    cache, tokenizer, seen = tmp_path / "cache", tmp_path / "mine.json", []

    def opened(**changes):
        dataset = open_dataset(dataclasses.replace(text_config, **changes), cache)
        seen.append(len(folders(cache)))
        return dataset

    before = opened()
    load_tokenizer(opened(tokenizer="bpe:270").tokenizer_path).save(tokenizer)
    assert opened(tokenizer=str(tokenizer)).provenance["tokenizer"] == "mine.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    opened(tokenizer=str(tokenizer))
    monkeypatch.setattr(datasets, "BPE_SAMPLE_BYTES", 100)  # of text of more bytes a BPE sees a part
    opened(tokenizer="bpe:270")
    opened()
    (tmp_path / "elsewhere").mkdir()
    paths = [(tmp_path / name).rename(tmp_path / "elsewhere" / name) for name in ("a.txt", "b.txt")]
    cached = modified(cache)
    assert opened(paths=tuple(map(str, paths))).provenance == before.provenance
    assert modified(cache) == cached
    paths[0].write_text(TEXT + "more")
    changed = opened(paths=tuple(map(str, paths))).provenance
    assert seen == [1, 2, 3, 4, 5, 5, 5, 6]
    assert sum(changed[split]["n_bytes"] for split in ("train", "validation")) == 2 * len(TEXT) + 4


def test_two_processes_build_the_same(text_config, tmp_path, monkeypatch):
    """A second builder finishes while the first is in the middle; the first neither fails nor damages it."""
    cache, real, results = tmp_path / "cache", datasets.prepare, []

    def while_the_first_builds(*args, **options):
        monkeypatch.setattr(datasets, "prepare", real)
        results.append(open_dataset(text_config, cache))
        return real(*args, **options)

    monkeypatch.setattr(datasets, "prepare", while_the_first_builds)
    results.append(open_dataset(text_config, cache))
    np.testing.assert_array_equal(results[0].train, results[1].train)
    assert len(folders(cache)) == 1


def test_a_failed_build_leaves_nothing(text_config, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match="needs more text"):
        open_dataset(dataclasses.replace(text_config, tokenizer="bpe:5000"), cache)
    (tmp_path / "c.txt").write_text("nine char")
    with pytest.raises(UserError, match=r"no text for the token file validation\.bin in c\.txt"):
        open_dataset(dataclasses.replace(text_config, paths=(str(tmp_path / "c.txt"),)), cache)
    assert folders(cache) == []


def test_kind_tokens(text_config, tmp_path):
    made = open_dataset(text_config, tmp_path / "cache")
    folder = made.tokenizer_path.parent
    config = DataConfig(kind="tokens", paths=(str(folder / "train.bin"), str(folder / "validation.bin")))
    opened = open_dataset(config, tmp_path / "unused")
    np.testing.assert_array_equal(opened.train, made.train)
    np.testing.assert_array_equal(opened.validation, made.validation)
    assert opened.provenance == made.provenance
    assert opened.tokenizer_path == made.tokenizer_path
    assert not (tmp_path / "unused").exists()
    with pytest.raises(UserError, match="is a validation split"):
        open_dataset(dataclasses.replace(config, paths=config.paths[::-1]), tmp_path)
    bpe = dataclasses.replace(text_config, tokenizer="bpe:270")
    other = open_dataset(bpe, tmp_path / "cache").tokenizer_path.parent
    mixed = dataclasses.replace(config, paths=(config.paths[0], str(other / "validation.bin")))
    with pytest.raises(UserError, match=r"different tokenizers \(bytes, bpe:270\)"):
        open_dataset(mixed, tmp_path)
    values = json.loads((folder / "validation.json").read_text())
    del values["content_sha256"]
    (other / "validation.json").write_text(json.dumps(values | {"bos_id": 0}))
    shutil.copy(folder / "validation.bin", other)
    with pytest.raises(UserError, match=r"different tokenizers \(bytes, bytes\): bos_id is 256 and 0"):
        open_dataset(mixed, tmp_path)
    for spec in ("bytes", str(folder / "tokenizer.json")):
        open_dataset(dataclasses.replace(config, tokenizer=spec), tmp_path)
    for spec in ("bpe:270", str(other / "tokenizer.json")):
        with pytest.raises(UserError, match=r"different tokenizer \(bytes, sha256 \w+\) than data\.tokenizer="):
            open_dataset(dataclasses.replace(config, tokenizer=spec), tmp_path)


def test_refused(text_config, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"the data cache .* is a file"):
        open_dataset(text_config, tmp_path / "file")
    with pytest.raises(ValueError, match="bigram_backcopy"):
        open_dataset(DataConfig(kind="bigram_backcopy"), tmp_path)
    path = open_dataset(text_config, tmp_path / "cache").tokenizer_path.parent / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train\.bin has(.|\n)*delete that folder"):
        open_dataset(text_config, tmp_path / "cache")
