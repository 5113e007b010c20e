"""The benchmarks run, with tiny shapes, and print ratios."""

import json
import subprocess
import sys

import pytest
from small_runs import ROOT, cpu_environment

COMPARED = {
    "attention": {"softmax", "softmax1", "learned sink", "softmax of jax.nn"},
    "optimizer": {"optax.adamw", "orthoadam, hadamard", "orthoadam, haar", "optax.contrib.muon"},
    "training": {"vanilla", "cured", "plain flax + optax"},
    "loop": {"one step per dispatch", "several steps per dispatch", "plain flax + optax"},
}


def run(script, *arguments):
    command = [sys.executable, str(ROOT / script), "--tiny", "--repeats=2", *arguments]
    environment = cpu_environment()
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.parametrize("name", [pytest.param("attention", marks=pytest.mark.slow), "optimizer"])
def test_benchmark_prints_a_table_of_ratios(name):
    heading, rule, *rows = [line.strip("| ").split(" | ") for line in run(f"benchmarks/{name}.py").splitlines()[3:-1]]
    assert set(rule) == {"---"}
    assert {row[heading.index(name)] for row in rows} == COMPARED[name]
    assert all(float(row[heading.index("ratio")]) > 0 for row in rows)


@pytest.mark.slow
def test_variants_of_the_step_are_timed_and_lowered():
    environment, *rows = map(json.loads, run("benchmarks/gpu_step.py").splitlines())
    assert environment["environment"]["versions"]["jax"]
    variants = {row["variant"]: row for row in rows if "variant" in row}
    assert len(variants) == 4
    assert all(row["ratio"] > 0 and row["temp_bytes"] > 0 for row in variants.values())
    assert [row["attention"] for row in rows if "attention" in row] == ["softmax", "softmax1"]
    rows = [json.loads(line) for line in run("benchmarks/gpu_step.py", "--lower").splitlines()]
    assert len({row["variant"] for row in rows}) == len(rows) >= len(variants)
    # Forward and backward, in each of the two layers; some versions of JAX write the body of an unrolled scan once.
    assert {row["attention_kernels"] for row in rows} <= {2, 4}


@pytest.mark.slow
def test_launcher_prints_json_of_every_benchmark():
    results = [json.loads(line) for line in run("launch/benchmark.py", "--json").splitlines()]
    assert len(results) == len(COMPARED)
    for result, names in zip(results, COMPARED.values(), strict=True):
        assert names <= {value for row in result["rows"] for value in row.values()}
        assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in result["rows"])
        assert result["versions"]["jax"]
