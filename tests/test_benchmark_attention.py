"""The attention suite: what a repetition computes, what its ratios are of, and what is left out."""

import dataclasses
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.benchmarks import attention, attention_cases
from orthojax.benchmarks.program import Program
from orthojax.benchmarks.suite import TimeBudget

SHAPE = (2, 7, 3, 8)
FORWARD = attention_cases.Case(
    SHAPE, "xla", False, jnp.float32, attention_cases.vendor_softmax("xla"),
    {"softmax1": attention_cases.ours("xla", "softmax1")},
)  # fmt: skip
BACKWARD = dataclasses.replace(FORWARD, backward=True)


def refuses(query, key, value, sink):
    raise NotImplementedError("attention with implementation='fake': heads wider than 4\nand a long story")


@pytest.fixture
def fake_compiler(monkeypatch):
    """Replaces compilation and runs; softmax has 100 bytes of temporaries and every program after it 30 more."""
    compiled = []

    def compile_program(function, *operands):
        compiled.append(function)
        return Program(lambda *_: (), 0.25, 0.5, 1.0, {"temp_bytes": 70 + 30 * len(compiled)})

    monkeypatch.setattr(attention, "compile_program", compile_program)
    return compiled


def with_contenders(case, *names):
    known = {"refuses": refuses, "softmax1": attention_cases.ours("xla", "softmax1")}
    return dataclasses.replace(case, contenders={name: known[name] for name in names})


# What is compared.


def test_the_contenders_are_what_they_are_called():
    _, query, key, value, sink = attention.operands_of(SHAPE, jnp.float32)
    logits = np.einsum("bthd,bshd->bhts", query, key).astype(np.float64) / np.sqrt(8)
    logits = np.where(np.tril(np.ones((7, 7), bool)), logits, -np.inf)

    def expected(sinks):  # exp(x) / (exp(sink) + sum exp(x)), None: no sink
        extra = 0.0 if sinks is None else np.exp(np.broadcast_to(sinks, 3)).reshape(1, 3, 1, 1)
        weights = np.exp(logits) / (extra + np.exp(logits).sum(-1, keepdims=True))
        return np.einsum("bhts,bshd->bthd", weights, value)

    wanted = [
        (attention_cases.ours("xla", "softmax1"), 0.0),
        (attention_cases.ours("xla", "learned sink"), sink),
        (attention_cases.zero_row("xla"), 0.0),
        (attention_cases.vendor_softmax("xla"), None),
        (attention_cases.ours("xla", "softmax"), None),
    ]
    for attend, sinks in wanted:
        found = jax.jit(attend)(query, key, value, sink)
        np.testing.assert_allclose(found, expected(sinks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "kernels", "dtype"),
    [
        ("gpu", ("cudnn", "xla"), "bfloat16"),
        ("tpu", ("splash", "xla"), "bfloat16"),
        ("cpu", ("xla", "xla_chunked"), "float32"),
    ],
)
def test_each_platform_has_its_kernels_first_and_plain_xla(platform, kernels, dtype):
    found = attention_cases.cases(platform, tiny=False)
    assert list(dict.fromkeys(case.implementation for case in found)) == list(kernels)
    assert {jnp.dtype(case.dtype).name for case in found} == {dtype}
    assert len({case.name for case in found}) == len(found)
    for case in found:
        assert any(dataclasses.replace(case, backward=not case.backward).name == other.name for other in found)
        assert list(case.contenders)[:2] == ["softmax1", "learned sink"]
        further = {"cudnn": ["softmax1 by a zero row"], "xla": ["softmax of jax.nn"]}
        assert list(case.contenders)[2:] == further.get(case.implementation, [])
    if platform != "cpu":
        shapes = {(32, 1024, 12, 64), (8, 4096, 12, 64), (128, 256, 12, 64), (8, 2048, 16, 128)}
        assert {case.shape for case in found} == shapes


@pytest.mark.parametrize(
    ("platform", "kernel", "ours"),
    [("gpu", "cudnn", False), ("gpu", "xla", True), ("tpu", "splash", True), ("cpu", "xla_chunked", True)],
)
def test_the_reference_is_softmax_by_the_same_kernel(monkeypatch, platform, kernel, ours):
    """Of `jax.nn` on cuDNN, else our own; none may pick another by itself."""
    called = []

    def record(who):
        return lambda query, *_, **options: called.append((who, options)) or query

    monkeypatch.setattr(attention_cases, "dot_product_attention", record("ours"))
    monkeypatch.setattr(jax.nn, "dot_product_attention", record("jax.nn"))
    (case, *_) = [c for c in attention_cases.cases(platform, tiny=True) if c.implementation == kernel]
    for attend in (case.reference, *case.contenders.values()):
        attend(*(jnp.zeros(case.shape) for _ in range(3)), jnp.zeros(case.shape[2]))
    assert called[0][0] == ("ours" if ours else "jax.nn")
    assert called[0][1].get("normalizer", "softmax") == "softmax"
    assert all(options["implementation"] == kernel and options["is_causal"] for _, options in called)
    assert [options.get("normalizer", "softmax") for _, options in called[1:2]] == ["softmax1"]
    assert called[2][1]["normalizer"].shape == case.shape[2:3]


def test_forward_calls_depend_on_each_other():
    operands = attention.operands_of(SHAPE, jnp.float32)
    found = jax.jit(attention.repeated(FORWARD.contenders["softmax1"], False, 3))(*operands)
    _, query, key, value, sink = operands
    once = jax.jit(FORWARD.contenders["softmax1"])
    for _ in range(3):
        query = once(query, key, value, sink)
    np.testing.assert_allclose(found, query, rtol=1e-5, atol=1e-6)


def test_every_backward_call_gives_all_gradients_and_depends_on_the_one_before():
    operands = attention.operands_of(SHAPE, jnp.float32)
    cotangent, query, key, value, sink = operands
    attend = attention_cases.ours("xla", "learned sink")
    found = jax.jit(attention.repeated(attend, True, 3))(*operands)

    @jax.jit
    def once(query, value):
        output, pullback = jax.vjp(attend, query, key, value, sink)
        return output, *pullback(cotangent)

    for _ in range(3):
        results = once(query, value)
        query, value = results[1], results[3]
    for a, b in zip(found, results, strict=True):
        assert float(jnp.abs(b).max()) > 1e-3  # gradients do not fade from call to call
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_no_product_is_the_same_in_all_calls():
    """Nor left out: two products of the forward and four of the backward pass, all inside the loop."""
    function = attention.repeated(BACKWARD.reference, True, 3)
    text = jax.jit(function).lower(*attention.operands_of(SHAPE, jnp.float32)).compile().as_text()
    assert text.count(" dot(") == 6
    assert " dot(" not in text[text.index("ENTRY") :]


# What is measured.


def test_ratios_are_of_the_same_repetition_and_the_control_of_softmax_itself(monkeypatch, fake_compiler):
    calls = []

    def fake(functions, repeats, warmup=1, **clock):
        assert clock in ({}, {"clock": time.process_time})  # on a CPU, for what counts
        calls.append((tuple(functions), repeats))
        for function in functions.values():
            function()
        seconds = {"softmax": 0.4, "softmax again": 0.5, "softmax1": 0.6}
        return {name: [seconds[name] * (i + 1) for i in range(repeats)] for name in functions}

    monkeypatch.setattr(attention, "interleaved_seconds", fake)
    (row,) = attention.measure_case(BACKWARD, 7, TimeBudget(1e6))
    assert calls == [(("softmax", "softmax again", "softmax1"), repeats) for repeats in (1, 7)]
    metrics = row.metrics
    assert (row.case, row.variant) == ("xla 2x7x3x8 float32 forward + backward", "softmax1")
    assert metrics["seconds_ratio"] == pytest.approx(1.5)
    assert metrics["control_ratio"] == pytest.approx(1.25)
    assert metrics["seconds"] == pytest.approx(0.6 * 4 / metrics["calls_per_repetition"])
    assert metrics["softmax_seconds"] == pytest.approx(0.4 * 4 / metrics["calls_per_repetition"])
    assert metrics["repetitions"] == 7
    assert (metrics["temp_bytes"], metrics["softmax_temp_bytes"]) == (130, 100)
    assert metrics["temp_bytes_ratio"] == 1.3


def test_slow_attentions_are_repeated_less_often(monkeypatch, fake_compiler):
    monkeypatch.setattr(
        attention,
        "interleaved_seconds",
        lambda functions, repeats, warmup, **clock: {name: [1.0] * repeats for name in functions},
    )
    (row,) = attention.measure_case(FORWARD, 50, TimeBudget(1e6))
    assert row.metrics["repetitions"] == attention._LONGEST_CASE_SECONDS // 3
    (row,) = attention.measure_case(FORWARD, 50, TimeBudget(5))
    assert row.metrics["repetitions"] == 3


# What is left out.


@pytest.mark.slow
def test_what_an_implementation_refuses_is_left_out_with_the_reason():
    rows = list(attention.measure_cases([with_contenders(FORWARD, "refuses", "softmax1"), BACKWARD], 2, TimeBudget(60)))
    assert [(row.variant, bool(row.left_out)) for row in rows] == [
        ("refuses", True), ("softmax1", False), ("softmax1", False)
    ]  # fmt: skip
    assert rows[0].left_out == "NotImplementedError: attention with implementation='fake': heads wider than 4"
    assert rows[0].metrics == {}
    for row in rows[1:]:
        for name in ("seconds_ratio", "control_ratio", "seconds", "softmax_seconds"):
            assert 0 < row.metrics[f"{name}_lower_quartile"] <= row.metrics[name]


def test_without_softmax_to_compare_with_all_are_left_out():
    case = dataclasses.replace(with_contenders(FORWARD, "refuses", "softmax1"), reference=refuses)
    rows = list(attention.measure_case(case, 2, TimeBudget(60)))
    assert [row.variant for row in rows] == ["refuses", "softmax1"]
    assert all(row.left_out.startswith("NotImplementedError: attention with implementation='fake'") for row in rows)


def test_cudnn_is_asked_before_its_softmax_is_compiled(monkeypatch):
    """Asking loads what cuDNN needs; where it cannot run, that is the reason."""
    kernel = types.ModuleType("cudnn")
    kernel.unavailable = lambda: "cuDNN misses a library"
    monkeypatch.setitem(sys.modules, "orthojax.ops.attention.cudnn", kernel)
    case = dataclasses.replace(with_contenders(FORWARD, "refuses", "softmax1"), implementation="cudnn")
    rows = list(attention.measure_case(case, 2, TimeBudget(60)))
    assert [row.left_out for row in rows] == ["cuDNN misses a library"] * 2


def test_a_program_that_fails_when_it_runs_is_left_out(monkeypatch):
    runs = []

    def run(*operands):
        runs.append(operands)
        if len(runs) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return operands

    memory = {"temp_bytes": 1}
    monkeypatch.setattr(attention, "compile_program", lambda *_: Program(run, 0.0, 0.0, 0.0, memory))
    (row,) = attention.measure_case(FORWARD, 2, TimeBudget(60))
    assert "RESOURCE_EXHAUSTED: Out of memory" in row.left_out


def test_a_missing_module_is_no_reason_to_leave_out():
    def attend(query, key, value, sink):
        raise ModuleNotFoundError("no kernel")

    with pytest.raises(ModuleNotFoundError):
        list(attention.measure_case(dataclasses.replace(FORWARD, contenders={"new": attend}), 2, TimeBudget(60)))


def test_what_has_not_begun_when_the_time_is_over_is_left_out(fake_compiler):
    budget = TimeBudget(10.0, clock=lambda: 4.0 * len(fake_compiler))
    two = with_contenders(FORWARD, "refuses", "softmax1")
    rows = list(attention.measure_cases([BACKWARD, two, BACKWARD], 2, budget))
    # 4 s and 8 s are within the time, the second case's softmax begins then, and its contenders after 12 s do not.
    assert [row.left_out for row in rows] == ["", *["time budget"] * 3]
    assert rows[0].metrics["repetitions"] == 2


def test_a_budget_gives_at_least_three_repetitions():
    now = types.SimpleNamespace(seconds=5.0)
    budget = TimeBudget(10.0, clock=lambda: now.seconds)
    assert budget.seconds_left() == 10.0
    assert budget.repetitions(20, 0.1, longest=1e9) == 20
    assert budget.repetitions(20, 1.0, longest=1e9) == 10
    assert budget.repetitions(20, 1.0, longest=5.0) == 5
    assert budget.repetitions(20, 100.0, longest=5.0) == 3
    assert budget.repetitions(2, 100.0, longest=5.0) == 2
    now.seconds = 20.0
    assert budget.seconds_left() == 0.0
    assert budget.repetitions(20, 1.0, longest=1e9) == 3
