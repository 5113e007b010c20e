"""What a run is said to take, against its real state and step."""

import re

import jax
import pytest

from orthojax.config import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig
from orthojax.fields import replace
from orthojax.model import gpt2, parameter_count
from orthojax.train import dry_run, init_state
from orthojax.train.estimates import bytes_on_one_device

SMALL = Config(
    gpt2("tiny", num_layers=2, d_model=32, num_heads=4, d_mlp=64, vocab_size=64, max_length=16),
    OptimConfig(optimizer="orthoadam", warmup_steps=1),
    DataConfig(sequence_length=16),
    TrainConfig(steps=10, batch_size=16),
    EvalConfig(sequences=16, batch_size=16),
)
MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


@pytest.fixture(scope="module")
def told():
    return list(dry_run(replace(SMALL, MESH)))


def _after(lines, start):
    line = next(line for line in lines if line.startswith(start))
    return line.split(":", 1)[1].strip()


def test_counts_are_those_of_the_run(told):
    assert _after(told, "parameters:") == f"{parameter_count(SMALL.model):,}"
    assert _after(told, "tokens:") == "2,560 in 10 steps of 256"
    assert _after(told, "devices:").startswith("8 x cpu, mesh data 2, fsdp 2, tensor 2")
    (h200,) = [line for line in told if "NVIDIA H200" in line]
    hours = [float(value) for value in h200.split(":")[1].split(",")]
    assert hours[0] / hours[2] == pytest.approx(5 / 3, rel=0.01)


def test_every_parameter_is_told_with_the_bytes_that_a_device_really_holds(told):
    state = init_state(replace(SMALL, MESH))
    first = jax.devices()[0]

    def held(tree):
        shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == first]
        return sum(shard.data.nbytes for shard in shards)

    assert bytes_on_one_device(state.params) == held(state.params)
    assert bytes_on_one_device(state.opt_state) == held(state.opt_state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        (line,) = [line for line in told if line.strip().startswith(f"{name} (")]
        spec = str(tuple(leaf.sharding.spec)) if any(leaf.sharding.spec) else "whole"
        assert f": {spec} | " in line
        number, unit = re.findall(r"([\d.]+) ([kMG])B$", line)[0]
        assert float(number) * {"k": 1e3, "M": 1e6, "G": 1e9}[unit] == pytest.approx(held(leaf), rel=0.01)


def test_parts_of_the_memory_are_told_and_add_up(told):
    start = told.index("memory of each device:")
    sizes = {}
    for line in told[start + 1 : -2]:
        name, size = line.strip().split(": ")
        number, unit = size.split()
        sizes[name] = float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    together = sizes.pop("together")
    assert sizes.pop("of these gradients, at most") == sizes["parameters"]
    # 16 rows over data and fsdp, 16 positions, 64 ids over tensor, float32: 16/4 * 16 * 64/2 * 4
    assert sizes.pop("of these logits, each time that they are materialised") == pytest.approx(8192, rel=0.01)
    assert list(sizes) == ["parameters", "optimizer state", "tokens of a batch", "gradients, activations, logits"]
    assert together == pytest.approx(sum(sizes.values()), rel=0.01)
    assert min(sizes.values()) > 0


@pytest.mark.slow
def test_one_device_has_no_mesh():
    lines = list(dry_run(SMALL))
    assert lines[0] == "devices: 1 x cpu"
    assert not [line for line in lines if " | " in line]
    assert lines[-1].startswith("compiled for cpu in")
