"""The examples run as they stand, in a process of their own, and stay short enough to be copied."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["orthoadam", "adamw"])
@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_training(library, name):
    printed = re.fullmatch(r"(\w+): ([\d.]+) -> ([\d.]+) nats per byte\n", run(f"{library}_training.py", *[name]))
    assert printed
    assert printed[1] == name
    first, last = float(printed[2]), float(printed[3])
    assert first > 4.5  # about ln 128 = 4.85, before anything is learned
    assert last < 3.0


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_attention_in_ten_lines(library, capsys):
    path = ROOT / "examples" / f"{library}_attention.py"
    assert sum(map(bool, path.read_text(encoding="utf-8").splitlines()[1:])) <= 10
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out == "(2, 16, 64)\n"


def test_every_example_is_tested():
    tested = {"linen_attention.py", "nnx_attention.py", "nnx_training.py", "equinox_training.py"}
    assert {path.name for path in EXAMPLES} == tested
