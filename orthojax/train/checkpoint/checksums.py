"""Checksums of arrays that do not depend on how an array is split over devices and processes.

The checksum of an array is a sum over its elements modulo 2**64,

    sum_i mix(bits_i XOR (i * G mod 2**64)),

where i is the row-major index of the element in the whole array, bits_i are its bits as an unsigned integer, G is odd,
and mix is the finaliser of MurmurHash3 with shifts of 32 and 29: two odd multiplications and two xor-shifts. Because it
is a sum, every process adds up the parts that it holds, and the parts of a checkpoint add up to the same number on any
mesh, device count and process count; nothing is gathered. Because mix is one-to-one for a given i, a change of any one
element, a flipped bit among them, always changes the sum; because i enters non-linearly, a swap, a shift or a lost
block goes unseen with the chance of a random 64-bit number. It guards against damage, not against an adversary.

It is computed on the host, on the very copy that is written, in NumPy and in blocks that fit a core's cache.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

ALGORITHM = "sum of mix64(bits xor index * 0x9e3779b97f4a7c15) mod 2**64"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(32), np.uint64(0xC4CEB9FE1A85EC53), np.uint64(29))
_BLOCK = 1 << 15  # elements: 256 KiB of 64-bit words, twice

# A part of an array on the host: where it starts along every axis, and its values.
Part = tuple[tuple[int, ...], np.ndarray]


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, as in `layers_0/attention/query/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def describe_array(shape: Iterable[int], dtype: Any) -> str:
    """Type and shape in one word.

    >>> describe_array((16, 32), np.float32)
    'float32[16,32]'
    """
    return f"{np.dtype(dtype)}[{','.join(map(str, shape))}]"


def host_parts(array: jax.Array) -> list[Part]:
    """The parts of an array that this process answers for: every part of the array belongs to one process.

    Returns:
      Views of host memory: valid for as long as they are held, also when the array is donated. Orbax uses the same
      host copy.
    """
    return [
        (tuple(piece.start or 0 for piece in shard.index), jax.device_get(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def copy_to_host(trees: Mapping[str, Any]) -> dict[str, dict[str, tuple[tuple[int, ...], list[Part]]]]:
    """Fetches what this process answers for, all transfers at once.

    Returns:
      item -> path -> (shape of the whole array, parts).
    """
    for leaf in jax.tree.leaves(trees):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                shard.data.copy_to_host_async()
    return {
        item: {path: (tuple(leaf.shape), host_parts(leaf)) for path, leaf in by_path(tree).items()}
        for item, tree in trees.items()
    }


def parts_sum(shape: tuple[int, ...], parts: Iterable[Part]) -> int:
    """What the parts add to the checksum of an array of this shape; 0 to 2**64 - 1.

    >>> whole = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> left, right = ((0, 0), whole[:, :1]), ((0, 1), whole[:, 1:])
    >>> parts_sum((2, 3), [left, right]) == parts_sum((2, 3), [((0, 0), whole)])
    True
    """
    return sum(_part_sum(shape, start, values) for start, values in parts) % 2**64


def _part_sum(shape: tuple[int, ...], start: tuple[int, ...], values: np.ndarray) -> int:
    if values.size == 0:
        return 0
    columns = values.shape[-1] if values.ndim else 1
    bits = np.ascontiguousarray(values).reshape(-1, columns).view(f"u{values.dtype.itemsize}")
    # The index, times G: of the first element of every row of the last axis, and along that axis.
    row_keys, stride = np.zeros(1, np.uint64), 1
    column_keys = np.zeros(1, np.uint64)
    for axis in reversed(range(values.ndim)):
        keys = np.arange(start[axis], start[axis] + values.shape[axis], dtype=np.uint64) * np.uint64(stride) * _GOLDEN
        stride *= shape[axis]
        if axis == values.ndim - 1:
            column_keys = keys
        else:
            row_keys = np.add.outer(keys, row_keys).reshape(-1)
    total, step = 0, max(1, _BLOCK // columns)
    for top in range(0, len(bits), step):
        for left in range(0, columns, _BLOCK):
            block = np.s_[top : top + step], np.s_[left : left + _BLOCK]
            words = np.add.outer(row_keys[block[0]], column_keys[block[1]])
            np.bitwise_xor(words, bits[block], out=words)
            total += _mixed_sum(words)
    return total


def _mixed_sum(words: np.ndarray) -> int:
    first, shift, second, last_shift = _MIX
    words *= first
    words ^= words >> shift
    words *= second
    words ^= words >> last_shift
    return int(words.sum(dtype=np.uint64))


def json_checksum(values: Any) -> int:
    """CRC-32 of JSON values, whatever the order of their keys and the spaces."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def crc32_of_array(array: jax.Array) -> int:
    """CRC-32 of the bytes of a whole array, row-major: the checksum of checkpoints of format 1."""
    if not array.is_fully_addressable:
        from jax.experimental import multihost_utils

        array = multihost_utils.process_allgather(array, tiled=True)
    return zlib.crc32(np.ascontiguousarray(jax.device_get(array)).reshape(-1).view(np.uint8).data)
