"""From a config to tokens: the cache is reused, rebuilt after a change, and safe when two processes build it."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from orthojax.config import DataConfig
from orthojax.data import datasets
from orthojax.data.corpus import embedded_corpus, text_corpus
from orthojax.data.datasets import open_dataset
from orthojax.data.tokenizers import load_tokenizer
from orthojax.errors import UserError

TEXT = "Some words that come again, and again some words.\n" * 40


@pytest.fixture
def text_config(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT.upper())
    return DataConfig(kind="text", paths=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), tokenizer="bytes")


def forbid(*_, **__):
    raise AssertionError("the cache was not used")


def folders(cache):
    return sorted(path.name for path in cache.iterdir())


def test_text_with_bytes(text_config, tmp_path):
    dataset = open_dataset(text_config, tmp_path / "cache")
    train, validation = text_corpus(text_config.paths).split()
    for split, documents in ((dataset.train, train), (dataset.validation, validation)):
        expected = [i for _, text in documents for i in (*text.encode(), 257)]
        assert split.tolist() == expected
    assert (dataset.vocab_size, dataset.bos_id, dataset.eos_id) == (258, 256, 257)
    assert dataset.validation_bytes == 400
    facts = dataset.provenance
    assert facts["source"] == "a.txt, b.txt"
    assert facts["source_sha256"] == text_corpus(text_config.paths).sha256
    assert facts["file_count"] == 2
    assert facts["validation"]["n_tokens"] == len(dataset.validation) == 402
    assert json.loads(json.dumps(facts)) == facts


def test_embedded_with_bpe_is_cached(tmp_path, monkeypatch):
    small = dataclasses.replace(embedded_corpus(), files=embedded_corpus().files[:40])
    monkeypatch.setattr(datasets, "embedded_corpus", lambda: small)
    config, calls = DataConfig(tokenizer="bpe:400"), []
    dataset = open_dataset(config, tmp_path, progress=lambda *call: calls.append(call))
    assert [calls[0][0], calls[-1][0]] == ["training bpe:400", "validation"]
    assert calls[-1][1] == calls[-1][2] == dataset.validation_bytes
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    assert tokenizer.sha256 == dataset.provenance["tokenizer_sha256"]
    _, validation = small.split()
    ids = np.asarray(dataset.validation)
    pieces = np.split(ids, np.flatnonzero(ids == dataset.eos_id) + 1)[:-1]
    assert [tokenizer.decode(piece) for piece in pieces] == [text for _, text in validation]
    monkeypatch.setattr(datasets, "build_dataset", forbid)
    again = open_dataset(config, tmp_path)
    np.testing.assert_array_equal(again.train, dataset.train)
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


def test_changes_make_a_new_folder(text_config, tmp_path):
    cache = tmp_path / "cache"
    seen = []
    open_dataset(text_config, cache)
    seen.append(folders(cache))
    open_dataset(dataclasses.replace(text_config, tokenizer="bpe:270"), cache)
    seen.append(folders(cache))
    tokenizer = tmp_path / "mine.json"
    load_tokenizer(next(cache.glob("text-bpe270-*")) / "tokenizer.json").save(tokenizer)
    with_file = dataclasses.replace(text_config, tokenizer=str(tokenizer))
    assert open_dataset(with_file, cache).provenance["tokenizer"] == "mine.json"
    seen.append(folders(cache))
    tokenizer.write_text(tokenizer.read_text() + " ")
    open_dataset(with_file, cache)
    seen.append(folders(cache))
    (tmp_path / "a.txt").write_text(TEXT + "more")
    changed = open_dataset(text_config, cache)
    seen.append(folders(cache))
    assert [len(names) for names in seen] == [1, 2, 3, 4, 5]
    assert sum(changed.provenance[split]["n_bytes"] for split in ("train", "validation")) == 2 * len(TEXT) + 4
    open_dataset(text_config, cache)
    assert folders(cache) == seen[-1]


def test_moved_files_keep_their_cache(text_config, tmp_path, monkeypatch):
    before = open_dataset(text_config, tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    paths = [(tmp_path / name).rename(tmp_path / "elsewhere" / name) for name in ("a.txt", "b.txt")]
    monkeypatch.setattr(datasets, "build_dataset", forbid)
    moved = open_dataset(dataclasses.replace(text_config, paths=tuple(map(str, paths))), tmp_path / "cache")
    assert moved.provenance == before.provenance


def test_two_processes_build_the_same(text_config, tmp_path, monkeypatch):
    """A second builder finishes while the first is in the middle; the first must neither fail nor spoil it."""
    cache, real, results = tmp_path / "cache", datasets.make_tokenizer, []

    def while_the_first_builds(spec, texts):
        monkeypatch.setattr(datasets, "make_tokenizer", real)
        results.append(open_dataset(text_config, cache))
        return real(spec, texts)

    monkeypatch.setattr(datasets, "make_tokenizer", while_the_first_builds)
    results.append(open_dataset(text_config, cache))
    np.testing.assert_array_equal(results[0].train, results[1].train)
    assert len(folders(cache)) == 1


def test_a_failed_build_leaves_nothing(text_config, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(
            datasets, "prepare", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(UserError, match="No space left"):
            open_dataset(text_config, cache)
    assert folders(cache) == []
    assert len(open_dataset(text_config, cache).train)


def test_damaged_cache_says_what_to_do(text_config, tmp_path):
    dataset = open_dataset(text_config, tmp_path / "cache")
    path = dataset.tokenizer_path.parent / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train\.bin has(.|\n)*delete that folder"):
        open_dataset(text_config, tmp_path / "cache")


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
    other = open_dataset(
        dataclasses.replace(text_config, tokenizer="bpe:270"), tmp_path / "cache"
    ).tokenizer_path.parent
    mixed = dataclasses.replace(config, paths=(config.paths[0], str(other / "validation.bin")))
    with pytest.raises(UserError, match=r"different tokenizers \(bytes, bpe:270\)"):
        open_dataset(mixed, tmp_path)
    for spec in ("bytes", str(folder / "tokenizer.json")):
        open_dataset(dataclasses.replace(config, tokenizer=spec), tmp_path)
    for spec in ("bpe:270", str(other / "tokenizer.json")):
        with pytest.raises(UserError, match=r"data\.tokenizer=.* is not what made the token files: that is bytes"):
            open_dataset(dataclasses.replace(config, tokenizer=spec), tmp_path)


def test_synthetic_task_has_no_files(tmp_path):
    with pytest.raises(ValueError, match="bigram_backcopy"):
        open_dataset(DataConfig(kind="bigram_backcopy"), tmp_path)


def test_unusable_cache_folder(text_config, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="cannot write the data cache"):
        open_dataset(text_config, tmp_path / "file")
