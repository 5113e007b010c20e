"""Checkpoints saved on one mesh and read on others, by training, plain Orbax and the command line; runs on stores."""

import re
import shutil

import fake_store
import foreign_reader
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_runs import CONFIG as SMALL
from tiny_run import Stop, bits, blank_state, by_path, stop_at

from orthojax import load
from orthojax import train as training
from orthojax.config import replace
from orthojax.data import open_token_file, prepare, text_parts
from orthojax.data.token_files import fetched_pattern
from orthojax.errors import UserError
from orthojax.stores import as_path
from orthojax.train import Checkpoints, find_checkpoint, open_inputs, read_metrics, train, verify_checkpoint

CONFIG = replace(
    SMALL, {"model.vocab_size": 64, "model.num_layers": 2, "model.scan_layers": True, "optim.weight_decay": 0.1}
)
KINDS = {"adam": {"optim.optimizer": "adam"}}
KINDS |= {kind: {"optim.rotation.kind": kind} for kind in ("hadamard", "haar")}
AXES = ("data", "fsdp", "tensor")


def placed(state, sizes):
    """The state over a mesh: every axis of every array is split where its length allows."""
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), AXES)

    def place(leaf):
        axes: list = [None] * leaf.ndim
        for name, axis in zip(("tensor", "fsdp", "data"), reversed(range(leaf.ndim)), strict=False):
            if leaf.shape[axis] % mesh.shape[name] == 0:
                axes[axis] = name
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(place, state)


def state_of(config, step=5):
    """A state whose arrays all differ from what a new one has."""
    noise = np.random.default_rng(0)

    def drawn(leaf):
        if not np.issubdtype(leaf.dtype, np.floating):
            return np.ones(leaf.shape, leaf.dtype)
        return noise.normal(size=leaf.shape).astype(leaf.dtype)

    return jax.tree.map(drawn, training.state_shapes(config))._replace(step=np.int32(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint of every kind, saved over 2 x 2 x 2 devices, and what was saved."""
    home, states = tmp_path_factory.mktemp("saved"), {}
    for kind, changes in KINDS.items():
        config = replace(CONFIG, changes)
        states[kind] = state_of(config)
        with Checkpoints(home / kind / "checkpoints", keep=2) as checkpoints:
            checkpoints.save(placed(states[kind], (2, 2, 2)), config, {"source": "test"})
    return home, states


MESHES = [(4, 1, 2), (8, 1, 1), (1, 1, 1)]


def restore(folder, config, sizes):
    like = placed(blank_state(config), sizes)
    with Checkpoints(folder, keep=2) as checkpoints:
        state = checkpoints.restore_newest(like)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    return state


@pytest.mark.parametrize(
    "kind", ["haar", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("adam", "hadamard"))]
)
@pytest.mark.parametrize("sizes", [pytest.param(s, marks=[pytest.mark.slow] * (s == MESHES[1])) for s in MESHES])
def test_a_state_is_restored_onto_another_mesh_and_back(saved, kind, sizes, tmp_path):
    home, states = saved
    config = replace(CONFIG, KINDS[kind])
    state = restore(home / kind / "checkpoints", config, sizes)
    assert bits(state) == bits(states[kind])
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(state, config, {})
    assert bits(restore(tmp_path, config, (2, 2, 2))) == bits(states[kind])
    assert kind != "haar" or any("basis" in path for path in by_path(states[kind].opt_state))


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_alone_are_read_onto_one_device(saved, kind):
    home, states = saved
    folder = find_checkpoint(home / kind)
    params = training.read_params(folder)
    assert training.read_config(folder) == replace(CONFIG, KINDS[kind])
    assert training.read_json_item(folder, "data") == {"source": "test", "next_step": 5}
    assert bits(params) == bits(states[kind].params)
    assert all(leaf.dtype == "float32" and leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(params))


def test_state_of_another_structure_is_not_called_damaged(saved):
    home, _ = saved
    with Checkpoints(home / "adam/checkpoints", keep=2) as checkpoints:
        like = blank_state(replace(CONFIG, KINDS["adam"]))
        wider = like._replace(params=jax.tree.map(lambda x: jax.numpy.tile(x, 2), like.params))
        narrower = like._replace(params={name: tree for name, tree in like.params.items() if "embedding" not in name})
        for other in (blank_state(replace(CONFIG, KINDS["haar"])), wider, narrower):
            with pytest.raises(UserError, match="structure") as refused:
                checkpoints.restore_newest(other)
            assert not isinstance(refused.value, training.DamagedError)
    assert find_checkpoint(home / "adam").name == "5"


# Other readers, in processes of their own, with one device.


def test_the_snippet_of_the_readme_reads_every_kind(saved, tmp_path):
    home, states = saved
    items = [(kind, item) for kind in KINDS for item in ("params", "opt_state")]
    found = foreign_reader.read(tmp_path, *(home / kind / "checkpoints/5" / item for kind, item in items))
    for (kind, item), arrays in zip(items, found, strict=True):
        assert bits(arrays) == bits(getattr(states[kind], item))


def test_inspection_shows_and_verifies_every_array(saved):
    home, states = saved
    done = foreign_reader.inspect("haar", "--verify", cwd=home)
    assert done.returncode == 0, done.stderr
    for item in ("params", "opt_state"):
        leaves = by_path(getattr(states["haar"], item))
        assert f"{item}: {len(leaves)} arrays, {sum(leaf.size for leaf in leaves.values()):,} numbers" in done.stdout
        for path, leaf in leaves.items():
            line = rf"^  {re.escape(path)} +{leaf.dtype} +{re.escape(str(list(leaf.shape)))} {leaf.nbytes:,} bytes$"
            assert re.search(line, done.stdout, re.M), (line, done.stdout)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(states["haar"][1:]))
    words = ("step 5", "model.normalizer = softmax1", "source: 'test'", "next_step: 5")
    words += (f"checksums: all hold, of {total:,} bytes",)
    assert all(word in done.stdout for word in words), done.stdout


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
    config = replace(SMALL, {"data.kind": "tokens", "data.paths": paths})
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


def test_what_was_deleted_on_a_store_is_not_read_from_the_cache(tmp_path, store):
    (tmp_path / "a.txt").write_text("the quick brown fox. " * 200)
    for name in ("train", "train2"):
        prepare(store / name, text_parts([str(tmp_path / "a.txt")], ["train", "validation"]), "bytes")
    for suffix in (".bin", ".json"):
        shutil.move(store / f"train2/train{suffix}", store / f"train/train2{suffix}")
    pattern = "gs://bucket/train/train*.bin"
    both = open_token_file(fetched_pattern(pattern, tmp_path / "cache")).info.n_tokens
    (store / "train/train2.bin").unlink()
    assert open_token_file(fetched_pattern(pattern, tmp_path / "cache")).info.n_tokens == both // 2


def test_a_store_without_its_package_is_named():
    with pytest.raises(UserError, match=r"(?s)config file s3://bucket/run cannot be reached.*pip install s3fs"):
        as_path("s3://bucket/run", "config file")
    for what in ("workdir", "checkpoint", "model"):
        with pytest.raises(UserError, match=rf"{what} az://bucket/run: checkpoints are not written there"):
            as_path("az://bucket/run", what)
    with pytest.raises(UserError, match="ftp://host/run is an address"):
        as_path("ftp://host/run", "workdir")
