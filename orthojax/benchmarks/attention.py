"""Attention with softmax-1 and with learned sinks against softmax by the same kind of kernel: time and memory."""

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.benchmarks.attention_cases import Attend, Case, Shape, cases
from orthojax.benchmarks.program import Program, compile_program
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
from orthojax.train import interleaved_seconds, median_ratio, spread

_BUDGET_SECONDS = 150.0
_LONGEST_CASE_SECONDS = 15.0
_REFERENCE, _CONTROL = "softmax", "softmax again"


def _calls() -> int:
    """Dependent calls in one repetition: on an accelerator one alone is too short to time from the host."""
    return 2 if jax.default_backend() == "cpu" else 10


@functools.lru_cache(maxsize=1)  # the cases of one shape come one after the other
def operands_of(shape: Shape, dtype: Any) -> tuple[jax.Array, ...]:
    """Cotangent of the output, query, key, value; sink logits, float32: all standard normal."""
    generator = np.random.default_rng(0)
    large = [jnp.asarray(generator.standard_normal(shape, np.float32)).astype(dtype) for _ in range(4)]
    return *large, jnp.asarray(generator.standard_normal(shape[2], np.float32))


def repeated(attend: Attend, backward: bool, calls: int) -> Callable[..., Any]:
    """A function of `operands` that attends `calls` times, each time with the last result for a query.

    Args:
      attend: What is repeated.
      backward: With all gradients; those of query and value are the next query and value.
      calls: How often.

    Returns:
      A function to the last output, or to that and the gradients of query, key, value and sink.
    """

    def forward(cotangent, query, key, value, sink):
        del cotangent
        return jax.lax.fori_loop(0, calls, lambda _, query: attend(query, key, value, sink), query)

    def with_gradients(cotangent, query, key, value, sink):
        def call(_, results):
            # With a new query alone, cotangent @ value^T would be the same in all calls, and computed once. A new
            # key as well would let the gradients fade from call to call.
            _, query, _, value, _ = results
            output, pullback = jax.vjp(attend, query, key, value, sink)
            return output, *pullback(cotangent)  # without the output, its product would not be computed at all

        return jax.lax.fori_loop(0, calls, call, (query, query, key, value, sink))

    return with_gradients if backward else forward


def _ready(attend: Attend, case: Case) -> tuple[Program, Callable[[], Any]] | str:
    """The compiled repetition and a call of it that has run once, or why there is none."""
    operands = operands_of(case.shape, case.dtype)
    try:
        program = compile_program(jax.jit(repeated(attend, case.backward, _calls())), *operands)
        call = functools.partial(program.run, *operands)
        jax.block_until_ready(call())
    except FAILURES as error:
        return reason(error)
    return program, call


def _unavailable(implementation: str) -> str:
    """Why cuDNN cannot run here, or "". Asking loads what cuDNN needs, which its softmax in `jax.nn` does not."""
    if implementation != "cudnn":
        return ""
    return importlib.import_module("orthojax.ops.attention.cudnn").unavailable()


def measure_case(case: Case, repeats: int, budget: TimeBudget) -> Iterator[Row]:
    """The rows of one case: every contender against softmax, in turn, softmax against itself among them.

    Args:
      case: What is measured.
      repeats: Repetitions; fewer, but at least three, where the case would take too long.
      budget: When it is spent nothing more is measured.
    """
    if not budget.seconds_left():
        reference = budget.LEFT_OUT
    else:
        reference = _unavailable(case.implementation) or _ready(case.reference, case)
    if isinstance(reference, str):
        yield from (Row(case.name, name, {}, reference) for name in case.contenders)
        return
    ready = {}
    for name, attend in case.contenders.items():
        found = _ready(attend, case) if budget.seconds_left() else budget.LEFT_OUT
        if isinstance(found, str):
            yield Row(case.name, name, {}, found)
        else:
            ready[name] = found
    if not ready:
        return
    functions = {_REFERENCE: reference[1], _CONTROL: reference[1]} | {name: call for name, (_, call) in ready.items()}
    try:
        seconds = _seconds(functions, repeats, budget)
    except FAILURES as error:
        yield from (Row(case.name, name, {}, reason(error)) for name in ready)
        return
    for name, (program, _) in ready.items():
        yield Row(case.name, name, _metrics(seconds, name, reference[0], program))


def _seconds(functions: dict[str, Callable[[], Any]], repeats: int, budget: TimeBudget) -> dict[str, list[float]]:
    # With the call that showed that it runs, three that do not count.
    once = sum(times[0] for times in interleaved_seconds(functions, 1, warmup=1).values())
    repetitions = budget.repetitions(repeats, once, _LONGEST_CASE_SECONDS)
    # On a CPU the time of its cores, so that other programs count as little as they can.
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    return interleaved_seconds(functions, repetitions, warmup=0, clock=clock)


def _metrics(seconds: dict[str, list[float]], name: str, reference: Program, program: Program) -> dict[str, Any]:
    calls = _calls()
    temp, softmax_temp = program.memory["temp_bytes"], reference.memory["temp_bytes"]
    return {
        **spread_metrics("seconds_ratio", median_ratio(seconds[name], seconds[_REFERENCE])),
        **spread_metrics("control_ratio", median_ratio(seconds[_CONTROL], seconds[_REFERENCE])),
        **spread_metrics("seconds", spread([repetition / calls for repetition in seconds[name]])),
        **spread_metrics("softmax_seconds", spread([repetition / calls for repetition in seconds[_REFERENCE]])),
        "repetitions": len(seconds[name]),
        "calls_per_repetition": calls,
        "temp_bytes": temp,
        "softmax_temp_bytes": softmax_temp,
        "temp_bytes_ratio": temp / softmax_temp if temp is not None and softmax_temp else None,
        "compile_seconds": program.lower_seconds + program.compile_seconds,
    }


def measure_cases(found: Sequence[Case], repeats: int, budget: TimeBudget) -> Iterator[Row]:
    """The rows of all cases, in their order."""
    for case in found:
        yield from measure_case(case, repeats, budget)


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    yield from measure_cases(cases(jax.default_backend(), tiny), repeats, TimeBudget(_BUDGET_SECONDS))


SUITE = Suite(
    name="attention",
    title=(
        "Causal attention against softmax by the same kind of kernel (B x T x N x H): median ratio (quartiles),\n"
        "on a CPU of processor time, which all its cores add to"
    ),
    measure=_measure,
    columns=(
        Column("time ratio", spread_text("seconds_ratio")),
        Column("softmax to itself", spread_text("control_ratio")),
        Column("call", lambda m: seconds_text(m["seconds"])),
        Column("softmax", lambda m: seconds_text(m["softmax_seconds"])),
        Column("temporary ratio", measured("temp_bytes_ratio", lambda m: f"{m['temp_bytes_ratio']:.4g}")),
        Column("temporary", lambda m: bytes_text(m["temp_bytes"])),
        Column("of softmax", lambda m: bytes_text(m["softmax_temp_bytes"])),
    ),
    repeats=20,
)
