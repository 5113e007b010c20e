"""The checksum of an array: its definition in plain integers, how it adds up over devices, and what it notices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orthojax.train.checkpoint.checksums import (
    by_path,
    copy_to_host,
    crc32_of_array,
    describe_array,
    host_parts,
    json_checksum,
    parts_sum,
)

WORD = 2**64


def defined_sum(values):
    """The definition, with Python's integers."""
    width, total = values.dtype.itemsize, 0
    data = np.ascontiguousarray(values).tobytes()
    for i in range(values.size):
        word = int.from_bytes(data[i * width : (i + 1) * width], "little") ^ (i * 0x9E3779B97F4A7C15 % WORD)
        word = word * 0xFF51AFD7ED558CCD % WORD
        word ^= word >> 32
        word = word * 0xC4CEB9FE1A85EC53 % WORD
        total += word ^ (word >> 29)
    return total % WORD


def whole_sum(values):
    return parts_sum(values.shape, [((0,) * values.ndim, values)])


def numbers(shape, dtype="float32", seed=0):
    return np.asarray(jnp.asarray(np.random.default_rng(seed).normal(0, 100, shape)).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool", "uint32"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (4, 0, 2)])
def test_it_is_what_its_definition_says(shape, dtype):
    values = numbers(shape, dtype)
    assert whole_sum(values) == defined_sum(values)


def test_wide_and_long_arrays_are_summed_in_blocks(monkeypatch):
    monkeypatch.setattr("orthojax.train.checkpoint.checksums._BLOCK", 8)
    for shape in [(40,), (3, 20), (30, 3), (2, 5, 9)]:
        assert whole_sum(numbers(shape)) == defined_sum(numbers(shape))
    assert whole_sum(np.arange(6.0).astype(np.float64)) == defined_sum(np.arange(6.0))


MESHES = [(2, 2, 2), (4, 1, 2), (8, 1, 1), (1, 8, 1), (1, 1, 1)]
SPECS = [
    PartitionSpec(),
    PartitionSpec("data"),
    PartitionSpec(None, "fsdp"),
    PartitionSpec("fsdp", "tensor"),
    PartitionSpec(("data", "fsdp"), None, "tensor"),
    PartitionSpec("tensor", ("fsdp", "data")),
]


@pytest.mark.parametrize("sizes", MESHES)
def test_it_does_not_depend_on_the_sharding(sizes):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, ("data", "fsdp", "tensor"))
    values = numbers((8, 16, 8))
    for spec in SPECS:
        array = jax.device_put(values, NamedSharding(mesh, spec))
        parts = host_parts(array)
        assert sum(part.size for _, part in parts) == values.size  # every element once
        assert parts_sum(values.shape, parts) == whole_sum(values)


def test_the_parts_of_many_processes_add_up():
    values = numbers((6, 10))
    first = parts_sum((6, 10), [((0, 0), values[:2]), ((2, 0), values[2:, :3])])
    second = parts_sum((6, 10), [((2, 3), values[2:, 3:])])
    assert (first + second) % WORD == whole_sum(values)


def test_every_flipped_bit_and_every_swap_is_noticed():
    values = numbers((3, 4))
    good, bits = whole_sum(values), values.view(np.uint32)
    for i in range(values.size):
        for bit in range(32):
            flipped = bits.copy()
            flipped.flat[i] ^= np.uint32(1) << np.uint32(bit)
            assert whole_sum(flipped.view(np.float32)) != good
        for j in range(i):
            swapped = values.copy()
            swapped.flat[i], swapped.flat[j] = values.flat[j], values.flat[i]
            assert whole_sum(swapped) != good
    assert whole_sum(values.T.copy()) != good
    assert whole_sum(np.roll(values, 1)) != good
    assert whole_sum(np.zeros((64, 64), np.float32)) != whole_sum(-np.zeros((64, 64), np.float32))


def test_the_host_copy_outlives_donation():
    """The next step takes over the state's memory while the sums are still being made."""
    values = numbers((256, 256))
    state = {"w": jnp.asarray(values.copy())}
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    held = copy_to_host({"params": state})
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    shape, parts = held["params"]["w"]
    assert parts_sum(shape, parts) == whole_sum(values)


def test_format_1_and_small_things():
    assert crc32_of_array(jnp.asarray(np.frombuffer(b"123456789", np.uint8))) == 0xCBF43926  # the check value of CRC-32
    assert crc32_of_array(jnp.zeros(())) == crc32_of_array(jnp.zeros((1,)))
    assert json_checksum({"a": 1, "b": [2.5]}) == json_checksum({"b": [2.5], "a": 1}) != json_checksum({"a": 1})
    assert describe_array((), jnp.bfloat16) == "bfloat16[]"
    assert list(by_path({"a": {"b": [1, 2]}})) == ["a/b/0", "a/b/1"]
