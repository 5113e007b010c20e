"""Checksums: Orbax restores a flipped byte silently, so every step carries the SHA-256 of each of its files.

`checksums/metadata` is `{"algorithm": "sha256", "files": {path in the step folder: digest}}` (format 3). Process 0
writes it in the background once all processes have written and Orbax has merged their arrays, before the step is
renamed: it commits with what it guards or not at all. On a restore every process checks its share of the files.

Older formats have a checksum for each array, and are still verified. Format 2 is a sum over the elements,

    sum_i mix(bits_i XOR (i * G mod 2**64)) mod 2**64,

with i the row-major index of an element, bits_i its bits as an unsigned integer, G odd, and mix the finaliser of
MurmurHash3 with shifts of 32 and 29; `checksums/process_N` has the share of every process N but the first. Format 1 is
a CRC-32 of each array and none of the JSON items.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from orthojax.errors import UserError
from orthojax.files import read_json, write_text

ARRAYS = ("params", "opt_state")  # the items of arrays; a quantised checkpoint has the first alone
JSON_ITEMS = ("config", "data", "validation", "quantization")  # the last two only where they apply
_SUM = "sum of mix64(bits xor index * 0x9e3779b97f4a7c15) mod 2**64"  # the algorithm of format 2


class DamagedError(UserError):
    """A checkpoint is not what was written; training resumes from the one before it.

    Attributes:
      reason: What was found, in a few words.
    """

    def __init__(self, folder: Path, error: Exception | str):
        """Names the folder, of a step or of one of its items, what was found, and which other steps there are."""
        self.reason = error if isinstance(error, str) else first_line(error)
        step_folder = folder if folder.name.isdigit() else folder.parent
        others = [step for step in steps_in(step_folder.parent) if str(step) != step_folder.name]
        super().__init__(
            f"cannot read the checkpoint {folder}: {self.reason}",
            allowed="a complete orthojax checkpoint",
            hint=f"also in {step_folder.parent}: {', '.join(map(str, reversed(others)))}" if others else "",
        )


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; of a long one 200 characters, since the cause stands at its end.

    >>> first_line(ValueError("writing " + "x" * 300 + ": No space left on device"))[-30:]
    'xxxxx: No space left on device'
    """
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 200 else f"{text[:97]} ... {text[-98:]}"


def steps_in(folder: Path) -> list[int]:
    """The steps that a `checkpoints` folder holds, in order."""
    if not os.path.isdir(folder):
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def read_json_item(step_folder: Path, item: str, file: str = "metadata") -> dict[str, Any]:
    """A JSON item of one step: `config`, `data`, `checksums`, or `validation` where there is one.

    Raises:
      DamagedError: Where it is missing or not a JSON object.
    """
    path = step_folder / item / file
    try:
        return read_json(path, "file")
    except UserError as error:
        raise DamagedError(step_folder, f"item {item!r}: {first_line(error).replace(f' {path}', '')}") from None


class ManifestHandler(ocp.JsonCheckpointHandler):
    """Writes the digests of all other items into the item `checksums` when Orbax finalises it."""

    @classmethod
    def typestr(cls) -> str:
        """On disk it is plain JSON: readers without orthojax find it so."""
        return ocp.JsonCheckpointHandler.typestr()

    def finalize(self, directory: Any) -> None:
        """Called by Orbax on process 0, after every process has written its part and before the step is renamed."""
        folder = Path(directory)
        paths = [path for item in (*ARRAYS, *JSON_ITEMS) for path in (folder.parent / item).rglob("*")]
        files = sorted(path for path in paths if path.is_file() and path.name != "commit_success.txt")
        digests = file_digests(folder.parent, [path.relative_to(folder.parent).as_posix() for path in files])
        write_text(folder / "metadata", json.dumps({"algorithm": "sha256", "files": digests}))


def handler_registry() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """The items of a step, in the order in which Orbax finalises them: arrays are merged, then everything is hashed."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ARRAYS:
        registry.add(item, ocp.args.StandardSave, ocp.StandardCheckpointHandler())
    for item in JSON_ITEMS:
        registry.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    registry.add("checksums", ocp.args.JsonSave, ManifestHandler())
    return registry


def file_digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files in a folder, several at a time."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


# Formats 1 and 2.


def older_checksums(
    step_folder: Path, manifest: dict[str, Any], items: Iterable[str], read: Callable[[str], dict[str, np.ndarray]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checksums that a checkpoint of format 1 or 2 states, and those of what it holds, by name.

    Args:
      step_folder: The checkpoint.
      manifest: Its `checksums/metadata`.
      items: Of arrays, those to check.
      read: Item -> path -> array, contiguous.

    Raises:
      AttributeError, KeyError, TypeError, ValueError: Where they are not understood.
    """
    stated: dict[str, Any] = {}
    found: dict[str, Any] = {}
    algorithm = manifest.get("algorithm")
    checksum = mixed_sum if algorithm else lambda array: zlib.crc32(array.tobytes())
    if algorithm is None:
        stated = {f"{item}/{path}": value for item in items for path, value in manifest[item].items()}
    elif algorithm != _SUM:
        raise ValueError(f"unknown algorithm {algorithm!r}")
    else:
        stated |= manifest["json"]
        found = {item: _json_checksum(read_json_item(step_folder, item)) for item in stated}
        for process in range(int(manifest["processes"])):
            part = read_json_item(step_folder, "checksums", f"process_{process}") if process else manifest
            if part["own"] != _json_checksum({name: value for name, value in part.items() if name != "own"}):
                raise ValueError(f"the part of process {process} does not match its own checksum")
            for item in items:
                for path, text in part[item].items():  # such as "float32[16,32] 0123456789abcdef"
                    name = f"{item}/{path}"
                    stated[name] = (stated.get(name, 0) + int(text.split()[1], 16)) % 2**64
    for item in items:
        found |= {f"{item}/{path}": checksum(array) for path, array in read(item).items()}
    return stated, found


def mixed_sum(values: np.ndarray) -> int:
    """The checksum of an array in format 2; 0 to 2**64 - 1."""
    bits = values.reshape(-1).view(f"u{values.dtype.itemsize}")
    words = np.arange(bits.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= bits
    words *= np.uint64(0xFF51AFD7ED558CCD)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0xC4CEB9FE1A85EC53)
    words ^= words >> np.uint64(29)
    return int(words.sum(dtype=np.uint64))


def _json_checksum(values: Any) -> int:
    """CRC-32 of JSON values in format 2, whatever the order of their keys and the spaces."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
