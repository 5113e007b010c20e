"""Whether a checkpoint is what was written: its checksums against what was read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orthojax.errors import UserError
from orthojax.train.checkpoint.checksums import (
    ALGORITHM,
    by_path,
    crc32_of_array,
    describe_array,
    host_parts,
    json_checksum,
    parts_sum,
)
from orthojax.train.checkpoint.handler import file_name
from orthojax.train.checkpoint.items import DamagedError, read_json_item


@dataclasses.dataclass(frozen=True)
class Checksums:
    """What a checkpoint says of itself.

    Attributes:
      format: 1: CRC-32 of whole arrays; 2: the sums of `checksums`, types and shapes, and CRC-32 of the JSON items.
      arrays: Item -> path -> checksum.
      described: Item -> path -> type and shape; {} in format 1.
      values: JSON item -> CRC-32; {} in format 1.
    """

    format: int
    arrays: dict[str, dict[str, int]]
    described: dict[str, dict[str, str]]
    values: dict[str, int]


def read_checksums(step_folder: Path) -> Checksums:
    """The item `checksums`, added up over the processes that wrote it.

    Raises:
      DamagedError: Where it is missing or not understood.
    """
    first = read_json_item(step_folder, "checksums")
    try:
        if "algorithm" not in first:
            return Checksums(1, {item: dict(first[item]) for item in ("params", "opt_state")}, {}, {})
        if first["algorithm"] != ALGORITHM:
            raise ValueError(f"checksums of an unknown kind, {first['algorithm']!r}")
        sums: dict[str, dict[str, int]] = {"params": {}, "opt_state": {}}
        described: dict[str, dict[str, str]] = {"params": {}, "opt_state": {}}
        for process in range(int(first["processes"])):
            part = read_json_item(step_folder, "checksums", file_name(process)) if process else first
            if part.pop("own", None) != json_checksum(part):
                raise ValueError(f"{file_name(process)} does not have its own checksum")
            for item, arrays in sums.items():
                for path, text in part[item].items():
                    kind, _, number = text.partition(" ")
                    if described[item].setdefault(path, kind) != kind:
                        raise ValueError(f"processes disagree on {item}/{path}")
                    arrays[path] = (arrays.get(path, 0) + int(number, 16)) % 2**64
        return Checksums(2, sums, described, {name: int(value) for name, value in first["json"].items()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, DamagedError):
            raise
        problem = "{} is not a complete orthojax checkpoint: {}"
        raise DamagedError(step_folder, f"item 'checksums': {error}", problem=problem) from error


def require_fitting(step_folder: Path, checksums: Checksums, item: str, like: Any) -> None:
    """Refuses a tree of other names, shapes or dtypes than were saved; nothing is damaged then.

    Raises:
      UserError: Naming the first array that differs.
    """
    if checksums.format == 1:
        return
    saved = checksums.described[item]
    wanted = {path: describe_array(leaf.shape, leaf.dtype) for path, leaf in by_path(like).items()}
    for path in sorted(saved | wanted):
        if saved.get(path) != wanted.get(path):
            raise UserError(
                f"the checkpoint {step_folder} is of another structure: {item}/{path} is "
                f"{saved.get(path, 'absent')}, not {wanted.get(path, 'absent')}",
                allowed="a checkpoint of the same model and optimizer",
            )


def require_intact_values(step_folder: Path, checksums: Checksums) -> None:
    """Compares the JSON items with their checksums.

    Raises:
      DamagedError: Naming the item.
    """
    for item, checksum in checksums.values.items():
        if json_checksum(read_json_item(step_folder, item)) != checksum:
            raise DamagedError(step_folder, f"{item} does not have its checksum")


def local_checksums(checksums: Checksums, tree: Any) -> dict[str, int]:
    """What this process adds to the checksum of every array of a tree."""
    if checksums.format == 1:
        return {path: crc32_of_array(leaf) for path, leaf in by_path(tree).items()}
    return {path: parts_sum(tuple(leaf.shape), host_parts(leaf)) for path, leaf in by_path(tree).items()}


def first_damaged(checksums: Checksums, item: str, found: dict[str, int]) -> str:
    """The first array without its checksum as words, or ''."""
    saved = checksums.arrays[item]
    bad = [path for path in sorted(saved | found) if saved.get(path) != found.get(path)]
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"{item}/{bad[0]} does not have its checksum: it is damaged{more}" if bad else ""


def require_intact(step_folder: Path, checksums: Checksums, item: str, tree: Any) -> None:
    """Compares arrays that this process holds whole with their checksums.

    Raises:
      DamagedError: Naming the array.
    """
    damage = first_damaged(checksums, item, local_checksums(checksums, tree))
    if damage:
        raise DamagedError(step_folder, damage)


def restore_agreed(step_folder: Path, checksums: Checksums, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Reads and checks arrays that many processes hold together: all of them return, or all of them raise.

    Args:
      step_folder: The checkpoint.
      checksums: Of it.
      read: Reads this process's part, without waiting for the others: item -> tree.

    Raises:
      DamagedError: On every process, where one cannot read its part or an array does not have its checksum.
    """
    trees, failure = {}, None
    try:
        trees = read()
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # of this machine, not of the files
    except Exception as error:
        failure = error
    shares = [(item, path) for item, arrays in checksums.arrays.items() for path in arrays]
    found = {item: local_checksums(checksums, tree) for item, tree in trees.items()}
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        own = [found.get(item, {}).get(path, 0) for item, path in shares]
        words = np.array([[number >> 32, number % 2**32] for number in [int(failure is not None), *own]], np.uint32)
        rows = np.asarray(multihost_utils.process_allgather(words)).astype(object)
        failed, *totals = [
            sum((int(high) << 32) + int(low) for high, low in column) for column in zip(*rows, strict=True)
        ]
        if failed and failure is None:
            failure = ValueError("another process cannot read its part")
        if checksums.format == 2:  # in format 1 every process has computed the whole
            for (item, path), total in zip(shares, totals, strict=True):
                found.setdefault(item, {})[path] = total % 2**64
    if failure is not None:
        raise DamagedError(step_folder, failure) from failure
    for item in trees:
        damage = first_damaged(checksums, item, found[item])
        if damage:
            raise DamagedError(step_folder, damage)
    return trees
