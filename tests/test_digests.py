"""Files of ours that are read back: whatever a bad disk or an editor changes, no other number comes out of them."""

import json
import random

import numpy as np
import pytest
from tiny_run import TINY

from orthojax import cards, train
from orthojax.cards.model_card import SCHEMA
from orthojax.config import replace
from orthojax.data.token_files import open_token_file, write_token_file
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError
from orthojax.experiments.stored import read_results_file
from orthojax.files import json_line, read_json, read_with_digest, write_text, write_with_digest
from orthojax.train.loading import _tokenizer

ROWS = [{"variant": "a", "seed": 0, "overrides": {"x": 0.25}, "metrics": {"perplexity": 17.25, "loss_nats": 2.848}}]
RESULTS = {"experiment": "made", "scale": "tiny", "provenance": {"seeds": [0]}, "rows": ROWS}
CARD = {"schema": SCHEMA, "model": {"name": "a", "source": "b"}, "measured": {}, "metrics": [
    {"name": "kurtosis_first", "value": 12.5, "measured_as": "x", "source": "y"}],
    "rounding": [{"format": "w4a4", "perplexity": 18.75, "lost": 0.125}]}  # fmt: skip
LINES = [{"step": step, "loss_nats": 4 + step / 7} for step in range(1, 9)]
INFO = {"format_version": 2, "dtype": "uint16", "vocab_size": 258, "bos_id": 256, "eos_id": 257, "tokenizer": "bytes",
        "tokenizer_sha256": "ab", "source": "made", "source_sha256": "cd", "file_count": 1,
        "split": "train"}  # fmt: skip


def write_sidecar(path):
    write_token_file(path.with_suffix(".bin"), INFO, [(np.arange(9), 1, 12)])


# Kind -> its name, how it is written, and what is read of it.
KINDS = {
    "results": ("results.json", lambda path: write_with_digest(path, RESULTS), read_results_file),
    "card": ("card.json", lambda path: write_with_digest(path, CARD), cards.read_cards),
    "stage": ("stage.json", lambda path: write_with_digest(path, {"x": 1.5}), lambda path: read_with_digest(path, "x")),
    "sidecar": ("t.json", write_sidecar, lambda path: open_token_file(path.with_suffix(".bin")).info),
    "metrics": ("metrics.jsonl", lambda path: write_text(path, "".join(map(json_line, LINES))), train.read_metrics),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_changes_no_number(kind, tmp_path):
    name, write, read = KINDS[kind]
    path = tmp_path / name
    write(path)
    before, content, draw, noticed = read(path), path.read_bytes(), random.Random(kind), 0
    for _ in range(200):
        damaged = bytearray(content)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            after = read(path)
        except UserError:
            noticed += 1
            continue
        noticed += after != before
        # Where the name of the sum is damaged, it is a field that nobody reads.
        if kind == "metrics":
            assert all(any(old.items() <= new.items() for old in before) for new in after)
        elif after != before:
            ((old, new),) = zip(*(x if isinstance(x, list) else [x] for x in (before, after)), strict=True)
            assert {key: new[key] for key in old} == old
    assert noticed > 100  # the others flip a blank, or one sign of JSON to another with its meaning


@pytest.mark.parametrize("kind", ["results", "card", "sidecar"])
def test_files_without_a_sum_are_read_and_said_to_be_unchecked(kind, tmp_path, capsys):
    name, write, read = KINDS[kind]
    write(tmp_path / name)
    before, values = read(tmp_path / name), read_json(tmp_path / name, "file")
    del values["sha256"]
    write_text(tmp_path / name, json.dumps(values))
    for _ in range(2):
        assert read(tmp_path / name) == before
    assert capsys.readouterr().err.count(f"{tmp_path / name} has no sha256") == 1


def test_damaged_lines_of_a_log_are_counted(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(json_line, LINES)).replace("4.142857", "3.142857") + '{"step": 9, "lo')
    assert train.read_metrics(path) == LINES[1:]
    assert capsys.readouterr().err == f"{path}: left out 2 damaged lines\n"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))  # as 0.1.0 wrote them
    assert train.read_metrics(path) == LINES


def test_another_tokenizer_beside_a_run_is_left_out_and_named(tmp_path, capsys):
    folder = tmp_path / "run/checkpoints/4"
    (folder / "data").mkdir(parents=True)
    (folder / "data/metadata").write_text(json.dumps({"tokenizer_sha256": ByteTokenizer().sha256}))
    (tmp_path / "run/tokenizer.json").write_text("{}")
    assert (
        _tokenizer(folder, replace(TINY, {"data.tokenizer": "bytes"})).sha256 == ByteTokenizer().sha256
    )  # which the config names
    assert f"{tmp_path / 'run/tokenizer.json'} is left out" in capsys.readouterr().err
