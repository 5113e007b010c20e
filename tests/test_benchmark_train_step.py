"""The training step suite: what is compared, which batch fits, what the numbers are of, and what is left out."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.benchmarks import train_step, train_step_cases
from orthojax.benchmarks.program import Program
from orthojax.benchmarks.suite import TimeBudget
from orthojax.fields import changed_fields
from orthojax.model import parameter_count
from orthojax.ops.attention import dot_product as choice
from orthojax.train import StepMetrics, init_state, model_flops_utilization

(TINY,) = train_step_cases.cases("cpu", tiny=True)
VARIANTS = tuple(train_step_cases.VARIANTS)


def fake_program(batch_size, variant):
    """Of a model whose temporaries are 1,000 bytes for each sequence, a little more for later variants."""
    temp = 1000 * batch_size + 10 * VARIANTS.index(variant)
    sizes = {"argument_bytes": 500, "output_bytes": 400, "donated_bytes": 300, "temp_bytes": temp}
    return Program(None, 1.0, 2.0, 3.0, sizes)


@pytest.fixture
def fake_compiler(monkeypatch):
    """Replaces compilation; returns what was asked for."""
    asked = []

    def compile_step(case, variant, batch_size):
        asked.append((variant, batch_size))
        return fake_program(batch_size, variant)

    monkeypatch.setattr(train_step, "compile_step", compile_step)
    return asked


@pytest.fixture
def fake_seconds(monkeypatch):
    """Replaces the runs: variants are slower the later they come, and the loss is 2 nats."""

    def seconds(case, programs, batch_size, repeats, budget):
        metrics = StepMetrics(jnp.float32(64.0), jnp.int32(32), *[jnp.float32(1.0)] * 4, None)
        found = {variant: [1.0 + VARIANTS.index(variant)] * repeats for variant in programs}
        return found | {"control": [1.01] * repeats}, dict.fromkeys(programs, metrics)

    monkeypatch.setattr(train_step, "_seconds", seconds)


# What is compared.


def test_variants_differ_in_what_they_are_called_after_alone():
    reference = TINY.config("softmax + AdamW")
    changes = {variant: changed_fields(reference, TINY.config(variant)) for variant in VARIANTS}
    assert changes == {
        "softmax + AdamW": {},
        "softmax1 + AdamW": {"model.normalizer": "softmax1"},
        "softmax + OrthoAdam": {"optim.optimizer": "orthoadam"},
        "softmax1 + OrthoAdam": {"model.normalizer": "softmax1", "optim.optimizer": "orthoadam"},
    }
    assert reference.optim.optimizer == "adam"
    assert reference.optim.weight_decay > 0
    assert reference.model.normalizer == "softmax"


def test_accelerators_train_the_sizes_of_the_paper():
    found = train_step_cases.cases("gpu", tiny=False)
    ratios = {case.name: round(case.paper_step_ratio, 2) for case in found if case.sequence_length == 256}
    assert ratios == {"gpt2 60m": 1.17, "gpt2 130m": 1.25, "gpt2 350m": 1.1, "gpt2 1.4b": 0.91}
    assert [case.paper_step_ratio for case in found if case.sequence_length != 256] == [None]
    for case in found:
        assert case.variants[0] == train_step_cases.REFERENCE
        assert case.variants[-1] == train_step_cases.PROPOSED
        config = case.config(case.variants[0])
        assert config.model.dtype == "bfloat16"
        assert config.model.vocab_size % 128 == 0
    sizes = [parameter_count(case.model) / 1e6 for case in found]
    assert [round(size) for size in sizes] == [64, 124, 355, 1314, 124]
    assert [case.batch_size * case.sequence_length for case in found[:2]] == [131_072] * 2


def test_a_cpu_trains_a_small_model_and_says_so():
    (case,) = train_step_cases.cases("cpu", tiny=False)
    assert "CPU" in case.name
    assert parameter_count(case.model) < 1e7
    assert case.batch_size * case.sequence_length <= 2048
    assert case.config(VARIANTS[0]).model.dtype == "float32"


def test_tokens_are_the_same_every_time_and_below_the_vocabulary():
    case = train_step_cases.cases("gpu", tiny=False)[0]
    tokens = case.tokens(3)
    assert (tokens.shape, tokens.dtype) == ((3, 257), jnp.int32)
    np.testing.assert_array_equal(tokens, case.tokens(3))
    assert 0 <= int(tokens.min()) < int(tokens.max()) < 50_257  # not of the padding
    assert int(TINY.tokens(2).max()) < TINY.model.vocab_size


def test_a_step_is_traced_where_attention_may_not_fall_back(monkeypatch):
    seen = []
    monkeypatch.setattr(
        train_step,
        "compile_program",
        lambda function, state, tokens: seen.append((choice._fallback_forbidden.get(), tokens)),
    )
    train_step.compile_step(TINY, VARIANTS[0], 5)
    assert seen == [(True, jax.ShapeDtypeStruct((5, 17), jnp.int32))]
    assert not choice._fallback_forbidden.get()


@pytest.mark.slow
def test_a_runner_takes_the_steps_of_training():
    variant = "softmax1 + AdamW"
    tokens = TINY.tokens(2)
    params = init_state(TINY.config("softmax + AdamW")).params  # of the reference: the same
    program = train_step.compile_step(TINY, variant, 2)
    runner = train_step._Runner(TINY, variant, program, params, tokens)
    found = runner.caller(3)()
    state = init_state(TINY.config(variant))
    for _ in range(3):
        state, metrics = program.run(state, tokens)
    jax.tree.map(np.testing.assert_array_equal, runner._state, state)
    assert int(runner._state.step) == 3
    assert found.loss_sum_nats == metrics.loss_sum_nats
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))  # other variants start from them too


# What is measured.


def test_the_numbers_of_a_row(monkeypatch, fake_compiler, fake_seconds):
    on_h200 = functools.partial(model_flops_utilization, device_kind="NVIDIA H200")
    monkeypatch.setattr(train_step, "model_flops_utilization", on_h200)
    monkeypatch.setattr(train_step, "free_bytes", lambda: None)
    case = dataclasses.replace(TINY, paper_step_ratio=1.25)
    rows = list(train_step.measure_case(case, 3, TimeBudget(60)))
    assert [(row.case, row.variant, row.left_out) for row in rows] == [
        ("gpt2 tiny 2x16", name, "") for name in VARIANTS
    ]
    first, last = rows[0].metrics, rows[-1].metrics
    assert first["step_seconds_ratio"] == first["control_ratio"] == last["control_ratio"] == pytest.approx(1.01)
    assert last["step_seconds_ratio"] == pytest.approx(4.0)
    assert last["step_seconds"] == pytest.approx(4.0)
    assert last["tokens_per_step"] == 32
    assert last["tokens_per_second"] == pytest.approx(8.0)
    # d = 16, one layer, d_mlp 24, V 32, T 16
    flops = 6 * (4 * 16**2 + 2 * 16 * 24 + 32 * 16) + 6 * 16 * 16
    assert last["flops_per_token"] == flops
    assert last["mfu"] == pytest.approx(8.0 * flops / 989e12)
    assert last["mfu_full_attention"] == pytest.approx(8.0 * (flops + 6 * 16 * 16) / 989e12)
    assert last["loss_nats"] == 2.0
    assert last["peak_bytes"] == 500 + 400 - 300 + 2000 + 30
    assert last["peak_bytes_ratio"] == pytest.approx(2630 / 2600)
    assert [row.metrics.get("paper_step_ratio") for row in rows] == [None, None, None, 1.25]


def test_repetitions_take_turns_and_short_steps_are_bundled(monkeypatch):
    calls = []

    def fake(functions, repeats, warmup=1):
        calls.append((tuple(functions), repeats, warmup))
        taken.clear()
        for function in functions.values():
            function()
        counts.append(list(taken))
        return {name: [0.005] * repeats for name in functions}

    taken, counts = [], []
    monkeypatch.setattr(train_step, "interleaved_seconds", fake)
    program = Program(lambda state, tokens: taken.append(0) or (state, None), 0.0, 0.0, 0.0, {})
    programs = dict.fromkeys(VARIANTS[:2], program)
    seconds, _ = train_step._seconds(TINY, programs, 2, 6, TimeBudget(60))
    assert calls == [(VARIANTS[:2], 1, 2), ((*VARIANTS[:2], "control"), 6, 0)]
    assert [len(each) for each in counts] == [2, 3 * 4]  # four steps of 5 ms make 20 ms
    assert seconds["control"] == pytest.approx([0.005 / 4] * 6)


# Memory.


def state_bytes(variants=VARIANTS):
    return sum(train_step.tree_bytes(train_step._state_shapes(TINY, variant)) for variant in variants)


@pytest.mark.parametrize(("room_for", "batch_size", "compilations"), [(16, 16, 1), (15, 8, 2), (3, 2, 2), (1, 1, 2)])
def test_the_batch_is_halved_until_it_fits(monkeypatch, fake_compiler, room_for, batch_size, compilations):
    free = 1.1 * (state_bytes() + 1000 * room_for) + 1
    monkeypatch.setattr(train_step, "free_bytes", lambda: free)
    found, program = train_step.fitting_step(dataclasses.replace(TINY, batch_size=16))
    assert found == batch_size
    assert program.memory["temp_bytes"] == 1000 * batch_size
    assert len(fake_compiler) == compilations  # as many halvings at once as are needed


def test_what_does_not_fit_at_all_is_left_out(monkeypatch, fake_compiler):
    monkeypatch.setattr(train_step, "free_bytes", lambda: 1000)
    rows = list(train_step.measure_case(dataclasses.replace(TINY, batch_size=4), 3, TimeBudget(60)))
    assert [row.variant for row in rows] == list(VARIANTS)
    assert all("of memory, 1 kB are free" in row.left_out for row in rows)


# What is left out.


def test_a_variant_that_is_refused_is_left_out(monkeypatch, fake_seconds):
    def compile_step(case, variant, batch_size):
        if variant == "softmax1 + AdamW":
            raise NotImplementedError("attention may not fall back from 'fake' here: no such device")
        return fake_program(batch_size, variant)

    monkeypatch.setattr(train_step, "compile_step", compile_step)
    rows = list(train_step.measure_case(TINY, 3, TimeBudget(60)))
    assert [bool(row.left_out) for row in rows] == [False, True, False, False]
    assert rows[1].left_out == "NotImplementedError: attention may not fall back from 'fake' here: no such device"
    assert rows[2].metrics["step_seconds_ratio"] == pytest.approx(3.0)


def test_without_the_reference_all_are_left_out(monkeypatch):
    def compile_step(case, variant, batch_size):
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(train_step, "compile_step", compile_step)
    rows = list(train_step.measure_case(TINY, 3, TimeBudget(60)))
    assert [row.left_out for row in rows] == ["softmax + AdamW: RuntimeError: no compiler today"] * 4


def test_a_run_that_fails_leaves_the_sizes(monkeypatch, fake_compiler):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while running")

    monkeypatch.setattr(train_step, "_seconds", fails)
    for row in train_step.measure_case(TINY, 3, TimeBudget(60)):
        assert row.left_out == ""
        assert "RESOURCE_EXHAUSTED" in row.metrics["not_timed"]
        assert row.metrics["peak_bytes"] > 0
        assert "step_seconds" not in row.metrics
        texts = [column.text(row.metrics) for column in train_step.SUITE.columns]
        assert texts.count("-") == 5  # the times; the paper has none of this model


def test_a_missing_module_is_no_reason_to_leave_out(monkeypatch):
    def compile_step(case, variant, batch_size):
        raise ModuleNotFoundError("no kernel")

    monkeypatch.setattr(train_step, "compile_step", compile_step)
    with pytest.raises(ModuleNotFoundError):
        list(train_step.measure_case(TINY, 3, TimeBudget(60)))


@pytest.mark.parametrize(
    ("seconds", "compiled", "timed"), [(100.0, 4, True), (20.0, 4, False), (10.0, 2, False), (5.0, 1, False)]
)
def test_what_has_not_begun_when_the_time_is_over_is_left_out(monkeypatch, fake_seconds, seconds, compiled, timed):
    now = types.SimpleNamespace(seconds=0.0)

    def slow(case, variant, batch_size):
        now.seconds += 5.0
        return fake_program(batch_size, variant)

    monkeypatch.setattr(train_step, "compile_step", slow)
    budget = TimeBudget(seconds - 0.5, clock=lambda: now.seconds)
    first, second = (list(train_step.measure_cases([case], 3, budget, reserved=0.0)) for case in (TINY, TINY))
    assert [row.left_out for row in first] == [""] * compiled + ["time budget"] * (4 - compiled)
    for row in first[:compiled]:
        assert ("step_seconds" in row.metrics) == timed
        assert row.metrics.get("not_timed") == (None if timed else "time budget")
        assert row.metrics["peak_bytes"] > 0
    if not timed:
        assert [row.left_out for row in second] == ["time budget"] * 4


def test_the_memory_of_what_there_is_no_time_to_run_is_measured_all_the_same(monkeypatch, fake_seconds):
    now = types.SimpleNamespace(seconds=0.0)

    def slow(case, variant, batch_size):
        now.seconds += 5.0
        return fake_program(batch_size, variant)

    monkeypatch.setattr(train_step, "compile_step", slow)
    budget = TimeBudget(50.0, clock=lambda: now.seconds)  # four variants take 20 s to compile
    rows = list(train_step.measure_cases([TINY, TINY, TINY], 3, budget, reserved=25.0))
    assert ["step_seconds" in row.metrics for row in rows] == [True] * 4 + [False] * 8
    assert ["peak_bytes" in row.metrics for row in rows] == [True] * 10 + [False] * 2
    assert [row.left_out for row in rows] == [""] * 10 + ["time budget"] * 2
