"""Checkpoints saved on one mesh and read on others, by training, by plain Orbax, and by the command line."""

import json
import re
import shutil
import zlib

import foreign_reader
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_runs import CONFIG as SMALL
from small_runs import bits, by_path, flip, largest
from tiny_run import blank_state

from orthojax.config import replace
from orthojax.errors import UserError
from orthojax.train import (
    Checkpoints,
    DamagedError,
    find_checkpoint,
    read_config,
    read_json_item,
    read_params,
    state_shapes,
    verify_checkpoint,
)
from orthojax.train.checkpoint.checksums import mixed_sum

CONFIG = replace(
    SMALL, {"model.vocab_size": 64, "model.num_layers": 2, "model.scan_layers": True, "optim.weight_decay": 0.1}
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
    noise = np.random.default_rng(0)

    def drawn(leaf):
        if not np.issubdtype(leaf.dtype, np.floating):
            return np.ones(leaf.shape, leaf.dtype)
        return noise.normal(size=leaf.shape).astype(leaf.dtype)

    return jax.tree.map(drawn, state_shapes(config))._replace(step=np.int32(step))


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


MESHES = [(4, 1, 2), (8, 1, 1), (1, 1, 1)]


def restore(folder, config, sizes):
    like = placed(blank_state(config), sizes)
    with Checkpoints(folder, keep=2) as checkpoints:
        state = checkpoints.restore(like, 5)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    return state


DAMAGE = {
    "a flipped bit of the parameters": lambda step: flip(largest(step / "params")),
    "a flipped bit of the moments": lambda step: flip(largest(step / "opt_state"), 0.1),
    "a flipped bit of the names": lambda step: flip(step / "opt_state/_METADATA"),
    "a missing file": lambda step: largest(step / "params").unlink(),
}


@pytest.mark.parametrize(
    "kind", ["haar", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("adam", "hadamard"))]
)
@pytest.mark.parametrize("sizes", [pytest.param(s, marks=[pytest.mark.slow] * (s == MESHES[1])) for s in MESHES])
def test_a_state_is_restored_onto_another_mesh_or_refused_where_it_is_damaged(saved, tmp_path, kind, sizes):
    home, states = saved
    config = replace(CONFIG, KINDS[kind])
    assert bits(restore(home / kind / "checkpoints", config, sizes)) == bits(states[kind])
    assert kind != "haar" or any("basis" in path for path in by_path(states[kind].opt_state))
    for name, damage in DAMAGE.items():
        copy = shutil.copytree(home / kind / "checkpoints", tmp_path / name)
        damage(copy / "5")
        with pytest.raises(DamagedError, match=r"(params|opt_state)/.* (is missing|does not match its checksum)"):
            restore(copy, config, sizes)


@pytest.mark.parametrize("sizes", [(1, 1, 1), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in MESHES[:2])])
def test_and_the_other_way_round(tmp_path, sizes):
    state = state_of(CONFIG)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(placed(state, sizes), CONFIG, {})
    assert bits(restore(tmp_path, CONFIG, (2, 2, 2))) == bits(state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_alone_are_read_onto_one_device(saved, kind):
    home, states = saved
    folder = find_checkpoint(home / kind)
    params = read_params(folder)
    assert read_config(folder) == replace(CONFIG, KINDS[kind])
    assert read_json_item(folder, "data") == {"source": "test", "next_step": 5}
    assert bits(params) == bits(states[kind].params)
    assert all(leaf.dtype == "float32" and leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(params))


def test_a_state_of_another_structure_is_refused_and_not_called_damaged(saved):
    home, _ = saved
    with Checkpoints(home / "adam/checkpoints", keep=2) as checkpoints:
        like = blank_state(replace(CONFIG, KINDS["adam"]))
        wider = like._replace(params=jax.tree.map(lambda x: np.tile(x, 2), like.params))
        narrower = like._replace(params={name: tree for name, tree in like.params.items() if "embedding" not in name})
        shorter = like._replace(opt_state=jax.tree.map(lambda x: x.astype("float16"), like.opt_state))
        for other in (blank_state(replace(CONFIG, KINDS["haar"])), wider, narrower, shorter):
            with pytest.raises(UserError, match="has a different structure: ") as refused:
                checkpoints.restore_newest(other)
            assert not isinstance(refused.value, DamagedError)
    assert find_checkpoint(home / "adam").name == "5"


# Formats 1 and 2.


def defined_sum(values):
    """The checksum of format 2, with Python's integers."""
    width, total = values.dtype.itemsize, 0
    data = np.ascontiguousarray(values).tobytes()
    for i in range(values.size):
        word = int.from_bytes(data[i * width : (i + 1) * width], "little") ^ (i * 0x9E3779B97F4A7C15 % 2**64)
        word = word * 0xFF51AFD7ED558CCD % 2**64
        word ^= word >> 32
        word = word * 0xC4CEB9FE1A85EC53 % 2**64
        total += word ^ (word >> 29)
    return total % 2**64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8", "bool", "float64"])
def test_the_sum_of_format_2_is_what_its_definition_says(dtype):
    for shape in [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (40,)]:
        values = np.random.default_rng(0).normal(0, 100, shape).astype(jax.numpy.dtype(dtype))
        assert mixed_sum(values) == defined_sum(values)


def older(step, state, version):
    """Rewrites a step's checksums as an older version wrote them; two processes wrote format 2."""
    arrays = {item: by_path(getattr(state, item)) for item in ("params", "opt_state")}
    arrays = {item: {path: np.asarray(leaf) for path, leaf in leaves.items()} for item, leaves in arrays.items()}
    if version == 1:
        sums = {item: {path: zlib.crc32(a.tobytes()) for path, a in leaves.items()} for item, leaves in arrays.items()}
        (step / "checksums/metadata").write_text(json.dumps(sums))
        return
    values = {item: json.loads((step / item / "metadata").read_text()) for item in ("config", "data", "validation")}
    header = {
        "algorithm": "sum of mix64(bits xor index * 0x9e3779b97f4a7c15) mod 2**64",
        "processes": 2,
        "json": {item: zlib.crc32(json.dumps(content, sort_keys=True).encode()) for item, content in values.items()},
    }
    share = 0xFEDCBA9876543210  # of the second process
    for name in ("metadata", "process_1"):
        part = header | {
            item: {
                path: f"{a.dtype}[{','.join(map(str, a.shape))}] "
                f"{share if name == 'process_1' else (defined_sum(a) - share) % 2**64:016x}"
                for path, a in leaves.items()
            }
            for item, leaves in arrays.items()
        }
        part["own"] = zlib.crc32(json.dumps(part, sort_keys=True).encode())
        (step / "checksums" / name).write_text(json.dumps(part))


@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_checkpoints_of_older_formats_are_read_and_checked(saved, tmp_path, version):
    home, states = saved
    state, config = states["haar"], replace(CONFIG, KINDS["haar"])
    step = shutil.copytree(home / "haar/checkpoints", tmp_path / "run") / "5"
    older(step, state, version)
    assert bits(read_params(step)) == bits(state.params)
    assert verify_checkpoint(step) == sum(leaf.nbytes for leaf in jax.tree.leaves(state[1:]))
    assert bits(restore(step.parent, config, (4, 1, 2))) == bits(state)
    moments = by_path(state.opt_state)
    name = next(path for path, leaf in moments.items() if leaf.ndim == 3)
    moments[name] = moments[name] + np.float32(1)
    other = jax.tree.unflatten(jax.tree.structure(state.opt_state), list(moments.values()))
    older(step, state._replace(opt_state=other), version)
    for read in (verify_checkpoint, lambda _: restore(step.parent, config, (2, 2, 2))):
        with pytest.raises(DamagedError, match=f"opt_state/{name} does not match its checksum\n"):
            read(step)
    assert bits(read_params(step)) == bits(state.params)
    older(step, state, version)
    for path in (step / "opt_state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DamagedError, match="cannot read the checkpoint"):
        restore(step.parent, config, (1, 1, 1))
    if version == 2:
        (step / "data/metadata").write_text('{"source": "another"}')
        with pytest.raises(DamagedError, match="data does not match its checksum"):
            read_params(step)
        (step / "checksums/process_1").unlink()
        with pytest.raises(DamagedError, match="item 'checksums'"):
            read_params(step)


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
    words = ("step 5", "source: 'test'", "next_step: 5", "loss_nats: 3.25", f"checksums: all hold, of {total:,} bytes")
    assert all(word in done.stdout for word in words), done.stdout
