"""The benchmarks: that they measure what they say, on shapes whose bytes are known in closed form."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthojax.benchmarks import (
    attention_cases,
    compilation,
    data,
    optimizer,
    quantization,
    suite,
    telemetry,
    train_step_cases,
)
from orthojax.benchmarks.catalog import SUITES
from orthojax.benchmarks.optimizer_cases import KERNEL_ROTATIONS
from orthojax.benchmarks.program import Program, compile_program, free_bytes, tree_bytes
from orthojax.config import Config
from orthojax.fields import changed_fields
from orthojax.optim import RotatedState, Rotation, orthoadam, scale_by_orthoadam
from orthojax.train import provenance

ROOT = Path(__file__).parents[1]
KERNEL = {"kernel": jax.ShapeDtypeStruct((16, 24), jnp.float32)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The whole command at its smallest: what it wrote and what it printed."""
    home, absent = tmp_path_factory.mktemp("benchmark"), tmp_path_factory.mktemp("absent")
    for library in ("grain", "tensorflow_datasets"):  # a machine that only measures need not have them
        (absent / f"{library}.py").write_text(f"raise ImportError('{library} is absent')")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(absent), environment.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/benchmark.py"), "--tiny", "--repeats=2", "--workdir=out"],
        cwd=home, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [path.name for path in (home / "out").iterdir()] == ["benchmark.json"]
    return json.loads((home / "out/benchmark.json").read_text()), done.stdout


@pytest.mark.slow
def test_the_command_measures_every_suite_case_and_rotation(tiny):
    results, printed = tiny
    assert results["finished"]
    rows = [(row["suite"], row["case"], row["variant"]) for row in results["rows"]]
    wanted = [("optimizer", case.name, name) for case in optimizer.cases(tiny=True) for name in case.rotations]
    wanted.append(("compile", "gpt2 tiny unrolled", "orthoadam"))
    attentions = attention_cases.cases("cpu", tiny=True)
    assert {case.implementation for case in attentions} == {"xla", "xla_chunked"}
    wanted += [("attention", case.name, name) for case in attentions for name in case.contenders]
    wanted += [("train_step", "gpt2 tiny 2x16", name) for name in train_step_cases.VARIANTS]
    wanted += [("telemetry", "gpt2 tiny 2x16", "telemetry")]
    wanted += [("quantization", case.name, name) for case in quantization.cases(tiny=True) for name in case.settings]
    wanted += [
        ("data", "ArrayRecord", "token file"),  # left out
        ("data", "0.1 MB of jsonl, 50 documents, bpe:300", "token file"),
        ("data", "0.1 MB of jsonl, divided, 50 documents, bpe:300", "token file"),
        ("data", "0.1 MB of TFRecord, 50 documents, bpe:300", "token file"),
        ("data", "100 batches of 4 x 8 of one file", "batches"),
        ("data", "100 batches of 4 x 8 of 4 shards", "batches"),
    ]
    assert rows == wanted
    absent = [row["left_out"] for row in results["rows"] if "left_out" in row]
    assert absent == ["ImportError: tensorflow_datasets is absent", *["ImportError: grain is absent"] * 2]
    lines = printed.splitlines()
    for i, row in enumerate(rows):  # as they come, in order, and again in the tables
        assert lines[i].startswith(", ".join(row) + ": ")
    for _, case, variant in [row for row, made in zip(rows, results["rows"], strict=True) if "left_out" not in made]:
        pattern = rf"{re.escape(case)}(, |  +){re.escape(variant)}(: |  +)"
        assert sum(bool(re.search(pattern, line)) for line in lines) == 2
    assert lines[-1] == "written: out/benchmark.json"


@pytest.mark.slow
def test_the_record_says_how_it_was_made(tiny):
    provenance = tiny[0]["provenance"]
    assert provenance["command"] == "python launch/benchmark.py --tiny --repeats=2 --workdir=out"
    assert provenance["repeats"] == dict.fromkeys(SUITES, 2)
    assert provenance["tiny"] is True
    assert provenance["versions"]["jax"] == jax.__version__
    assert provenance["versions"]["optax"] == optax.__version__
    assert f"{os.cpu_count()} CPU cores" in provenance["device"]
    assert len(provenance["load_average_at_start"]) == 3
    assert provenance["wall_seconds"] > 0


@pytest.mark.slow
def test_times_are_positive_and_their_quartiles_in_order(tiny):
    names = {
        "optimizer": ("step_seconds_ratio", "control_ratio", "step_seconds", "adamw_step_seconds"),
        "compile": ("compile_seconds_ratio", "compile_cpu_seconds_ratio"),
        "attention": ("seconds_ratio", "control_ratio", "seconds", "softmax_seconds"),
        "train_step": ("step_seconds_ratio", "control_ratio", "step_seconds"),
        "quantization": ("seconds_ratio", "control_ratio", "seconds", "float32_seconds"),
        "telemetry": ("telemetry_ratio", "step_seconds"),
        "data": ("seconds",),
    }
    for row in tiny[0]["rows"]:
        if "left_out" in row:
            continue
        metrics = row["metrics"]
        for name in names[row["suite"]]:
            lower, median, upper = (metrics[name + quartile] for quartile in ("_lower_quartile", "", "_upper_quartile"))
            assert 0 < lower <= median <= upper
        assert metrics["repetitions"] == 2
        if row["suite"] not in ("telemetry", "data"):
            assert metrics["compile_seconds"] > 0
        if row["suite"] in ("optimizer", "compile"):
            assert metrics["lower_seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "variant", "basis_numbers"),
    [("16x16", "hadamard output", 0), ("16x16", "haar both", 2 * 16**2), ("16x24", "haar both", 16**2 + 24**2)],
)
def test_bytes_of_a_kernel_are_those_of_the_closed_form(tiny, case, variant, basis_numbers):
    (metrics,) = [r["metrics"] for r in tiny[0]["rows"] if (r["case"], r["variant"]) == (case, variant)]
    params = 4 * int(np.prod([int(side) for side in case.split("x")]))
    adam = 2 * params + 4  # mu, nu and the count of steps
    assert metrics["adamw_state_bytes"] == adam
    assert metrics["state_bytes"] == adam + 4 * basis_numbers
    assert metrics["state_bytes_ratio"] == pytest.approx(1 + 4 * basis_numbers / adam)
    # All that the step changes is given over; the gradients, and a basis that only passes through, are the rest.
    assert metrics["adamw_argument_bytes"] == 2 * params + adam
    assert metrics["adamw_donated_bytes"] == params + adam
    assert metrics["argument_bytes"] == 2 * params + adam + 4 * basis_numbers
    assert metrics["donated_bytes"] == params + adam + 4 * basis_numbers
    assert metrics["temp_bytes"] >= params  # the rotated gradient


@pytest.mark.slow
def test_hadamard_has_the_state_of_adamw_on_the_whole_model_and_haar_its_matrices(tiny):
    d, d_mlp, layers = 16, 24, 1
    # Along the last axis of six kernels a layer, and d_model of the two tables.
    matrices = layers * (5 * d**2 + d_mlp**2) + 2 * d**2
    for name in ("gpt2 tiny unrolled", "gpt2 tiny stacked"):
        found = {row["variant"]: row["metrics"] for row in tiny[0]["rows"] if row["case"] == name}
        assert found["hadamard residual"]["state_bytes_ratio"] == 1.0
        extra = found["haar output"]["state_bytes"] - found["haar output"]["adamw_state_bytes"]
        assert extra == 4 * matrices


@pytest.mark.slow
def test_a_training_step_has_its_tokens_memory_and_loss(tiny):
    rows = {row["variant"]: row["metrics"] for row in tiny[0]["rows"] if row["suite"] == "train_step"}
    reference = rows["softmax + AdamW"]
    parameters = 32 * 16 + 16 * 16 + (4 * 16**2 + 4 * 16) + (2 * 16 * 24 + 24 + 16) + 3 * 2 * 16
    assert reference["parameters"] == parameters
    for metrics in rows.values():
        assert metrics["tokens_per_second"] == pytest.approx(32 / metrics["step_seconds"])
        assert metrics["mfu"] is None  # nobody knows the peak of this processor
        # Parameters, two moments, three counts of steps, tokens; hadamard keeps no state.
        assert metrics["argument_bytes"] == 4 * (3 * parameters + 3 + 2 * 17)
        assert metrics["peak_bytes"] >= metrics["argument_bytes"] + metrics["temp_bytes"]
        assert metrics["peak_bytes_ratio"] == metrics["peak_bytes"] / reference["peak_bytes"]
        assert 0 < metrics["loss_nats"] < 10
    assert reference["step_seconds_ratio"] == reference["control_ratio"]


# What is timed.


def random_tree(seed):
    return {"kernel": jnp.asarray(np.random.default_rng(seed).standard_normal((16, 24)), jnp.float32)}


@pytest.mark.parametrize(
    ("name", "rotation"),
    [("haar both", Rotation("haar", axes="both")), ("hadamard input", Rotation("hadamard", axes="input"))],
)
def test_the_step_is_the_optimizer_of_that_name(name, rotation):
    made, plain = optimizer._orthoadam(name), optax.chain(
        scale_by_orthoadam(rotation=rotation), optax.add_decayed_weights(0.1), optax.scale(-1e-3)
    )  # fmt: skip
    params, grads = random_tree(0), random_tree(1)
    updates, _ = plain.update(grads, plain.init(params), params)
    expected = optax.apply_updates(params, updates)
    got, state = optimizer.optimizer_step(made)(params, made.init(params), grads)
    np.testing.assert_allclose(got["kernel"], expected["kernel"], rtol=1e-5, atol=1e-6)
    assert int(optax.tree.get(state, "count")) == 1
    assert params["kernel"].is_deleted()  # its memory was given over
    assert not grads["kernel"].is_deleted()


def test_both_optimizers_have_the_same_hyperparameters():
    """With the identity for a rotation OrthoAdam is AdamW, so a difference would be one of the two set-ups."""
    params, grads = random_tree(0), random_tree(1)
    results = []
    for made in (optimizer._adamw(), optimizer._orthoadam("identity output")):
        updates, _ = made.update(grads, made.init(params), params)
        results.append(updates["kernel"])
    np.testing.assert_array_equal(*results)


def test_a_state_for_timing_is_like_a_real_one():
    made = orthoadam(1e-3, rotation=Rotation("haar", axes="both"))
    real = made.init(random_tree(0))
    state = optimizer._state_like(jax.eval_shape(made.init, KERNEL))
    assert jax.tree.structure(state) == jax.tree.structure(real)
    jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or pytest.fail(f"{a} {b}"), state, real)
    (rotated,) = [part for part in state if isinstance(part, RotatedState)]
    basis = rotated.basis["kernel"]["basis_1"]
    assert float(jnp.std(basis)) == pytest.approx(24**-0.5, rel=0.1)  # as the entries of a rotation
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(rotated.inner))


def test_repetitions_take_turns_and_short_steps_are_bundled(monkeypatch):
    timed = []

    def fake(functions, repeats, warmup=1):
        timed.append((tuple(functions), repeats, warmup))
        seconds = {"": 0.004, "adamw": 0.03, "adamw again": 0.06, "orthoadam": 0.12}
        for function in functions.values():
            function()
        return {name: [seconds[name]] * repeats for name in functions}

    monkeypatch.setattr(optimizer, "interleaved_seconds", fake)
    case = optimizer.Case("kernel", KERNEL, ("hadamard output",))
    (row,) = optimizer.measure_case(case, repeats=7)
    assert timed[-1] == (("adamw", "adamw again", "orthoadam"), 7, 0)  # compiled and warmed up before
    assert row.metrics["steps_per_repetition"] == 5  # of 4 ms, to make 20 ms
    assert row.metrics["step_seconds"] == pytest.approx(0.12 / 5)
    assert row.metrics["adamw_step_seconds"] == pytest.approx(0.03 / 5)
    assert row.metrics["step_seconds_ratio"] == pytest.approx(4.0)
    assert row.metrics["control_ratio"] == pytest.approx(2.0)


@pytest.mark.parametrize(("seconds", "repeats", "expected"), [(1.0, 50, 20), (30.0, 50, 3), (30.0, 2, 2)])
def test_slow_steps_are_repeated_less_often(monkeypatch, seconds, repeats, expected):
    """A minute holds 20 repetitions of three calls of one second, and none of thirty seconds, yet there are three."""
    monkeypatch.setattr(
        optimizer,
        "interleaved_seconds",
        lambda functions, repeats, **_: {name: [seconds] * repeats for name in functions},
    )
    (row,) = optimizer.measure_case(optimizer.Case("kernel", KERNEL, ("hadamard output",)), repeats)
    assert row.metrics["repetitions"] == expected


# What is left out.


@pytest.mark.parametrize(("short", "left_out"), [(1, True), (0, False)])
def test_what_does_not_fit_into_memory_is_left_out_with_the_reason(monkeypatch, short, left_out):
    state = 8 * 16 * 24 + 4
    temporary = max(
        compile_program(optimizer.optimizer_step(made), KERNEL, jax.eval_shape(made.init, KERNEL), KERNEL).memory[
            "temp_bytes"
        ]
        for made in (optimizer._adamw(), optimizer._orthoadam("hadamard output"))
    )
    needed = 2 * 4 * 16 * 24 + 2 * state + temporary  # parameters, gradients, two states
    monkeypatch.setattr(optimizer, "free_bytes", lambda: needed - short)
    rows = list(optimizer.measure_case(optimizer.Case("kernel", KERNEL, ("hadamard output",), {"dct": "so"}), 1))
    assert len(rows) == 2
    assert bool(rows[0].left_out) == left_out
    assert bool(rows[0].metrics) != left_out
    assert rows[1] == suite.Row("kernel", "dct", {}, "so")
    if left_out:
        assert f"{needed / 1e3:.3g} kB" in rows[0].left_out


def test_prepared_and_read_tokens_are_counted():
    *prepared, one_file, shards = data.SUITE.measure(1, True)
    assert [row.case for row in prepared] == [
        f"0.1 MB of {kind}, 50 documents, bpe:300" for kind in ("jsonl", "jsonl, divided", "TFRecord", "ArrayRecord")
    ]
    for row in prepared:
        bytes_per_second = 50 * 2000 / row.metrics["seconds"]
        assert 1 < bytes_per_second / row.metrics["tokens_per_second"] < 10  # a token of code has a few bytes
        assert row.metrics["speed_ratio"] > 0
    for batches in (one_file, shards):
        tokens = batches.metrics["tokens_per_second"] * batches.metrics["seconds"]
        assert tokens == pytest.approx(100 * 4 * 8)


def test_telemetry_is_the_sum_of_its_parts_over_a_step():
    (row,) = telemetry.SUITE.measure(1, True)
    parts = [row.metrics[f"{part}_seconds_per_step"] for part in ("probe", "norms", "record")]
    assert min(parts) > 0
    assert row.metrics["telemetry_ratio"] == pytest.approx(sum(parts) / row.metrics["step_seconds"])
    assert (row.metrics["probe_every_steps"], row.metrics["log_every_steps"]) == (100, 20)


def test_integer_kernels_have_the_bytes_of_the_closed_form_and_late_rows_are_left_out():
    layer, _, model = quantization.cases(tiny=True)
    rows = {row.variant: row for row in quantization.measure_case(layer, 2, suite.TimeBudget(60))}
    assert {row.metrics["float32_params_bytes"] for row in rows.values()} == {4 * 16 * 24}
    found = {name: row.metrics["params_bytes"] for name, row in rows.items()}
    # Integers, two of 4 bits in a byte; then one step, one for each output, or one and a shift for each output.
    assert found == {
        "int8_moderate": 16 * 24 + 4,
        "w4a8": 16 * 24 // 2 + 4 * 24,
        "int4_zeropoint": 16 * 24 // 2 + 2 * 4 * 24,
    }
    assert all(row.metrics["seconds_ratio"] > 0 for row in rows.values())
    assert rows["w4a8"].metrics["params_bytes_ratio"] == pytest.approx(288 / 1536)
    late = list(quantization.measure_case(model, 2, suite.TimeBudget(0)))
    assert [row.left_out for row in late] == ["time budget"] * 3


def test_free_memory_is_a_plausible_number():
    free = free_bytes()
    if free is not None:  # not every system tells
        assert 2**26 < free < 2**50


def test_every_rotation_of_a_model_is_measured_or_left_out_with_a_reason():
    for case in optimizer.cases(tiny=False):
        assert not set(case.rotations) & set(case.left_out)
        assert set(case.rotations) | set(case.left_out) >= set(KERNEL_ROTATIONS)
        assert all(case.left_out.values())
        for name in case.rotations:
            jax.eval_shape(optimizer._orthoadam(name).init, case.shapes)
    shapes = [case.shapes for case in optimizer.cases(tiny=False)]
    assert [tree["kernel"].shape for tree in shapes[:2]] == [(768, 768), (768, 3072)]
    assert [tree_bytes(tree) for tree in shapes[2:]] == [4 * 124_439_808] * 2


# Compilation.


def test_compiling_starts_anew_every_time_and_counts_bytes():
    traced = []

    @jax.jit
    def inner(x):
        traced.append("inner")
        return x @ x.T

    def outer(x, y):
        traced.append("outer")
        return inner(x) + y

    function = jax.jit(outer, donate_argnums=1)
    shapes = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    for _ in range(2):
        program = compile_program(function, *shapes)
    assert traced == ["outer", "inner"] * 2
    assert program.memory["argument_bytes"] == 4 * (64 * 32 + 64 * 64)
    assert program.memory["donated_bytes"] == 4 * 64 * 64
    assert program.lower_seconds > 0
    assert program.compile_seconds > 0
    assert program.cpu_seconds > 0
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    np.testing.assert_allclose(program.run(x, np.ones((64, 64), np.float32)), x @ x.T + 1, rtol=1e-4, atol=1e-5)


def test_compile_times_are_those_of_the_programs_taken_in_turn(monkeypatch):
    compiled = []

    def fake(model, optim):
        assert model is suite.TINY_MODEL
        compiled.append(optim.optimizer)
        slow = {"adam": 1.0, "orthoadam": 1.5}[optim.optimizer] * len(compiled)  # a machine that gets slower
        cpu = {"adam": 1.0, "orthoadam": 1.2}[optim.optimizer]
        return Program(None, 0.25 * slow, 0.75 * slow, cpu, {"temp_bytes": len(optim.optimizer)})

    monkeypatch.setattr(compilation, "compile_train_step", fake)
    row = compilation.measure_model("a case", suite.TINY_MODEL, 3)
    assert compiled == ["adam", "orthoadam", "orthoadam", "adam", "adam", "orthoadam"]
    ratios = [1.5 * 2 / 1, 1.5 * 3 / 4, 1.5 * 6 / 5]
    assert row.metrics["compile_seconds_ratio"] == pytest.approx(np.median(ratios))
    assert row.metrics["compile_seconds_ratio_lower_quartile"] == pytest.approx(np.percentile(ratios, 25))
    assert row.metrics["compile_cpu_seconds_ratio"] == pytest.approx(1.2)
    assert row.metrics["adamw_lower_seconds"] == pytest.approx(0.25 * 4)
    assert row.metrics["compile_seconds"] == pytest.approx(0.75 * 1.5 * 3)
    assert (row.metrics["temp_bytes"], row.metrics["adamw_temp_bytes"]) == (9, 4)


def test_the_two_training_steps_differ_in_their_optimizer_alone():
    adam, ours = (dataclasses.replace(Config(), optim=compilation._OPTIMIZERS[name]) for name in ("adamw", "orthoadam"))
    assert changed_fields(adam, ours) == {"optim.optimizer": "orthoadam"}


# The record.


def test_a_library_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(provenance, "_LIBRARIES", ("jax", "a library of next year"))
    assert (
        provenance.environment()["versions"].items() >= {"jax": jax.__version__, "a library of next year": None}.items()
    )


def fake_suite(rows, fail=None):
    def measure(repeats, tiny):
        for i in range(rows):
            yield suite.Row("case", f"variant {i}", {"x": repeats + i})
        yield suite.Row("case", "large", {}, "too large")
        if fail:
            raise fail

    return suite.Suite("fake", "A title", measure, (suite.Column("x", lambda m: f"{m['x']} units"),), 5)


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path, capsys):
    (tmp_path / "benchmark.json").write_text("of another run")
    with pytest.raises(KeyboardInterrupt):
        suite.run_suites([fake_suite(2, KeyboardInterrupt())], tmp_path)
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert written["finished"] is False
    assert written["rows"] == [
        {"suite": "fake", "case": "case", "variant": "variant 0", "metrics": {"x": 5}},
        {"suite": "fake", "case": "case", "variant": "variant 1", "metrics": {"x": 6}},
        {"suite": "fake", "case": "case", "variant": "large", "left_out": "too large"},
    ]
    assert "fake, case, variant 1: x 6 units\nfake, case, large: left out: too large\n" in capsys.readouterr().out


def test_a_run_that_measures_nothing_leaves_the_earlier_record(tmp_path):
    def measure(repeats, tiny):
        raise KeyboardInterrupt
        yield

    (tmp_path / "benchmark.json").write_text("of another run")
    with pytest.raises(KeyboardInterrupt):
        suite.run_suites([dataclasses.replace(fake_suite(0), measure=measure)], tmp_path)
    assert (tmp_path / "benchmark.json").read_text() == "of another run"


def test_the_table_comes_last_and_is_aligned(tmp_path, capsys):
    results = suite.run_suites([fake_suite(2)], tmp_path, repeats=99)
    assert results["finished"]
    assert results["provenance"]["repeats"] == {"fake": 99}
    assert capsys.readouterr().out.split("\n\n", 1)[1].splitlines() == [
        "A title",
        "-" * 26,
        "case  variant    x",
        "-" * 26,
        "case  variant 0  99 units",
        "case  variant 1  100 units",
    ]


def test_suites_have_the_names_that_they_go_by():
    assert [found.name for found in SUITES.values()] == list(SUITES)
