"""A run whose folder and token files are on an object store, with a stand-in for it."""

import fake_store
import jax
import pytest
from small_runs import CONFIG
from tiny_run import Stop, bits, stop_at

from orthojax import load
from orthojax.config import replace
from orthojax.data import prepare, text_parts
from orthojax.errors import UserError
from orthojax.stores import as_path
from orthojax.train import find_checkpoint, open_inputs, read_metrics, train, verify_checkpoint


@pytest.fixture
def store(tmp_path, monkeypatch):
    (tmp_path / "store/bucket").mkdir(parents=True)
    server = fake_store.start(tmp_path / "store", monkeypatch)
    yield tmp_path / "store/bucket"
    server.shutdown()


def test_a_run_on_a_store_resumes_to_the_bits_of_one_on_a_disk(tmp_path, store):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    prepare(store / "data", text_parts([str(tmp_path / "a.txt")], ["train", "validation"]), "bytes")
    paths = ("gs://bucket/data/train*.bin", "gs://bucket/data/validation.bin")
    config = replace(CONFIG, {"data.kind": "tokens", "data.paths": paths})
    inputs = open_inputs(config, tmp_path / "cache")
    whole = train(config, inputs, tmp_path / "run")
    workdir = as_path("gs://bucket/run", "workdir")
    with pytest.raises(Stop):
        train(config, inputs, workdir, on_step=stop_at(8))
    state = train(config, inputs, workdir)
    assert bits(state) == bits(whole)
    assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == 11
    step = find_checkpoint(workdir)
    assert str(step) == "gs://bucket/run/checkpoints/11"
    assert verify_checkpoint(step) == verify_checkpoint(find_checkpoint(tmp_path / "run"))
    loaded = load("gs://bucket/run")
    assert loaded.tokenizer.spec == "bytes"
    assert bits(loaded.params) == bits(jax.device_get(whole.params))
    with pytest.raises(UserError, match="another config"):
        train(replace(config, {"train.seed": 3}), inputs, workdir)
    with pytest.raises(UserError, match=r"tensorboard .* gs://bucket/other"):
        train(replace(config, {"train.tensorboard": True}), inputs, as_path("gs://bucket/other", "workdir"))


def test_a_store_without_its_package_is_named():
    with pytest.raises(UserError, match=r"(?s)workdir s3://bucket/run cannot be reached.*pip install s3fs"):
        as_path("s3://bucket/run", "workdir")
    with pytest.raises(UserError, match="ftp://host/run is an address"):
        as_path("ftp://host/run", "workdir")
