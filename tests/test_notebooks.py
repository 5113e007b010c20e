"""Notebooks run from their first cell to their last, and print the kind of thing that they hold as outputs."""

import json
import re
import subprocess
import sys

import pytest
from small_runs import ROOT, cpu_environment

NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
LARGEST_BYTES = 100_000


def cells(name, kind):
    return [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == kind]


def printed(name):
    """Returns what its cells printed when it was saved."""
    outputs = [output for cell in cells(name, "code") for output in cell["outputs"]]
    return "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")


def shape_of(text):
    """Removes the numbers, which depend on the machine and the Python that is read."""
    return [" ".join(re.sub(r"[-\d.,e+\[\]]+", " ", line).split()) for line in text.splitlines()]


def run(name, tmp_path, **replaced):
    code = "\n".join("".join(cell["source"]) for cell in cells(name, "code"))
    for word, value in replaced.items():
        code, found = re.subn(rf"^{word} = .*$", f"{word} = {value}", code, flags=re.MULTILINE)
        assert found == 1
    environment = cpu_environment(MPLBACKEND="agg")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_saved_outputs_are_whole_without_errors(name):
    assert len(json.dumps(NOTEBOOKS[name])) < LARGEST_BYTES
    outputs = [output for cell in cells(name, "code") for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert not re.search(r"/(tmp|home|root|work)/", json.dumps(outputs))
    numbers = [cell["execution_count"] for cell in cells(name, "code")]
    assert numbers == list(range(1, len(numbers) + 1))


def test_measure_your_model_runs(tmp_path):
    assert shape_of(run("measure_your_model", tmp_path)) == shape_of(printed("measure_your_model"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swap_the_optimizer", "bigram_backcopy"])
def test_shorter_runs_print_the_saved_lines(name, tmp_path):
    assert shape_of(run(name, tmp_path, STEPS=150)) == shape_of(printed(name))


@pytest.mark.slow
@pytest.mark.pretrained
def test_the_real_model_prints_the_saved_lines(tmp_path):
    assert run("real_model", tmp_path).splitlines()[1:] == printed("real_model").splitlines()[1:]
