"""The benchmarks: that they compare what they say, on shapes whose bytes are known, and leave out what fails."""

import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthojax.benchmarks import SUITES, kernels, optimizer, run_suites, suite, training
from orthojax.config import changed_fields
from orthojax.model import parameter_count
from orthojax.optim import RotatedState, Rotation, orthoadam, scale_by_orthoadam

ROOT = Path(__file__).parents[1]
(TINY,) = training.cases("cpu", tiny=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The whole command at its smallest: what it wrote and what it printed."""
    home, absent = tmp_path_factory.mktemp("benchmark"), tmp_path_factory.mktemp("absent")
    for library in ("grain", "tensorflow_datasets"):  # a machine that only measures need not have them
        (absent / f"{library}.py").write_text(f"raise ImportError('{library} is absent')")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(absent), str(ROOT), environment.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/benchmark.py"), "--tiny", "--repeats=2", "--workdir=out"],
        cwd=home, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [path.name for path in (home / "out").iterdir()] == ["benchmark.json"]
    return json.loads((home / "out/benchmark.json").read_text()), done.stdout


def rows_of(tiny, name):
    return {(row["case"], row["variant"]): row["metrics"] for row in tiny[0]["rows"] if row["suite"] == name}


@pytest.mark.slow
def test_the_command_measures_every_suite_and_says_how(tiny):
    results, printed = tiny
    rows = [(row["suite"], row["case"], row["variant"]) for row in results["rows"]]
    cases = {
        "optimizer": optimizer.cases(tiny=True),
        "attention": kernels.attention_cases("cpu", tiny=True),
        "quantization": kernels.quantization_cases(tiny=True),
    }
    wanted = {
        name: [(case.name, each) for case in found for each in list(case.contenders)[1:]]  # all but the reference
        for name, found in cases.items()
    }
    wanted["compile"] = [("gpt2 tiny unrolled", "orthoadam")]
    wanted["train_step"] = [("gpt2 tiny 2x16", name) for name in (*training.VARIANTS, training.FLAX)]
    wanted["telemetry"] = [("gpt2 tiny 2x16", "telemetry")]
    wanted["telemetry"] += [("bigram_backcopy 1 layer 16x16", name) for name in ("probe_steps", "probe_details")]
    wanted["telemetry"] += [("bigram_backcopy 1 layer 4x16", "generation")]
    documents = [f"0.1 MB of {kind}, 50 documents, bpe:300" for kind in ("jsonl", "jsonl, divided")]
    wanted["data"] = [(case, "token file") for case in ("TFRecord", "ArrayRecord", *documents)]  # two are left out
    wanted["data"] += [(f"100 batches of 4 x 8 of {of}", "batches") for of in ("one file", "4 shards")]
    assert rows == [(name, *row) for name in SUITES for row in wanted[name]]
    absent = [row["left_out"] for row in results["rows"] if "left_out" in row]
    assert absent == [
        f"ImportError: {name} is absent" for name in ("tensorflow_datasets", "tensorflow_datasets", "grain", "grain")
    ]
    lines = printed.splitlines()
    assert all(line.startswith(", ".join(row) + ": ") for line, row in zip(lines, rows, strict=False))
    assert all(found.title.splitlines()[0] in lines for found in SUITES.values())  # the tables
    assert lines[-1] == "written: out/benchmark.json"
    provenance = results["provenance"]
    assert results["finished"]
    assert provenance["command"] == "orthojax benchmark --tiny --repeats=2 --workdir=out"
    assert provenance["repeats"] == dict.fromkeys(SUITES, 2)
    assert provenance["tiny"] is True
    assert provenance["versions"]["jax"] == jax.__version__
    assert f"{os.cpu_count()} CPU cores" in provenance["device"]
    assert len(provenance["load_average_at_start"]) == 3
    assert provenance["wall_seconds"] > 0


# (suite, variant) -> metrics of its columns that it does not have: flax's own layers report less, and of telemetry
# probes, their drawing and generation are separate measurements.
_BY_PROBE = {"norms_seconds_per_step", "record_seconds_per_step"}
LACKING = {
    ("train_step", training.FLAX): {"mfu", "process_peak_bytes"},
    ("telemetry", "telemetry"): {"first_probe_seconds", "draw_seconds_per_step"},
    ("telemetry", "probe_steps"): {*_BY_PROBE, "draw_seconds_per_step"},
    ("telemetry", "probe_details"): {*_BY_PROBE, "draw_seconds_per_step"},
    ("telemetry", "generation"): {*_BY_PROBE, "first_probe_seconds", "probe_seconds_per_step"},
}


@pytest.mark.slow
def test_every_column_has_its_metrics_and_quartiles_are_in_order(tiny):
    unknown = {"mfu", "process_peak_bytes"}  # of this processor
    only_some = {"paper_step_ratio", "speed_ratio", "control_ratio"}
    for row in (row for row in tiny[0]["rows"] if "left_out" not in row):
        metrics, columns = row["metrics"], SUITES[row["suite"]].columns
        lacking = {column.metric for column in columns if column.text(metrics) == "-"} - only_some
        assert lacking == LACKING.get((row["suite"], row["variant"]), set()), row
        for column in columns:
            for name in set(column.metric.split("+")) & set(metrics):
                assert metrics[name] is None if name in unknown else metrics[name] >= 0
        spreads = [name.removesuffix("_lower_quartile") for name in metrics if name.endswith("_lower_quartile")]
        assert spreads
        for name in spreads:
            assert (
                0 < metrics[f"{name}_lower_quartile"] <= metrics[name] <= metrics[f"{name}_upper_quartile"] < math.inf
            )
        assert metrics["repetitions"] == 2


@pytest.mark.slow
def test_bytes_are_those_of_the_closed_form(tiny):
    rows = rows_of(tiny, "optimizer")
    for (case, variant), basis_numbers in {
        ("16x16", "hadamard output"): 0,
        ("16x16", "haar both"): 2 * 16**2,
        ("16x24", "haar both"): 16**2 + 24**2,
    }.items():
        metrics, params = rows[case, variant], 4 * math.prod(map(int, case.split("x")))
        adam = 2 * params + 4  # mu, nu and the count of steps
        assert metrics["adamw_state_bytes"] == adam
        assert metrics["state_bytes"] == adam + 4 * basis_numbers
        assert metrics["state_bytes_ratio"] == pytest.approx(1 + 4 * basis_numbers / adam)
        # All that the step changes is donated; the gradients, and a basis that only passes through, are the rest.
        assert metrics["adamw_argument_bytes"] == 2 * params + adam
        assert metrics["adamw_donated_bytes"] == params + adam
        assert metrics["argument_bytes"] == 2 * params + adam + 4 * basis_numbers
        assert metrics["donated_bytes"] == params + adam + 4 * basis_numbers
        assert metrics["temp_bytes"] >= params  # the rotated gradient
    for case in ("gpt2 tiny unrolled", "gpt2 tiny stacked"):
        assert rows[case, "hadamard residual"]["state_bytes_ratio"] == 1.0
        haar = rows[case, "haar output"]  # along the last axis of six kernels, and d_model of the two tables
        assert haar["state_bytes"] - haar["adamw_state_bytes"] == 4 * (5 * 16**2 + 24**2 + 2 * 16**2)
    layer = {variant: m for (case, variant), m in rows_of(tiny, "quantization").items() if case == "1 token x 16x24"}
    assert {metrics["float32_params_bytes"] for metrics in layer.values()} == {4 * 16 * 24}
    # Integers, two of 4 bits in a byte; then one scale, one for each output, or one and a zero point for each output.
    assert {name: metrics["params_bytes"] for name, metrics in layer.items()} == {
        "int8_moderate": 16 * 24 + 4,
        "w4a8": 16 * 24 // 2 + 4 * 24,
        "int4_zeropoint": 16 * 24 // 2 + 2 * 4 * 24,
    }
    assert layer["w4a8"]["params_bytes_ratio"] == pytest.approx(288 / 1536)


@pytest.mark.slow
def test_a_training_step_has_its_tokens_memory_flops_and_loss(tiny):
    rows = {variant: metrics for (_, variant), metrics in rows_of(tiny, "train_step").items()}
    plain = rows["softmax + AdamW"]
    parameters = 32 * 16 + 16 * 16 + (4 * 16**2 + 4 * 16) + (2 * 16 * 24 + 24 + 16) + 3 * 2 * 16
    assert plain["step_seconds_ratio"] == plain["control_ratio"]
    for variant, metrics in rows.items():
        assert (metrics["parameters"], metrics["tokens_per_step"]) == (parameters, 32)
        assert metrics["tokens_per_second"] == pytest.approx(32 / metrics["step_seconds"])
        assert 0 < metrics["loss_nats"] < 10
        if variant == "plain flax + optax":  # counts its own steps and rate
            continue
        # d = 16, one layer, d_mlp 24, V 32, T 16
        assert metrics["flops_per_token"] == 6 * (4 * 16**2 + 2 * 16 * 24 + 32 * 16) + 6 * 16 * 16
        # Parameters, two moments, three counts of steps, tokens; hadamard keeps no state.
        assert metrics["argument_bytes"] == 4 * (3 * parameters + 3 + 2 * 17)
        assert metrics["peak_bytes"] >= metrics["argument_bytes"] + metrics["temp_bytes"]
        assert metrics["peak_bytes_ratio"] == metrics["peak_bytes"] / plain["peak_bytes"]


@pytest.mark.slow
def test_telemetry_is_the_sum_of_its_parts_over_a_step():
    row = next(SUITES["telemetry"].measure(1, True))
    parts = [row.metrics[f"{part}_seconds_per_step"] for part in ("probe", "norms", "record")]
    assert min(parts) > 0
    assert row.metrics["telemetry_ratio"] == pytest.approx(sum(parts) / row.metrics["step_seconds"])
    assert (row.metrics["probe_every_steps"], row.metrics["log_every_steps"]) == (100, 20)


@pytest.mark.slow
def test_what_goes_on_beside_a_step_of_the_task_is_over_that_step():
    _, *rows = SUITES["telemetry"].measure(1, True)
    assert [row.variant for row in rows] == ["probe_steps", "probe_details", "generation"]
    for variant, metrics in ((row.variant, row.metrics) for row in rows):
        part = metrics[f"{'draw' if variant == 'generation' else 'probe'}_seconds_per_step"]
        assert metrics["telemetry_ratio"] == pytest.approx(part / metrics["step_seconds"])
    assert rows[0].metrics["first_probe_seconds"] > 0


@pytest.mark.slow
def test_prepared_and_read_tokens_are_counted():
    *prepared, one_file, shards = SUITES["data"].measure(1, True)
    kinds = ("jsonl", "jsonl, divided", "TFRecord", "ArrayRecord")
    assert [row.case for row in prepared] == [f"0.1 MB of {kind}, 50 documents, bpe:300" for kind in kinds]
    for row in prepared:
        bytes_per_second = 50 * 2000 / row.metrics["seconds"]
        assert 1 < bytes_per_second / row.metrics["tokens_per_second"] < 10  # a token of code has a few bytes
        assert row.metrics["speed_ratio"] > 0
    for batches in (one_file, shards):
        assert batches.metrics["tokens_per_second"] * batches.metrics["seconds"] == pytest.approx(100 * 4 * 8)


# How contenders are compared.


class Machine:
    """Calls take the given seconds of its clock."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def contender(self, name, seconds, fails=None, sizes=None):
        def call(calls):
            self.calls.append((name, calls))
            self.now += calls * seconds
            if fails and len(self.calls) > 2:
                raise fails

        def make():
            self.now += 1.0
            if fails and not seconds:
                raise fails
            return suite.Contender(
                call, sizes or {"temp_bytes": 100}, lambda seconds: {"calls_per_second": 1 / seconds}
            )

        return make

    def rows(self, contenders, reference=None, repeats=4, budget=1e6, longest=1e6, **options):
        case = suite.Case("case", {"plain": reference or self.contender("plain", 2.0)} | contenders)
        comparison = suite.Comparison(("temp_bytes",), longest, clock=lambda: self.now, **options)
        return list(comparison.rows(case, repeats, suite.TimeBudget(budget, clock=lambda: self.now)))


def test_ratios_are_of_the_same_repetition_and_the_control_of_the_reference():
    machine = Machine()
    contenders = {"ours": machine.contender("ours", 3.0, sizes={"temp_bytes": 130}), "b": machine.contender("b", 1.0)}
    ours, _ = machine.rows(contenders, shortest=0.0, fewest_calls=5)
    assert machine.calls[:8] == [(name, 5) for name in ("b", "ours", "plain", "plain", "ours", "b", "plain", "plain")]
    for name, value in {"seconds": 3.0, "seconds_ratio": 1.5, "control_ratio": 1.0, "plain_seconds": 2.0}.items():
        assert ours.metrics[name] == ours.metrics[f"{name}_upper_quartile"] == pytest.approx(value)
    further = {"repetitions": 4, "calls_per_repetition": 5, "plain_temp_bytes": 100, "temp_bytes_ratio": 1.3}
    assert ours.metrics.items() >= further.items()
    assert ours.metrics["calls_per_second"] == pytest.approx(1 / 3)


def test_a_reference_may_have_a_row():
    machine = Machine()
    plain, ours = machine.rows({"ours": machine.contender("ours", 3.0)}, repeats=2, own_row=True)
    assert (plain.variant, plain.metrics["seconds_ratio"], ours.metrics["seconds_ratio"]) == ("plain", 1.0, 1.5)


def test_what_fails_is_left_out_with_the_reason():
    machine, error = Machine(), NotImplementedError("heads wider than 4\nand a long story")
    contenders = {"refuses": machine.contender("refuses", 0.0, error), "ours": machine.contender("ours", 1.0)}
    refuses, ours = machine.rows(contenders)
    assert refuses == suite.Row("case", "refuses", {}, "NotImplementedError: heads wider than 4")
    assert ours.metrics["seconds_ratio"] == pytest.approx(0.5)
    rows = machine.rows(contenders, machine.contender("plain", 0.0, error))
    assert [row.left_out for row in rows] == ["plain: NotImplementedError: heads wider than 4"] * 2
    machine.calls.clear()
    (dies,) = machine.rows({"dies": machine.contender("dies", 1.0, RuntimeError("RESOURCE_EXHAUSTED"))})
    assert dies.metrics["not_timed"] == "RuntimeError: RESOURCE_EXHAUSTED"
    assert dies.metrics["temp_bytes"] == 100
    assert suite.Column("", "seconds_ratio").text(dies.metrics) == "-"
    with pytest.raises(ModuleNotFoundError):  # our own mistake is no reason to leave out
        machine.rows({"new": machine.contender("new", 0.0, ModuleNotFoundError("no kernel"))})


def test_what_has_not_begun_when_the_time_is_over_is_left_out():
    machine = Machine()
    contenders = {name: machine.contender(name, 1.0) for name in ("a", "b")}
    assert [row.left_out for row in machine.rows(contenders, budget=0.0)] == ["time budget"] * 2
    a, b = machine.rows(contenders, budget=1.5)  # making each takes a second
    assert (a.metrics["temp_bytes"], a.metrics["not_timed"], b.left_out) == (100, "time budget", "time budget")
    for row in machine.rows(contenders, budget=10.0, reserved=8.0):
        assert (row.metrics["temp_bytes"], row.metrics["not_timed"]) == (100, "time budget")


def test_a_budget_gives_at_least_three_repetitions():
    now = types.SimpleNamespace(seconds=5.0)
    budget = suite.TimeBudget(10.0, clock=lambda: now.seconds)
    assert budget.seconds_left() == 10.0
    for (wanted, seconds, longest), repetitions in {
        (20, 0.1, 1e9): 20,
        (20, 1.0, 1e9): 10,
        (20, 1.0, 5.0): 5,
        (20, 100.0, 5.0): 3,
        (2, 100.0, 5.0): 2,
    }.items():
        assert budget.repetitions(wanted, seconds, longest) == repetitions
    now.seconds = 20.0
    assert budget.seconds_left() == 0.0
    assert budget.repetitions(20, 1.0, longest=1e9) == 3


def test_every_compilation_is_a_cold_one_and_counts_bytes():
    traced = []

    @jax.jit
    def inner(x):
        traced.append("inner")
        return x @ x.T

    function = jax.jit(lambda x, y: (traced.append("outer"), inner(x) + y)[1], donate_argnums=1)
    shapes = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    for _ in range(2):
        program = suite.compile_program(function, *shapes)
    assert traced == ["outer", "inner"] * 2
    assert program.memory["argument_bytes"] == 4 * (64 * 32 + 64 * 64)
    assert program.memory["donated_bytes"] == 4 * 64 * 64
    assert min(program.lower_seconds, program.compile_seconds, program.cpu_seconds) > 0
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    np.testing.assert_allclose(program.run(x, np.ones((64, 64), np.float32)), x @ x.T + 1, rtol=1e-4, atol=1e-5)


# What is compared.

SHAPE = (2, 7, 3, 8)


def test_attentions_are_what_they_are_called():
    _, query, key, value, sink = kernels.attention_operands(SHAPE, jnp.float32)
    logits = np.einsum("bthd,bshd->bhts", query, key).astype(np.float64) / np.sqrt(8)
    logits = np.where(np.tril(np.ones((7, 7), bool)), logits, -np.inf)
    for attend, sinks in [
        (kernels.ours("xla", "softmax1"), 0.0),
        (kernels.ours("xla", "learned sink"), sink),
        (kernels.zero_row("xla"), 0.0),
        (kernels.vendor_softmax("xla"), None),
        (kernels.ours("xla", "softmax"), None),
    ]:  # exp(x) / (exp(sink) + sum exp(x)), None: no sink
        extra = 0.0 if sinks is None else np.exp(np.broadcast_to(sinks, 3)).reshape(1, 3, 1, 1)
        weights = np.exp(logits) / (extra + np.exp(logits).sum(-1, keepdims=True))
        want = np.einsum("bhts,bshd->bthd", weights, value)
        np.testing.assert_allclose(jax.jit(attend)(query, key, value, sink), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "implementations", "dtype"),
    [
        ("gpu", ("cudnn", "xla"), "bfloat16"),
        ("tpu", ("splash", "xla"), "bfloat16"),
        ("cpu", ("xla", "xla_chunked"), "float32"),
    ],
)
def test_each_platform_has_its_kernels_first_and_plain_xla(platform, implementations, dtype):
    found = kernels.attention_cases(platform, tiny=False)
    assert len({case.name for case in found}) == len(found)
    assert list(dict.fromkeys(case.name.split()[0] for case in found)) == list(implementations)
    further = {"cudnn": ["softmax1 by a zero row"], "xla": ["softmax of jax.nn"]}
    for case in found:
        assert dtype in case.name
        assert list(case.contenders) == ["softmax", "softmax1", "learned sink", *further.get(case.name.split()[0], [])]
    if platform != "cpu":
        shapes = {"32x1024x12x64", "8x4096x12x64", "128x256x12x64", "8x2048x16x128"}
        assert {case.name.split()[1] for case in found} == shapes


def test_calls_in_one_program_depend_on_each_other_and_none_is_left_out():
    operands = kernels.attention_operands(SHAPE, jnp.float32)
    cotangent, query, key, value, sink = operands
    attend = kernels.ours("xla", "learned sink")
    forward = jax.jit(kernels.repeated(attend, False, 3))(*operands)
    backward = jax.jit(kernels.repeated(attend, True, 3))
    text = backward.lower(*operands).compile().as_text()
    # Two products of the forward and four of the backward pass, all inside the loop.
    assert text.count(" dot(") == 6
    assert " dot(" not in text[text.index("ENTRY") :]

    @jax.jit
    def once(query, value):
        output, pullback = jax.vjp(attend, query, key, value, sink)
        return output, *pullback(cotangent)

    found, next_query, results = query, query, (query,) * 5
    for _ in range(3):
        found = once(found, value)[0]
    np.testing.assert_allclose(forward, found, rtol=1e-5, atol=1e-6)
    for _ in range(3):
        results = once(next_query, value)
        next_query, value = results[1], results[3]
    for a, b in zip(backward(*operands), results, strict=True):
        assert float(jnp.abs(b).max()) > 1e-3  # gradients do not fade from call to call
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "rotation"),
    [("haar both", Rotation("haar", axes="both")), ("hadamard input", Rotation("hadamard", axes="input"))],
)
def test_the_step_is_the_optimizer_of_that_name_and_donates(name, rotation):
    params, grads = ({"kernel": jax.random.normal(jax.random.key(i), (16, 24))} for i in range(2))
    plain = optax.chain(scale_by_orthoadam(rotation=rotation), optax.add_decayed_weights(0.1), optax.scale(-1e-3))
    want = optax.apply_updates(params, plain.update(grads, plain.init(params), params)[0])
    # With the identity for a rotation OrthoAdam is AdamW: the same hyperparameters.
    adamw, identity = (optimizer.make_optimizer(each) for each in ("adamw", "identity output"))
    updates = [made.update(grads, made.init(params), params)[0]["kernel"] for made in (adamw, identity)]
    np.testing.assert_array_equal(*updates)
    made = optimizer.make_optimizer(name)
    got, state = optimizer.optimizer_step(made)(params, made.init(params), grads)
    np.testing.assert_allclose(got["kernel"], want["kernel"], rtol=1e-5, atol=1e-6)
    assert int(optax.tree.get(state, "count")) == 1
    assert params["kernel"].is_deleted()
    assert not grads["kernel"].is_deleted()


def test_a_state_for_timing_is_like_a_real_one():
    made, params = orthoadam(1e-3, rotation=Rotation("haar", axes="both")), {"kernel": jnp.ones((16, 24))}
    real, state = made.init(params), optimizer.state_like(jax.eval_shape(made.init, params))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), real)
    (rotated,) = [part for part in state if isinstance(part, RotatedState)]
    basis = rotated.basis["kernel"]["basis_1"]
    assert float(jnp.std(basis)) == pytest.approx(24**-0.5, rel=0.1)  # as the entries of a rotation
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(rotated.inner))


def test_every_rotation_of_a_model_is_measured_or_left_out_with_a_reason():
    found = {}
    for case in optimizer.cases(tiny=False):
        found.setdefault(case.name, set()).update(case.contenders)
    assert list(found) == ["768x768", "768x3072", "gpt2 130m unrolled", "gpt2 130m stacked"]
    assert all(names >= {"adamw", *optimizer.KERNEL_ROTATIONS} for names in found.values())
    for name in set.union(*found.values()):
        optimizer.make_optimizer(name)


def test_training_variants_differ_in_their_names_alone_and_sizes_are_those_of_the_paper():
    plain = TINY.config("softmax + AdamW")
    assert (plain.optim.optimizer, plain.model.normalizer, plain.optim.weight_decay) == ("adam", "softmax", 0.1)
    softmax1, orthoadam = {"model.normalizer": "softmax1"}, {"optim.optimizer": "orthoadam"}
    changes = [changed_fields(plain, TINY.config(variant)) for variant in training.VARIANTS]
    assert changes == [{}, softmax1, orthoadam, softmax1 | orthoadam]
    found = training.cases("gpu", tiny=False)
    paper = [case.paper_step_ratio and round(case.paper_step_ratio, 2) for case in found]
    assert paper == [1.17, 1.25, 1.1, 0.91, None]
    assert [round(parameter_count(case.model) / 1e6) for case in found] == [64, 124, 355, 1314, 124]
    assert [case.batch_size * case.sequence_length for case in found[:2]] == [131_072] * 2
    for case in found:
        assert (case.variants[0], case.variants[-1]) == (training.PLAIN, training.PROPOSED)
        assert (case.model.dtype, case.model.vocab_size % 128) == ("bfloat16", 0)
    tokens = found[0].tokens(3)
    assert (tokens.shape, tokens.dtype) == ((3, 257), jnp.int32)
    assert 0 <= int(tokens.min()) < int(tokens.max()) < 50_257  # not of the padding
    np.testing.assert_array_equal(tokens, found[0].tokens(3))
    (small,) = training.cases("cpu", tiny=False)
    assert parameter_count(small.model) < 1e7


@pytest.mark.slow
def test_the_batch_is_halved_until_it_fits():
    whole, _ = training.fitting_step(TINY, math.inf)
    assert whole == TINY.batch_size
    temp = {n: training.compile_step(TINY.config(training.PLAIN), n).memory["temp_bytes"] for n in (1, 2)}
    shapes = [jax.eval_shape(lambda v=v: training.init_state(TINY.config(v))) for v in TINY.variants]
    states = sum(map(suite.tree_bytes, shapes))
    assert training.fitting_step(TINY, 1.1 * (states + temp[2]) + 1)[0] == 2
    assert training.fitting_step(TINY, 1.1 * (states + temp[1]) + 1)[0] == 1
    with pytest.raises(suite.LeftOut, match="of memory, 1 kB are free"):
        training.fitting_step(TINY, 1000)


# The record.


def fake_suite(rows, fail=None):
    def measure(repeats, tiny):
        yield from (suite.Row("case", f"variant {i}", {"x": repeats + i}) for i in range(rows))
        yield from [suite.Row("case", "large", {}, "too large")] * (rows > 0)
        if fail:
            raise fail

    return suite.Suite("fake", "A title", measure, (suite.Column("x", "x", "{} units"),), 5)


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path):
    (tmp_path / "benchmark.json").write_text("of another run")
    for rows, written in ((0, "of another run"), (2, None)):
        with pytest.raises(KeyboardInterrupt):
            run_suites([fake_suite(rows, KeyboardInterrupt())], tmp_path)
        assert written in (None, (tmp_path / "benchmark.json").read_text())
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert written["finished"] is False
    assert written["rows"] == [
        {"suite": "fake", "case": "case", "variant": "variant 0", "metrics": {"x": 5}},
        {"suite": "fake", "case": "case", "variant": "variant 1", "metrics": {"x": 6}},
        {"suite": "fake", "case": "case", "variant": "large", "left_out": "too large"},
    ]


def test_rows_are_printed_as_they_come_and_the_aligned_table_last(tmp_path, capsys):
    results = run_suites([fake_suite(2)], tmp_path, repeats=99)
    assert results["finished"]
    assert results["provenance"]["repeats"] == {"fake": 99}
    assert capsys.readouterr().out.splitlines() == [
        "fake, case, variant 0: x 99 units",
        "fake, case, variant 1: x 100 units",
        "fake, case, large: left out: too large",
        "",
        "A title",
        "-" * 26,
        "case  variant    x",
        "-" * 26,
        "case  variant 0  99 units",
        "case  variant 1  100 units",
    ]


def test_columns_show_units_and_what_is_not_there():
    spread = suite.spread_metrics("ratio", suite.Spread(1.041, 1.02, 1.07))
    metrics = spread | {"a": 0.0000123, "b": 0.25, "c": 0.9999, "bytes": 1_493_285_932, "none": None}
    seconds = [suite.Column("", name, "seconds").text(metrics) for name in ("a", "b", "c", "b+c", "d")]
    assert seconds == ["12.3 us", "250 ms", "1 s", "1.25 s", "-"]
    assert suite.Column("", "ratio").text(metrics) == "1.04 (1.02-1.07)"
    assert [suite.Column("", name, "bytes").text(metrics) for name in ("bytes", "none")] == ["1.49 GB", "unknown"]
