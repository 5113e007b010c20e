"""Batches: a pure function of seed and step; and from a config to tokens, which are cached."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from small_runs import times

from orthojax import data
from orthojax.config import DataConfig
from orthojax.data import embedded_corpus, load_tokenizer, open_dataset, prepare, repeat_passages, text_corpus
from orthojax.data.preparation import hold_out_by_name
from orthojax.errors import UserError

T, B, ROWS = 3, 4, 12


def batches(**changes):
    """Twelve rows, so that three batches are an epoch; token i has the value i."""
    arguments = {"tokens": np.arange(ROWS * T + 1, dtype=np.uint16), "sequence_length": T, "batch_size": B, "seed": 5}
    return data.TokenBatches(**(arguments | changes))


def row_numbers(batch):
    return (batch[:, 0] // T).tolist()


@pytest.mark.parametrize("batch_size", [B, 5])
def test_batches_in_any_order_are_those_of_grain(batch_size):
    """Also where a batch runs across the end of an epoch, and for a restarted run, whatever it asks for first."""
    import grain

    dataset = grain.MapDataset.range(ROWS).seed(5).shuffle().repeat(5).batch(batch_size)
    expected = [indices.tolist() for indices in dataset.to_iter_dataset()]
    for steps in (range(12), range(11, -1, -1)):
        source = batches(batch_size=batch_size)
        for step in steps:
            batch = source(step)
            assert batch.dtype == np.int32
            np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(T + 1))
            assert (batch[:, 0] % T == 0).all()
            assert row_numbers(batch) == expected[step]
    rows = [row for indices in expected for row in indices]
    epochs = [tuple(rows[i : i + ROWS]) for i in range(0, 4 * ROWS, ROWS)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(range(ROWS)), *epochs}) == 5
    assert row_numbers(batches(seed=6)(0)) != row_numbers(batches(seed=5)(0))


def test_rows_begin_with_bos_or_share_a_token():
    rows = batches().spread_rows(ROWS)
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.arange(1, ROWS * T + 1))
    np.testing.assert_array_equal(rows[:, :-1].ravel(), np.arange(ROWS * T))
    source = batches(tokens=np.arange(ROWS * T), bos_id=999)
    assert source.n_rows == ROWS
    rows = source.spread_rows(ROWS)
    assert (rows[:, 0] == 999).all()
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.arange(ROWS * T))  # every token is a target, once
    batch = source(2)
    assert (batch[:, 0] == 999).all()
    np.testing.assert_array_equal(batch[:, 1:], batch[:, 1:2] + np.arange(T))
    assert (batches(bos_id=0).spread_rows(3)[:, 0] == 0).all()  # 0 is an id
    assert batches(tokens=np.arange(B * T + 1)).n_rows == batches(tokens=np.arange(B * T), bos_id=0).n_rows == B


def test_processes_read_their_rows_of_the_batch():
    source = batches(batch_size=8)
    for step in (0, 3, 11):
        for share in (2, 4):
            parts = [source.rows(step, start, start + share) for start in range(0, 8, share)]
            np.testing.assert_array_equal(np.concatenate(parts), source(step))
    assert source.rows(0, 3, 3).shape == (0, T + 1)


TEXT = "Some words that come again, and again some words.\n" * 40


@pytest.fixture
def config(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT.upper())
    return DataConfig(kind="text", paths=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), tokenizer="bytes")


def test_text_is_divided_and_described(config, tmp_path):
    dataset = open_dataset(config, tmp_path / "cache")
    cut = len(TEXT) - len(TEXT) // 10  # of few documents, the last tenth of each is held out
    for split, part in ((dataset.train, slice(cut)), (dataset.validation, slice(cut, None))):
        assert split.tolist() == [i for text in (TEXT, TEXT.upper()) for i in (*text[part].encode(), 257)]
    assert (dataset.vocab_size, dataset.bos_id, dataset.eos_id, dataset.validation_bytes) == (258, 256, 257, 400)
    facts = dataset.provenance
    assert (facts["source"], facts["file_count"], facts["bos_id"]) == ("a.txt, b.txt", 2, 256)
    assert facts["source_sha256"] == text_corpus(config.paths).sha256
    assert facts["validation"]["n_tokens"] == len(dataset.validation) == 402
    assert json.loads(json.dumps(facts)) == facts


def test_the_embedded_corpus_is_divided_by_name(tmp_path):
    dataset = open_dataset(DataConfig(tokenizer="bytes"), tmp_path)
    documents, sizes = list(embedded_corpus().documents()), []
    for split in ("train", "validation"):
        wanted = [document.text for document in documents if hold_out_by_name(split, document)]
        ids = np.concatenate([np.append(np.frombuffer(text.encode(), np.uint8), np.uint16(257)) for text in wanted])
        np.testing.assert_array_equal(getattr(dataset, split), ids)
        sizes.append(len(ids))
    assert sum(sizes) == sum(len(document.text.encode()) + 1 for document in documents if document.text)
    assert 0.05 < sizes[1] / sum(sizes) < 0.10


def test_the_cache_is_what_prepare_writes(config, tmp_path):
    config = dataclasses.replace(config, tokenizer="bpe:270")
    dataset, calls = open_dataset(config, tmp_path / "cache"), []
    prepare(tmp_path / "out", data.text_parts(config.paths, ["train", "validation"]), "bpe:270")
    folder = dataset.tokenizer_path.parent
    contents = [{path.name: path.read_bytes() for path in of.iterdir()} for of in (folder, tmp_path / "out")]
    assert contents[0] == contents[1]
    before = times(tmp_path / "cache")
    again = open_dataset(config, tmp_path / "cache", progress=lambda *call: calls.append(call))
    assert times(tmp_path / "cache") == before
    assert again.provenance == dataset.provenance
    assert not calls
    (folder / "validation.bin").unlink()
    assert open_dataset(config, tmp_path / "cache").provenance == dataset.provenance


def test_changes_make_a_new_folder(config, tmp_path):
    cache, tokenizer, seen = tmp_path / "cache", tmp_path / "mine.json", []

    def opened(**changes):
        dataset = open_dataset(dataclasses.replace(config, **changes), cache)
        seen.append(len(list(cache.iterdir())))
        return dataset

    before = opened()
    load_tokenizer(opened(tokenizer="bpe:270").tokenizer_path).save(tokenizer)
    assert opened(tokenizer=str(tokenizer)).provenance["tokenizer"] == "mine.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    opened(tokenizer=str(tokenizer))
    opened()
    (tmp_path / "elsewhere").mkdir()
    paths = [(tmp_path / name).rename(tmp_path / "elsewhere" / name) for name in ("a.txt", "b.txt")]
    assert opened(paths=tuple(map(str, paths))).provenance == before.provenance
    paths[0].write_text(TEXT + "more")
    opened(paths=tuple(map(str, paths)))
    assert seen == [1, 2, 3, 4, 4, 4, 5]


def test_repeated_passages_are_those_of_the_documents(config, tmp_path):
    repeated = dataclasses.replace(config, repeated_share=0.5)
    plain, once = (open_dataset(of, tmp_path / "cache") for of in (config, repeated))
    kept = [text[: len(text) - len(text) // 10] for text in (TEXT, TEXT.upper())]
    wanted = "".join(repeat_passages(text, 0.5) for text in kept)
    assert load_tokenizer(once.tokenizer_path).decode(once.train) == wanted
    assert once.validation_bytes > plain.validation_bytes
    assert once.provenance["source"] != plain.provenance["source"]


def test_token_files_are_opened_in_pairs(config, tmp_path):
    made = open_dataset(config, tmp_path / "cache")
    folder = made.tokenizer_path.parent
    tokens = DataConfig(kind="tokens", paths=(str(folder / "train.bin"), str(folder / "validation.bin")))
    opened = open_dataset(tokens, tmp_path / "unused")
    np.testing.assert_array_equal(opened.train, made.train)
    np.testing.assert_array_equal(opened.validation, made.validation)
    assert (opened.provenance, opened.tokenizer_path) == (made.provenance, made.tokenizer_path)
    assert not (tmp_path / "unused").exists()
    other = open_dataset(dataclasses.replace(config, tokenizer="bpe:270"), tmp_path / "cache").tokenizer_path.parent
    mixed = dataclasses.replace(tokens, paths=(tokens.paths[0], str(other / "validation.bin")))
    with pytest.raises(UserError, match=r"bytes, bpe:270"):
        open_dataset(mixed, tmp_path)
    shutil.copy(other / "tokenizer.json", folder)  # another one is not taken for theirs
    assert open_dataset(tokens, tmp_path).tokenizer_path is None
