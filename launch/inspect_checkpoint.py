"""Shows what a checkpoint holds: python launch/inspect_checkpoint.py runs/mine.

Prints the step, the config and every array's name, shape and dtype; no array is read.
"""

import math
from pathlib import Path

from orthojax import cli
from orthojax.fields import flatten


def main(arguments: list[str]) -> None:
    from orthojax.train import find_checkpoint, list_arrays, read_config, read_json_item

    step_folder = find_checkpoint(Path(arguments[0]))
    config = read_config(step_folder)
    print(f"checkpoint {step_folder}, step {step_folder.name}")
    print("config:")
    for path, value in flatten(config).items():
        print(f"  {path} = {value}")
    print("data:")
    for name, value in read_json_item(step_folder, "data").items():
        print(f"  {name}: {value!r}")
    for item in ("params", "opt_state"):
        arrays = list_arrays(step_folder, item)
        print(f"{item}: {len(arrays)} arrays, {sum(math.prod(shape) for _, shape, _ in arrays):,} numbers")
        for path, shape, dtype in arrays:
            print(f"  {path:64} {dtype:10} {list(shape)}")


if __name__ == "__main__":
    cli.run(main, positional="a checkpoint folder")
