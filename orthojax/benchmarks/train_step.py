"""The whole training step with softmax-1 and OrthoAdam against softmax and AdamW: time, MFU, memory."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from orthojax.benchmarks.program import Program, compile_program, free_bytes, tree_bytes
from orthojax.benchmarks.suite import (
    FAILURES,
    Column,
    Row,
    Suite,
    TimeBudget,
    bytes_text,
    measured,
    reason,
    seconds_text,
    spread_metrics,
    spread_text,
)
from orthojax.benchmarks.train_step_cases import PROPOSED, REFERENCE, Case, cases
from orthojax.model import parameter_count
from orthojax.ops.attention import forbid_fallback
from orthojax.train import (
    TrainState,
    build,
    init_state,
    interleaved_seconds,
    make_train_step,
    median_ratio,
    model_flops_per_token,
    model_flops_utilization,
    spread,
)

_BUDGET_SECONDS = 270.0
_UNTIMED_SECONDS = 70.0  # of these, for compiling what there is no time to run: its memory is known all the same
_LONGEST_CASE_SECONDS = 40.0
_SHORTEST_REPETITION_SECONDS, _FEWEST_STEPS = 0.02, 2  # the host runs ahead of the device then, as in training
_HEADROOM = 1.1  # allocators lose memory between arrays, and libraries want workspaces
_CONTROL = "control"


def compile_step(case: Case, variant: str, batch_size: int) -> Program:
    """Compiles the training step of a variant from shapes alone; its attention is the vendor's kernel or an error."""
    tokens = jax.ShapeDtypeStruct((batch_size, case.sequence_length + 1), jnp.int32)
    with forbid_fallback():
        return compile_program(make_train_step(case.config(variant)), _state_shapes(case, variant), tokens)


@functools.cache  # tracing takes a second
def _state_shapes(case: Case, variant: str) -> Any:
    return jax.eval_shape(lambda: init_state(case.config(variant)))


def fitting_step(case: Case) -> tuple[int, Program]:
    """The largest batch for which the reference, and the states of the other variants, fit; and its program.

    Raises:
      RuntimeError: Where not even one sequence fits.
    """
    batch_size, free = case.batch_size, free_bytes()
    states = sum(tree_bytes(_state_shapes(case, variant)) for variant in case.variants)
    while True:
        program = compile_step(case, REFERENCE, batch_size)
        temp = program.memory["temp_bytes"]
        needed = _HEADROOM * (states + (temp or 0))
        if free is None or temp is None or needed <= free:
            return batch_size, program
        if batch_size == 1:
            raise RuntimeError(f"it needs {bytes_text(needed)} of memory, {bytes_text(free)} are free")
        # Temporaries grow with the batch: as many halvings at once as they suggest.
        halvings = 1
        while batch_size >> halvings > 1 and _HEADROOM * (states + temp / 2**halvings) > free:
            halvings += 1
        batch_size = max(1, batch_size >> halvings)


class _Runner:
    """A variant with its state, which every step takes over."""

    def __init__(self, case: Case, variant: str, program: Program, params: Any, tokens: jax.Array):
        config = case.config(variant)
        params = jax.tree.map(jnp.copy, params)
        opt_state = build(config).optimizer.init(params)
        self._state, self._tokens, self._program = (
            TrainState(jnp.zeros((), jnp.int32), params, opt_state),
            tokens,
            program,
        )
        self.metrics: Any = None

    def caller(self, steps: int) -> Callable[[], Any]:
        """A function that takes `steps` steps."""

        def call() -> Any:
            for _ in range(steps):
                self._state, self.metrics = self._program.run(self._state, self._tokens)
            return self.metrics

        return call


def _programs(case: Case, budget: TimeBudget) -> tuple[int, dict[str, Program], dict[str, str]]:
    """The batch size, the compiled variants, and why others are not."""
    if not budget.seconds_left():
        return case.batch_size, {}, dict.fromkeys(case.variants, budget.LEFT_OUT)
    try:
        batch_size, reference = fitting_step(case)
    except FAILURES as error:
        return case.batch_size, {}, dict.fromkeys(case.variants, f"{REFERENCE}: {reason(error)}")
    programs, left_out = {REFERENCE: reference}, {}
    for variant in case.variants[1:]:
        if not budget.seconds_left():
            left_out[variant] = budget.LEFT_OUT
            continue
        try:
            programs[variant] = compile_step(case, variant, batch_size)
        except FAILURES as error:
            left_out[variant] = reason(error)
    return batch_size, programs, left_out


def _seconds(
    case: Case, programs: dict[str, Program], batch_size: int, repeats: int, budget: TimeBudget
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of single steps by variant, of the reference again as the control, and what the steps reported."""
    params, tokens = init_state(case.config(REFERENCE)).params, case.tokens(batch_size)
    runners = {variant: _Runner(case, variant, program, params, tokens) for variant, program in programs.items()}
    once = interleaved_seconds({name: runner.caller(1) for name, runner in runners.items()}, 1, warmup=2)
    steps = max(_FEWEST_STEPS, math.ceil(_SHORTEST_REPETITION_SECONDS / once[REFERENCE][0]))
    functions = {name: runner.caller(steps) for name, runner in runners.items()}
    functions[_CONTROL] = functions[REFERENCE]
    repetition = steps * (sum(times[0] for times in once.values()) + once[REFERENCE][0])
    repetitions = budget.repetitions(repeats, repetition, _LONGEST_CASE_SECONDS)
    seconds = interleaved_seconds(functions, repetitions, warmup=0)
    single = {name: [whole / steps for whole in found] for name, found in seconds.items()}
    return single, {name: runner.metrics for name, runner in runners.items()}


def measure_case(case: Case, repeats: int, budget: TimeBudget, reserved: float = 0.0) -> Iterator[Row]:
    """The rows of one case: every variant against softmax and AdamW, in turn; that one's own ratio is the control.

    Args:
      case: What is measured.
      repeats: Repetitions; fewer, but at least three, where the case would take too long.
      budget: When it is spent nothing more is measured.
      reserved: Seconds of the budget in which steps are compiled and not run: rows have their memory and no times.
    """
    batch_size, programs, left_out = _programs(case, budget)
    name = f"{case.name} {batch_size}x{case.sequence_length}"
    seconds, reported, not_timed = {}, {}, ""
    if programs and budget.seconds_left() <= reserved:
        not_timed = budget.LEFT_OUT
    elif programs:
        try:
            seconds, reported = _seconds(case, programs, batch_size, repeats, budget)
        except FAILURES as error:
            not_timed = reason(error)
    for variant in case.variants:
        if variant in left_out:
            yield Row(name, variant, {}, left_out[variant])
            continue
        metrics = _sizes(case, variant, batch_size, programs)
        if not_timed:
            metrics["not_timed"] = not_timed
        else:
            metrics |= _speed(case, variant, batch_size, seconds)
            step = reported[variant]
            metrics["loss_nats"] = float(step.loss_sum_nats) / float(step.target_tokens)
        yield Row(name, variant, metrics)


def _sizes(case: Case, variant: str, batch_size: int, programs: dict[str, Program]) -> dict[str, Any]:
    program, peak, reference_peak = programs[variant], programs[variant].peak_bytes, programs[REFERENCE].peak_bytes
    found = {
        "batch_size": batch_size,
        "sequence_length": case.sequence_length,
        "tokens_per_step": batch_size * case.sequence_length,
        "parameters": parameter_count(case.model),
        "peak_bytes": peak,
        "peak_bytes_ratio": peak / reference_peak if peak is not None and reference_peak else None,
        **program.memory,
        # Of the process so far, all variants and cases: the device does not tell them apart.
        "process_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "compile_seconds": program.lower_seconds + program.compile_seconds,
    }
    if variant == PROPOSED and case.paper_step_ratio is not None:
        found["paper_step_ratio"] = case.paper_step_ratio
    return found


def _speed(case: Case, variant: str, batch_size: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    step = spread(seconds[variant])
    tokens_per_second = batch_size * case.sequence_length / step.median
    control = median_ratio(seconds[_CONTROL], seconds[REFERENCE])
    ratio = control if variant == REFERENCE else median_ratio(seconds[variant], seconds[REFERENCE])
    flops = {causal: model_flops_per_token(case.model, case.sequence_length, causal=causal) for causal in (True, False)}
    return {
        **spread_metrics("step_seconds_ratio", ratio),
        **spread_metrics("control_ratio", control),
        **spread_metrics("step_seconds", step),
        "repetitions": len(seconds[variant]),
        "tokens_per_second": tokens_per_second,
        "flops_per_token": flops[True],
        "mfu": model_flops_utilization(tokens_per_second, flops[True], device_count=1),
        "mfu_full_attention": model_flops_utilization(tokens_per_second, flops[False], device_count=1),
    }


def measure_cases(
    found: Sequence[Case], repeats: int, budget: TimeBudget, reserved: float = _UNTIMED_SECONDS
) -> Iterator[Row]:
    """The rows of all cases, in their order."""
    for case in found:
        yield from measure_case(case, repeats, budget, reserved)


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    yield from measure_cases(cases(jax.default_backend(), tiny), repeats, TimeBudget(_BUDGET_SECONDS))


def _mfu_text(metrics: dict[str, Any]) -> str:
    return "unknown" if metrics["mfu"] is None else f"{100 * metrics['mfu']:.1f}%"


SUITE = Suite(
    name="train_step",
    title=(
        "The training step (batch x length) against softmax + AdamW: median ratio (quartiles); the first row of each\n"
        "case is the reference against itself. Paper: its Table 4, whose memory ratios are 1.015 to 1.05"
    ),
    measure=_measure,
    columns=(
        Column("time ratio", measured("step_seconds_ratio", spread_text("step_seconds_ratio"))),
        Column("paper", measured("paper_step_ratio", lambda m: f"{m['paper_step_ratio']:.3g}")),
        Column("step", measured("step_seconds", lambda m: seconds_text(m["step_seconds"]))),
        Column("tokens/s", measured("tokens_per_second", lambda m: f"{m['tokens_per_second']:,.0f}")),
        Column("MFU", measured("step_seconds", _mfu_text)),
        Column("tokens/step", lambda m: f"{m['tokens_per_step']:,}"),
        Column("peak memory ratio", measured("peak_bytes_ratio", lambda m: f"{m['peak_bytes_ratio']:.4g}")),
        Column("peak memory", lambda m: bytes_text(m["peak_bytes"])),
        Column("process so far", lambda m: bytes_text(m["process_peak_bytes"])),
    ),
    repeats=10,
)
