"""Reads items of checkpoints as docs/checkpoints.md says, without orthojax, on one device: the tests run it alone.

python foreign_reader.py OUTPUT STEP/params [STEP/opt_state ...] writes OUTPUT/0.npz, OUTPUT/1.npz, ... with an
array for each leaf, under its path.
"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]


def snippet() -> str:
    """The lines of the guide, of a path that is called `given`."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/checkpoints.md").read_text(), re.S)
    (found,) = [block for block in blocks if "import" in block and "orbax.checkpoint" in block]
    found, replaced = re.subn(r'pathlib\.Path\("[^"]*/params"\)', "pathlib.Path(given)", found)
    assert replaced == 1
    return found


def run(*command: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A Python program, with one device."""
    from small_runs import python  # not at the top: it imports orthojax

    return python(*command, cwd=cwd)


def inspect(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line that shows a checkpoint."""
    return run(ROOT / "launch/inspect_checkpoint.py", *arguments, cwd=cwd)


def read(output: Path, *items: Path) -> list[dict[str, np.ndarray]]:
    """What this program finds, for each item its arrays by path."""
    done = run(__file__, output, *items)
    assert done.returncode == 0, done.stderr
    found = []
    for index in range(len(items)):
        with np.load(output / f"{index}.npz") as arrays:
            found.append(dict(arrays))
    return found


def main(output: str, *items: str) -> None:
    for index, given in enumerate(items):
        names: dict = {"given": given}
        exec(snippet(), names)
        jax, ocp, step = names["jax"], names["ocp"], names["path"].parent
        leaves = jax.tree_util.tree_leaves_with_path(names["params"])
        arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
        np.savez(f"{output}/{index}.npz", **arrays)
        json_items = ("config", "data", "checksums")
        restore = {item: ocp.args.JsonRestore() for item in json_items}
        manager = ocp.CheckpointManager(step.parent)
        assert manager.latest_step() == int(step.name)
        found = manager.restore(int(step.name), args=ocp.args.Composite(**restore))
        assert all(found[item] for item in json_items)
        assert jax.device_count() == 1
    assert not [name for name in sys.modules if name.split(".")[0] == "orthojax"]


if __name__ == "__main__":
    main(*sys.argv[1:])
