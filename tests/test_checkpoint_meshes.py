"""Checkpoints saved on one mesh and read on others, by training, by plain Orbax, and by the command line."""

import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import foreign_reader
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig
from orthojax.errors import UserError
from orthojax.fields import replace
from orthojax.train import Checkpoints, DamagedError, find_checkpoint, init_state, read_params, verify_checkpoint
from orthojax.train.checkpoint.reading import by_path

ROOT = Path(__file__).parents[1]
CONFIG = Config(
    model=ModelConfig(vocab_size=64, max_length=8, d_model=16, num_layers=2, num_heads=2, d_mlp=32, scan_layers=True),
    optim=OptimConfig(optimizer="orthoadam", warmup_steps=2, weight_decay=0.1),
    data=DataConfig(sequence_length=8),
    eval=EvalConfig(sequences=8, batch_size=8),
)
KINDS = {
    "adam": {"optim.optimizer": "adam"},
    "hadamard": {"optim.rotation.kind": "hadamard"},
    "haar": {"optim.rotation.kind": "haar"},
}
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
    state = init_state(config)
    noise = np.random.default_rng(0)

    def disturbed(leaf):
        values = np.asarray(leaf)
        if not np.issubdtype(values.dtype, np.floating):
            return values + 1
        return values + noise.normal(size=values.shape).astype(values.dtype)

    return jax.tree.map(disturbed, state)._replace(step=np.int32(step))


def bits(tree):
    return {path: (str(leaf.dtype), np.asarray(leaf).tobytes()) for path, leaf in by_path(tree).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint of every kind, saved over 2 x 2 x 2 devices, and what was saved."""
    home, states = tmp_path_factory.mktemp("saved"), {}
    for kind, changes in KINDS.items():
        config = replace(CONFIG, changes)
        states[kind] = state_of(config)
        with Checkpoints(home / kind / "checkpoints", keep=2) as checkpoints:
            checkpoints.validated(4, 3.25)
            checkpoints.save(placed(states[kind], (2, 2, 2)), config, {"source": "test"})
    return home, states


SLOW = ("adam", "hadamard")
MESHES = [(4, 1, 2), (8, 1, 1)]


@pytest.mark.parametrize("kind", ["haar", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
@pytest.mark.parametrize("sizes", [*MESHES, (1, 1, 1)])
def test_a_state_saved_over_a_mesh_is_restored_onto_another(saved, kind, sizes):
    home, states = saved
    like = placed(init_state(replace(CONFIG, KINDS[kind])), sizes)
    with Checkpoints(home / kind / "checkpoints", keep=2) as checkpoints:
        state = checkpoints.restore(like, 5)
    assert bits(state) == bits(states[kind])
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    if kind == "haar":
        assert any("basis" in path for path in by_path(state.opt_state))


@pytest.mark.parametrize("sizes", [(1, 1, 1), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in MESHES)])
def test_and_the_other_way_round(tmp_path, sizes):
    state = state_of(CONFIG)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(placed(state, sizes), CONFIG, {})
        checkpoints.wait()
        assert bits(checkpoints.restore(placed(init_state(CONFIG), (2, 2, 2)), 5)) == bits(state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_alone_are_read_onto_one_device(saved, kind):
    home, states = saved
    params = read_params(find_checkpoint(home / kind))
    assert bits(params) == bits(states[kind].params)
    assert all(leaf.dtype == "float32" and leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(params))


def test_a_state_of_another_structure_is_refused_and_not_called_damaged(saved):
    home, _ = saved
    with Checkpoints(home / "adam/checkpoints", keep=2) as checkpoints:
        like = init_state(replace(CONFIG, KINDS["adam"]))
        wider = like._replace(params=jax.tree.map(lambda x: np.tile(x, 2), like.params))
        narrower = like._replace(params={name: tree for name, tree in like.params.items() if "embedding" not in name})
        shorter = like._replace(opt_state=jax.tree.map(lambda x: x.astype("float16"), like.opt_state))
        for other in (init_state(replace(CONFIG, KINDS["haar"])), wider, narrower, shorter):
            with pytest.raises(UserError, match="has a different structure: ") as refused:
                checkpoints.restore_newest(other)
            assert not isinstance(refused.value, DamagedError)
    assert find_checkpoint(home / "adam").name == "5"


def test_checkpoints_of_format_1_are_read_and_checked(saved, tmp_path):
    _, states = saved
    state = states["hadamard"]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(placed(state, (1, 1, 1)), CONFIG, {})
    path = tmp_path / "5/checksums/metadata"
    sums = {
        item: {path: zlib.crc32(np.asarray(leaf).tobytes()) for path, leaf in by_path(tree).items()}
        for item, tree in (("params", state.params), ("opt_state", state.opt_state))
    }
    path.write_text(json.dumps(sums))
    assert bits(read_params(tmp_path / "5")) == bits(state.params)
    assert verify_checkpoint(tmp_path / "5") > 0
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert bits(checkpoints.restore(placed(init_state(CONFIG), (2, 2, 2)), 5)) == bits(state)
        name = next(iter(sums["opt_state"]))
        sums["opt_state"][name] ^= 1
        path.write_text(json.dumps(sums))
        with pytest.raises(DamagedError, match=f"opt_state/{name} does not match its checksum"):
            checkpoints.restore(placed(init_state(CONFIG), (2, 2, 2)), 5)


# Other readers, in processes of their own, with one device.


def test_the_snippet_of_the_readme_reads_every_kind(saved, tmp_path):
    home, states = saved
    items = [(kind, item) for kind in KINDS for item in ("params", "opt_state")]
    found = foreign_reader.read(tmp_path, *(home / kind / "checkpoints/5" / item for kind, item in items))
    for (kind, item), arrays in zip(items, found, strict=True):
        assert {path: (str(values.dtype), values.tobytes()) for path, values in arrays.items()} == bits(
            getattr(states[kind], item)
        )


def inspect(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / "launch/inspect_checkpoint.py"), *arguments],
        cwd=cwd, env=foreign_reader.one_device(), capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["haar", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("adam", "hadamard"))]
)
def test_inspection_shows_and_verifies_every_kind(saved, kind):
    home, states = saved
    done = inspect(kind, "--verify", cwd=home)
    assert done.returncode == 0, done.stderr
    arrays = {"params": states[kind].params, "opt_state": states[kind].opt_state}
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    for item, tree in arrays.items():
        leaves = by_path(tree)
        assert f"{item}: {len(leaves)} arrays, {sum(leaf.size for leaf in leaves.values()):,} numbers" in done.stdout
        for path, leaf in leaves.items():
            line = rf"^  {re.escape(path)} +{leaf.dtype} +{re.escape(str(list(leaf.shape)))} {leaf.nbytes:,} bytes$"
            assert re.search(line, done.stdout, re.M), (line, done.stdout)
    for words in (
        f"checksums: all hold, of {total:,} bytes",
        "step 5",
        "source: 'test'",
        "next_step: 5",
        "loss_nats: 3.25",
    ):
        assert words in done.stdout


def test_verification_finds_what_is_damaged(saved, tmp_path):
    state = saved[1]["adam"]
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(placed(state, (2, 2, 2)), replace(CONFIG, KINDS["adam"]), {})
    step = tmp_path / "checkpoints/5"
    assert verify_checkpoint(step) == sum(leaf.nbytes for leaf in jax.tree.leaves(state[1:]))
    path = step / "data/metadata"
    path.write_text(path.read_text().replace("5", "6"))
    with pytest.raises(DamagedError, match="data/metadata does not match its checksum"):
        verify_checkpoint(step)


@pytest.mark.slow
def test_inspection_finds_what_is_damaged(saved, tmp_path):
    step = shutil.copytree(saved[0] / "adam/checkpoints/5", tmp_path / "5")
    (step / "data/metadata").write_text("{}")
    done = inspect(".", "--verify", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read the checkpoint")
