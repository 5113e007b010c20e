"""Shows what a checkpoint holds: orthojax inspect runs/mine --verify.

Prints the step, the config, the data, and every array's name, type, shape and size, without reading any array; --verify
compares every file with its checksum.
"""

import math
from pathlib import Path

from absl import flags

from orthojax.config import flatten
from orthojax.errors import printable
from orthojax.places import find_checkpoint

FLAGS = flags.FLAGS
POSITIONAL = "a checkpoint folder"


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_bool("verify", False, "Compare everything in the checkpoint with its checksums.")


def main(arguments: list[str]) -> None:
    step_folder = find_checkpoint(Path(arguments[0]))

    import numpy as np

    from orthojax.train import ARRAYS, list_arrays, read_config, read_json_item, verify_checkpoint

    config = read_config(step_folder)
    print(printable(f"checkpoint {step_folder}, step {step_folder.name}"))
    print("config:")
    for path, value in flatten(config).items():
        print(printable(f"  {path} = {value}"))
    if (step_folder / "data").is_dir():
        print("data:")
        for name, value in read_json_item(step_folder, "data").items():
            print(printable(f"  {name}: {value!r}"))
    for item in ARRAYS:
        arrays = list_arrays(step_folder, item)
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in arrays]
        numbers = sum(math.prod(shape) for _, shape, _ in arrays)
        print(f"{item}: {len(arrays)} arrays, {numbers:,} numbers, {sum(sizes):,} bytes")
        for (path, shape, dtype), size in zip(arrays, sizes, strict=True):
            print(printable(f"  {path:64} {dtype:10} {list(shape)} {size:,} bytes"))
    if FLAGS.verify:
        print(f"checksums: all hold, of {verify_checkpoint(step_folder):,} bytes")
