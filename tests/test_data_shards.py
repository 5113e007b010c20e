"""Shards of a token file: read as the one file that they are parts of, and refused where one is missing or foreign."""

import json
import shutil

import numpy as np
import pytest

from orthojax.config import DataConfig
from orthojax.data import token_shards
from orthojax.data.batches import TokenBatches
from orthojax.data.datasets import open_dataset
from orthojax.data.preparation import prepare, text_parts
from orthojax.data.token_files import sidecar_path
from orthojax.data.token_shards import JoinedTokens, open_token_files, shard_path
from orthojax.errors import UserError

SHARDS = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same text as one file, and in five shards."""
    home = tmp_path_factory.mktemp("shards")
    lines = [json.dumps({"text": f"text {i} " * (1 + i % 9)}) for i in range(200)]
    (home / "a.jsonl").write_text("\n".join(lines))
    for folder, count in (("one", 1), ("many", SHARDS)):
        for i in range(count):
            parts = text_parts([str(home / "a.jsonl")], ["train", "validation"], home / folder)
            prepare(home / folder, parts, "bytes", shard=(i, count))
    return home


@pytest.fixture
def home(made, tmp_path):
    shutil.copytree(made, tmp_path / "home")
    return tmp_path / "home"


def test_shards_are_the_parts_of_the_one_file(made):
    for split in ("train", "validation"):
        whole = (made / "one" / f"{split}.bin").read_bytes()
        parts = [shard_path(made / "many" / f"{split}.bin", i, SHARDS).read_bytes() for i in range(SHARDS)]
        assert b"".join(parts) == whole
        assert all(parts)


def test_opened_by_the_name_of_the_whole_or_by_a_pattern(made):
    one = open_token_files(made / "one/train.bin")
    for path in ("many/train.bin", "many/train-*.bin", "m*/train-0*-of-00005.bin"):
        many = open_token_files(made / path, verify=True)
        assert len(many.tokens) == len(one.tokens)
        np.testing.assert_array_equal(many.tokens[:], one.tokens)
        for name in ("n_tokens", "n_bytes", "n_documents", "tokenizer_sha256", "source_sha256", "split", "shard"):
            assert getattr(many.info, name) == getattr(one.info, name)


def test_batches_are_those_of_the_one_file(made):
    configs = [
        DataConfig(kind="tokens", paths=(str(made / folder / "train.bin"), str(made / folder / "validation.bin")))
        for folder in ("one", "many")
    ]
    one, many = (open_dataset(config, made / "unused") for config in configs)
    for bos_id in (None, 256):
        sources = [TokenBatches(dataset.train, 7, 16, 3, bos_id) for dataset in (one, many)]
        for step in (0, 5, 40):
            np.testing.assert_array_equal(sources[1](step), sources[0](step))
        np.testing.assert_array_equal(sources[1].spread_rows(20), sources[0].spread_rows(20))


@pytest.mark.parametrize("open_at_once", [1, 256])
def test_joined_tokens_slice_as_one_array(tmp_path, monkeypatch, open_at_once):
    monkeypatch.setattr(token_shards, "_OPEN_AT_ONCE", open_at_once)
    whole, lengths = np.arange(1000, 1023, dtype="<u4"), [5, 1, 10, 7]
    for i, part in enumerate(np.split(whole, np.cumsum(lengths)[:-1])):
        part.tofile(tmp_path / str(i))
    joined = JoinedTokens([tmp_path / str(i) for i in range(4)], lengths, np.dtype("<u4"))
    assert len(joined) == 23
    for start in range(-3, 25):
        for stop in range(-3, 26):
            np.testing.assert_array_equal(joined[start:stop], whole[start:stop])
    assert joined[3:9].dtype == np.uint32
    with pytest.raises(IndexError):
        joined[::2]


def test_missing_foreign_and_renamed_shards(home):
    many, name = home / "many", "train-00002-of-00005"
    (many / f"{name}.bin").rename(home / "kept.bin")
    with pytest.raises(
        UserError, match=r"of the 5 shards of .*train\.bin, 1 are missing, the first is 2\n.*--shard=2/5"
    ):
        open_token_files(many / "train.bin")
    shutil.copy(many / "train-00001-of-00005.bin", many / f"{name}.bin")
    kept = (many / f"{name}.json").read_text()
    shutil.copy(many / "train-00001-of-00005.json", many / f"{name}.json")
    with pytest.raises(UserError, match=r"00002-of-00005\.bin is shard 1/5 by its sidecar: it was renamed"):
        open_token_files(many / "train.bin")
    (home / "kept.bin").rename(many / f"{name}.bin")
    for field, value in (("tokenizer_sha256", "0"), ("source_sha256", "1"), ("split", "test")):
        (many / f"{name}.json").write_text(json.dumps(json.loads(kept) | {field: value}))
        with pytest.raises(UserError, match=f"do not belong together: {field} is .* and {value}"):
            open_token_files(many / "train.bin")
    (many / f"{name}.json").write_text(kept)
    open_token_files(many / "train.bin")
    shutil.copy(many / f"{name}.bin", many / "train-00002-of-00009.bin")
    with pytest.raises(UserError, match="shards of 5 and of 9 files"):
        open_token_files(many / "train.bin")
    with pytest.raises(UserError, match=r"train-00000-of-00005\.bin is shard 0/5\nallowed: all shards: .*train\.bin"):
        open_token_files(many / "train-00000-of-00005.bin")
    with pytest.raises(UserError, match=r"there is no token file .*nothing\.bin"):
        open_token_files(many / "nothing.bin")
    with pytest.raises(UserError, match=r"\.bin is no shard\nallowed: names such as train-00000-of-00008"):
        open_token_files(home / "one/*.bin")
    (many / "train-00002-of-00009.bin").unlink()
    shutil.copytree(many, home / "more")
    with pytest.raises(UserError, match="names a shard twice"):
        open_token_files(home / "m*/train-*.bin")


def test_damage_is_found_in_every_shard(home):
    shard = shard_path(home / "many/train.bin", 3, SHARDS)
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(content)
    config = DataConfig(
        kind="tokens", paths=(str(home / "many/train.bin"), str(home / "many/validation.bin")), verify=True
    )
    with pytest.raises(UserError, match=r"train-00003-of-00005\.bin does not have the sha256"):
        open_dataset(config, home / "unused")


def test_verify_reads_all_of_every_file(home, monkeypatch):
    """A look at a few blocks does not see every byte; `data.verify` does, and always where there is little to read."""
    shard = shard_path(home / "many/train.bin", 3, SHARDS)
    values = json.loads(sidecar_path(shard).read_text())
    sidecar_path(shard).write_text(json.dumps(values | {"data_sha256": "0" * 64}))
    paths = (str(home / "many/train.bin"), str(home / "many/validation.bin"))
    monkeypatch.setattr(token_shards, "_ALWAYS_COMPARED_BYTES", 1000)
    open_dataset(DataConfig(kind="tokens", paths=paths), home / "unused")
    with pytest.raises(UserError, match=r"train-00003-of-00005\.bin does not have the sha256"):
        open_dataset(DataConfig(kind="tokens", paths=paths, verify=True), home / "unused")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"train-00003-of-00005\.bin does not have the sha256"):
        open_dataset(DataConfig(kind="tokens", paths=paths), home / "unused")


def test_another_tokenizer_beside_the_files_is_refused(home):
    (home / "many/tokenizer.json").write_text("{}")
    paths = (str(home / "many/train.bin"), str(home / "many/validation.bin"))
    with pytest.raises(UserError, match=r"tokenizer\.json is not the tokenizer of .*train\.bin"):
        open_dataset(DataConfig(kind="tokens", paths=paths), home / "unused")
    (home / "many/tokenizer.json").unlink()
    assert open_dataset(DataConfig(kind="tokens", paths=paths), home / "unused").tokenizer_path is None
